"""Table -> Batch: arrays for one step of training, read ahead, resumable at any row. Plain NumPy, shared with serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from recmill.dataset.prefetch import prefetch
from recmill.dataset.shard import ShardFile
from recmill.dataset.table import Table
from recmill.errors import ArtifactError
from recmill.features.chain import ColumnInfo
from recmill.features.labels import check_binary, is_positive

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Keys:
    """Ids or keys of one feature: one for each row, or `offsets` into them for lists (one more than rows)."""

    values: Array  # int64
    offsets: Array | None = None  # int64


@dataclass(frozen=True)
class Batch:
    """One step's rows: numbers side by side, keys that were never floats, labels."""

    size: int
    numbers: Array  # float32 [size, number features]
    keys: Mapping[str, Keys]
    lists: Mapping[str, Keys]  # lists of numbers, with float32 values
    labels: Mapping[str, Array]  # float32 [size]
    whole: int | None = None  # rows of the batch that these are one worker's share of; None: these are all

    @property
    def total(self) -> int:
        """Rows of the step, whoever has them."""
        return self.size if self.whole is None else self.whole


@dataclass(frozen=True)
class Layout:
    """Which columns a batch holds, and how."""

    numbers: tuple[str, ...]
    keys: tuple[str, ...]
    lists: tuple[str, ...]
    labels: tuple[str, ...]
    bounds: Mapping[str, int]  # ids of these features must be below

    @classmethod
    def of(cls, columns: Sequence[ColumnInfo], features: Sequence[str] | None = None) -> Layout:
        """All features of a Table, or the named ones in the order given; all labels."""
        known = {column.name: column for column in columns if column.role == "feature"}
        chosen = [known[name] for name in (features if features is not None else known)]
        named = {kind: tuple(c.name for c in chosen if c.kind in kinds) for kind, kinds in _KINDS.items()}
        bounds = {column.name: column.size for column in chosen if column.size is not None}
        labels = tuple(column.name for column in columns if column.role == "label")
        return cls(named["numbers"], named["keys"], named["lists"], labels, bounds)

    @property
    def features(self) -> list[str]:
        return [*self.numbers, *self.keys, *self.lists]

    @property
    def columns(self) -> list[str]:
        return [*self.features, *self.labels]

    def misfit(self, rows: pl.DataFrame) -> str | None:
        """What is wrong with the type of a column; None when all are as a batch needs them."""
        for names, expected, fits in (
            (self.numbers, "numbers", _is_number),
            (self.keys, "ids", lambda dtype: _element(dtype).is_integer()),
            (self.lists, "lists of numbers", lambda dtype: _is_list(dtype) and _is_number(_element(dtype))),
            (self.labels, "numbers", _is_number),
        ):
            for name in names:
                if not fits(rows.schema[name]):
                    return f'has {rows.schema[name]} in column "{name}", expected {expected}'
        return None


_KINDS = {"numbers": ("number",), "keys": ("id", "key", "ids", "keys"), "lists": ("numbers",)}


def _is_list(dtype: pl.DataType) -> bool:
    return isinstance(dtype, pl.List)


def _element(dtype: pl.DataType) -> pl.DataType:
    return dtype.inner if isinstance(dtype, pl.List) else dtype  # type: ignore[return-value]


def _is_number(dtype: pl.DataType) -> bool:
    return dtype.is_float()


def collate(rows: pl.DataFrame, layout: Layout, with_labels: bool = True) -> Batch:
    """Rows of a Table, or what a Plan made of a request, as a batch. An id out of range is an error."""
    numbers = np.empty((rows.height, len(layout.numbers)), dtype=np.float32)
    for place, name in enumerate(layout.numbers):
        numbers[:, place] = rows[name].to_numpy()
    keys = {name: keys_of(rows[name], layout.bounds.get(name)) for name in layout.keys}
    lists = {name: _list_of(rows[name], np.float32) for name in layout.lists}
    labels = {name: rows[name].to_numpy(writable=True) for name in layout.labels} if with_labels else {}
    return Batch(rows.height, numbers, keys, lists, labels)


def keys_of(column: pl.Series, bound: int | None) -> Keys:
    """The keys of one feature. An id out of range is an error."""
    is_list = isinstance(column.dtype, pl.List)
    keys = _list_of(column, np.int64) if is_list else Keys(column.to_numpy().astype(np.int64))
    if bound is not None and len(keys.values):
        least, most = int(keys.values.min()), int(keys.values.max())
        if least < 0 or most >= bound:
            found = least if least < 0 else most
            raise ArtifactError(f'Feature "{column.name}" has id {found}, but its ids are 0 to {bound - 1}.')
    return keys


def _list_of(column: pl.Series, dtype: type[np.generic]) -> Keys:
    lengths = column.list.len().to_numpy()
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    values = column.filter(column.list.len() > 0).explode().to_numpy().astype(dtype)
    return Keys(values, offsets)


