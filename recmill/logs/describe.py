"""A preview of a log before any work: its files, and whether the first rows of each parse."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from recmill.errors import LogError
from recmill.logs.base import BadRow, LogFile, LogFiles, open_source
from recmill.logs.delimited import DelimitedSource
from recmill.logs.files import match_pattern
from recmill.logs.hint import format_hint
from recmill.logs.sequence import missing_names
from recmill.recipe.recipe import Log, SideTable, TextFormat

_NUM_FIRST_ROWS = 100
_FIRST_BYTES = 64 << 10
_FILES_AT_ONCE = 8


@dataclass(frozen=True)
class FilesReport:
    """The files that a log's patterns match, and how their first rows parse.

    `problem` is set when they cannot be read.
    """

    matches: dict[str, tuple[LogFile, ...]]
    num_good: int = 0
    bad: tuple[BadRow, ...] = ()
    problem: str | None = None
    text: TextFormat | None = None  # the detected format, if it is delimited text
    hint: str | None = None  # what to change in the recipe, where most rows do not parse
    missing: tuple[str, ...] = ()  # names missing from a sequence such as day_0, day_1, day_3
    empty: tuple[str, ...] = ()  # files without any row


def describe_files(spec: Log | SideTable, data: str) -> FilesReport:
    """Match every pattern and parse about a hundred rows of each file.

    Problems are part of the report, never raised.
    """
    matches: dict[str, tuple[LogFile, ...]] = {}
    try:
        for pattern in spec.files:
            matches[pattern] = match_pattern(pattern, data)
        source = open_source(spec, data, may_grow=True)
        with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
            read = list(threads.map(partial(_read_first_rows, source), range(len(source.files))))
    except LogError as error:
        return FilesReport(matches, problem=str(error))
    num_good, bad = sum(good for good, _ in read), tuple(row for _, rows in read for row in rows)
    first = next(iter(file for files in matches.values() for file in files))
    return FilesReport(
        matches,
        num_good,
        bad,
        text=source.spec.text if isinstance(source, DelimitedSource) else None,
        hint=format_hint(spec, first) if len(bad) > num_good else None,
        missing=_missing(matches),
        empty=tuple(
            file.name for file, (good, rows) in zip(source.files, read, strict=True) if not good and not rows
        ),
    )


def _missing(matches: dict[str, tuple[LogFile, ...]]) -> tuple[str, ...]:
    """Missing names of each glob; named files must exist anyway."""
    return tuple(
        name
        for pattern, files in matches.items()
        if re.search(r"[*?\[]", pattern)
        for name in missing_names(file.name for file in files)
    )


def _read_first_rows(source: LogFiles, file_index: int) -> tuple[int, list[BadRow]]:
    """The number of valid rows at the beginning of a file, and the bad ones."""
    num_good, bad = 0, list[BadRow]()
    for unit in source.units_of(file_index):
        for batch in source.read(unit, _FIRST_BYTES):
            num_good += len(batch.frame)
            bad += batch.bad
            if num_good + len(bad) >= _NUM_FIRST_ROWS:
                return num_good, bad
    return num_good, bad
