"""Where the log of a checkpoint is: --data, or the path recorded by its Table or by training."""

from __future__ import annotations

import os
from pathlib import Path

from recmill.artifacts.checkpoint.checkpoint import WITH_EVAL_ROWS, Checkpoint
from recmill.dataset.table import Table
from recmill.errors import ArtifactError, LogError


def find_log(folder: Checkpoint, data: str | None = None, table: str | Path | None = None) -> str:
    """The log's directory or URL; an error that names the flags if it cannot be found."""
    if data is not None:
        return data
    found = _of_table(folder, table) if table is not None else folder.manifest.get("data")
    if found is None:
        raise LogError(
            f"Checkpoint {folder.path} does not record where its log is; users and items are read from it as of its "
            "end. Add --data DIR."
        )
    if "://" not in found and not os.path.isdir(found):
        raise LogError(
            f"Checkpoint {folder.path} was trained from the log in {found}, which does not exist any more. "
            "Give its location with --data DIR."
        )
    return found


def _of_table(folder: Checkpoint, path: str | Path) -> str | None:
    table = Table.open(path)
    source = folder.manifest["source"].removesuffix(WITH_EVAL_ROWS)
    if source.startswith("table ") and source != f"table {table.digest}":
        raise ArtifactError(
            f"Checkpoint {folder.path} was trained from {source}, but {path} is table {table.digest}."
        )
    return table.manifest.get("data")
