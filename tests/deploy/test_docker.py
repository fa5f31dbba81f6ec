"""docker: the Dockerfile's own lines are run here, as far as they are about Python; the stack is consistent."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from recmill import __version__
from recmill.cli import build_parser
from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.deploy import render
from recmill.stages.deploy.settings import DeployConfig
from recmill.stages.deploy.templates import files_in
from recmill.stages.deploy.yaml import loads
from recmill.stages.serve.config import ServeConfig

ROOT = Path(__file__).parent.parent.parent


@dataclass
class Stage:
    """One FROM of a Dockerfile, with its instructions in order."""

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [text for name, text in self.instructions if name == instruction]


def stages_of(dockerfile: str) -> dict[str, Stage]:
    lines = re.sub(r"\\\n\s*", " ", dockerfile).splitlines()
    found: dict[str, Stage] = {}
    for line in lines:
        name, _, text = line.strip().partition(" ")
        if name == "FROM":
            base, _, alias = text.partition(" AS ")
            found[alias] = Stage(base, alias)
        elif name and not name.startswith("#") and found:
            list(found.values())[-1].instructions.append((name, text.strip()))
    return found


@pytest.fixture
def files(quickstart: Recipe) -> dict[str, str]:
    return render(quickstart, "docker", DeployConfig())


@pytest.fixture
def stages(files: dict[str, str]) -> dict[str, Stage]:
    return stages_of(files["Dockerfile"])


@pytest.fixture
def compose(files: dict[str, str]) -> Any:
    return loads(files["docker-compose.yaml"])[0]


def copied(stage: Stage) -> list[str]:
    """What a stage takes from the source tree."""
    words = [text.split() for text in stage.all("COPY")]
    return [source for line in words if not line[0].startswith("--from") for source in line[:-1]]


def is_ignored(name: str, dockerignore: str) -> bool:
    """The last pattern that fits decides."""
    ignored = False
    for pattern in dockerignore.split():
        wanted = pattern.removeprefix("!").removeprefix("**/")
        if fnmatch.fnmatch(name, wanted) or fnmatch.fnmatch(Path(name).name, wanted):
            ignored = not pattern.startswith("!")
    return ignored


# the Dockerfile


def test_every_file_that_is_copied_is_there_and_reaches_the_builder(
    stages: dict[str, Stage], files: dict[str, str]
) -> None:
    sources = [source for stage in stages.values() for source in copied(stage)]
    assert sources == ["pyproject.toml", "README.md", "LICENSE", "constraints.txt", "native", "recmill"]
    ignored = files["Dockerfile.dockerignore"]
    for source in sources:
        assert (ROOT / source).exists()
        assert not is_ignored(source, ignored)
    assert all(is_ignored(name, ignored) for name in (".venv", ".git", "build", "recmill/_native.abi3.so"))


def test_every_stage_stands_on_python_or_an_earlier_stage(stages: dict[str, Stage]) -> None:
    assert list(stages) == ["wheel", "train-packages", "serve-packages", "program", "train", "serve"]
    seen: set[str] = set()
    for name, stage in stages.items():
        assert stage.base in {"python:${PYTHON}", *seen}
        for text in stage.all("COPY"):
            taken = re.match(r"--from=(\S+)", text)
            assert taken is None or taken[1] in seen
        seen.add(name)


@pytest.mark.parametrize("image", ["train", "serve"])
def test_an_image_runs_as_its_user_and_has_no_compiler(stages: dict[str, Stage], image: str) -> None:
    assert stages[image].all("USER") == ["10001:10001"]
    assert stages[image].base == "program"
    program = stages["program"]
    assert not any("g++" in text for text in program.all("RUN"))
    assert "--uid 10001 --gid 10001" in program.all("RUN")[0]
    assert program.all("STOPSIGNAL") == ["SIGTERM"]
    assert program.all("ENTRYPOINT") == ['["recmill"]']


def test_user_and_images_are_those_of_the_settings(quickstart: Recipe) -> None:
    text = render(
        quickstart, "docker", DeployConfig.of(["user=2000", "group=3000", "image.serve=r.example.com/s:9"])
    )
    stages = stages_of(text["Dockerfile"])
    assert stages["serve"].all("USER") == ["2000:3000"]
    assert "--target serve -t r.example.com/s:9 ." in text["Dockerfile"]
    assert loads(text["docker-compose.yaml"])[0]["services"]["server"]["user"] == "2000:3000"


def test_commands_of_images_and_services_are_those_of_the_command_line(
    stages: dict[str, Stage], compose: Any
) -> None:
    (default,) = stages["serve"].all("CMD")
    for command in (
        json.loads(default),
        compose["services"]["server"]["command"],
        compose["services"]["load"]["command"],
    ):
        build_parser().parse_args(command)


# what its lines about Python do


def shell(line: str, places: dict[str, Path], variables: dict[str, str]) -> None:
    """Run a line of a Dockerfile with its folders somewhere else."""
    for place, real in places.items():
        line = line.replace(place, str(real))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env = {
        **clean,
        "PATH": f"{os.environ['PATH']}:{Path(sys.executable).parent}",  # some machines have python3 but no python
        **variables,
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_COMPILE": "1",
    }
    ran = subprocess.run(["sh", "-ec", line], cwd=places["/src"], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, f"{line}\n{ran.stderr[-3000:]}"


def defaults_of(stage: Stage) -> dict[str, str]:
    return {name: value for name, _, value in (text.partition("=") for text in stage.all("ARG"))}


def python_lines(stage: Stage) -> list[str]:
    return [text for text in stage.all("RUN") if "pip " in text or "venv" in text]


def quick_compiler(folder: Path) -> Path:
    """A compiler that does not optimise: that it can is shown by the package that runs these tests."""
    script = folder / "quick-compiler"
    script.write_text('#!/bin/sh\nexec "$@" -O0\n')
    script.chmod(0o755)
    return script


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the stage that makes the wheel, with the wheel: built of what is copied, and of nothing else."""
    base = tmp_path_factory.mktemp("docker")
    made = {"/src": base / "src", "/wheels": base / "wheels", "/opt/recmill": base / "packages"}
    made["/src"].mkdir()
    wheel = stages_of((ROOT / "deploy/docker/Dockerfile").read_text())["wheel"]
    for source in copied(wheel):
        take = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        take(ROOT / source, made["/src"] / source)
    for library in made["/src"].rglob("*.so"):  # as .dockerignore does
        library.unlink()
    subprocess.run([sys.executable, "-m", "venv", base / "python"], check=True)
    variables = {
        "PATH": f"{base / 'python/bin'}:{os.environ['PATH']}",
        "SKBUILD_CMAKE_ARGS": f"-DCMAKE_CXX_COMPILER_LAUNCHER={quick_compiler(base)}",
    }
    for line in python_lines(wheel):
        shell(line, made, variables)
    return made


