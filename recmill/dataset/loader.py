"""Batches from units of rows, starting at any cursor; the units of a Table are row groups, which are prefetched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import polars as pl

from recmill.dataset.batch import Batch, Layout, between, collate, joined
from recmill.dataset.prefetch import prefetch
from recmill.dataset.schedule import Cursor, UnitRows
from recmill.dataset.shard import ShardFile, group_rows_of
from recmill.dataset.table import Table
from recmill.errors import ArtifactError
from recmill.features.labels import check_binary, is_positive

_UNITS_FETCHED_AHEAD = 4


def batches_from(
    chunks: Iterable[tuple[Batch, int]], units: UnitRows, batch_size: int, epoch: int
) -> Iterator[tuple[Batch, Cursor]]:
    """Batches of one size, each with the cursor after it; only the last batch of an epoch may be smaller.

    A chunk is any number of consecutive rows, with the number of rows of the epoch up to its end.
    """
    held: list[Batch] = []
    missing = batch_size
    for rows, end in chunks:
        begin = 0
        while rows.size - begin >= missing:
            stop = begin + missing
            yield joined([*held, between(rows, begin, stop)]), units.cursor(epoch, end - rows.size + stop)
            held, missing, begin = [], batch_size, stop
        if begin < rows.size:
            held.append(between(rows, begin, rows.size))
            missing -= rows.size - begin
    if held:
        yield joined(held), Cursor(epoch + 1)


class Unit(Protocol):
    """Rows that are scheduled together."""

    @property
    def rows(self) -> int: ...


class UnitReader(ABC):
    """Rows in units, read batch by batch from any cursor. The last batch of an epoch may be smaller."""

    layout: Layout
    batch_size: int
    num_rows: int

    @property
    @abstractmethod
    def units(self) -> Sequence[Unit]: ...

    @abstractmethod
    def chunks(self, unit: int, epoch: int) -> Iterator[Batch]:
        """The rows of one unit, in the order of an epoch."""

    def order(self, epoch: int) -> list[int]:
        """Indices of the units in reading order of an epoch."""
        return list(range(len(self.units)))

    def unit(self, number: int, epoch: int) -> Batch:
        """The rows of one unit, in the order of an epoch."""
        return joined(list(self.chunks(number, epoch)))

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def read(self, cursor: Cursor = Cursor()) -> Iterator[tuple[Batch, Cursor]]:  # noqa: B008, frozen
        """Read one epoch from the cursor: each batch with the cursor after it. Prefetches on a thread."""
        order = self.order(cursor.epoch)
        units = UnitRows(self.units[number].rows for number in order)
        start = units.row_of(cursor)
        chunks = prefetch(self._chunks(order[cursor.unit :], cursor.epoch, units.begin(cursor.unit), start))
        return batches_from(chunks, units, self.batch_size, cursor.epoch)

    def _chunks(self, order: Sequence[int], epoch: int, row: int, start: int) -> Iterator[tuple[Batch, int]]:
        """Chunks of units whose first row is `row`, without the rows before `start`."""
        with self.fetching(order) as fetch_after:
            for index, number in enumerate(order):
                fetch_after(index)
                for chunk in self.chunks(number, epoch):
                    row += chunk.size
                    if row > start:
                        yield between(chunk, max(0, chunk.size - (row - start)), chunk.size), row

    @contextmanager
    def fetching(self, order: Sequence[int]) -> Iterator[Callable[[int], None]]:
        """The function to call before a unit is read; it fetches the units after it."""
        yield lambda index: None


def read_rows(shard: ShardFile, group: int, layout: Layout) -> pl.DataFrame:
    """The rows of a row group, with columns that match the layout."""
    rows = shard.read(group, layout.columns)
    problem = layout.misfit(rows)
    if problem is not None:
        raise shard.damaged(problem)
    return rows


def permuted(rows: pl.DataFrame, seed: int, epoch: int, unit: int) -> pl.DataFrame:
    """The rows of a unit in the order of an epoch."""
    return rows[random_of(seed, epoch, unit).permutation(rows.height)]


def random_of(seed: int, epoch: int, unit: int) -> np.random.Generator:
    return np.random.default_rng([seed, epoch, unit + 1])


@dataclass(frozen=True)
class ShardUnit:
    """One row group of one shard."""

    shard: ShardFile
    group: int
    rows: int


class Batches(UnitReader):
    """The rows of one or several splits of a Table.

    Without a seed, rows come in Table order. With one, each epoch has its own order of the rows inside a unit and of
    the units; the first epoch keeps the order of units, because it may follow a Table that is still written. Both
    orders depend on nothing but seed and epoch. `where` names a label and `not_empty` a list feature: only rows with
    label 1, or with a list that is not empty, exist and count.
    """

    def __init__(
        self,
        table: Table,
        batch_size: int,
        split: str | Sequence[str] = "train",
        features: Sequence[str] | None = None,
        seed: int | None = None,
        where: str | None = None,
        not_empty: str | None = None,
    ) -> None:
        self.layout = Layout.of(table.columns, features)
        self.batch_size = batch_size
        splits = [split] if isinstance(split, str) else split
        self.shards = [shard for name in splits for shard in table.files(name)]
        self.seed = seed
        self.where = where
        self.not_empty = not_empty
        is_filtered = where is not None or not_empty is not None
        self.num_rows = (
            sum(unit.rows for unit in self.units) if is_filtered else sum(map(table.num_rows, splits))
        )
        if not self.num_rows:
            wanted = f"{' and '.join(splits)} rows" + ("" if where is None else f' with label "{where}"')
            wanted += "" if not_empty is None else f' and something in "{not_empty}"'
            raise ArtifactError(f"Table {table.path} has no {wanted} to make batches of.")

    @cached_property
    def units(self) -> list[ShardUnit]:
        return [
            ShardUnit(shard, group, num_rows)
            for shard, rows_of_groups in zip(self.shards, group_rows_of(self.shards), strict=True)
            for group, all_rows in enumerate(rows_of_groups)
            if (num_rows := self._count(shard, group, all_rows))
        ]

    def _count(self, shard: ShardFile, group: int, num_rows: int) -> int:
        """The number of rows of a row group that count."""
        read = [name for name in (self.where, self.not_empty) if name is not None]
        if not read:
            return num_rows
        rows = shard.read(group, read)
        if self.where is not None:
            check_binary(self.where, rows[self.where].to_numpy())  # a rating is not a click
        return self._filtered(rows).height

    def _filtered(self, rows: pl.DataFrame) -> pl.DataFrame:
        if self.where is not None:
            rows = rows.filter(is_positive(self.where))
        return rows if self.not_empty is None else rows.filter(pl.col(self.not_empty).list.len() > 0)

    def order(self, epoch: int) -> list[int]:
        order = list(range(len(self.units)))
        if self.seed is None or epoch == 0:
            return order
        return [int(unit) for unit in random_of(self.seed, epoch, -1).permutation(order)]

    def chunks(self, unit: int, epoch: int) -> Iterator[Batch]:
        shard = self.units[unit]
        rows = self._filtered(read_rows(shard.shard, shard.group, self.layout))
        if self.seed is not None:
            rows = permuted(rows, self.seed, epoch, unit)
        yield collate(rows, self.layout)

    @contextmanager
    def fetching(self, order: Sequence[int]) -> Iterator[Callable[[int], None]]:
        """Prefetch shards of a URL while others are read. Errors are raised when the shard is read."""
        if not any(shard.is_streamed for shard in self.shards):
            yield lambda index: None
            return
        threads = ThreadPoolExecutor(_UNITS_FETCHED_AHEAD)

        def fetch_after(index: int) -> None:
            begin = index + _UNITS_FETCHED_AHEAD if index else 1
            for number in order[begin : index + 1 + _UNITS_FETCHED_AHEAD]:
                threads.submit(self.units[number].shard.check_size)

        try:
            yield fetch_after
        finally:
            threads.shutdown(cancel_futures=True)
