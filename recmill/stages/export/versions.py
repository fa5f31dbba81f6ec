"""The folder of versions: one export writes at a time, and a version gets its name when it is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recmill.artifacts.bundle.bundle import Bundle, current_of, kept_checkpoint, previous_of, versions_of
from recmill.artifacts.lock import lock_folder
from recmill.artifacts.manifest import is_published, read_manifest, sync
from recmill.errors import ArtifactError

_PARTIAL = ".partial"


@contextmanager
def exporting(into: Path) -> Iterator[None]:
    """Lock out other exports, and remove leftovers of killed ones."""
    if is_published(into):
        raise ArtifactError(
            f"{into} is an artifact itself. Bundles go into a folder of their own: choose another --into."
        )
    with lock_folder(into):
        for path in into.glob(f"*{_PARTIAL}"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield


@contextmanager
def written_aside(into: Path, version: str) -> Iterator[Path]:
    """A new folder that is renamed to the version on success, and removed on failure."""
    aside = into / f"{version}{_PARTIAL}"
    aside.mkdir()
    try:
        yield aside
        remove(into / version)
        os.rename(aside, into / version)
        sync(into)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def is_whole(path: Path) -> bool:
    """Whether a version is there and not damaged."""
    try:
        Bundle.open(path)
    except ArtifactError:
        return False
    return True


def keep_newest(into: Path, number: int) -> list[str]:
    """Remove all but the newest versions; the current and the previous one always stay. Returns the removed ones."""
    known = sorted(versions_of(into), key=lambda version: _created_at(into / version))
    stay = {current_of(into), previous_of(into), *known[-number:]}
    gone = [version for version in known if version not in stay]
    for version in gone:
        remove(into / version)
        remove(into / f"{version}.deltas")
        remove(kept_checkpoint(into, version))
    return gone


def remove(path: Path) -> None:
    """Remove atomically: renamed first."""
    if path.exists():
        aside = path.with_name(f"{path.name}.gone{_PARTIAL}")
        os.rename(path, aside)
        shutil.rmtree(aside)


def _created_at(path: Path) -> float:
    try:
        return float(read_manifest(path, "bundle")["created_at"])
    except (ArtifactError, KeyError, TypeError, ValueError):  # damaged, so it is removed first
        return 0.0
