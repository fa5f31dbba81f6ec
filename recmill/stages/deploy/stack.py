"""stack: the pipeline and the servers of its bundles as one: on an empty volume, servers wait for the first bundle."""

from __future__ import annotations

from recmill.recipe.recipe import Recipe
from recmill.stages.deploy import pipeline, serve
from recmill.stages.deploy.context import DeployContext
from recmill.stages.deploy.settings import DeployConfig
from recmill.stages.deploy.templates import Files, render_folder


def render(recipe: Recipe, settings: DeployConfig) -> Files:
    """base/pipeline, base/serve; overlays: both with one set of claims, also with a daily run; run.yaml: one run."""
    context = DeployContext.of(recipe, settings)
    of_pipeline, of_serve = pipeline.render(recipe, settings), serve.render(recipe, settings)
    return {
        **_below("pipeline", of_pipeline),
        **_below("serve", of_serve),
        **render_folder("manifests/stack", context.values()),
        **context.storage_overlays(),
        **{name: of_pipeline[name] for name in ("daily/cron.yaml", "daily/kustomization.yaml", "run.yaml")},
    }


def _below(target: str, files: Files) -> Files:
    """The base of a target as one of several bases."""
    return {
        name.replace("base/", f"base/{target}/", 1): text
        for name, text in files.items()
        if name.startswith("base/")
    }
