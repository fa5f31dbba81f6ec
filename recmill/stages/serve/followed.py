"""A version's progress in an event stream: how far it is, and which events it applied before a delta delivers them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

import polars as pl

from recmill.artifacts.event_stream import Entry, entry_number
from recmill.features.expressions import columns_read, keep_where
from recmill.features.plan import Plan
from recmill.logs.entries import parse_entries
from recmill.recipe import recipe as r
from recmill.recipe.recipe import POSITION
from recmill.stages.serve.messages import Id, Values

_MAX_RECENT = 100_000  # events beyond the last delta: more than a working trainer leaves


@dataclass(frozen=True)
class StreamEvent:
    """One row of the log from the stream. `is_click`: whether it counts as seen and towards popularity."""

    entry: int
    user: Id
    item: Id
    values: Values
    is_click: bool


class FollowedEvents:
    """`position` is the last entry up to which a version has everything, from the stream or from its deltas.

    Deltas deliver the same events later; `is_counted` tells which clicks were counted already.
    """

    def __init__(self) -> None:
        self.position = 0
        self._recent: deque[StreamEvent] = deque()
        self._entries: set[int] = set()
        self._forgotten_until = 0

    def add(self, events: Iterable[StreamEvent], counted: Set[int]) -> None:
        """Record applied events, and the entries of those whose clicks were counted."""
        self._recent.extend(events)
        self._entries |= counted
        while len(self._recent) > _MAX_RECENT:
            self._forgotten_until = self._recent[0].entry
            self._forget_first()

    def is_counted(self, entries: pl.Series) -> pl.Series:
        """Which clicks of a delta this version has counted already."""
        known = [entry <= self._forgotten_until or entry in self._entries for entry in entries]
        return pl.Series(known, dtype=pl.Boolean)

    def after(self, entry: int) -> Iterator[StreamEvent]:
        """Applied events after this entry, which no delta up to it contains."""
        return (event for event in self._recent if event.entry > entry)

    def delta_applied(self, end: int) -> None:
        """Record that a delta that reaches up to this entry was applied."""
        while self._recent and self._recent[0].entry <= end:
            self._forget_first()
        self.position = max(self.position, end)

    def _forget_first(self) -> None:
        self._entries.discard(self._recent.popleft().entry)


def end_of_delta(manifest: object, key: str | None) -> int | None:
    """The last entry of this stream that a delta contains; None when the delta was not learned from it."""
    stream = manifest.get("stream") if isinstance(manifest, dict) else None
    return entry_number(stream["end"]) if stream and stream["key"] == key else None


def parse_events(recipe: r.Recipe, entries: Sequence[Entry]) -> pl.DataFrame:
    """Parse entries as servers count them: valid rows with a user and an item that pass the recipe's filters."""
    frame, _ = parse_entries(recipe.log.columns, entries)
    names = {column.name: "" for column in recipe.log.columns}
    for operation in recipe.rows:
        # Side tables are the trainer's business.
        if isinstance(operation, r.Filter) and set(columns_read(operation.sql, names)) <= set(names):
            frame = keep_where(operation.sql, frame)
    return frame.drop_nulls([str(recipe.log.user), str(recipe.log.item)])


def events_of(recipe: r.Recipe, plan: Plan, rows: pl.DataFrame) -> list[StreamEvent]:
    """Rows of the log as events."""
    user, item, label = str(recipe.log.user), str(recipe.log.item), recipe.click_label
    clicks = rows if label is None else plan.keep_positive(label, rows)
    clicked = set(clicks[POSITION])
    return [
        StreamEvent(
            row[POSITION],
            row[user],
            row[item],
            {name: value for name, value in row.items() if name not in (user, item, POSITION)},
            row[POSITION] in clicked,
        )
        for row in rows.iter_rows(named=True)
    ]
