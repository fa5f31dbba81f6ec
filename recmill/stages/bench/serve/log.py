"""The generated log behind the bench bundle: as many columns as Criteo's, owned by user, item or context.

Items belong to clusters and every user likes a few clusters: clicks on items of a liked cluster are likely, others
rare. Two of the numbers shift the probability a little; the other columns are noise of realistic cardinality.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

Array = np.ndarray[Any, np.dtype[Any]]

LIKED = 3  # clusters of each user
USER_NUMBERS = tuple(f"u{number}" for number in range(1, 10))
CONTEXT_NUMBERS = tuple(f"x{number}" for number in range(1, 5))
USER_KINDS = {f"uk{number}": size for number, size in enumerate((0, 0, 0, 50, 100, 200, 1000, 5000), 1)}
CONTEXT_KINDS = {"xk1": 24, "xk2": 10}
# Cardinality; 0 is the cluster itself, and -n means that n clusters share a value.
ITEM_KINDS = {
    f"ik{number}": size
    for number, size in enumerate((0, -4, -16, -64, 5, 10, 20, 50, 100, 500, 1000, 5000, 20_000, 100_000), 1)
}
LABELS = "labels.parquet"
CONTEXT = "context.parquet"
_LABEL_ROWS, _CONTEXT_ROWS = 20_000, 1000
_START = 1_700_000_000


@dataclass(frozen=True)
class LogSize:
    """Numbers of items, users and rows; every item is in at least one row."""

    items: int
    users: int
    rows: int

    @property
    def clusters(self) -> int:
        return max(4, min(2000, self.items // 50))

    @staticmethod
    def of(items: int) -> LogSize:
        """A fifth as many users, and a fifth more rows than items."""
        return LogSize(items, max(20, items // 5), items + items // 5 + 1000)


def write_log(size: LogSize, into: Path, seed: int = 0) -> None:
    """`log.parquet` in time order, `labels.parquet` with other pairs, `context.parquet` with columns of requests."""
    random = np.random.default_rng(seed)
    tastes = _Tastes(size, random)
    into.mkdir(parents=True, exist_ok=True)
    items = np.concatenate(
        [random.permutation(size.items), random.integers(0, size.items, size.rows - size.items)]
    )
    random.shuffle(items)
    tastes.events(items, random).write_parquet(into / "log.parquet", compression="lz4")
    held_out = tastes.events(random.integers(0, size.items, _LABEL_ROWS), random)
    pairs = held_out.select(user="user_id", item="item_id", label="click")
    held_out.select(*CONTEXT_NUMBERS, *CONTEXT_KINDS).head(_CONTEXT_ROWS).write_parquet(into / CONTEXT)
    pairs.write_parquet(into / LABELS)


class _Tastes:
    """The clusters of items, and which of them each user likes."""

    def __init__(self, size: LogSize, random: np.random.Generator) -> None:
        self.size = size
        self.cluster_of_item = random.integers(0, size.clusters, size.items)
        self.liked = random.integers(0, size.clusters, (size.users, LIKED))
        flat = self.liked.reshape(-1)
        self.fans = np.argsort(flat, kind="stable") // LIKED
        self.first_fan = np.searchsorted(np.sort(flat), np.arange(size.clusters + 1))
        self.user_numbers = random.lognormal(0, 1, (size.users, len(USER_NUMBERS))).astype(np.float32)
        self.user_kinds = self._user_kinds(random)
        self.item_kinds = self._item_kinds(random)

    def _user_kinds(self, random: np.random.Generator) -> dict[str, Array]:
        liked = iter(self.liked.T)
        return {
            name: random.integers(0, count, self.size.users) if count else next(liked)
            for name, count in USER_KINDS.items()
        }

    def _item_kinds(self, random: np.random.Generator) -> dict[str, Array]:
        return {
            name: self.cluster_of_item // max(1, -count)
            if count <= 0
            else random.integers(0, count, self.size.items)
            for name, count in ITEM_KINDS.items()
        }

    def events(self, items: Array, random: np.random.Generator) -> pl.DataFrame:
        """One row for each of the items; half of them are shown to a user who likes their cluster."""
        clusters = self.cluster_of_item[items]
        starts, ends = self.first_fan[clusters], self.first_fan[clusters + 1]
        drawn = starts + (random.random(len(items)) * (ends - starts)).astype(np.int64)
        fans = self.fans[np.minimum(drawn, len(self.fans) - 1)]
        anybody = random.integers(0, self.size.users, len(items))
        users = np.where((random.random(len(items)) < 0.5) & (ends > starts), fans, anybody)
        context = random.lognormal(0, 1, (len(items), len(CONTEXT_NUMBERS))).astype(np.float32)
        likes = (self.liked[users] == clusters[:, None]).any(axis=1)
        logits = (
            np.where(likes, 0.5, -2.5)
            + 0.4 * np.log(context[:, 0])
            + 0.3 * np.log(self.user_numbers[users, 0])
        )
        columns: dict[str, Array] = {
            "time": _START + np.arange(len(items)),
            "user_id": users,
            "item_id": items,
            "click": (random.random(len(items)) < 1 / (1 + np.exp(-logits))).astype(np.int8),
        }
        columns |= {name: self.user_numbers[users, index] for index, name in enumerate(USER_NUMBERS)}
        columns |= {name: context[:, index] for index, name in enumerate(CONTEXT_NUMBERS)}
        columns |= {name: values[users] for name, values in self.user_kinds.items()}
        columns |= {name: random.integers(0, size, len(items)) for name, size in CONTEXT_KINDS.items()}
        columns |= {name: values[items] for name, values in self.item_kinds.items()}
        return pl.DataFrame(columns)
