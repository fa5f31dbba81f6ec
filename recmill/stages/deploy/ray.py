"""ray: RayJobs that prepare and train, and a RayCluster that stays, with separate nodes for data and for training.

For KubeRay 1.5.1 or later, which makes each cluster's token, and Ray 2.53 or later, whose nodes answer /api/healthz.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import Any

from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.context import DeployContext, check_shared_storage, resources
from recmill.stages.deploy.settings import DeployConfig, DeployError
from recmill.stages.deploy.sizing import GB, MB, Resources, smallest_bound
from recmill.stages.deploy.templates import Files, render_folder

_LEAST_RAY = (2, 53, 0)
_LONGEST_JOB_NAME = 47  # that KubeRay takes
_NODE_BYTES = 512 * MB  # Ray's own processes on a worker
_HEAD = Resources(2, 2 * GB)  # Ray's own processes on the head
_TRAINER_BYTES = GB  # a training worker without tables and batches
# Of a worker's slice of the tables: keys are not spread evenly, and small tables are on every worker.
_ROOM = 1.3
_STORE_FRACTION, _LEAST_STORE = (
    0.3,
    512 * MB,
)  # of the object store: beside what tasks hold, what they pass on


def render(recipe: Recipe, settings: DeployConfig) -> Files:
    """base/{prepare,train,cluster}: one each; overlays/<kind>/...: the same with the storage that they mount."""
    context = DeployContext.of(recipe, settings)
    _check(context)
    check_shared_storage(context)
    files = render_folder("manifests/ray", {**context.values(), **_values(context)})
    if recipe_map := context.recipe_map():
        files |= {f"base/{stage}/recipe.yaml": recipe_map for stage in ("prepare", "train", "cluster")}
    return files | context.storage_overlays(inside="storage/")


def _check(context: DeployContext) -> None:
    problems = []
    version, longest = context.settings.ray.version, _LONGEST_JOB_NAME - len("-ray-prepare")
    if tuple(map(int, version.split("."))) < _LEAST_RAY:
        problems.append(f"ray.version must be at least {'.'.join(map(str, _LEAST_RAY))}, got {version}")
    if len(context.name) > longest:
        problems.append(
            f"name must have at most {longest} characters for target ray, got {len(context.name)}: {context.name}"
        )
    if problems:
        raise DeployError("--set", problems)


def _values(context: DeployContext) -> dict[str, Any]:
    data, train = data_nodes(context), train_nodes(context)
    head = _HEAD.memory + _LEAST_STORE + context.sizing.prepare_fixed + task_memory(context)  # and the driver
    return {
        "ray_version": context.settings.ray.version,
        "prepare_entrypoint": shlex.join(prepare_command(context)),
        "train_entrypoint": shlex.join(train_command(context)),
        "head_resources": resources(Resources(_HEAD.cpus, head)),
        "head_store": str(_LEAST_STORE),
        "data_workers": data.number,
        "data_resources": resources(data.need),
        "data_store": str(data.store),
        "train_workers": train.number,
        "trainer_resources": resources(train.need),
        "train_store": str(train.store),
    }


# what nodes are given


@dataclass(frozen=True)
class NodeGroup:
    """Nodes that are alike. `work` is what tasks hold; Ray and its object store come on top."""

    number: int
    cpus: int
    work: int
    store: int

    @property
    def need(self) -> Resources:
        return Resources(self.cpus, _NODE_BYTES + self.work + self.store)


def data_nodes(context: DeployContext) -> NodeGroup:
    """A task for each core, each with its own memory."""
    cpus, memory = max(1, math.ceil(context.sizing.prepare.cpus)), task_memory(context)
    store = max(_LEAST_STORE, int(cpus * memory * _STORE_FRACTION))
    work = cpus * (context.sizing.prepare_fixed + memory)
    return NodeGroup(context.settings.ray.data_workers, cpus, work, store)


def task_memory(context: DeployContext) -> int:
    """--memory of `recmill prepare`, which bounds each task: those of a node divide what one process would have."""
    tasks = max(1, math.ceil(context.sizing.prepare.cpus))
    return max(smallest_bound(), context.sizing.prepare_bound // tasks)


def train_nodes(context: DeployContext) -> NodeGroup:
    """A worker for each node. What is set is what each gets; what is computed for one machine is divided."""
    settings, whole = context.settings.train, context.sizing.train
    number = settings.workers or context.settings.ray.train_workers
    cpus = whole.cpus if settings.cpus else whole.cpus / number
    memory = whole.memory if settings.memory else _TRAINER_BYTES + int(_ROOM * whole.memory / number)
    return NodeGroup(number, max(1, math.ceil(cpus)), memory, _LEAST_STORE)


# commands


def prepare_command(context: DeployContext) -> list[str]:
    command = ["recmill", "prepare", context.recipe_argument, "--data", context.data_path]
    command += ["--into", "/runs/table", "--engine", "ray", "--address", "auto"]
    return [*command, "--memory", f"{task_memory(context) // MB}MB"]


def train_command(context: DeployContext) -> list[str]:
    data, train = data_nodes(context), train_nodes(context)
    command = ["recmill", "train", context.recipe_argument, "--table", "/runs/table"]
    command += ["--into", "/runs/checkpoint", "--resume", "--engine", "ray", "--address", "auto"]
    command += ["--workers", str(train.number), "--cpus-per-worker", str(train.cpus)]
    command += ["--worker-resource", "train"]
    return [*command, "--data-workers", str(data.number * data.cpus), "--data-resource", "data"]
