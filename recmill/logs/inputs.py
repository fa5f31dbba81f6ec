"""The inputs of a job besides its recipe: the log, side tables, user-defined functions."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from recmill.logs.base import LogFile, LogFiles, open_source
from recmill.logs.files import open_bytes
from recmill.recipe import recipe as r
from recmill.recipe.trust import functions_of

FORMAT = 1  # version of the rows' content; unfinished work of another version starts over
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Inputs:
    """The files that rows are read from, as of the start of a job."""

    recipe: r.Recipe
    log: LogFiles
    tables: Mapping[str, LogFiles]

    def fingerprint(self) -> dict[str, Any]:
        """Equal for inputs with equal rows.

        Files of the log count by name, size and time, because they may be huge; side tables by content; functions by
        the source of their modules.
        """
        return {
            "format": FORMAT,
            "log": [[file.name, file.size, file.modified_ns] for file in self.log.files],
            "tables": {name: _content(table.files) for name, table in self.tables.items()},
            "functions": {path: _source_digest(path) for path in functions_of(self.recipe)},
        }

    def check_unchanged(self) -> None:
        """Raise LogError when a file has changed since the job began."""
        for source in (self.log, *self.tables.values()):
            source.check_unchanged()


def open_inputs(recipe: r.Recipe, data: str, may_grow: bool = False) -> Inputs:
    """Open the log and the side tables that the recipe joins; only the log may grow.

    The recipe of the result includes the detected formats of the files.
    """
    joined = dict.fromkeys(operation.table for operation in recipe.rows if isinstance(operation, r.Join))
    tables = {name: open_source(recipe.tables[name], data) for name in joined}
    log = open_source(recipe.log, data, may_grow)
    read = {name: recipe.tables[name].with_text(table.spec) for name, table in tables.items()}
    recipe = replace(recipe, log=recipe.log.with_text(log.spec), tables={**recipe.tables, **read})
    return Inputs(recipe, log, tables)


def _content(files: tuple[LogFile, ...]) -> list[list[str]]:
    return [[file.name, _digest_of(file)] for file in files]


def _digest_of(file: LogFile) -> str:
    digest = hashlib.sha256()
    with open_bytes(file) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _source_digest(path: str) -> str | None:
    """The digest of a function's source file; None for a function without one, such as a built-in."""
    try:
        spec = importlib.util.find_spec(path.partition(":")[0])
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.has_location:
        return None
    with open(spec.origin, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
