"""docker: an image that trains, a small one that serves without torch, and a stack of containers for a laptop."""

from __future__ import annotations

from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.context import DeployContext
from recmill.stages.deploy.settings import DeployConfig
from recmill.stages.deploy.templates import Files, read, render_folder


def render(recipe: Recipe, settings: DeployConfig) -> Files:
    context = DeployContext.of(recipe, settings)
    runs_mount = f"${{RECMILL_RUNS:-../../runs/{recipe.name}}}:/runs:ro"
    files = render_folder("manifests/docker", {**context.values(), "runs_mount": runs_mount})
    return {**files, "grafana/dashboards/recmill.json": read("chart/files/dashboard.json")}
