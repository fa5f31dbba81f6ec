"""Who clicked what: which items each user has seen, and which items are clicked by the same users.

Clicks are spilled to disk partitioned by user, so that they can be processed some users at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from recmill.features.kernels import hash64
from recmill.logs.base import LogFile

NUM_SIMILAR = 20
RECENT_CLICKS = 50
MAX_ITEMS = 2_000_000  # with more, there are no similar items
_PART_BYTES = 512 << 20  # of the log, for each part of the users
_HELD_BYTES = 64 << 20
_PAIRS_AT_ONCE = 8_000_000
_MAX_PAIRS = 400_000_000  # with more, users are sampled evenly

Array = np.ndarray[Any, np.dtype[Any]]


class ClickWriter:
    """Takes clicks in log order and spills them, partitioned by user."""

    def __init__(self, work: Path, user: str, item: str, files: Sequence[LogFile]) -> None:
        self.work, self.user, self.item = work / "clicks", user, item
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        self.num_parts = 1 + sum(file.size for file in files) // _PART_BYTES
        self._held: list[pl.DataFrame] = []
        self._num_bytes = 0.0
        self._num_written = 0

    def add(self, clicks: pl.DataFrame, order: Sequence[str]) -> None:
        """Clicks of known users and items, with the columns that order them."""
        ordering = [pl.col(name).alias(f"order{index}") for index, name in enumerate(order)]
        self._held.append(
            clicks.select(pl.col(self.user).alias("user"), pl.col(self.item).alias("item"), *ordering)
        )
        self._num_bytes += self._held[-1].estimated_size()
        if self._num_bytes > _HELD_BYTES:
            self._write()

    def finish(self, users: pl.Series, items: pl.Series) -> Clicks:
        """All clicks, of users and items in the order of these ids."""
        self._write()
        return Clicks(self.work, self.num_parts, _indices(users, "user"), _indices(items, "item"))

    def _write(self) -> None:
        if not self._held:
            return
        clicks = pl.concat(self._held)
        part = hash64(clicks["user"], 0) % np.uint64(self.num_parts)
        for number in range(self.num_parts):
            some = clicks.filter(part == number)
            if some.height:
                some.write_parquet(self.work / f"{number}-{self._num_written}.parquet", compression="lz4")
        self._held, self._num_bytes, self._num_written = [], 0.0, self._num_written + 1


def _indices(ids: pl.Series, name: str) -> pl.DataFrame:
    return pl.DataFrame({name: ids, f"{name}_index": pl.Series(np.arange(len(ids), dtype=np.int32))})


@dataclass(frozen=True)
class Clicks:
    """Spilled clicks; users and items are indices from here on."""

    work: Path
    num_parts: int
    users: pl.DataFrame
    items: pl.DataFrame

    def parts(self) -> Iterator[pl.DataFrame]:
        """Columns user and item, oldest click first; all clicks of a user are in the same part."""
        for number in range(self.num_parts):
            files = sorted(self.work.glob(f"{number}-*.parquet"))
            if not files:
                continue
            clicks = pl.read_parquet(files).join(self.users, on="user").join(self.items, on="item")
            ordered = clicks.sort(pl.selectors.starts_with("order"), nulls_last=False)
            yield ordered.select(pl.col("user_index").alias("user"), pl.col("item_index").alias("item"))

    def write_seen(self, into: Path) -> int:
        """seen.npy: indices of the items that each user clicked, each once, from where seen.offsets.npy has it."""
        num_users = self.users.height
        lengths = np.zeros(num_users, np.int64)
        for pairs in self._seen():
            lengths += np.bincount(pairs["user"].to_numpy(), minlength=num_users)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        np.save(into / "seen.offsets.npy", offsets)
        seen = np.empty(offsets[-1], np.int32)
        for pairs in self._seen():
            users = pairs["user"].to_numpy()
            first = np.searchsorted(users, users)  # where each row's user begins
            seen[offsets[users] + np.arange(len(users)) - first] = pairs["item"].to_numpy()
        np.save(into / "seen.npy", seen)
        return len(seen)

    def _seen(self) -> Iterator[pl.DataFrame]:
        return (part.unique().sort("user", "item") for part in self.parts())

    def similar(self) -> Array | None:
        """int32 [items, 20]: the items most often clicked by the same users, best first, -1 where there are no more.

        By the cosine of who clicked them, of each user's last 50 clicks. None when there are too many items.
        """
        num_items = self.items.height
        if num_items > MAX_ITEMS:
            return None
        similar = np.full((num_items, NUM_SIMILAR), -1, np.int32)
        recent = _fewer(self._recent())
        counts = np.bincount(recent["item"].to_numpy(), minlength=num_items)
        for first, last in _ranges(recent, num_items):
            best = _most_similar(recent, counts, first, last)
            similar[best["item"].to_numpy(), best["rank"].to_numpy()] = best["other"].to_numpy()
        return similar

    def _recent(self) -> pl.DataFrame:
        """User and item of each user's last clicks, each pair once."""
        nothing = pl.DataFrame(schema={"user": pl.Int32, "item": pl.Int32})
        from_end = pl.int_range(pl.len(), 0, -1).over("user")
        recent = (part.filter(from_end <= RECENT_CLICKS).unique() for part in self.parts())
        return pl.concat([nothing, *recent]).sort("user", "item")


def _fewer(recent: pl.DataFrame) -> pl.DataFrame:
    """All users, or so many of them that their pairs of items can be counted in reasonable time."""
    num_pairs = int(
        recent.group_by("user").len().select((pl.col("len").cast(pl.Int64) ** 2).sum()).item() or 0
    )
    every = -(-num_pairs // _MAX_PAIRS)
    return recent.filter(pl.col("user") % every == 0) if every > 1 else recent


def _ranges(recent: pl.DataFrame, num_items: int) -> Iterator[tuple[int, int]]:
    """Items from first to before last, such that not too many pairs begin with them."""
    sizes = recent.with_columns(pl.len().over("user").alias("size"))
    pairs = np.bincount(sizes["item"].to_numpy(), sizes["size"].to_numpy(), minlength=num_items)
    number = (np.cumsum(pairs) // _PAIRS_AT_ONCE).astype(np.int64)
    starts = np.flatnonzero(np.diff(number, prepend=-1))
    yield from zip(starts, [*starts[1:], num_items], strict=True)


def _most_similar(recent: pl.DataFrame, counts: Array, first: int, last: int) -> pl.DataFrame:
    """Columns item, other and rank, from 0, of the items from first to before last."""
    of_range = recent.filter(pl.col("item").is_between(first, last - 1))
    pairs = of_range.join(recent.rename({"item": "other"}), on="user").filter(
        pl.col("item") != pl.col("other")
    )
    together = pairs.group_by("item", "other").len("both")
    items, others = together["item"].to_numpy(), together["other"].to_numpy()
    cosine = together["both"].to_numpy() / np.sqrt(counts[items] * counts[others].astype(np.float64))
    ranked = together.with_columns(pl.Series("cosine", cosine)).sort(
        "item", "cosine", "other", descending=[False, True, False]
    )
    rank = pl.int_range(pl.len()).over("item")
    return ranked.with_columns(rank.alias("rank")).filter(pl.col("rank") < NUM_SIMILAR)
