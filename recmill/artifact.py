"""What stages hand to each other: a directory that is whole once its manifest is there, and not before."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recmill.errors import ArtifactError

MANIFEST = "manifest.json"
_MAKERS = {
    "table": "recmill prepare",
    "checkpoint": "recmill train",
    "step": "recmill train",
    "bundle": "recmill export",
    "delta": "recmill train --publish",
}


def write_whole(path: Path, text: str, durable: bool = False) -> None:
    """Write a file so that it is either whole or not there; `durable` survives a power cut too."""
    aside = path.with_name(path.name + ".partial")
    aside.write_text(text, encoding="utf-8")
    if durable:
        sync(aside)
    os.replace(aside, path)


def sync(path: Path) -> None:
    """Wait until a file is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def publish(path: Path, kind: str, manifest: Mapping[str, Any]) -> None:
    """Make a finished directory an artifact: all of it is on the disk before the manifest says so."""
    for file in path.rglob("*"):
        if file.is_file():
            sync(file)
    write_manifest(path, kind, manifest)


def write_manifest(path: Path, kind: str, manifest: Mapping[str, Any]) -> None:
    """What says that a directory is whole, and of which kind."""
    text = json.dumps({"kind": kind, "format": 1, **manifest}, indent=1) + "\n"
    write_whole(path / MANIFEST, text, durable=True)


def is_published(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def read_manifest(path: Path, kind: str) -> dict[str, Any]:
    """The manifest of a whole artifact of this kind; anything else is an error that says what to do."""
    name = kind.capitalize()
    if not path.exists():
        raise ArtifactError(f"{name} {path} does not exist. Run `{_MAKERS[kind]}` first.")
    if not path.is_dir():
        raise ArtifactError(f"{name} {path} is a file; expected the directory that `{_MAKERS[kind]}` wrote.")
    if not is_published(path):
        raise ArtifactError(
            f"{name} {path} is incomplete (no manifest). Run `{_MAKERS[kind]}` again; it resumes."
        )
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{name} {path} has a damaged manifest: {error}. Run `{_MAKERS[kind]}` again."
        ) from None
    if not isinstance(manifest, dict) or manifest.get("kind") != kind:
        found = manifest.get("kind") if isinstance(manifest, dict) else None
        raise ArtifactError(f"{path} is a {found or 'stranger'}; expected a {kind}.")
    return manifest
