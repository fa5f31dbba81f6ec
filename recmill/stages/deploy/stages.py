"""Kustomizations of targets with several stages, which are applied one after the other over one storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from recmill.stages.deploy.parts import Files, Object, Site, claims, kustomization
from recmill.stages.deploy.settings import DeployError
from recmill.stages.deploy.yaml import dumps

_STORAGE: tuple[Literal["pvc", "nfs"], ...] = ("pvc", "nfs")


def base(site: Site, stage: str, files: Mapping[str, Sequence[Object]], beside: Sequence[str] = ()) -> Files:
    """base/<stage>: its files, and other stages that it stands on."""
    resources = [*(f"../{other}" for other in beside), *files]
    return {
        f"base/{stage}/kustomization.yaml": kustomization(site, resources),
        **{f"base/{stage}/{name}": dumps(objects) for name, objects in files.items()},
    }


def overlays(site: Site, stages: Sequence[str]) -> Files:
    """overlays/{pvc,nfs}/storage: the claims that pods mount; overlays/{pvc,nfs}/<stage>: a base with its storage."""
    files: Files = {}
    for kind in _STORAGE:
        folder = f"overlays/{kind}"
        files[f"{folder}/storage/kustomization.yaml"] = kustomization(site, ["claims.yaml"])
        files[f"{folder}/storage/claims.yaml"] = dumps(claims(site, kind))
        for stage in stages:
            resources = [f"../../../base/{stage}", "../storage"]
            files[f"{folder}/{stage}/kustomization.yaml"] = kustomization(site, resources)
    return files


def check_shared_storage(site: Site) -> None:
    if site.settings.storage.access == "ReadWriteOnce":
        problem = "storage.access=ReadWriteOnce lets one node mount /runs, and here are several: leave it out"
        raise DeployError("--set", [problem])
