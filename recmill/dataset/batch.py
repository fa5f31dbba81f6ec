"""A Batch: the arrays of one training step; its layout, conversion from rows, slicing and joining. Plain NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import polars as pl

from recmill.errors import ArtifactError
from recmill.features.chain import ColumnInfo

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Keys:
    """Ids or keys of one feature: one for each row, or `offsets` into them for lists (one more than rows)."""

    values: Array  # int64
    offsets: Array | None = None  # int64


@dataclass(frozen=True)
class Batch:
    """The rows of one step: numbers side by side, integer keys, labels."""

    size: int
    numbers: Array  # float32 [size, number columns]: one column per number feature, several for a vector
    keys: Mapping[str, Keys]
    lists: Mapping[str, Keys]  # lists of numbers of different lengths, with float32 values
    labels: Mapping[str, Array]  # float32 [size]
    whole: int | None = None  # size of the batch that this is one worker's slice of; None: the whole batch

    @property
    def total(self) -> int:
        """Rows of the step over all workers."""
        return self.size if self.whole is None else self.whole


@dataclass(frozen=True)
class Layout:
    """The columns of a batch and their kinds."""

    numbers: tuple[str, ...]
    keys: tuple[str, ...]
    lists: tuple[str, ...]
    labels: tuple[str, ...]
    bounds: Mapping[str, int]  # upper bounds of the ids of these features
    widths: Mapping[str, int] = field(default_factory=dict)  # widths of number features that are vectors

    @classmethod
    def of(cls, columns: Sequence[ColumnInfo], features: Sequence[str] | None = None) -> Layout:
        """The layout of all features of a Table, or of the named ones in the given order; all labels."""
        known = {column.name: column for column in columns if column.role == "feature"}
        chosen = [known[name] for name in (features if features is not None else known)]
        named = {kind: tuple(c.name for c in chosen if _kind_of(c) == kind) for kind in _KINDS}
        sizes = {column.name: column.size for column in chosen if column.size is not None}
        bounds = {name: sizes[name] for name in named["keys"] if name in sizes}
        widths = {name: sizes[name] for name in named["numbers"] if name in sizes}
        labels = tuple(column.name for column in columns if column.role == "label")
        return cls(named["numbers"], named["keys"], named["lists"], labels, bounds, widths)

    @property
    def number_columns(self) -> list[str]:
        """The feature of each number column."""
        return [name for name in self.numbers for _ in range(self.widths.get(name, 1))]

    @cached_property
    def number_slices(self) -> Mapping[str, slice]:
        """The number columns of each feature."""
        ends = list(accumulate(self.widths.get(name, 1) for name in self.numbers))
        return {
            name: slice(end - self.widths.get(name, 1), end)
            for name, end in zip(self.numbers, ends, strict=True)
        }

    @property
    def features(self) -> list[str]:
        return [*self.numbers, *self.keys, *self.lists]

    @property
    def columns(self) -> list[str]:
        return [*self.features, *self.labels]

    def misfit(self, rows: pl.DataFrame) -> str | None:
        """What is wrong with the type of a column; None when all fit."""
        for names, expected, fits in (
            ([name for name in self.numbers if name not in self.widths], "numbers", _is_number),
            (self.widths, "lists of numbers", _is_list_of_numbers),
            (self.keys, "ids", lambda dtype: _element(dtype).is_integer()),
            (self.lists, "lists of numbers", _is_list_of_numbers),
            (self.labels, "numbers", _is_number),
        ):
            for name in names:
                if not fits(rows.schema[name]):
                    return f'has {rows.schema[name]} in column "{name}", expected {expected}'
        return None


_KINDS = {"numbers": ("number",), "keys": ("id", "key", "ids", "keys"), "lists": ("numbers",)}


def _kind_of(column: ColumnInfo) -> str:
    """The member of a batch that holds it. Lists of numbers of equal length are vectors among the numbers."""
    if column.kind == "numbers" and column.size is not None:
        return "numbers"
    return next(kind for kind, kinds in _KINDS.items() if column.kind in kinds)


def _is_list_of_numbers(dtype: pl.DataType) -> bool:
    return isinstance(dtype, pl.List) and _is_number(_element(dtype))


def _element(dtype: pl.DataType) -> pl.DataType:
    return dtype.inner if isinstance(dtype, pl.List) else dtype  # type: ignore[return-value]


def _is_number(dtype: pl.DataType) -> bool:
    return dtype.is_float()


def collate(rows: pl.DataFrame, layout: Layout, with_labels: bool = True) -> Batch:
    """Convert rows of a Table, or a Plan's output, to a batch. An id out of range is an error."""
    numbers = np.empty((rows.height, len(layout.number_columns)), dtype=np.float32)
    for name, columns in layout.number_slices.items():
        numbers[:, columns] = numbers_of(rows[name], layout.widths.get(name))
    keys = {name: keys_of(rows[name], layout.bounds.get(name)) for name in layout.keys}
    lists = {name: _list_of(rows[name], np.float32) for name in layout.lists}
    labels = {name: rows[name].to_numpy(writable=True) for name in layout.labels} if with_labels else {}
    return Batch(rows.height, numbers, keys, lists, labels)


