"""Impression logs without users: a 0/1 label and many columns, for a ranker alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import polars as pl

from recmill.stages.init.columns import ColumnProfile, FileProfile
from recmill.stages.init.config import InitConfig
from recmill.stages.init.names import CLICKS, LABELS, USERS
from recmill.stages.init.positives import is_binary
from recmill.stages.init.roles import TimeColumn, Unclear, find_key, find_time

_FEWEST_INPUTS = 8
_MOST_OF_ROWS = 0.5  # fraction of rows of one "user" above which it stands for unknown users
_NEARLY_UNIQUE = 0.9
_ROW_IDS = ("id", "rowid", "index", "requestid", "impressionid")
_MAX_CODES = 1_000  # distinct whole numbers that may be codes as well as counts


@dataclass(frozen=True)
class ShownRows:
    """An impression log: rows with a label, without users."""

    events: FileProfile
    label: ColumnProfile
    time: TimeColumn | None
    file_name: str

    @property
    def columns(self) -> list[ColumnProfile]:
        """The columns that are read; all of them, in order, for a file without a header."""
        return [c for c in self.events.columns if not self.events.has_names or c in self._used]

    @property
    def inputs(self) -> list[ColumnProfile]:
        others = [c for c in self.events.columns if c.name not in (self.label.name, self._time_name)]
        return [column for column in others if is_input(column)]

    @property
    def _used(self) -> list[ColumnProfile]:
        return [self.label, *([self.time.column] if self.time else []), *self.inputs]

    @property
    def _time_name(self) -> str | None:
        return None if self.time is None else self.time.name

    @property
    def numbers(self) -> list[ColumnProfile]:
        return [column for column in self.inputs if column.is_number]

    @property
    def categories(self) -> list[ColumnProfile]:
        """Text columns, and whole numbers that may be codes."""
        return [c for c in self.inputs if not c.is_number or (c.type == "int" and c.num_unique <= _MAX_CODES)]

    @cached_property
    def unused(self) -> list[str]:
        used = {column.name for column in self._used}
        return [column.name for column in self.events.columns if column.name not in used]

    @property
    def share(self) -> float:
        return float(self.label.values.cast(pl.Float64).mean() or 0.0)  # type: ignore[arg-type]


def is_input(column: ColumnProfile) -> bool:
    """Whether values recur, so that a model can learn from them."""
    if column.type == "time" or column.num_unique < 2 or column.plain in _ROW_IDS:
        return False
    return column.type == "float" or column.num_unique < _NEARLY_UNIQUE * len(column.present)


def find_shown_rows(
    events: FileProfile, config: InitConfig, num_files: int, file_name: str
) -> ShownRows | None:
    """None for a log of users and items, which most are, and for one without a recognisable label."""
    if num_files > 1 or config.user or config.item or config.positive:
        return None
    if _has_users(events):
        return None
    label = _label(events)
    if label is None:
        return None
    time = (
        find_time(events, config.time, config.time_format, (label.name,), True) if events.has_names else None
    )
    if not events.has_names:
        events = events.renamed({label.name: "label"})
        label = events.columns[0]
    shown = ShownRows(events, label, time if time is not None and time.is_time else None, file_name)
    return shown if len(shown.inputs) >= _FEWEST_INPUTS else None


def _has_users(events: FileProfile) -> bool:
    if not events.has_names:
        return False
    try:
        user = find_key(events, "user", None)
    except Unclear:
        # Several columns may be the user: ask, unless no column with more than one value has such a name.
        named = [c for c in events.columns if any(c.plain in group for group in USERS)]
        return any(column.num_unique > 1 for column in named)
    largest = user.present.value_counts(name="rows", sort=True)["rows"][0]
    return bool(largest < _MOST_OF_ROWS * len(user.present))


def _label(events: FileProfile) -> ColumnProfile | None:
    """The one 0/1 column with the name of a label; without a header, the first column."""
    binary = [column for column in events.columns if len(column.present) and is_binary(column)]
    if not events.has_names:
        return binary[0] if binary and binary[0] is events.columns[0] else None
    named = [column for column in binary if column.plain in CLICKS + LABELS]
    return named[0] if len(named) == 1 else None


def describe_shown_rows(shown: ShownRows, file_line: str, time_line: str) -> Iterator[str]:
    number = "1" if not shown.events.has_names else f'"{shown.label.name}"'
    yield f"read   {file_line}"
    yield "user   none, so that there are no lists to recommend; name columns with --user and --item if there are"
    yield f"label  column {number}: 1 in {shown.share:.1%} of rows"
    if shown.time is not None:
        yield f"time   {time_line}"
        yield "split  time: The last tenth of the rows by time is test, the tenth before it eval."
    else:
        yield "split  tail: The last tenth of the file is test, the tenth before it eval; name a time with --time."
    yield (
        f"model  Wide & Deep: the probability of the label from {len(shown.categories)} columns of ids and "
        f"{len(shown.numbers)} of numbers"
    )
    if shown.unused:
        yield f"unused {', '.join(shown.unused[:8])}{', ...' if len(shown.unused) > 8 else ''}"
