"""Reduces rows of a log while it is read, when they are too many to hold in memory."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

_HELD_BYTES = 128 << 20


class ReducedRows:
    """Rows that arrive frame by frame and are reduced whenever they exceed a memory bound.

    `reduce` must give the same rows whether frames are reduced together or one after the other.
    """

    def __init__(self, reduce: Callable[[pl.DataFrame], pl.DataFrame]) -> None:
        self._reduce = reduce
        self._held: list[pl.DataFrame] = []
        self._num_bytes = 0.0
        self._bound = float(_HELD_BYTES)

    def add(self, frame: pl.DataFrame) -> None:
        self._held.append(self._reduce(frame))
        self._num_bytes += self._held[-1].estimated_size()
        if self._num_bytes > self._bound:
            self._held = [self._reduce(pl.concat(self._held))]
            self._num_bytes = self._held[0].estimated_size()
            # Rows that cannot be reduced further must not be reduced again with every frame.
            self._bound = max(_HELD_BYTES, 2 * self._num_bytes)

    def result(self) -> pl.DataFrame | None:
        """All rows, reduced; None when there were none."""
        return self._reduce(pl.concat(self._held)) if self._held else None
