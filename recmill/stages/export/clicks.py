"""Who clicked what: the items that each user has seen, and the interactions that recall is fitted to.

Clicks are spilled to disk partitioned by user, so that they can be processed some users at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from recmill.features.kernels import hash64
from recmill.logs.base import LogFile
from recmill.recall.interactions import Interactions, Sequences

MAX_INTERACTIONS = 200_000_000  # for recall to be fitted to; with more, some of the users are enough
_PART_BYTES = 512 << 20  # of the log, for each part of the users
_HELD_BYTES = 64 << 20


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
        return (self._ordered([number]) for number in range(self.num_parts))

    def write_seen(self, into: Path) -> int:
        """seen.npy: indices of the items that each user clicked, each once, the one clicked last at the end.

        Those of a user lie from where seen.offsets.npy has it.
        """
        num_users = self.users.height
        lengths = np.zeros(num_users, np.int64)
        for part in self._sequences():
            lengths += np.diff(part.offsets)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        np.save(into / "seen.offsets.npy", offsets)
        seen = np.empty(offsets[-1], np.int32)
        for part in self._sequences():
            seen[offsets[part.users] + np.arange(len(part.items)) - part.offsets[part.users]] = part.items
        np.save(into / "seen.npy", seen)
        return len(seen)

    def _sequences(self) -> Iterator[Sequences]:
        return (self._interactions(part).sequences for part in self.parts())

    def interactions(self) -> Interactions:
        """All clicks, oldest first; of a part of the users if they are very many."""
        files = sorted(self.work.glob("*.parquet"))
        num_clicks = sum(pl.scan_parquet(file).select(pl.len()).collect().item() for file in files)
        num_parts = max(1, int(self.num_parts * min(1.0, MAX_INTERACTIONS / max(1, num_clicks))))
        return self._interactions(self._ordered(range(num_parts)))

    def _interactions(self, clicks: pl.DataFrame) -> Interactions:
        users, items = (clicks[name].to_numpy().astype(np.int32) for name in ("user", "item"))
        return Interactions(users, items, self.users.height, self.items.height)

    def _ordered(self, parts: Iterable[int]) -> pl.DataFrame:
        files = [file for number in parts for file in sorted(self.work.glob(f"{number}-*.parquet"))]
        if not files:
            return pl.DataFrame(schema={"user": pl.Int32, "item": pl.Int32})
        clicks = pl.read_parquet(files).join(self.users, on="user").join(self.items, on="item")
        ordered = clicks.sort(pl.selectors.starts_with("order"), nulls_last=False)
        return ordered.select(pl.col("user_index").alias("user"), pl.col("item_index").alias("item"))
