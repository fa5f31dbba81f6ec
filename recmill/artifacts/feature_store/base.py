"""What every store does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import polars as pl

from recmill.artifacts.feature_store.codec import CodedRows

Side = Literal["user", "item"]
Id = str | int


class Store(Protocol):
    """Features and raw columns of users and items by id. Thread-safe; StoreError when it cannot answer in time."""

    def get(self, side: Side, ids: Sequence[Id], deadline_seconds: float) -> CodedRows:
        """Features in the order of the ids; those that are not found are an unknown user's or item's."""

    def raw(self, side: Side, id: Id, deadline_seconds: float) -> dict[str, Any] | None:
        """Raw columns by name, or None for an unknown id."""

    def is_loaded(self, deadline_seconds: float) -> bool:
        """Whether rows were ever loaded, so that an id which is not found is an unknown one."""

    def put(self, side: Side, raw: pl.DataFrame, features: pl.DataFrame) -> None:
        """Keep rows: raw columns, the id's among them, and what the Plan makes of them. Known ones are replaced."""

    def later(self, write: Callable[[], None], num_rows: int, wait_seconds: float) -> bool:
        """Do a write in its turn, and again until it succeeds. Whether it did within this time."""

    def num_deltas(self, version: str) -> int:
        """The last delta of a version whose rows are all there."""

    def set_num_deltas(self, version: str, number: int) -> None: ...

    @property
    def problem(self) -> str | None:
        """Why rows that were to be written are not; None when all are."""

    def close(self) -> None:
        """Let go of connections and files."""
