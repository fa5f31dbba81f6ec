"""What every store does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
import polars as pl

from recmill.batches import Batch

Array = np.ndarray[Any, np.dtype[Any]]
Side = Literal["user", "item"]
Id = str | int


class Store(Protocol):
    """Features and raw columns of users and items by id. Thread-safe; StoreError when it cannot answer in time."""

    def get(self, side: Side, ids: Sequence[Id], deadline_seconds: float) -> tuple[Batch, Array]:
        """Features in the order of the ids, and a bool for each: was it found? The others get a stranger's features."""

    def raw(self, side: Side, id: Id, deadline_seconds: float) -> dict[str, Any] | None:
        """Raw columns by name, or None for an unknown id."""

    def put(self, side: Side, raw: pl.DataFrame, features: pl.DataFrame) -> None:
        """Keep rows: raw columns, the id's among them, and what the Plan makes of them. Known ones are replaced."""

    def close(self) -> None:
        """Let go of connections and files."""
