"""The bundle's own rows, mapped into memory. What is put lives as long as the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from recmill.artifacts.feature_store.base import Id, Side
from recmill.artifacts.feature_store.codec import CodedRows
from recmill.errors import StoreError

if TYPE_CHECKING:
    from recmill.artifacts.bundle.bundle import Bundle
    from recmill.artifacts.bundle.entities import Entities


class MappedStore:
    """Serves the entities of a bundle; they always answer in time."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    def get(self, side: Side, ids: Sequence[Id], deadline_seconds: float) -> CodedRows:
        entities = entities_of(self._bundle, side)
        places = entities.places(ids)
        return CodedRows(entities.features(places), places >= 0, np.zeros(len(places), bool))

    def raw(self, side: Side, id: Id, deadline_seconds: float) -> dict[str, Any] | None:
        entities = entities_of(self._bundle, side)
        places = entities.places([id])
        return entities.raw(places).row(0, named=True) if places[0] >= 0 else None

    def is_loaded(self, deadline_seconds: float) -> bool:
        return True

    def put(self, side: Side, raw: pl.DataFrame, features: pl.DataFrame) -> None:
        entities_of(self._bundle, side).put(raw, features)

    def later(self, write: Callable[[], None], num_rows: int, wait_seconds: float) -> bool:
        write()
        return True

    def num_deltas(self, version: str) -> int:
        return 0

    def set_num_deltas(self, version: str, number: int) -> None:
        """Deltas are applied to the bundle itself."""

    @property
    def problem(self) -> None:
        return None

    def close(self) -> None:
        """Nothing is held that the bundle does not hold."""


def entities_of(bundle: Bundle, side: Side) -> Entities:
    entities = bundle.users if side == "user" else bundle.items
    if entities is None:
        raise StoreError(f"Bundle {bundle.path} has no {side}s: its recipe's log names no {side} column.")
    return entities
