"""Writes deltas, items and events to a feature store: in order, with retries, never delaying an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import polars as pl

from recmill.artifacts.bundle.entities import Side
from recmill.artifacts.feature_store.redis import RedisStore
from recmill.stages.serve.lookup import FeatureLookup
from recmill.stages.serve.messages import Id, Values

ROWS_AT_ONCE = 1_000
# seconds that a request waits for the store to have its change; later it is written in the background
_WAIT_SECONDS = 0.25
_READ_SECONDS = 1.0

SideRows = tuple[Side, pl.DataFrame, pl.DataFrame]  # raw columns, and features


class StoreWriter:
    """Writes changes into the store of a lookup. The bundle's own rows in memory are changed elsewhere."""

    def __init__(self, store: RedisStore, lookup: FeatureLookup) -> None:
        self._store = store
        self._lookup = lookup

    @property
    def problem(self) -> str | None:
        """Why changes have not reached the store; None when all have."""
        return self._store.problem

    def put(self, side: Side, raw: pl.DataFrame, features: pl.DataFrame) -> None:
        """Write the current rows."""
        self._store.later(lambda: self._store.put(side, raw, features), raw.height, _WAIT_SECONDS)

    def put_delta(self, version: str, number: int, rows: Sequence[SideRows]) -> None:
        """Write the rows of a delta, except those that another server wrote: they may have changed again since."""
        store = self._store
        parts = [
            (side, raw[start : start + ROWS_AT_ONCE], features[start : start + ROWS_AT_ONCE])
            for side, raw, features in rows
            for start in range(0, raw.height, ROWS_AT_ONCE)
        ]

        def write() -> None:
            if store.num_deltas(version) >= number:
                return
            while parts:
                store.put(*parts[0])
                parts.pop(0)
            store.set_num_deltas(version, number)

        store.later(write, sum(raw.height for _, raw, _ in rows), 0.0)

    def change_user(
        self, user: Id, own: Values, change: Callable[[Values], pl.DataFrame]
    ) -> pl.DataFrame | None:
        """Write the user's row after a change; None if the store has no row yet. `own` is the row to use then."""
        written: list[tuple[pl.DataFrame, pl.DataFrame]] = []

        def write() -> None:
            if not written:  # a retry writes the same row: the change may be in the store already
                raw = change(self._store.raw("user", user, _READ_SECONDS) or own)
                written.append((raw, self._lookup.features_of("user", raw)))
            self._store.put("user", *written[0])

        return written[0][0] if self._store.later(write, 1, _WAIT_SECONDS) else None
