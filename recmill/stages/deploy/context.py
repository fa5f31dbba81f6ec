"""A recipe with its settings -> the values that fill the templates of all targets."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from recmill import __version__
from recmill.recipe.load import load_recipe, shipped_recipes
from recmill.recipe.recipe import Recipe
from recmill.recipe.write import toml_of
from recmill.stages.deploy.settings import (
    MAX_NAME,
    STORAGE,
    DeployConfig,
    DeployError,
    is_app_name,
    number_of,
)
from recmill.stages.deploy.sizing import MB, Resources, Sizing, size, smallest_bound
from recmill.stages.deploy.templates import Files, fill, read

RECIPE_FOLDER = "/etc/recmill"


@dataclass(frozen=True)
class DeployContext:
    """A recipe with its settings: every name, and what each stage needs, resolved."""

    recipe: Recipe
    settings: DeployConfig
    name: str
    sizing: Sizing

    @classmethod
    def of(cls, recipe: Recipe, settings: DeployConfig) -> DeployContext:
        return cls(recipe, settings, settings.name or _name_of(recipe), _sizing(recipe, settings))

    @cached_property
    def is_shipped(self) -> bool:
        """Whether the image has this very recipe under its name."""
        shipped = self.recipe.name in shipped_recipes()
        return shipped and load_recipe(self.recipe.name) == self.recipe

    @property
    def recipe_argument(self) -> str:
        """RECIPE of commands: the name of a shipped one, or the file of the ConfigMap."""
        return self.recipe.name if self.is_shipped else f"{RECIPE_FOLDER}/recipe.toml"

    @property
    def data_path(self) -> str:
        """--data of commands."""
        path = self.settings.data.path.rstrip("/")
        return "/data" if path == "." else f"/data/{path.removeprefix('./')}"

    @property
    def bundle(self) -> str:
        """Where bundles are published and served from."""
        return self.settings.publish.url or "/runs/bundle"

    @property
    def prepare_bound(self) -> str:
        """--memory of `recmill prepare`, so that all of it stays within the container's memory."""
        return f"{self.sizing.prepare_bound // MB}MB"

    def values(self) -> dict[str, Any]:
        """What templates of several targets use. A line with a value of None is left out of a manifest."""
        settings = self.settings
        own = None if self.is_shipped else f"{self.name}-recipe"
        pull_secret, secret = settings.image.pull_secret, settings.publish.secret
        credentials = [{"secretRef": {"name": secret}}] if secret else None
        return {
            "name": self.name,
            "namespace": settings.namespace,
            "version": __version__,
            "user": settings.user,
            "group": settings.group,
            "train_image": settings.image.train,
            "serve_image": settings.image.serve,
            "redis_image": settings.image.redis,
            "pull_policy": settings.image.pull_policy,
            "pull_secrets": [{"name": pull_secret}] if pull_secret else None,
            "storage_class": settings.storage.class_name,
            "data_claim": settings.data.claim or f"{self.name}-data",
            "retry_limit": settings.retry_limit,
            "bundle": self.bundle,
            "credentials": credentials,
            "recipe": self.recipe_argument,
            "recipe_map": own,
            "recipe_folder": own and RECIPE_FOLDER,
            "recipe_file": own and "recipe.yaml",
            "data": self.data_path,
            "prepare_bound": self.prepare_bound,
            "prepare_resources": resources(self.sizing.prepare),
            "train_resources": resources(self.sizing.train),
        }

    def recipe_map(self) -> str | None:
        """The ConfigMap that holds the recipe; None for a shipped one."""
        if self.is_shipped:
            return None
        return fill(read("manifests/recipe.yaml"), {**self.values(), "recipe_toml": toml_of(self.recipe)})

    def claims(self, kind: str, folders: Sequence[str] = ("runs", "data")) -> str:
        """The claims that pods mount, and the volumes behind them; not one that is there already."""
        storage = self.settings.storage
        num_bytes = {"runs": self.sizing.runs_bytes, "data": self.sizing.log_bytes}
        values = {
            **self.values(),
            "access": storage.access,
            "nfs_server": storage.nfs.server,
            "nfs_path": storage.nfs.path.rstrip("/"),
            "host_path": storage.host_path.rstrip("/"),
        }
        made = [folder for folder in folders if folder == "runs" or not self.settings.data.claim]
        template = read(f"manifests/storage/{kind}.yaml")
        return "".join(
            fill(template, {**values, "folder": folder, "size": quantity(num_bytes[folder])})
            for folder in made
        )

    def storage_overlays(self, folders: Sequence[str] = ("runs", "data"), inside: str = "") -> Files:
        """claims.yaml of the overlay of each kind of storage."""
        return {f"overlays/{kind}/{inside}claims.yaml": self.claims(kind, folders) for kind in STORAGE}


