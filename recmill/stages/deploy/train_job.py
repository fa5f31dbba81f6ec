"""train-job: a Job that prepares, trains and evaluates on one node. An evicted pod goes on from its checkpoint."""

from __future__ import annotations

from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.context import DeployContext, check_measured
from recmill.stages.deploy.settings import DeployConfig, DeployError
from recmill.stages.deploy.templates import Files, render_folder


def render(recipe: Recipe, settings: DeployConfig) -> Files:
    """base: the Job; overlays: the storage that it mounts."""
    context = DeployContext.of(recipe, settings)
    check_measured(recipe)
    files = render_folder(
        "manifests/train-job", {**context.values(), "evaluate_command": evaluate_command(context)}
    )
    if recipe_map := context.recipe_map():
        files["base/recipe.yaml"] = recipe_map
    return files | context.storage_overlays()


def evaluate_command(context: DeployContext) -> list[str]:
    command = ["recmill", "evaluate", context.recipe_argument, "--checkpoint", "/runs/checkpoint"]
    command += ["--table", "/runs/table", "--report", "/runs/report.html"]
    gate = _gate(context)
    return [*command, "--gate", gate] if gate else command


def _gate(context: DeployContext) -> str | None:
    gate = context.settings.gate
    if gate and "live" in gate:
        problem = f'gate "{gate}" compares with the live model, which only target pipeline knows'
        raise DeployError("--set", [problem])
    return gate or ("ne<=constant" if context.recipe.ranking is not None else None)
