"""ray: what nodes are for and what they are given; the commands of its jobs run on a cluster as it describes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from cluster import Paths
from ray_nodes import RayNodes
from rendered import context_of
from small_log import small_recipe, write_log

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.cli import build_parser
from recmill.cli.flags import read_config
from recmill.dataset.table import Table
from recmill.recipe.defaults import is_resolution
from recmill.recipe.load import load_recipe
from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.context import DeployContext
from recmill.stages.deploy.deploy import render
from recmill.stages.deploy.ray import data_nodes, task_memory, train_nodes
from recmill.stages.deploy.settings import DeployConfig, DeployError, number_of
from recmill.stages.deploy.yaml import loads
from recmill.stages.prepare.prepare import prepare
from recmill.stages.train.config import RayTrainConfig


def stage_of(context: DeployContext, stage: str) -> Any:
    """The RayJob or RayCluster of a stage."""
    return loads(render(context.recipe, "ray", context.settings)[f"base/{stage}/{stage}.yaml"])[0]


def prepare_job(context: DeployContext) -> Any:
    return stage_of(context, "prepare")


def train_job(context: DeployContext) -> Any:
    return stage_of(context, "train")


def cluster(context: DeployContext) -> Any:
    return stage_of(context, "cluster")


def groups(spec: Any) -> dict[str, Any]:
    return {group["groupName"]: group for group in spec["workerGroupSpecs"]}


def container_of(group: Any) -> Any:
    return group["template"]["spec"]["containers"][0]


def test_data_and_training_have_nodes_of_their_own(context: DeployContext) -> None:
    spec = train_job(context)["spec"]
    parsed = build_parser().parse_args(shlex.split(spec["entrypoint"])[1:])
    given = read_config(parsed, RayTrainConfig)
    train, data = train_nodes(context), data_nodes(context)
    assert (given.worker_resource, given.data_resource) == ("train", "data")
    assert given.workers == (train.number, train.number)
    assert given.cpus_per_worker == train.cpus
    assert given.data_workers == data.number * data.cpus
    assert {name: group["replicas"] for name, group in groups(spec["rayClusterSpec"]).items()} == {
        "data": 2,
        "train": 2,
    }


@pytest.mark.parametrize("name", ["quickstart", "criteo-dlrm", "criteo-widedeep", "ml1m-leave-last-out"])
def test_entrypoints_are_commands_of_the_command_line(name: str) -> None:
    here = context_of(load_recipe(name))
    for job in (prepare_job(here), train_job(here)):
        build_parser().parse_args(shlex.split(job["spec"]["entrypoint"])[1:])


def test_nothing_runs_on_the_head_but_the_driver(context: DeployContext) -> None:
    for spec in (prepare_job(context)["spec"]["rayClusterSpec"], cluster(context)["spec"]):
        assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_a_data_node_holds_the_memory_of_all_its_tasks(context: DeployContext) -> None:
    nodes = data_nodes(context)
    held = nodes.cpus * (context.sizing.prepare_fixed + task_memory(context))
    limit = container_of(groups(prepare_job(context)["spec"]["rayClusterSpec"])["data"])["resources"][
        "limits"
    ]
    assert limit["cpu"] == str(nodes.cpus)
    assert number_of(limit["memory"]) >= held + nodes.store
    assert f"--memory {task_memory(context) >> 20}MB" in prepare_job(context)["spec"]["entrypoint"]


def test_what_one_machine_would_need_is_divided_among_those_that_train() -> None:
    recipe = load_recipe("criteo-dlrm")
    two, eight = (train_nodes(context_of(recipe, f"ray.train_workers={number}")) for number in (2, 8))
    assert eight.work < two.work < context_of(recipe).sizing.train.memory


def test_what_is_set_is_what_each_of_them_gets(quickstart: Recipe) -> None:
    nodes = train_nodes(context_of(quickstart, "train.workers=3", "train.cpus=4", "train.memory=8Gi"))
    assert (nodes.number, nodes.cpus, nodes.work) == (3, 4, 8 << 30)


def test_only_the_cluster_that_stays_grows_and_shrinks(context: DeployContext) -> None:
    spec = cluster(context)["spec"]
    assert spec["enableInTreeAutoscaling"] is True
    bounds = {name: (group["minReplicas"], group["maxReplicas"]) for name, group in groups(spec).items()}
    assert bounds == {"data": (1, 2), "train": (0, 2)}
    assert "enableInTreeAutoscaling" not in train_job(context)["spec"]["rayClusterSpec"]


def test_rays_autoscaler_understands_the_nodes(context: DeployContext) -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    whole = cluster(context)
    whole["metadata"]["namespace"] = "recmill"
    found = _derive_autoscaling_config_from_ray_cr(whole)["available_node_types"]
    assert found["headgroup"]["resources"]["CPU"] == 0
    assert found["data"]["resources"]["data"] == found["train"]["resources"]["train"] == 1
    assert found["data"]["resources"]["CPU"] == data_nodes(context).cpus
    assert (found["data"]["min_workers"], found["data"]["max_workers"]) == (1, 2)


def test_a_cluster_has_a_token_and_only_an_autoscaler_one_of_kubernetes(context: DeployContext) -> None:
    jobs = [prepare_job(context)["spec"]["rayClusterSpec"], train_job(context)["spec"]["rayClusterSpec"]]
    for spec in (*jobs, cluster(context)["spec"]):
        assert spec["authOptions"] == {"mode": "token"}
    heads = [spec["headGroupSpec"]["template"]["spec"] for spec in (*jobs, cluster(context)["spec"])]
    assert [head["automountServiceAccountToken"] for head in heads] == [False, False, True]


def test_a_finished_job_leaves_no_cluster_behind(context: DeployContext) -> None:
    for job in (prepare_job(context), train_job(context)):
        assert job["spec"]["shutdownAfterJobFinishes"] is True
        assert job["spec"]["backoffLimit"] == 3
        assert job["spec"]["submitterPodTemplate"]["spec"]["restartPolicy"] == "Never"  # a Job demands it


def test_the_log_is_mounted_where_it_is_read(context: DeployContext) -> None:
    def mounted(job: Any) -> list[bool]:
        spec = job["spec"]["rayClusterSpec"]
        found = [container_of(group) for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
        return ["/data" in [mount["mountPath"] for mount in one["volumeMounts"]] for one in found]

    assert mounted(prepare_job(context)) == [True, True]
    assert mounted(train_job(context)) == [False, False, False]


def test_names_differ_from_those_of_other_targets(context: DeployContext) -> None:
    """KubeRay makes a Job of the same name as a RayJob; train-job has one called <name>-train."""
    assert [job["metadata"]["name"] for job in (prepare_job(context), train_job(context))] == [
        "quickstart-ray-prepare",
        "quickstart-ray-train",
    ]


@pytest.mark.parametrize(
    ("pair", "problem"),
    [
        ("ray.version=2.52.1", "ray.version must be at least 2.53.0, got 2.52.1"),
        (f"name={'n' * 36}", "name must have at most 35 characters for target ray"),
        ("storage.access=ReadWriteOnce", "lets one node mount /runs"),
    ],
)
def test_what_kuberay_would_not_take_is_refused(quickstart: Recipe, pair: str, problem: str) -> None:
    with pytest.raises(DeployError, match=problem):
        render(quickstart, "ray", DeployConfig.of([pair]))


@pytest.mark.services
@pytest.mark.xdist_group("ray")
def test_the_jobs_prepare_and_train_on_nodes_started_as_they_say(tmp_path: Path) -> None:
    recipe = small_recipe()
    files = render(
        recipe, "ray", DeployConfig.of(["ray.data_workers=1", "ray.train_workers=1", "train.cpus=1"])
    )
    prepare_it, train_it = (loads(files[f"base/{stage}/{stage}.yaml"]) for stage in ("prepare", "train"))
    folders = {name: tmp_path / name for name in ("data", "runs", "recipe")}
    for folder in folders.values():
        folder.mkdir()
    write_log(folders["data"])
    (config,) = loads(files["base/prepare/recipe.yaml"])
    (folders["recipe"] / "recipe.toml").write_text(config["data"]["recipe.toml"])
    paths = Paths({"/data": folders["data"], "/runs": folders["runs"], "/etc/recmill": folders["recipe"]})
    nodes = RayNodes(train_it[0]["spec"]["rayClusterSpec"], paths)
    try:
        said = nodes.submit(prepare_it[0]["spec"]["entrypoint"])
        nodes.submit(train_it[0]["spec"]["entrypoint"])
    finally:
        nodes.stop()
    table = Table.open(folders["runs"] / "table")
    assert f"digest {table.digest}" in said
    assert table.digest == prepare(recipe, str(folders["data"]), tmp_path / "here").table.digest
    assert is_resolution(Checkpoint.open(folders["runs"] / "checkpoint").recipe, recipe)
