"""spark: a SparkApplication that prepares, and the same for plain spark-submit on Kubernetes.

For the Spark operator 2.1 or later, which hands pod templates to Spark. The train image must have Spark in it.
"""

from __future__ import annotations

import shlex
from typing import Any

from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.context import DeployContext, check_shared_storage
from recmill.stages.deploy.settings import DeployConfig, DeployError, number_of
from recmill.stages.deploy.sizing import GB, MB, smallest_bound
from recmill.stages.deploy.templates import Files, render_folder

_JAVA_BYTES = GB  # rows pass through Java in small batches; tasks hold their memory in Python


def render(recipe: Recipe, settings: DeployConfig) -> Files:
    """base/prepare: the application, and what it may do; overlays: with storage; submit: without the operator."""
    context = DeployContext.of(recipe, settings)
    _check(context)
    check_shared_storage(context)
    files = render_folder("manifests/spark", {**context.values(), **_values(context)})
    if recipe_map := context.recipe_map():
        files["base/rights/recipe.yaml"] = recipe_map
    if pull_secret := settings.image.pull_secret:
        files["submit/spark.conf"] += f"spark.kubernetes.container.image.pullSecrets {pull_secret}\n"
    return files | context.storage_overlays(inside="storage/")


def _check(context: DeployContext) -> None:
    settings = context.settings.spark
    problems = []
    for name, memory, tasks in (
        ("spark.executor_memory", settings.executor_memory, settings.executor_cpus),
        ("spark.driver_memory", settings.driver_memory, 1),
    ):
        needed = _pod_memory(context, tasks, smallest_bound())
        if memory and number_of(memory) < needed:
            problems.append(f"{name} must be at least {-(-needed // MB)}Mi for this recipe, got {memory}")
    if problems:
        raise DeployError("--set", problems)


def _values(context: DeployContext) -> dict[str, Any]:
    settings, image = context.settings.spark, context.settings.image
    return {
        "spark_version": settings.version,
        "service_account": settings.service_account,
        "spark_pull_secrets": [image.pull_secret] if image.pull_secret else None,
        "arguments": arguments(context),
        "shell_arguments": shlex.join(arguments(context)),
        # Executors come and go; the log is split for as many as there may be.
        "parallelism": str(settings.executors * settings.executor_cpus),
        "executors": settings.executors,
        "executor_cpus": settings.executor_cpus,
        "executor_cpu_limit": str(settings.executor_cpus),
        "java_memory": f"{_JAVA_BYTES // MB}m",
        "driver_overhead": _overhead(context, 1, settings.driver_memory),
        "executor_overhead": _overhead(context, settings.executor_cpus, settings.executor_memory),
    }


def arguments(context: DeployContext) -> list[str]:
    """Of recmill. Memory of executors is given again, because the engine would compute it without their programs."""
    settings = context.settings.spark
    overhead = _overhead(context, settings.executor_cpus, settings.executor_memory)
    command = ["prepare", context.recipe_argument, "--data", context.data_path, "--into", "/runs/table"]
    # The address is that of the API server, for a driver inside the cluster.
    command += ["--engine", "spark", "--address", "k8s://https://kubernetes.default.svc"]
    command += ["--memory", f"{task_memory(context) // MB}MB"]
    return [*command, "--spark-conf", f"spark.executor.memoryOverhead={overhead}"]


def task_memory(context: DeployContext) -> int:
    """--memory of `recmill prepare`: of the driver and of each task. What pods are set to have bounds it."""
    settings = context.settings.spark
    bounds = [max(smallest_bound(), context.sizing.prepare_bound // settings.executor_cpus)]
    if settings.executor_memory:
        bounds = [_bound_of_task(context, settings.executor_memory, settings.executor_cpus)]
    if settings.driver_memory:
        bounds.append(_bound_of_task(context, settings.driver_memory, 1))
    return min(bounds)


def _bound_of_task(context: DeployContext, memory: str, tasks: int) -> int:
    return (int(number_of(memory)) - _JAVA_BYTES) // tasks - context.sizing.prepare_fixed


def _pod_memory(context: DeployContext, tasks: int, bound: int) -> int:
    """Java, and for each task Python with its vocabularies and its bound."""
    return _JAVA_BYTES + tasks * (context.sizing.prepare_fixed + bound)


def _overhead(context: DeployContext, tasks: int, memory: str | None) -> str:
    """Spark's memoryOverhead: what a pod has beside Java."""
    whole = int(number_of(memory)) if memory else _pod_memory(context, tasks, task_memory(context))
    return f"{(whole - _JAVA_BYTES) // MB}m"
