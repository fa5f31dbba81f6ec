"""Users or items of a bundle: their raw columns and finished features, by id.

    raw.arrow     Arrow IPC, mapped: the id column first, then every raw column of that side
    hashes.npy    uint64, sorted: the hash of each id;  indices.npy  int64: its index (entity_ids.py)
    numbers.npy   float32 [n, number features];  keys.npy  int64 [n, features with one key], both in the layout's
order
    lists/        <feature>.npy int64: keys of all rows;  <feature>.offsets.npy int64 [n + 1]

The index of a user or item is its row in all of these files. Changed and new rows stay in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa

from recmill import _native
from recmill.artifacts.bundle.arrays import GrowingArray, file_name, map_array
from recmill.artifacts.bundle.entity_ids import EntityIds, Id, write_ids
from recmill.artifacts.bundle.features import FeatureRows
from recmill.artifacts.bundle.rows import MappedRows
from recmill.dataset.batch import Array, Batch, Keys, Layout, collate
from recmill.errors import ArtifactError
from recmill.features.kernels import is_text

Side = Literal["user", "item"]


def write_entities(
    into: Path, side: Side, raw: pl.DataFrame, features: pl.DataFrame, layout: Layout, id_column: str
) -> None:
    """Row i of `raw` and of `features` has index i. Ids must be unique and not null."""
    raw = _id_first(raw, id_column)
    ids = raw[id_column]
    # A frame without columns has no rows: models may read no feature of this side.
    rows = collate(features, layout, with_labels=False) if layout.features else no_features(raw.height)
    if raw.height != rows.size or ids.null_count() or ids.n_unique() != raw.height:
        raise ValueError(
            f"{raw.height} {side}s need as many rows of features, got {rows.size}, and one id each"
        )
    into.mkdir(parents=True, exist_ok=True)
    write_ids(into, ids)
    _write_raw(into / "raw.arrow", raw)
    _write_features(into, rows)


def no_features(num_rows: int) -> Batch:
    """Features of rows for models that read none."""
    return Batch(num_rows, np.empty((num_rows, 0), np.float32), {}, {}, {})


def _id_first(raw: pl.DataFrame, id_column: str) -> pl.DataFrame:
    ids = raw[id_column]
    ids = ids if is_text(ids.dtype) else ids.cast(pl.Int64)
    return raw.select(ids, pl.exclude(id_column))


def _write_raw(path: Path, raw: pl.DataFrame) -> None:
    """One uncompressed record batch, so that rows can be taken from the mapped file without decoding."""
    table = raw.to_arrow(compat_level=pl.CompatLevel.oldest()).combine_chunks()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def _write_features(into: Path, batch: Batch) -> None:
    np.save(into / "numbers.npy", batch.numbers)
    single = [keys.values for keys in batch.keys.values() if keys.offsets is None]
    np.save(into / "keys.npy", np.stack(single, axis=1) if single else np.empty((batch.size, 0), np.int64))
    for name, keys in batch.keys.items():
        if keys.offsets is not None:
            (into / "lists").mkdir(exist_ok=True)
            np.save(into / "lists" / f"{file_name(name)}.npy", keys.values)
            np.save(into / "lists" / f"{file_name(name)}.offsets.npy", keys.offsets)


@dataclass
class EntityUpdate:
    """A changed user or item in memory: lists of keys by feature, and the raw row."""

    lists: Mapping[str, Array]
    raw: tuple[Any, ...]


@dataclass(frozen=True)
class EntityRows:
    """Stored features of some known users or items, read lazily."""

    entities: Entities
    indices: Array

    @property
    def size(self) -> int:
        return len(self.indices)

    @cached_property
    def rows(self) -> FeatureRows:
        return self.entities.rows(self.indices)


class Entities:
    """All users or all items. Many threads may read; the caller excludes them during `put`."""

    def __init__(self, path: Path, side: Side, layout: Layout, id_column: str) -> None:
        self.path = path
        self.side = side
        self.layout = layout
        self.id_column = id_column
        self._raw = _map_table(path / "raw.arrow")
        self._ids = EntityIds(path, self._raw.column(0))
        self._numbers = GrowingArray(map_array(path / "numbers.npy"))
        self._keys = GrowingArray(map_array(path / "keys.npy"))
        self._lists = {
            name: (
                map_array(path / "lists" / f"{file_name(name)}.npy"),
                map_array(path / "lists" / f"{file_name(name)}.offsets.npy"),
            )
            for name in layout.keys
            if (path / "lists" / f"{file_name(name)}.npy").exists()
        }
        self._single = [name for name in layout.keys if name not in self._lists]
        self._num_mapped = self._raw.num_rows
        self._changed: dict[int, EntityUpdate] = {}
        self._is_changed = GrowingArray(np.zeros(self._num_mapped, bool))
        self._known_slots: dict[tuple[str, ...], Array] = {}  # by features: see native/rank.cpp
        self._columns: dict[str, pl.Series] = {}
        self._check()
        self.make_unknown_row: Callable[[], Batch] | None = (
            None  # set by the bundle: the Plan's features of nulls
        )

    def _check(self) -> None:
        sizes = {*self._ids.file_sizes, len(self._numbers), len(self._keys)}
        sizes |= {len(offsets) - 1 for _, offsets in self._lists.values()}
        none = np.empty(0, np.int64)
        widths = (self._numbers.take(none).shape[1], self._keys.take(none).shape[1])
        expected = (len(self.layout.number_columns), len(self._single))
        if sizes != {self._num_mapped} or widths != expected or self._raw.column_names[0] != self.id_column:
            raise ArtifactError(
                f"{self.path} is damaged: its files do not fit each other and the recipe. Run `recmill export` again."
            )

    def __len__(self) -> int:
        return len(self._numbers)

    @cached_property
    def unknown_row(self) -> Batch:
        """The features of an unknown user or item."""
        found = self._blank() if self.make_unknown_row is None else self.make_unknown_row()
        self.make_unknown_row = None  # a reference cycle with the bundle would keep its files open
        return found

    @cached_property
    def raw_schema(self) -> pl.Schema:
        return _frame(self._raw.slice(0, 0)).schema

    def _blank(self) -> Batch:
        """A row of zeros and empty lists."""
        empty = Keys(np.empty(0, np.int64), np.zeros(2, np.int64))
        zero = Keys(np.zeros(1, np.int64))
        keys = {name: empty if name in self._lists else zero for name in self.layout.keys}
        return Batch(1, np.zeros((1, len(self.layout.number_columns)), np.float32), keys, {}, {})

    # ids

    def indices(self, ids: Sequence[Id]) -> Array:
        """The index of each id, -1 for an unknown one. "7" and 7 are the same id."""
        return self._ids.indices(ids)

    def ids(self, indices: Array) -> list[Id]:
        """Raw ids of indices, which must be >= 0."""
        return self._ids.ids(indices)

    def ids_with_prefix(self, prefix: str, limit: int) -> list[Id]:
        """The first ids, in the order of indices, that begin with a prefix."""
        return self._ids.with_prefix(prefix, limit)

    # raw columns

    def raw(self, indices: Array, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Raw rows in the order of the indices; index -1 gives nulls. Reads only those rows of the file."""
        names = list(self.raw_schema) if columns is None else list(columns)
        table = self._raw if columns is None else self._raw.select(names)
        special = self._special(indices)
        if special is None:
            return _frame(table.take(pa.array(indices, pa.int64())))
        mapped = _frame(table.take(pa.array(indices[~special], pa.int64())))
        own = self._own_rows(indices[special].tolist(), names)
        order = np.argsort(np.concatenate([np.flatnonzero(~special), np.flatnonzero(special)]))
        return pl.concat([mapped, own])[order]

    def raw_row(self, id: Id) -> dict[str, Any] | None:
        """Raw columns of one id by name; None if it is unknown."""
        indices = self.indices([id])
        return self.raw(indices).row(0, named=True) if indices[0] >= 0 else None

    def _own_rows(self, indices: Sequence[int], names: Sequence[str]) -> pl.DataFrame:
        nothing = EntityUpdate({}, (None,) * len(self.raw_schema))
        rows = [self._changed.get(index, nothing).raw for index in indices]
        numbers = {name: number for number, name in enumerate(self.raw_schema)}
        return pl.DataFrame(
            [
                pl.Series(name, [row[numbers[name]] for row in rows], dtype=self.raw_schema[name])
                for name in names
            ]
        )

    def column(self, name: str) -> pl.Series:
        """One raw column of all indices."""
        mapped = self._columns.get(name)
        if mapped is None:
            mapped = self._columns[name] = _frame(self._raw.select([name])).to_series()
        if not self._changed:
            return mapped
        own = self._own_rows(list(self._changed), [name]).to_series()
        order = np.arange(len(self))
        order[list(self._changed)] = self._num_mapped + np.arange(len(self._changed))
        return pl.concat([mapped, own]).gather(order)

    # features

    def features(self, indices: Array) -> Batch:
        """Finished features in the layout's order; index -1 gives those of an unknown entity."""
        special = self._special(indices)
        unknown = indices < 0 if special is not None else None
        if unknown is not None and unknown.any():
            indices = np.where(unknown, 0, indices)
            if not len(self):
                return self._unknown_rows(len(indices))
        else:
            unknown = None
        numbers = self._numbers.take(indices)
        # Rows are contiguous in the file; models read one feature at a time.
        single = np.ascontiguousarray(self._keys.take(indices).T)
        keys = {name: Keys(single[index]) for index, name in enumerate(self._single)}
        if unknown is not None:
            numbers[unknown] = self.unknown_row.numbers[0]
            for name, column in keys.items():
                column.values[unknown] = self.unknown_row.keys[name].values[0]
        for name in self._lists:
            keys[name] = self._list_keys(name, indices, special, unknown)
        return Batch(len(indices), numbers, {name: keys[name] for name in self.layout.keys}, {}, {})

    def rows(self, indices: Array) -> FeatureRows:
        """Finished features by name."""
        return FeatureRows.of(self.features(indices), self.layout)

    def item_tables(
        self, keys: Sequence[str], numbers: Sequence[str], tables: Sequence[MappedRows]
    ) -> _native.ItemTables:
        """These features for native code, which reads them by index; `tables` has the rows of each key."""
        columns = {name: column for column, name in enumerate(self._single)}
        slices = self.layout.number_slices
        known = self._known_slots.setdefault(tuple(keys), np.zeros((self._num_mapped, len(tables)), np.int32))
        return _native.ItemTables(
            list(tables),
            self._keys.mapped,
            np.array([columns.get(name, -1) for name in keys], np.int64),
            self._numbers.mapped,
            np.array([c for name in numbers for c in range(slices[name].start, slices[name].stop)], np.int64),
            known,
        )

    @property
    def added_keys(self) -> Array:
        """Keys of new entities, which follow those of the file: one key for each single-key feature."""
        return self._keys.added

    @property
    def added_numbers(self) -> Array:
        return self._numbers.added

    def _special(self, indices: Array) -> Array | None:
        """Which indices differ from the mapped files: unknown, changed or new; None when there are none."""
        if not len(indices):
            return None
        if not self._changed:
            special = indices < 0
        else:
            special = (
                self._is_changed.take(np.maximum(indices, 0)) | (indices < 0) if len(self) else indices < 0
            )
        return special if special.any() else None

    def _list_keys(self, name: str, indices: Array, special: Array | None, unknown: Array | None) -> Keys:
        values, offsets = self._lists[name]
        if special is None:
            return _take_lists(values, offsets, indices)
        mapped = _take_lists(values, offsets, indices[~special])
        assert mapped.offsets is not None
        unknown_rows = np.zeros(len(indices), bool) if unknown is None else unknown
        own = [
            self.unknown_row.keys[name].values
            if unknown_rows[number]
            else self._changed[indices[number]].lists[name]
            for number in np.flatnonzero(special).tolist()
        ]
        lengths = np.empty(len(indices), np.int64)
        lengths[~special] = np.diff(mapped.offsets)
        lengths[special] = [len(one) for one in own]
        found = Keys(np.empty(lengths.sum(), np.int64), np.concatenate([[0], np.cumsum(lengths)]))
        is_own = np.repeat(special, lengths)
        found.values[~is_own] = mapped.values
        found.values[is_own] = np.concatenate(own)
        return found

    def _unknown_rows(self, count: int) -> Batch:
        keys = {
            name: Keys(
                np.tile(keys.values, count),
                None if keys.offsets is None else np.arange(count + 1) * len(keys.values),
            )
            for name, keys in self.unknown_row.keys.items()
        }
        return Batch(count, np.repeat(self.unknown_row.numbers, count, axis=0), keys, {}, {})

    # changing

    def put(self, raw: pl.DataFrame, features: pl.DataFrame) -> Array:
        """Replace rows of known ids and append new ones, in memory; returns the index of each row.

        Of equal ids, the last wins.
        """
        raw, batch = self.fitted(raw, features)
        ids = raw[self.id_column].to_list()
        new = list(
            dict.fromkeys(
                one for one, index in zip(ids, self.indices(ids).tolist(), strict=True) if index < 0
            )
        )
        self._append(new)
        indices = self.indices(ids)
        single = [batch.keys[name].values for name in self._single]
        last = np.array(
            list({index: number for number, index in enumerate(indices.tolist())}.values()), np.int64
        )
        self._numbers.put(indices[last], batch.numbers[last])
        if single:
            self._keys.put(indices[last], np.stack(single, axis=1)[last])
            for known in self._known_slots.values():
                known[indices[indices < self._num_mapped]] = 0
        lists = {name: _split(batch.keys[name]) for name in self._lists}
        for number, (index, row) in enumerate(zip(indices.tolist(), raw.iter_rows(), strict=True)):
            self._changed[index] = EntityUpdate({name: parts[number] for name, parts in lists.items()}, row)
        self._is_changed.put(indices, np.ones(len(indices), bool))
        return indices

    def fitted(self, raw: pl.DataFrame, features: pl.DataFrame) -> tuple[pl.DataFrame, Batch]:
        """Rows in the format of `put`; an error when they do not match."""
        raw, batch = self._with_columns(raw), collate(features, self.layout, with_labels=False)
        if raw[self.id_column].null_count() or raw.height != batch.size:
            raise ValueError(
                f"{raw.height} {self.side}s need an id each and {raw.height} rows of features, got {batch.size}"
            )
        return raw, batch

    def _with_columns(self, raw: pl.DataFrame) -> pl.DataFrame:
        """The columns of raw.arrow, with nulls for missing ones."""
        # Column by column: for the few rows of a typical `put`, a query would take longer than the rest of it.
        columns = [
            raw[name].cast(dtype)
            if name in raw.columns
            else pl.Series(name, [None], dtype).new_from_index(0, raw.height)
            for name, dtype in self.raw_schema.items()
        ]
        return pl.DataFrame(columns)

    def _append(self, ids: Sequence[Id]) -> None:
        """Append rows for new ids."""
        count = len(ids)
        self._keys.append(np.zeros((count, len(self._single)), np.int64))
        self._is_changed.append(np.ones(count, bool))
        self._numbers.append(np.zeros((count, len(self.layout.number_columns)), np.float32))
        self._ids.append(ids)


def _map_table(path: Path) -> pa.Table:
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as file:
            return file.read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise ArtifactError(f"{path} cannot be read: {error}. Run `recmill export` again.") from None


def _frame(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def _take_lists(values: Array, offsets: Array, indices: Array) -> Keys:
    """The lists of some indices, concatenated."""
    starts = offsets.take(indices)
    lengths = offsets.take(indices + 1) - starts
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    numbers = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], lengths)
    return Keys(values.take(numbers), ends)


def _split(keys: Keys) -> list[Array]:
    """Each row's own copy of its keys: a view would keep the whole batch in memory."""
    assert keys.offsets is not None
    bounds = keys.offsets.tolist()
    return [keys.values[start:stop].copy() for start, stop in pairwise(bounds)]