def numbers_of(column: pl.Series, width: int | None) -> Array:
    """The numbers of one feature, [rows, 1] or, of a vector, [rows, width]."""
    if width is None:
        return column.to_numpy()[:, None]
    lengths = column.list.len()
    if column.null_count() or (lengths != width).any():
        raise ArtifactError(
            f'Feature "{column.name}" has lists of other lengths than {width}; prepare the Table again.'
        )
    return column.explode().to_numpy().reshape(-1, width) if column.len() else np.empty((0, width))


def keys_of(column: pl.Series, bound: int | None) -> Keys:
    """The keys of one feature. An id out of range is an error."""
    is_list = isinstance(column.dtype, pl.List)
    keys = _list_of(column, np.int64) if is_list else Keys(column.to_numpy().astype(np.int64))
    if bound is not None and len(keys.values):
        least, most = int(keys.values.min()), int(keys.values.max())
        if least < 0 or most >= bound:
            wrong = least if least < 0 else most
            raise ArtifactError(f'Feature "{column.name}" has id {wrong}, but its ids are 0 to {bound - 1}.')
    return keys


def _list_of(column: pl.Series, dtype: type[np.generic]) -> Keys:
    lengths = column.list.len().to_numpy()
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    values = column.filter(column.list.len() > 0).explode().to_numpy().astype(dtype)
    return Keys(values, offsets)


# slicing and joining batches: views where possible, because the GIL is held here


def between(batch: Batch, begin: int, end: int) -> Batch:
    """A range of rows of a batch, without copies."""
    return Batch(
        end - begin,
        batch.numbers[begin:end],
        {name: _keys_between(keys, begin, end) for name, keys in batch.keys.items()},
        {name: _keys_between(keys, begin, end) for name, keys in batch.lists.items()},
        {name: labels[begin:end] for name, labels in batch.labels.items()},
    )


def _keys_between(keys: Keys, begin: int, end: int) -> Keys:
    if keys.offsets is None:
        return Keys(keys.values[begin:end])
    offsets = keys.offsets[begin : end + 1]
    return Keys(keys.values[offsets[0] : offsets[-1]], offsets - offsets[0])


def joined(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches of the same layout."""
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    return Batch(
        sum(batch.size for batch in batches),
        np.concatenate([batch.numbers for batch in batches]),
        {name: _joined_keys([batch.keys[name] for batch in batches]) for name in first.keys},
        {name: _joined_keys([batch.lists[name] for batch in batches]) for name in first.lists},
        {name: np.concatenate([batch.labels[name] for batch in batches]) for name in first.labels},
    )


def _joined_keys(parts: Sequence[Keys]) -> Keys:
    values = np.concatenate([keys.values for keys in parts])
    if parts[0].offsets is None:
        return Keys(values)
    lengths = [np.diff(keys.offsets) for keys in parts if keys.offsets is not None]
    return Keys(values, np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))]))