@pytest.mark.processes
@pytest.mark.xdist_group("docker")
def test_the_wheel_has_manifests_chart_and_dashboard(places: dict[str, Path]) -> None:
    (wheel,) = places["/wheels"].glob("recmill-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        inside = {name.removeprefix("recmill/stages/deploy/") for name in packed.namelist()}
    for folder in ("chart", "manifests"):
        assert {f"{folder}/{name}" for name in files_in(folder)} <= inside


@pytest.mark.processes
@pytest.mark.xdist_group("docker")
def test_the_serve_image_installs_without_torch_and_serves(
    stages: dict[str, Stage], places: dict[str, Path], tmp_path: Path
) -> None:
    home = tmp_path / "packages"
    venv, install = python_lines(stages["serve-packages"])
    shell(venv, {**places, "/opt/recmill": home}, {})
    shell(f"{install} --no-deps", {**places, "/opt/recmill": home}, {})
    extras = re.search(r"\[([a-z,]+)\]", install)
    assert extras is not None
    link_packages(closure("recmill", frozenset(extras[1].split(","))), home)
    size = sum(file.stat().st_size for file in home.rglob("*") if file.is_file())
    print(f"environment of the serve image: {size / 2**20:,.0f} MB")
    assert size < 800 * 2**20
    seen = _in(
        home,
        "import importlib.util as u; print([u.find_spec(m) for m in ('torch', 'ray', 'pyspark', 'pandas')])",
    )
    assert seen == "[None, None, None, None]\n"
    imported = (
        "recmill.stages.serve.server, recmill.stages.serve.grpc_server, recmill.artifacts.feature_store.redis, "
        "opentelemetry.sdk.trace, recmill"
    )
    assert (
        _in(home, f"import {imported}; print(recmill.__version__, recmill.__file__)").split()[0]
        == __version__
    )
    assert "Answer over HTTP and gRPC" in _run(home / "bin/recmill", "serve", "--help")


@pytest.mark.processes
@pytest.mark.xdist_group("docker")
def test_the_train_image_installs_extras_that_the_wheel_has(
    stages: dict[str, Stage], places: dict[str, Path], tmp_path: Path
) -> None:
    home = tmp_path / "packages"
    extras = f"{defaults_of(stages['train-packages'])['EXTRAS']},spark"
    venv, install = python_lines(stages["train-packages"])
    shell(venv, {**places, "/opt/recmill": home}, {})
    report = tmp_path / "report.json"
    dry = install.replace("pip install", f"pip install --dry-run --no-deps --quiet --report {report}")
    shell(dry, {**places, "/opt/recmill": home}, {"EXTRAS": extras})
    (found,) = json.loads(report.read_text())["install"]
    assert set(extras.split(",")) <= set(found["metadata"]["provides_extra"])


def test_what_the_train_image_installs_is_what_is_tested(stages: dict[str, Stage]) -> None:
    """The packages that run these tests were resolved with the same constraints; each one is among them."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    tested = {canonicalize_name(name): version for name, version in pins.items()}
    extras = {*defaults_of(stages["train-packages"])["EXTRAS"].split(","), "spark"}
    found = closure("recmill", frozenset(extras))
    assert {"torch", "onnx", "ray", "pyspark"} <= found
    assert {name: metadata.version(name).partition("+")[0] for name in found} == {
        name: tested[name] for name in found
    }


def link_packages(packages: set[str], home: Path) -> None:
    """What installing these would copy, from the packages that run these tests: resolved with the same constraints."""
    (target,) = home.glob("lib/python*/site-packages")
    for package in packages:
        for file in metadata.files(package) or []:
            if file.parts[0] != "..":
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                (target / file).symlink_to(Path(str(file.locate())).resolve())


def closure(package: str, extras: frozenset[str]) -> set[str]:
    """Packages that a package with extras requires, and what those require; each is here in a version that will do."""
    found: dict[tuple[str, str], None] = {}
    waiting = [(package, extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        for text in metadata.requires(name) or []:
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                assert wanted.specifier.contains(metadata.version(wanted.name), prereleases=True), text
                more = {(canonicalize_name(wanted.name), one) for one in ("", *wanted.extras)}
                waiting += more - found.keys()
                found |= dict.fromkeys(more)
    return {name for name, _ in found} - {package}


def _in(home: Path, code: str) -> str:
    return _run(home / "bin/python", "-c", code)


def _run(*command: object) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ran = subprocess.run([str(part) for part in command], env=env, cwd="/", capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


# the stack for a laptop


def test_every_service_is_confined(compose: Any) -> None:
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert int(service["user"].partition(":")[0]) > 0, name
        assert not {"privileged", "network_mode", "pid", "cap_add"} & set(service), name


def test_ports_are_open_to_this_machine_alone_and_each_once(compose: Any) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert len(ports) == len(set(ports)) == 4
    # Without tokens or TLS, that is what keeps others out.
    assert "--insecure" in compose["services"]["server"]["command"]


def test_every_image_has_its_version(compose: Any) -> None:
    images = {name: service["image"] for name, service in compose["services"].items()}
    assert images["server"] == images["load"] == DeployConfig().image.serve
    assert all(re.search(r":v?\d", image) for image in images.values())


def test_services_wait_for_services_that_are_there(compose: Any) -> None:
    for service in compose["services"].values():
        assert set(service.get("depends_on", [])) <= set(compose["services"])
    assert compose["services"]["server"]["depends_on"] == {
        "load": {"condition": "service_completed_successfully"}
    }


def test_what_is_mounted_is_rendered_beside_the_stack(compose: Any, files: dict[str, str]) -> None:
    mounts = [mount for service in compose["services"].values() for mount in service.get("volumes", [])]
    for source in (mount.partition(":")[0] for mount in mounts if mount.startswith("./")):
        assert any(name.startswith(source.removeprefix("./")) for name in files), source
    named = {mount.partition(":")[0] for mount in mounts if re.match(r"[a-z]+:", mount)}
    assert named == set(compose["volumes"])


def test_prometheus_asks_the_server_and_grafana_asks_prometheus(compose: Any, files: dict[str, str]) -> None:
    (scraped,) = loads(files["prometheus/prometheus.yml"])[0]["scrape_configs"]
    host, port = scraped["static_configs"][0]["targets"][0].split(":")
    assert any(mapping.endswith(f":{port}") for mapping in compose["services"][host]["ports"])
    (source,) = loads(files["grafana/provisioning/datasources/prometheus.yaml"])[0]["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert any(mapping.endswith(f":{port}") for mapping in compose["services"][host]["ports"])
    (provider,) = loads(files["grafana/provisioning/dashboards/recmill.yaml"])[0]["providers"]
    mounts = compose["services"]["grafana"]["volumes"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in mounts


def test_the_health_check_asks_the_port_and_path_that_the_server_has(stages: dict[str, Stage]) -> None:
    from recmill.stages.serve import http_routes

    (check,) = stages["serve"].all("HEALTHCHECK")
    asked = re.search(r"http://127\.0\.0\.1:(\d+)(/[a-z/]+)", check)
    assert asked is not None
    assert asked[1] == str(ServeConfig.http_port)
    assert f'Route("{asked[2]}"' in Path(http_routes.__file__).read_text()
    assert asked[1] in stages["serve"].all("EXPOSE")[0].split()
