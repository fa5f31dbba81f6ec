"""Target stack: the pipeline and its servers, each as its own target renders them, with one set of claims."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from validate import kustomized, validate

from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.deploy import deploy, render
from recmill.stages.deploy.settings import STORAGE, DeployConfig
from recmill.stages.deploy.yaml import loads

Object = dict[str, Any]
ALL = ("redis.enabled=true", "monitoring.enabled=true", "serve.split=true", "serve.tls_secret=tls")


def built(into: Path, recipe: Recipe, target: str, overlay: str) -> dict[tuple[str, str], Object]:
    deploy(recipe, target, into, DeployConfig.of(ALL))
    objects = kustomized(into / target / "overlays" / overlay)
    validate(objects)
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(set(names)) == len(names)
    return dict(zip(names, objects, strict=True))


@pytest.mark.services
@pytest.mark.parametrize("kind", STORAGE)
def test_it_is_what_both_targets_are(quickstart: Recipe, tmp_path: Path, kind: str) -> None:
    own = dataclasses.replace(quickstart, name="mine")
    for overlay in (kind, f"{kind}-daily"):
        stack = built(tmp_path, own, "stack", overlay)
        apart = built(tmp_path, own, "serve", kind) | built(tmp_path, own, "pipeline", overlay)
        assert stack == apart


def test_its_run_is_that_of_the_pipeline(quickstart: Recipe) -> None:
    files = render(quickstart, "stack", DeployConfig.of(["namespace=shop"]))
    (run,) = loads(files["run.yaml"])
    (template,) = loads(files["base/pipeline/workflow.yaml"])
    assert run["metadata"]["namespace"] == "shop"
    assert run["spec"]["workflowTemplateRef"]["name"] == template["metadata"]["name"]
