"""spark: what pods are given; Spark itself makes the driver's pod of our files, and its command runs here."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cluster import ROOT, Paths
from quick_java import ENVIRONMENT
from rendered import context_of
from small_log import small_recipe, write_log
from validate import validate

from recmill.cli import build_parser
from recmill.cli.flags import read_config
from recmill.dataset.table import Table
from recmill.errors import RecmillError
from recmill.recipe.load import load_recipe
from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.context import DeployContext
from recmill.stages.deploy.deploy import deploy, render
from recmill.stages.deploy.settings import DeployConfig, DeployError
from recmill.stages.deploy.spark import arguments, task_memory
from recmill.stages.deploy.spark_entrypoint import command_of, spark_home
from recmill.stages.deploy.yaml import loads
from recmill.stages.prepare.config import PrepareConfig
from recmill.stages.prepare.prepare import prepare

Object = dict[str, Any]
MB = 1 << 20


def application(context: DeployContext) -> Any:
    return loads(render(context.recipe, "spark", context.settings)["base/prepare/application.yaml"])[0]


def megabytes(text: str) -> int:
    assert text.endswith("m")
    return int(text[:-1])


@pytest.mark.parametrize("name", ["quickstart", "criteo-dlrm", "criteo-widedeep", "ml1m-leave-last-out"])
def test_arguments_are_those_of_the_command_line(name: str) -> None:
    given = read_config(build_parser().parse_args(arguments(context_of(load_recipe(name)))), PrepareConfig)
    assert (given.engine, given.address) == ("spark", "k8s://https://kubernetes.default.svc")


def test_an_executor_has_the_memory_of_all_its_tasks_outside_of_java(context: DeployContext) -> None:
    executor = application(context)["spec"]["executor"]
    each = context.sizing.prepare_fixed + task_memory(context)
    assert megabytes(executor["memoryOverhead"]) >= executor["cores"] * each // MB
    given = read_config(build_parser().parse_args(arguments(context)), PrepareConfig)
    assert given.memory == task_memory(context) // MB * MB
    # The engine would set another overhead if it were not told.
    assert given.spark_conf["spark.executor.memoryOverhead"] == executor["memoryOverhead"]


def test_memory_that_is_set_is_that_of_the_whole_pod(quickstart: Recipe) -> None:
    here = context_of(quickstart, "spark.executor_memory=4Gi", "spark.executor_cpus=3")
    executor = application(here)["spec"]["executor"]
    assert megabytes(executor["memory"]) + megabytes(executor["memoryOverhead"]) == 4096
    assert 3 * (task_memory(here) + here.sizing.prepare_fixed) <= 3072 * MB


@pytest.mark.parametrize("pair", ["spark.executor_memory=1Gi", "spark.driver_memory=1Gi"])
def test_too_little_memory_is_refused_with_the_least(quickstart: Recipe, pair: str) -> None:
    with pytest.raises(
        DeployError, match=rf"{pair.partition('=')[0]} must be at least \d+Mi for this recipe, got 1Gi"
    ):
        render(quickstart, "spark", DeployConfig.of([pair]))


def test_only_the_driver_may_ask_kubernetes(context: DeployContext) -> None:
    spec = application(context)["spec"]
    tokens = {
        role: spec[role]["template"]["spec"]["automountServiceAccountToken"]
        for role in ("driver", "executor")
    }
    assert tokens == {"driver": True, "executor": False}


def test_both_ways_of_submitting_say_the_same(context: DeployContext) -> None:
    spec, files = application(context)["spec"], render(context.recipe, "spark", context.settings)
    conf = dict(line.split(" ", 1) for line in files["submit/spark.conf"].splitlines())
    assert conf.items() >= spec["sparkConf"].items()
    assert conf["spark.executor.memoryOverhead"] == spec["executor"]["memoryOverhead"]
    assert conf["spark.dynamicAllocation.maxExecutors"] == str(spec["dynamicAllocation"]["maxExecutors"])
    words = shlex.split(files["submit/submit.sh"], comments=True)
    assert words[-len(spec["arguments"]) - 1 :] == [spec["mainApplicationFile"], *spec["arguments"]]


def test_a_drivers_pod_submits_itself_in_the_pod() -> None:
    command = command_of(
        ["driver", "--properties-file", "a", "local:///b.py", "c"], {"SPARK_DRIVER_BIND_ADDRESS": "10.0.0.7"}
    )
    assert command[0] == str(spark_home() / "bin" / "spark-submit")
    assert command[1:] == [
        "--conf", "spark.driver.bindAddress=10.0.0.7", "--deploy-mode", "client",
        "--properties-file", "a", "local:///b.py", "c",
    ]  # fmt: skip


EXECUTOR = {
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@127.0.0.1:1",
    "SPARK_EXECUTOR_ID": "1",
    "SPARK_EXECUTOR_CORES": "2",
    "SPARK_APPLICATION_ID": "spark-1",
    "SPARK_EXECUTOR_POD_IP": "127.0.0.1",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    "SPARK_EXECUTOR_POD_NAME": "exec-1",
    "SPARK_EXECUTOR_MEMORY": "256m",
}


def test_javas_options_come_in_the_order_of_their_numbers() -> None:
    options = {f"SPARK_JAVA_OPT_{number}": f"-Dnumber={number}" for number in (10, 2, 0)}
    command = command_of(["executor"], {**EXECUTOR, **options})
    assert command[:6] == ["java", "-Dnumber=0", "-Dnumber=2", "-Dnumber=10", "-Xms256m", "-Xmx256m"]


def test_a_pod_that_is_told_nothing_known_says_what_it_expected() -> None:
    with pytest.raises(RecmillError, match=r'expected "driver \.\.\." or "executor" from Spark, got: serve'):
        command_of(["serve"], {})
    with pytest.raises(RecmillError, match="an executor of Spark needs SPARK_APPLICATION_ID, "):
        command_of(["executor"], {})


class Recorder:
    """A server that takes every object it is sent, as Kubernetes would, and keeps it."""

    def __init__(self) -> None:
        self.objects: list[Object] = []
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                sent: Object = json.loads(self.rfile.read(int(self.headers["content-length"])))
                recorder.objects.append(json.loads(json.dumps(sent)))
                sent["metadata"] |= {"uid": "1", "resourceVersion": "1"}
                self.send_response(201)
                self.send_header("content-type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(sent).encode())

            do_POST = do_PUT = do_PATCH = answer  # noqa: N815

            def log_message(self, *_: Any) -> None:
                """Tests are silent."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def of_kind(self, kind: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] == kind]

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def kubernetes() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.stop()


