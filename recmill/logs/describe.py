"""A look at a log before any work: which files there are, and whether the first rows can be read."""

from __future__ import annotations

from dataclasses import dataclass

from recmill.errors import LogError
from recmill.logs.base import BadRow, LogFile, open_source
from recmill.logs.files import match_pattern
from recmill.logs.hint import format_hint
from recmill.recipe.recipe import Log, SideTable

_NUM_FIRST_ROWS = 100
_FIRST_BYTES = 64 << 10


@dataclass(frozen=True)
class FilesReport:
    """What a log's patterns match, and how its first rows read. `problem` is set when they cannot be."""

    matches: dict[str, tuple[LogFile, ...]]
    num_good: int = 0
    bad: tuple[BadRow, ...] = ()
    problem: str | None = None
    hint: str | None = None  # what to change in the recipe, where most rows do not parse


def describe_files(spec: Log | SideTable, data: str) -> FilesReport:
    """Match every pattern and read about a hundred rows. Problems are part of the report, never raised."""
    matches: dict[str, tuple[LogFile, ...]] = {}
    try:
        for pattern in spec.files:
            matches[pattern] = match_pattern(pattern, data)
        num_good, bad = _read_first_rows(spec, data)
    except LogError as error:
        return FilesReport(matches, problem=str(error))
    first = next(iter(file for files in matches.values() for file in files))
    hint = format_hint(spec, first) if len(bad) > num_good else None
    return FilesReport(matches, num_good, bad, hint=hint)


def _read_first_rows(spec: Log | SideTable, data: str) -> tuple[int, tuple[BadRow, ...]]:
    source = open_source(spec, data, may_grow=True)
    num_good, bad = 0, list[BadRow]()
    for unit in source.units(parts=1):
        for batch in source.read(unit, _FIRST_BYTES):
            num_good += len(batch.frame)
            bad += batch.bad
            if num_good + len(bad) >= _NUM_FIRST_ROWS:
                return num_good, tuple(bad)
    return num_good, tuple(bad)
