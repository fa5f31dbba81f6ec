"""Where the log of a checkpoint is: as asked, as its Table says, or as training wrote down."""

from __future__ import annotations

import os
import re
from pathlib import Path

from recmill.checkpoint import CheckpointFolder
from recmill.errors import ArtifactError, LogError
from recmill.table import Table

# What training says of its rows: see the names of sources in recmill/train/source.py.
_OF_TABLE = re.compile(r"table (?P<digest>[0-9a-f]+)(?: of log (?P<data>.+))?")
_OF_LOG = re.compile(r"log (?P<data>.+), plan [0-9a-f]+")


def find_log(folder: CheckpointFolder, data: str | None = None, table: Path | None = None) -> str:
    """The log's directory or URL; an error that names the flags when it is not to be found."""
    if data is not None:
        return data
    found = _of_table(folder, table) if table is not None else _of_source(folder)
    if found is None:
        raise LogError(
            f"Checkpoint {folder.path} does not say where its log is; users and items are read from it as of its "
            "end. Add --data DIR."
        )
    if "://" not in found and not os.path.isdir(found):
        raise LogError(
            f"Checkpoint {folder.path} was trained from the log in {found}, which is not there any more. "
            "Say where it is with --data DIR."
        )
    return found


def _of_table(folder: CheckpointFolder, path: Path) -> str | None:
    table = Table.open(path)
    match = _OF_TABLE.fullmatch(folder.manifest["source"])
    if match is not None and match["digest"] != table.digest:
        raise ArtifactError(
            f"Checkpoint {folder.path} was trained from table {match['digest']}, but {path} is table {table.digest}."
        )
    return table.manifest.get("data")


def _of_source(folder: CheckpointFolder) -> str | None:
    source = folder.manifest["source"]
    match = _OF_LOG.fullmatch(source) or _OF_TABLE.fullmatch(source)
    return match["data"] if match is not None else None
