"""The user, item and time columns of a log."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import polars as pl

from recmill.errors import RecmillError
from recmill.stages.init.columns import ColumnProfile, FileProfile
from recmill.stages.init.names import ITEMS, ORDERS, TIME_ENDS, TIMES, USERS

NO_TIME = "none"
_FIRST_YEAR, _LAST_YEAR = 1990, 2100
_UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}


class Unclear(RecmillError):
    """A question that the files do not answer; `name` is the InitConfig field that does."""

    exit_code = 2

    def __init__(self, question: str, name: str, options: Sequence[str] = ()) -> None:
        self.question, self.name, self.options = question, name, tuple(options)
        choices = f": {', '.join(self.options[:12])}" if options else ""
        super().__init__(f"{question} Give --{name.replace('_', '-')}{choices}.")

    def answer(self, typed: str) -> str:
        """Parse an answer: the number or text of an option, or another value."""
        if self.name in ("user", "item") and any(option == typed for option in self.options):
            return typed
        is_number = typed.isdigit() and 1 <= int(typed) <= len(self.options)
        chosen = self.options[int(typed) - 1] if is_number else typed
        return chosen.partition(" (")[0].strip('"') if is_number else chosen

    def __reduce__(self) -> tuple[type[Unclear], tuple[str, str, tuple[str, ...]]]:
        return type(self), (self.question, self.name, self.options)


@dataclass(frozen=True)
class TimeColumn:
    """The column that orders the events of a user: a time, or a number that only orders."""

    column: ColumnProfile
    is_time: bool
    how: str  # in words

    @property
    def name(self) -> str:
        return self.column.name


def find_key(events: FileProfile, role: str, given: str | None, taken: Iterable[str] = ()) -> ColumnProfile:
    """The user or item column."""
    if given is not None:
        return column_named(events, given, role)
    left = [column for column in events.columns if column.name not in taken and _may_be_key(column)]
    for names in USERS if role == "user" else ITEMS:
        matches = [column for column in left if column.plain in names]
        if len(matches) == 1:
            return _with_values(
                events, matches[0], role, [column for column in left if column is not matches[0]]
            )
        if matches:
            raise Unclear(
                f"{events.path}: which column is the {role}?", role, [column.name for column in matches]
            )
    missing = f" Left out: {', '.join(events.left_out)}." if events.left_out else ""
    which = "no name of a column tells:" if events.has_names else "has no header:"
    options = [_option(events, column) for column in left]
    raise Unclear(f"{events.path}: {which} which one is the {role}?{missing}", role, options)


def _with_values(
    events: FileProfile, column: ColumnProfile, role: str, others: Sequence[ColumnProfile]
) -> ColumnProfile:
    if column.num_unique > 1:
        return column
    question = f'{events.path}: "{column.name}" is always {column.present[0]!r}: which column is the {role}?'
    raise Unclear(question, role, [_option(events, other) for other in others])


def _option(events: FileProfile, column: ColumnProfile) -> str:
    """A column as the flag accepts it; without a header, its number and some values."""
    if events.has_names:
        return column.name
    examples = column.present.head(3).to_list()
    return f"{events.form.names.index(column.name) + 1} ({', '.join(map(str, examples))}, ...)"


def column_named(events: FileProfile, given: str, role: str) -> ColumnProfile:
    """A column by its name or, without a header, by its number from 1."""
    name = given
    if not events.has_names and given.isdigit():
        number = int(given)
        if not 1 <= number <= len(events.form.names):
            raise RecmillError(f"--{role} {given}: {events.path} has {len(events.form.names)} columns.")
        name = events.form.names[number - 1]
    column = events.named(name)
    if column is None:
        names = ", ".join(column.name for column in events.columns[:20])
        raise RecmillError(f"--{role} {given}: {events.path} has no such column; it has: {names}.")
    return column


def _may_be_key(column: ColumnProfile) -> bool:
    return column.type in ("int", "text") and len(column.present) > 0


def only(test: Callable[[ColumnProfile], bool], events: FileProfile, taken: Collection[str]) -> list[str]:
    """The one free column that passes a test; nothing if there are several."""
    matches = [column.name for column in events.columns if column.name not in taken and test(column)]
    return matches if len(matches) == 1 else []


# time


def is_like_time(column: ColumnProfile) -> bool:
    return column.type == "time" or epoch_unit(column) is not None


def find_time(
    events: FileProfile,
    given: str | None,
    time_format: str | None,
    taken: Sequence[str],
    has_impressions: bool,
) -> TimeColumn | None:
    """The column that orders the events; None when nothing does or nothing should."""
    if given == NO_TIME:
        return None
    if given is not None:
        return _as_time(column_named(events, given, "time"), time_format, True)
    left = [column for column in events.columns if column.name not in taken and len(column.present)]
    ranked = [
        (rank, timed)
        for column in left
        if (rank := _time_rank(column)) is not None
        and (timed := _as_time(column, time_format, False)) is not None
    ]
    if ranked:
        best = min(rank for rank, _ in ranked)
        first = [timed for rank, timed in ranked if rank == best]
        if len(first) > 1:
            raise Unclear(
                f"{events.path}: which column is the time?", "time", [t.name for t in first] + [NO_TIME]
            )
        return _unambiguous(events, first[0], time_format)
    if has_impressions:  # a position on the page is not an order of events
        return None
    ordering = [column for column in left if column.plain in ORDERS and column.type == "int"]
    ordering = [column for column in ordering if _orders(events, column, taken[0])]
    if len(ordering) > 1:
        raise Unclear(
            f"{events.path}: which column orders the events?", "time", [c.name for c in ordering] + [NO_TIME]
        )
    return TimeColumn(ordering[0], False, "orders each user's events") if ordering else None


def _time_rank(column: ColumnProfile) -> int | None:
    """How well a column fits as the time, lower is better; None if it does not."""
    for rank, names in enumerate(TIMES):
        if column.plain in names:
            return 2 * rank + (column.type == "time" and column.time_formats != ("",))
    is_named_so = column.plain.endswith(TIME_ENDS)
    if column.type == "time":
        return 4 if is_named_so else 5
    return 4 if is_named_so and epoch_unit(column) is not None else None


def _as_time(column: ColumnProfile, time_format: str | None, is_given: bool) -> TimeColumn | None:
    if time_format is not None and column.type in ("text", "time"):
        return TimeColumn(
            replace(column, type="time", time_formats=(time_format,)), True, f"written as {time_format}"
        )
    if column.type == "time":
        return TimeColumn(column, True, "dates and times")
    unit = epoch_unit(column)
    if unit is not None:
        return TimeColumn(column, True, f"{unit} since 1970")
    if column.is_number:
        return TimeColumn(column, False, "numbers that order the events")
    if is_given:
        example = column.present.head(1).to_list()
        raise Unclear(f'Times of "{column.name}" cannot be read, such as {example[0]!r}.', "time_format")
    return None


def _unambiguous(events: FileProfile, time: TimeColumn, time_format: str | None) -> TimeColumn:
    if time_format is None and len(time.column.time_formats) > 1:
        raise Unclear(
            f'{events.path}: days or months first in "{time.name}"?', "time_format", time.column.time_formats
        )
    return time


def epoch_unit(column: ColumnProfile) -> str | None:
    """The unit, s, ms, us or ns, if all numbers of a column are recent times."""
    if not column.is_number or not len(column.present):
        return None
    low, high = column.bounds
    first, last = (datetime(year, 1, 1, tzinfo=UTC).timestamp() for year in (_FIRST_YEAR, _LAST_YEAR))
    return next(
        (unit for unit, scale in _UNITS.items() if first * scale <= low and high < last * scale), None
    )


def seconds_of(time: TimeColumn) -> pl.Series:
    """Seconds since 1970 of a time column; the plain numbers of a column that only orders."""
    unit = epoch_unit(time.column)
    values = time.column.values.cast(pl.Float64)
    return values / _UNITS[unit] if time.is_time and unit is not None else values


def _orders(events: FileProfile, column: ColumnProfile, user: str) -> bool:
    """Whether a user's events have different values in it."""
    owner = events.named(user)
    assert owner is not None
    pairs = pl.DataFrame([owner.values.alias("user"), column.values.alias("order")])
    return pairs.n_unique() > 0.99 * pairs.height