def check_measured(recipe: Recipe) -> None:
    """Raises when the stage that evaluates would have nothing to measure."""
    if recipe.split is None:
        problem = "split is missing: nothing is held out, so that no model can be evaluated. Add [split]"
        raise DeployError(f"recipe {recipe.name}", [problem])


def check_shared_storage(context: DeployContext) -> None:
    if context.settings.storage.access == "ReadWriteOnce":
        problem = "storage.access=ReadWriteOnce lets one node mount /runs, and here are several: leave it out"
        raise DeployError("--set", [problem])


def _name_of(recipe: Recipe) -> str:
    if is_app_name(recipe.name):
        return recipe.name
    likely = re.sub(r"[^a-z0-9]+", "-", recipe.name.lower()).strip("-")[:MAX_NAME].rstrip("-")
    hint = f"such as --set name={likely}" if is_app_name(likely) else "with --set name=..."
    raise DeployError(
        "--set",
        [f'name is missing: the recipe\'s own, "{recipe.name}", is none for Kubernetes. Add one, {hint}'],
    )


def _sizing(recipe: Recipe, settings: DeployConfig) -> Sizing:
    """What `recmill size` computes, with what is set instead of it."""
    computed = size(recipe, settings.rows, settings.items, settings.users, settings.rate)
    most = settings.serve.max_replicas or computed.replicas
    sizing = dataclasses.replace(
        computed,
        prepare=_resources(computed.prepare, settings.prepare.cpus, settings.prepare.memory),
        train=_resources(computed.train, settings.train.cpus, settings.train.memory),
        serve=_resources(computed.serve, settings.serve.cpus, settings.serve.memory),
        replicas=settings.serve.replicas or min(computed.replicas, most),
        runs_bytes=_bytes(settings.storage.size, computed.runs_bytes),
        log_bytes=_bytes(settings.data.size, computed.log_bytes),
        redis_bytes=_bytes(settings.redis.memory, computed.redis_bytes),
    )
    if sizing.prepare_bound < smallest_bound():
        least = quantity(computed.prepare_fixed + smallest_bound())
        problem = f"prepare.memory must be at least {least} for this recipe, got {settings.prepare.memory}"
        raise DeployError("--set", [problem])
    return sizing


def _resources(computed: Resources, cpus: str | None, memory: str | None) -> Resources:
    return Resources(number_of(cpus) if cpus else computed.cpus, _bytes(memory, computed.memory))


def _bytes(setting: str | None, computed: int) -> int:
    return int(number_of(setting)) if setting else computed


# quantities of Kubernetes


def quantity(num_bytes: float) -> str:
    """Bytes as Kubernetes writes them, rounded up to whole Mi, or Gi when they come out even."""
    mebibytes = math.ceil(num_bytes / MB)
    return f"{mebibytes // 1024}Gi" if mebibytes % 1024 == 0 else f"{mebibytes}Mi"


def cores(cpus: float) -> str:
    return f"{cpus:g}" if cpus == int(cpus) else f"{math.ceil(cpus * 1000)}m"


def resources(need: Resources) -> dict[str, Any]:
    """Requests and limits alike: what a pod is promised is what it gets, and what its threads are counted by."""
    amounts = {"cpu": cores(need.cpus), "memory": quantity(need.memory)}
    return {"requests": amounts, "limits": amounts}