def read_rows(shard: ShardFile, group: int, layout: Layout) -> pl.DataFrame:
    """The rows of a row group, with columns that fit the layout."""
    rows = shard.read(group, layout.columns)
    problem = layout.misfit(rows)
    if problem is not None:
        raise shard.damaged(problem)
    return rows


@dataclass(frozen=True)
class Cursor:
    """How far the reading is: the next row to come. Part of every checkpoint."""

    epoch: int = 0
    unit: int = 0
    row: int = 0


@dataclass(frozen=True)
class ShardUnit:
    """A piece of work: one row group of one shard."""

    shard: ShardFile
    group: int
    rows: int


class Batches:
    """The rows of a split, batch after batch, from any cursor on.

    Without a seed, rows come in Table order. With one, each epoch has its own order of units and of the rows inside a
    unit, which depends on nothing but seed and epoch. The last batch of an epoch may be smaller; batches run across
    shards. `where` names a label: only rows that have it 1 are there, and only they count.
    """

    def __init__(
        self,
        table: Table,
        batch_size: int,
        split: str = "train",
        features: Sequence[str] | None = None,
        seed: int | None = None,
        where: str | None = None,
    ) -> None:
        self.layout = Layout.of(table.columns, features)
        self.batch_size = batch_size
        self.shards = table.files(split)
        self.seed = seed
        self.where = where
        self.num_rows = table.num_rows(split) if where is None else sum(unit.rows for unit in self.units)
        if not self.num_rows:
            wanted = f"{split} rows" if where is None else f'{split} rows with label "{where}"'
            raise ArtifactError(f"Table {table.path} has no {wanted} to make batches of.")

    @cached_property
    def units(self) -> list[ShardUnit]:
        return [
            ShardUnit(shard, group, num_rows)
            for shard in self.shards
            for group, all_rows in enumerate(shard.group_rows())
            if (num_rows := all_rows if self.where is None else self._count(shard, group, self.where))
        ]

    @staticmethod
    def _count(shard: ShardFile, group: int, label: str) -> int:
        rows = shard.read(group, [label])
        check_binary(label, rows[label].to_numpy())  # one star is no click
        return rows.filter(is_positive(label)).height

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def read(self, cursor: Cursor = Cursor()) -> Iterator[tuple[Batch, Cursor]]:  # noqa: B008, frozen
        """One epoch from the cursor on: each batch with the cursor behind it. Decoding runs ahead on a thread."""
        held: list[pl.DataFrame] = []
        num_held = 0
        for rows, after in prefetch(self._rows(cursor)):
            held.append(rows)
            num_held += rows.height
            while num_held >= self.batch_size:
                batch, held = self._take(held)
                num_held -= self.batch_size
                yield batch, self._back(after, num_held)
        if num_held:
            yield self._take(held)[0], Cursor(cursor.epoch + 1)

    def _take(self, held: list[pl.DataFrame]) -> tuple[Batch, list[pl.DataFrame]]:
        rows = pl.concat(held) if len(held) > 1 else held[0]
        rest = rows[self.batch_size :]
        return collate(rows[: self.batch_size], self.layout), [rest] if rest.height else []

    def _rows(self, cursor: Cursor) -> Iterator[tuple[pl.DataFrame, Cursor]]:
        """Units in the epoch's order, from the cursor on, each with the cursor behind it."""
        order = self.order(cursor.epoch)
        for place in range(cursor.unit, len(order)):
            rows = self._read_unit(order[place], cursor.epoch)
            skip = cursor.row if place == cursor.unit else 0
            yield rows[skip:], Cursor(cursor.epoch, place + 1)

    def order(self, epoch: int) -> list[int]:
        """The numbers of the units as an epoch reads them."""
        order = np.arange(len(self.units))
        return (order if self.seed is None else self._random(epoch, -1).permutation(order)).tolist()

    def unit(self, number: int, epoch: int) -> Batch:
        """The rows of one unit, in the order of an epoch."""
        return collate(self._read_unit(number, epoch), self.layout)

    def _read_unit(self, number: int, epoch: int) -> pl.DataFrame:
        unit = self.units[number]
        rows = read_rows(unit.shard, unit.group, self.layout)
        if self.where is not None:
            rows = rows.filter(is_positive(self.where))
        if self.seed is None:
            return rows
        return rows[self._random(epoch, number).permutation(rows.height)]

    def _random(self, epoch: int, unit: int) -> np.random.Generator:
        return np.random.default_rng([self.seed or 0, epoch, unit + 1])

    def _back(self, after: Cursor, num_rows: int) -> Cursor:
        """The cursor `num_rows` rows before another one, which stands at the beginning of a unit."""
        if not num_rows:
            return after if after.unit < len(self.units) else Cursor(after.epoch + 1)
        order = self.order(after.epoch)
        unit = after.unit
        while num_rows > 0:
            unit -= 1
            num_rows -= self.units[order[unit]].rows
        return replace(after, unit=unit, row=-num_rows)
