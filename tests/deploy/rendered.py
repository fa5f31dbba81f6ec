"""What targets render, as objects."""

from __future__ import annotations

from typing import Any

from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.context import DeployContext
from recmill.stages.deploy.deploy import render
from recmill.stages.deploy.settings import DeployConfig
from recmill.stages.deploy.yaml import loads

Object = dict[str, Any]


def context_of(recipe: Recipe, *pairs: str) -> DeployContext:
    return DeployContext.of(recipe, DeployConfig.of(pairs))


def rendered(recipe: Recipe, target: str, *pairs: str) -> dict[str, list[Object]]:
    """Path -> objects of every YAML file of a target."""
    files = render(recipe, target, DeployConfig.of(pairs))
    return {name: loads(text) for name, text in files.items() if name.endswith(".yaml")}


def base_objects(recipe: Recipe, target: str, *pairs: str) -> list[Object]:
    """The objects of a target without its storage."""
    files = rendered(recipe, target, *pairs)
    return [
        one
        for name, objects in files.items()
        if name.startswith("base/") and not name.endswith("kustomization.yaml")
        for one in objects
    ]


def named(objects: list[Object], kind: str, name: str) -> Object:
    (one,) = [one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return one
