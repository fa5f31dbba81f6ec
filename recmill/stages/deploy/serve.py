"""serve: servers and what stands beside them, as a kustomize base and overlays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

from recmill.recipe.kinds import crossed_features
from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.parts import Files, Object, Site, claims, kustomization
from recmill.stages.deploy.serve_network import network
from recmill.stages.deploy.serve_pods import redis, roles, servers
from recmill.stages.deploy.serve_transports import ingress, monitoring, node_port
from recmill.stages.deploy.serving import ServeParts, Serving, chosen, max_servers
from recmill.stages.deploy.settings import DeployConfig, DeployError
from recmill.stages.deploy.yaml import dumps

GROUPS: dict[str, Callable[[Serving], list[Object]]] = {
    "servers": servers,
    "network": network,
    "split": roles,
    "redis": redis,
    "monitoring": monitoring,
    "ingress": ingress,
    "nodeport": node_port,
}
ALWAYS = ("servers", "network")
# What an overlay adds. Who comes from outside the cluster always shows a token.
OVERLAYS: dict[str, frozenset[str]] = {
    "redis": frozenset({"redis"}),
    "split": frozenset({"split"}),
    "monitoring": frozenset({"monitoring"}),
    "ingress": frozenset({"ingress", "tokens"}),
    "nodeport": frozenset({"nodeport", "tokens"}),
}
_STORAGE: tuple[Literal["pvc", "nfs"], ...] = ("pvc", "nfs")


def render(recipe: Recipe, settings: DeployConfig) -> Files:
    """base: what the settings ask for; overlays: its storage, and what they might have asked for on top of that."""
    site = Site.of(recipe, settings)
    check(site)
    base = Serving.of(site, chosen(settings))
    groups = {f"{name}.yaml": objects for name, objects in groups_of(base)}
    files = {f"base/{name}": dumps(objects) for name, objects in groups.items()}
    files = {"base/kustomization.yaml": kustomization(site, list(groups)), **files}
    for kind in _STORAGE:
        files[f"overlays/{kind}/kustomization.yaml"] = kustomization(site, ["../../base", "claims.yaml"])
        files[f"overlays/{kind}/claims.yaml"] = dumps(runs_claim(site, kind))
    for name, more in OVERLAYS.items():
        if name not in base.on.chosen and not misfit(recipe, name):
            wanted = dataclasses.replace(base, on=ServeParts(base.on.chosen | more))
            files |= _overlay(site, name, objects_of(base), objects_of(wanted))
    return files


def check(site: Site) -> None:
    """Raises when settings and recipe do not go together."""
    asked, servers = site.settings, site.sizing.replicas
    problems = [problem for name in chosen(asked) if (problem := misfit(site.recipe, name))]
    if asked.storage.access == "ReadWriteOnce" and servers > 1:
        problems.append(
            f"storage.access=ReadWriteOnce lets one node mount the bundles, and this recipe needs {servers} servers. "
            "Add serve.replicas=1, or take ReadWriteMany"
        )
    if max_servers(site) < servers:
        problems.append(f"serve.max_replicas must be at least {servers}, got {asked.serve.max_replicas}")
    if problems:
        raise DeployError("--set", sorted(problems))


def misfit(recipe: Recipe, choice: str) -> str | None:
    """Why a recipe cannot be served like this, if so."""
    scores_rows = not (recipe.log.user and recipe.log.item)
    if choice == "redis" and scores_rows:
        return f'redis.enabled needs users and items, and recipe "{recipe.name}" has none: it scores rows'
    if choice == "split" and (scores_rows or recipe.retrieval is None or recipe.ranking is None):
        return f'serve.split needs retrieval and ranking of users and items, and recipe "{recipe.name}" lacks some'
    crossed = crossed_features(recipe) if choice == "split" else []
    if crossed:
        return (
            f'serve.split lets features and ranking run apart, but feature "{crossed[0]}" looks at users and items '
            "together: leave serve.split out"
        )
    return None


def runs_claim(site: Site, kind: Literal["pvc", "nfs"]) -> list[Object]:
    """The claim that bundles lie in, the same as that of the targets that make them; for NFS with its volume."""
    return [made for made in claims(site, kind) if made["metadata"]["name"].endswith(site.runs_claim)]


def _overlay(site: Site, name: str, base: list[Object], wanted: list[Object]) -> Files:
    """What is new as objects, what is other as patches."""
    before = {_identity(one): one for one in base}
    new = [one for one in wanted if _identity(one) not in before]
    patches = [
        {"target": {"kind": one["kind"], "name": one["metadata"]["name"]}, "patch": dumps_patch(changes)}
        for one in wanted
        if (changes := list(differences(before.get(_identity(one), one), one)))
    ]
    folder = f"overlays/{name}"
    names = [f"../{site.settings.storage.kind}", f"{name}.yaml"]
    return {
        f"{folder}/kustomization.yaml": kustomization(
            site, names, **({"patches": patches} if patches else {})
        ),
        f"{folder}/{name}.yaml": dumps(new),
    }


def _identity(one: Object) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]


def dumps_patch(changes: list[Object]) -> str:
    """A JSON patch, written as YAML."""
    text = dumps([{"patch": changes}]).removeprefix("patch:\n")
    return "".join(line.removeprefix("  ") for line in text.splitlines(keepends=True))


def differences(before: Any, after: Any, path: str = "") -> Iterator[Object]:
    """The JSON patch that makes one value of another."""
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            place = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
            if key not in after:
                yield {"op": "remove", "path": place}
            elif key not in before:
                yield {"op": "add", "path": place, "value": after[key]}
            else:
                yield from differences(before[key], after[key], place)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, f"{path}/{number}")
    else:
        yield {"op": "replace", "path": path, "value": after}


# objects


def objects_of(serving: Serving) -> list[Object]:
    return [one for _, objects in groups_of(serving) for one in objects]


def groups_of(serving: Serving) -> Iterator[tuple[str, list[Object]]]:
    """File name without its ending, and objects, of all that was chosen."""
    for name, make in GROUPS.items():
        if name in ALWAYS or name in serving.on.chosen:
            yield name, make(serving)
