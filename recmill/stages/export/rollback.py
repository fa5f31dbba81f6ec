"""rollback: serve an earlier version of a folder of bundles again."""

from __future__ import annotations

from pathlib import Path

from recmill.artifacts.bundle.bundle import current_of, previous_of, set_current, versions_of
from recmill.artifacts.bundle.remote import rollback_at
from recmill.errors import ArtifactError
from recmill.storage.objects import is_url


def rollback(address: str | Path, version: str | None = None) -> tuple[str, str | None]:
    """Make a version current, by default the one that was so before; returns it and the one that was current."""
    if is_url(address):
        return rollback_at(str(address), version)
    folder = Path(address)
    try:
        before = current_of(folder)
    except ArtifactError:
        if version is None:
            raise
        before = None
    if before is None and not versions_of(folder):
        raise ArtifactError(
            f"{folder} holds no versions. Give the folder that `recmill export --into` was given."
        )
    version = version or previous_of(folder)
    if version is None:
        known = ", ".join(versions_of(folder))
        raise ArtifactError(f"{folder} has no version before {before}. Name one of: {known}.")
    set_current(folder, version)
    return version, before
