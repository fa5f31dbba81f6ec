"""Eval queries: held-out users and the items they clicked later, to fit or measure lists by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from recmill.features.kernels import hash64
from recmill.recall.interactions import Array, Sequences
from recmill.stages.export.snapshot import EntitySnapshot

_SEED = 20_21


@dataclass(frozen=True)
class HeldOutQueries:
    """Users by raw id, and the items that they clicked later for the first time, as indices of the snapshot's items.

    An item that is not in the snapshot counts as relevant too; no list can contain it.
    """

    users: list[Any]
    indices: Array  # indices of users in the snapshot, -1 for new ones
    relevant: list[Array]  # int64; an unknown item has an index beyond all items
    num_repeats: int  # held-out clicks on items that the user had clicked before: nothing to recommend

    @classmethod
    def of(cls, snapshot: EntitySnapshot, seen: Sequences) -> HeldOutQueries:
        assert snapshot.held_out is not None
        assert snapshot.users is not None
        assert snapshot.items is not None
        users = _indexed(snapshot.users, "user")
        items = _indexed(snapshot.items, "item")
        rows = snapshot.held_out.join(users, on="user", how="left").join(items, on="item", how="left")
        rows = rows.sort("user", "item")
        unknown = pl.int_range(pl.len()) + snapshot.items.height
        rows = rows.with_columns(pl.coalesce("item_index", unknown), pl.col("user_index").fill_null(-1))
        kept = ~_is_seen(rows, seen, snapshot.items.height)
        groups = (
            rows.filter(kept).group_by("user", maintain_order=True).agg("item_index", pl.first("user_index"))
        )
        relevant = [np.sort(np.array(one, np.int64)) for one in groups["item_index"].to_list()]
        return cls(groups["user"].to_list(), groups["user_index"].to_numpy(), relevant, int((~kept).sum()))

    def __len__(self) -> int:
        return len(self.users)

    @property
    def is_new(self) -> Array:
        """Whether each user is not in the snapshot."""
        return self.indices < 0

    def take(self, chosen: Array) -> HeldOutQueries:
        return HeldOutQueries(
            [self.users[number] for number in chosen],
            self.indices[chosen],
            [self.relevant[number] for number in chosen],
            self.num_repeats,
        )

    def sample(self, number: int) -> HeldOutQueries:
        """A random sample of this many, always the same."""
        if len(self) <= number:
            return self
        return self.take(np.sort(np.argsort(self._hashes(), kind="stable")[:number]))

    def halves(self) -> tuple[HeldOutQueries, HeldOutQueries]:
        """Two random halves, always the same."""
        is_first = self._hashes() % np.uint64(2) == 0
        return self.take(np.flatnonzero(is_first)), self.take(np.flatnonzero(~is_first))

    def _hashes(self) -> Array:
        return hash64(pl.Series([str(user) for user in self.users], dtype=pl.String), _SEED)


def offsets_of(relevant: Sequence[Array]) -> Array:
    return np.concatenate(
        [np.zeros(1, np.int64), np.cumsum([len(items) for items in relevant], dtype=np.int64)]
    )


def _indexed(entities: pl.DataFrame, name: str) -> pl.DataFrame:
    ids = entities.to_series(0).alias(name)
    return pl.DataFrame([ids, pl.Series(f"{name}_index", np.arange(len(ids)))])


def _is_seen(rows: pl.DataFrame, seen: Sequences, num_items: int) -> Array:
    known = seen.users * np.int64(num_items) + seen.items
    users, items = rows["user_index"].to_numpy(), rows["item_index"].to_numpy()
    pairs = np.where((users >= 0) & (items < num_items), users * num_items + items, -1)
    return np.isin(pairs, known)
