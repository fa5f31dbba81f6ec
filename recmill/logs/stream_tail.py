"""Tailing an event stream: the rows that arrived since the last poll."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from recmill.artifacts.event_stream import Entry, EventStream, entry_id
from recmill.logs.base import BadRow
from recmill.logs.entries import described, parse_entries
from recmill.logs.tally import Tally
from recmill.recipe.recipe import Log

_ENTRIES_AT_ONCE = 1_000
_MAX_ENTRIES = 50_000  # entries per poll: no more is learned between two deltas


class StreamTail:
    """Reads the entries after a given one. Bad rows are stored beside the stream, with their entries' ids.

    `done` is the last entry that was read; `items` are changes of items in the stream: id -> raw columns.
    """

    def __init__(self, log: Log, stream: EventStream, done: int) -> None:
        self.stream, self.done = stream, done
        self.items: dict[str, Mapping[str, Any]] | None = None
        self._log = log

    def read(self, tally: Tally) -> Iterator[pl.DataFrame]:
        """New rows. Raises StoreError when Redis does not respond; the next call resumes at the same entry."""
        if self.items is None:
            self.items = {}
            self._take_items(self.stream.items()[0])
        entries: list[Entry] = []
        done = self.done
        while len(entries) < _MAX_ENTRIES and (found := self.stream.read(done, _ENTRIES_AT_ONCE)):
            entries += found
            done = found[-1].number
        frame = self._rows([entry for entry in entries if entry.item_change is None], tally)
        self._take_items(entry for entry in entries if entry.item_change is not None)
        self.done = done
        if frame.height:
            yield frame

    def _rows(self, entries: list[Entry], tally: Tally) -> pl.DataFrame:
        frame, problems = parse_entries(self._log.columns, entries)
        tally.rows += len(entries)
        for row, (reason, column) in sorted(problems.items()):
            entry = entries[row]
            name = f"{self.stream} entry {entry_id(entry.number)}"
            tally.note(BadRow(name, 0, reason, column, described([entry])))
            self.stream.reject(entry, reason if column is None else f"{reason} ({column})")
        return frame

    def _take_items(self, entries: Any) -> None:
        assert self.items is not None
        for entry in entries:
            change = json.loads(entry.item_change)
            if isinstance(change, dict):
                self.items[str(change["id"])] = change.get("values", {})