def run(command: list[str], environment: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    usual = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "OMP_WAIT_POLICY": "PASSIVE",
        **ENVIRONMENT,
    }
    given = {
        **usual,
        **({"JAVA_HOME": os.environ["JAVA_HOME"]} if "JAVA_HOME" in os.environ else {}),
        **environment,
    }
    return subprocess.run(command, env=given, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.services
@pytest.mark.xdist_group("spark")
def test_spark_makes_a_safe_driver_of_our_files_and_its_command_prepares(
    tmp_path: Path, kubernetes: Recorder
) -> None:
    recipe = small_recipe()
    deploy(recipe, "spark", tmp_path, DeployConfig())
    script = tmp_path / "spark" / "submit" / "submit.sh"
    conf = script.parent / "spark.conf"
    conf.write_text(conf.read_text() + "spark.kubernetes.submission.waitAppCompletion false\n")
    submitted = run(["sh", str(script)], {"KUBERNETES_API": kubernetes.url}, tmp_path)
    assert submitted.returncode == 0, submitted.stderr

    (pod,) = kubernetes.of_kind("Pod")
    validate(kubernetes.objects)
    (container,) = pod["spec"]["containers"]
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["resources"]["limits"].keys() == {"cpu", "memory"}

    prepared = run_driver(pod, kubernetes, recipe, tmp_path)
    assert prepared.returncode == 0, prepared.stdout + prepared.stderr
    table = Table.open(tmp_path / "runs" / "table")
    assert f"digest {table.digest}" in prepared.stdout
    assert table.digest == prepare(recipe, str(tmp_path / "data"), tmp_path / "here").table.digest


def run_driver(
    pod: Object, kubernetes: Recorder, recipe: Recipe, folder: Path
) -> subprocess.CompletedProcess[str]:
    """The driver's command with its volumes in a folder; executors are threads of it, not pods."""
    (container,) = pod["spec"]["containers"]
    paths = Paths({mount["mountPath"]: folder / mount["name"] for mount in container["volumeMounts"]})
    for path in paths.mounts.values():
        path.mkdir(exist_ok=True)
    write_log(folder / "data")
    files = render(recipe, "spark", DeployConfig())
    (program,), (config,) = (loads(files[f"base/rights/{name}.yaml"]) for name in ("program", "recipe"))
    (folder / "program" / "main.py").write_text(program["data"]["main.py"])
    (folder / "recipe" / "recipe.toml").write_text(config["data"]["recipe.toml"])
    (properties,) = (
        one["data"]["spark.properties"]
        for one in kubernetes.of_kind("ConfigMap")
        if "data" in one and "spark.properties" in one["data"]
    )
    here = "spark.master=local[2]\nspark.driver.host=127.0.0.1\n"
    (paths.mounts["/opt/spark/conf"] / "spark.properties").write_text(properties + here)

    def word(text: str) -> str:
        if text.startswith("k8s://"):
            return "local[2]"
        scheme = "local://" if text.startswith("local://") else ""
        return scheme + paths.here(text.removeprefix(scheme))

    said = {one["name"]: paths.here(one["value"]) for one in container["env"] if "value" in one}
    command = [word(text) for text in (*container["command"], *container["args"])]
    return run(command, {**said, "SPARK_DRIVER_BIND_ADDRESS": "127.0.0.1"}, folder)


@pytest.mark.services
@pytest.mark.xdist_group("spark")
def test_an_executors_command_looks_for_its_driver(tmp_path: Path) -> None:
    tried = run(
        [sys.executable, "-m", "recmill.stages.deploy.spark_entrypoint", "executor"], EXECUTOR, tmp_path
    )
    assert tried.returncode != 0
    assert "Failed to connect to /127.0.0.1:1" in tried.stdout + tried.stderr
