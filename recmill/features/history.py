"""The history of a user: which earlier events a row or a request sees. Defined only here, in two forms.

The history of a row holds the values of `columns` in the events that have the row's value of `by`, are strictly
earlier by `order` and meet `where`: the last `max_length` of them, oldest first, events of one time in log order.
With `same_time`, events of the row's own time that precede it in the log count as earlier too. A row without a value
of `by` has an empty history, and so have most training rows where histories are `packed`.

Batch, from frames to lists: `add_history` for rows that come with all events of their users (prepare),
`latest_events` and `add_latest_histories` for the state after the log's last row (export). Incremental, event by
event: `UserHistory` (train --follow, serve).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from recmill.features.base import to_lists
from recmill.features.expressions import evaluate_condition, matches
from recmill.features.kernels import Array
from recmill.recipe.recipe import POSITION, SPLIT, History


def meets_condition(history: History, frame: pl.DataFrame) -> pl.Series:
    """Which rows are events of the history."""
    if history.where is None:
        return pl.repeat(True, frame.height, eager=True)
    return matches(history.where, frame)


def may_meet_condition(history: History, frame: pl.DataFrame) -> pl.Series:
    """Rows that could be events of the history, whatever the values are that are null here."""
    if history.where is None:
        return pl.repeat(True, frame.height, eager=True)
    return evaluate_condition(history.where, frame).fill_null(True)


# batch


def add_history(history: History, frame: pl.DataFrame) -> pl.DataFrame:
    """Rows with their histories, without those that `min_length` and `last` drop. Needs all rows of each user.

    A packed history reads the rows' split.
    """
    ordered = frame.sort(history.by, history.order, POSITION, nulls_last=False)
    is_event = meets_condition(history, ordered)
    first, stop = _event_ranges(history, ordered, is_event)
    start = np.maximum(first, stop - history.max_length)
    if history.packed:
        start = np.where(_ends_sequence(history, ordered), start, stop)
    events = ordered.filter(is_event)
    lists = [
        _take_ranges(events[name], start, stop).alias(column) for name, column in history.list_columns.items()
    ]
    result = ordered.with_columns(lists).filter(pl.Series(stop - first >= history.min_length))
    if history.last is not None:
        result = result.filter(_is_latest(history.by, history.last) | pl.col(history.by).is_null())
    return result


def _event_ranges(history: History, ordered: pl.DataFrame, is_event: pl.Series) -> tuple[Array, Array]:
    """For each row, the offset among all events where its user's begin, and where those before its time end."""
    num_before = is_event.cast(pl.Int64).cum_sum() - is_event.cast(pl.Int64)
    rows = ordered.select(history.by, history.order, num_before.alias("__before"))
    before = pl.col("__before")
    # Rows of one time have the same end, because the order within it may not be the order of events.
    ranges = rows.select(
        before.first().over(history.by).alias("first"),
        (before if history.same_time else before.first().over(history.by, history.order)).alias("stop"),
    )
    first, stop = ranges["first"].to_numpy(), ranges["stop"].to_numpy()
    # Rows without a user do not belong to one user.
    return np.where(ordered[history.by].is_null().to_numpy(), stop, first), stop


def _ends_sequence(history: History, ordered: pl.DataFrame) -> Array:
    """Rows whose histories are kept when they are packed: together they cover all training rows."""
    is_training = (pl.col(SPLIT) == 0).cast(pl.Int64)
    num_after = is_training.cum_sum(reverse=True).over(history.by) - 1
    is_kept = (pl.col(SPLIT) != 0) | (num_after % history.max_length == 0)
    return ordered.select(is_kept).to_series().to_numpy()


def _take_ranges(values: pl.Series, start: Array, stop: Array) -> pl.Series:
    """values[start:stop] for each row, as lists."""
    lengths = stop - start
    ends = np.cumsum(lengths)
    indices = np.arange(int(lengths.sum())) + np.repeat(start - ends + lengths, lengths)
    return to_lists(values.name, values.gather(pl.Series(indices, dtype=pl.UInt32)), pl.Series(lengths))


def _is_latest(by: str, number: int) -> pl.Expr:
    return pl.int_range(pl.len(), 0, -1).over(by) <= number


def latest_events(history: History, events: pl.DataFrame) -> pl.DataFrame:
    """The events that the next row of each user would see.

    `events` are rows that meet the condition. A log may be processed in chunks: the latest of all are among the
    latest of each.
    """
    needed = dict.fromkeys([history.by, history.order, POSITION, *history.columns])
    ordered = events.select(*needed).drop_nulls(history.by).sort(history.order, POSITION, nulls_last=False)
    return ordered.filter(_is_latest(history.by, history.max_length))


def add_latest_histories(history: History, events: pl.DataFrame, users: pl.DataFrame) -> pl.DataFrame:
    """Users with the histories of their latest events; users without events have empty ones."""
    values = {column: pl.col(name) for name, column in history.list_columns.items()}
    lists = latest_events(history, events).group_by(history.by, maintain_order=True).agg(**values)
    joined = users.join(lists, on=history.by, how="left", maintain_order="left")
    return joined.with_columns(pl.col(list(values)).fill_null(pl.lit([])))


# incremental


class UserHistory:
    """The history of one user while events arrive in order of time. A late event is appended."""

    def __init__(self, history: History, stored: Mapping[str, Any] | None = None) -> None:
        """`stored` has the list columns of a bundle: events before all that will be added."""
        self.history = history
        lists = {name: (stored or {}).get(column) for name, column in history.list_columns.items()}
        self._past: dict[str, list[Any]] = {name: list(values or ()) for name, values in lists.items()}
        # Events of the latest time are held apart, because rows of that time do not see them.
        self._latest: dict[str, list[Any]] = {name: [] for name in lists}
        self._time: Any = None

    def push(self, event: Mapping[str, Any], time: Any = None) -> None:
        """Add an event that meets the condition; `time` is its value of `order`."""
        if not _is_same(time, self._time):
            self._past, self._latest = self._all(), {name: [] for name in self._latest}
            self._time = time
        for name, values in self._latest.items():
            values.append(event.get(name))
            del values[: -self.history.max_length]

    def before(self, time: Any) -> dict[str, list[Any]]:
        """The list columns of a row at this time."""
        is_left_out = _is_same(time, self._time) and not self.history.same_time
        return self._columns(self._past if is_left_out else self._all())

    def latest(self) -> dict[str, list[Any]]:
        """The list columns of the next row after all events."""
        return self._columns(self._all())

    def _all(self) -> dict[str, list[Any]]:
        size = self.history.max_length
        return {name: [*values, *self._latest[name]][-size:] for name, values in self._past.items()}

    def _columns(self, values: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        return {column: values[name] for name, column in self.history.list_columns.items()}


def _is_same(time: Any, other: Any) -> bool:
    """Whether two values of `order` are the same time; NaN equals itself, as in Polars."""
    return bool(time == other or (time != time and other != other))
