"""Embedding rows of a bundle: memory-mapped, read by key or by slot, changed in memory.

    spec.json    the definition of the table
    keys.npy     int64, sorted; the slot of a key is its index here (bounded tables have no keys.npy: slot = key)
    rows.npy     [n, dim] float32, float16 or int8
    scales.npy   float32 [n], int8 only: a row is its int8 values times its scale
    shared.npy   float32 [shared_rows, dim]: read for keys without a row of their own

Shapes: B rows of a request, T features, D embedding dim.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from recmill import _native
from recmill.artifacts.bundle.arrays import GrowingArray, file_name, map_array, search
from recmill.artifacts.bundle.row_files import DTYPES, absent_table, encode
from recmill.dataset.batch import Keys
from recmill.embeddings.collection import EmbeddingFeature
from recmill.embeddings.table import Array, EmbeddingTable, TableSpec, as_keys
from recmill.errors import ArtifactError

_MANY_KEYS = 64  # in one lookup: from this number on a hash table is faster than a binary search


MappedRows = tuple[_native.IntLookup | None, Array, Array | None]  # its keys, rows, scales


class RowTable:
    """One table. Many threads may read; the caller excludes them during a change."""

    def __init__(self, path: Path, spec: TableSpec) -> None:
        self.path = path
        self.spec = spec
        self.dim = spec.dim
        self._keys = np.empty(0, np.int64) if spec.num_rows else map_array(path / "keys.npy")
        self._rows = GrowingArray(map_array(path / "rows.npy"))
        self.dtype = str(self._rows.take(np.empty(0, np.int64)).dtype)
        self._scales = GrowingArray(map_array(path / "scales.npy")) if self.dtype == "int8" else None
        self._shared = map_array(path / "shared.npy") if spec.shared_rows else None
        self._added_keys = np.empty(0, np.int64)  # sorted
        self._added_slots = np.empty(0, np.int64)
        self._reading_shared: set[int] = set()  # keys that have a slot, but no row of their own
        self._check()

    @classmethod
    def open(cls, path: Path) -> RowTable:
        try:
            spec = TableSpec(**json.loads((path / "spec.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ArtifactError(
                f"{path} is not a table of a bundle: {error}. Run `recmill export` again."
            ) from None
        return cls(path, spec)

    def _check(self) -> None:
        expected = len(self._keys) if self.spec.num_rows is None else self.spec.num_rows
        fits = [len(self._rows) == expected, self.dtype in DTYPES]
        fits += [self._rows.take(np.empty(0, np.int64)).shape == (0, self.dim)]
        fits += [len(self._scales) == expected] if self._scales is not None else []
        if not all(fits):
            raise ArtifactError(
                f"{self.path} is damaged: its rows do not fit its keys and spec.json. Run `recmill export` again."
            )

    @property
    def num_rows(self) -> int:
        """Number of slots, including those added in memory."""
        return len(self._rows)

    @property
    def keys(self) -> Array:
        """The key of each slot."""
        if self.spec.num_rows is not None:
            return np.arange(self.spec.num_rows)
        return np.concatenate([self._keys, self._added_keys[np.argsort(self._added_slots)]])

    def slots(self, keys: Array) -> Array:
        """The slot of each key; -1 for a key that has none."""
        keys = as_keys(keys)
        if self.spec.num_rows is not None:
            # As unsigned numbers, negative keys are out of range too.
            if not len(keys) or keys.view(np.uint64).max() < self.spec.num_rows:
                return keys
            return np.where((keys >= 0) & (keys < self.spec.num_rows), keys, -1)
        found = self._find(keys)
        if len(self._added_keys) and found.min(initial=0) < 0:
            missing = found < 0
            indices = search(self._added_keys, keys[missing])
            found[missing] = np.where(indices < 0, -1, self._added_slots[indices])
        return found

    def _find(self, keys: Array) -> Array:
        """Slots of keys in the file; -1 for others. Binary search for a user's few keys, hashing for many."""
        if len(keys) < _MANY_KEYS:
            return search(self._keys, keys)
        return self._index.find(keys, None).astype(np.int64) - 1

    @cached_property
    def _index(self) -> _native.IntLookup:
        return _native.IntLookup(self._keys)

    def mapped(self) -> MappedRows:
        """The rows for native code: those of the file, with their changes."""
        index = self._index if self.spec.num_rows is None else None
        return index, self._rows.mapped, self._scales.mapped if self._scales is not None else None

    def some_keys(self, number: int) -> Array:
        """Some keys with rows in the file, at most this many."""
        return np.arange(min(number, self.spec.num_rows)) if self.spec.num_rows else self._keys[:number]

    def gather(self, slots: Array, out: Array | None = None) -> Array:
        """Rows of slots (all of them >= 0), float32 [n, dim]; `out` may be a strided view."""
        rows = self._rows.take(slots)
        if self._scales is not None:
            scales = self._scales.take(slots)
            return np.multiply(rows, scales[:, None], out=out)
        if out is None:
            return rows.astype(np.float32, copy=False)
        out[...] = rows
        return out

    def lookup(self, keys: Array, out: Array | None = None) -> Array:
        """Rows of keys, float32 [n, dim]. An absent key reads the same as in the trainer's prediction."""
        slots = self.slots(keys)
        if not len(slots) or slots.min() >= 0:
            return self.gather(slots, out)
        if out is None:
            out = np.empty((len(slots), self.dim), np.float32)
        absent = slots < 0
        out[absent] = self.absent_rows(as_keys(keys)[absent])
        out[~absent] = self.gather(slots[~absent])
        return out

    def absent_rows(self, keys: Array) -> Array:
        """The rows of absent keys; a key outside a bounded table is an IndexError."""
        return self._absent.pool(self._absent.lookup(keys, train=False))

    @cached_property
    def _absent(self) -> EmbeddingTable:
        return absent_table(self.spec, self._shared)

    # changing

    def update(self, keys: Array, rows: Array) -> None:
        """Change rows of known keys and append new keys, in memory only. Of equal keys the last one wins."""
        self.check(keys, rows)
        keys, rows = as_keys(keys), np.asarray(rows, np.float32)
        keys, last = np.unique(keys[::-1], return_index=True)
        rows = rows[::-1][last]
        slots = self.slots(keys)
        new = slots < 0
        if new.any():
            self._append(keys[new], rows[new])
        self._write(slots[~new], rows[~new])
        if self._reading_shared:
            self._reading_shared.difference_update(keys.tolist())

    def check(self, keys: Array, rows: Array, shared_rows: Array | None = None) -> None:
        """Raise a ValueError or IndexError if these rows, or these shared rows, do not fit the table."""
        keys, rows = as_keys(keys), np.asarray(rows, np.float32)
        if rows.shape != (len(keys), self.dim) or not np.isfinite(rows).all():
            raise ValueError(
                f'Table "{self.spec.name}": {len(keys)} keys need finite rows {(len(keys), self.dim)}, got {rows.shape}'
            )
        if self.spec.num_rows is not None:
            outside = keys[(keys < 0) | (keys >= self.spec.num_rows)]
            if len(outside):
                raise IndexError(
                    f'Table "{self.spec.name}": key {outside[0]} is outside 0..{self.spec.num_rows - 1}'
                )
        if shared_rows is not None:
            size = 0 if self._shared is None else self._shared.size
            if shared_rows.size != size or not np.isfinite(shared_rows).all():
                raise ValueError(
                    f'Table "{self.spec.name}" needs {size} finite shared numbers, got {shared_rows.size}'
                )

    def remove(self, keys: Array) -> None:
        """Make keys read as absent. They keep their slots."""
        keys = np.unique(as_keys(keys))
        slots = self.slots(keys)
        keys = keys[slots >= 0]
        if len(keys):
            self._write(slots[slots >= 0], self.absent_rows(keys))
            self._note_shared(keys)

    def update_shared(self, shared_rows: Array) -> None:
        """Replace the rows of keys that have none of their own. A number that is not finite is a ValueError."""
        assert self._shared is not None, "only tables with shared_rows have them"
        shared = np.asarray(shared_rows, np.float32).reshape(self._shared.shape)
        self._absent = absent_table(self.spec, shared)
        self._shared = shared
        keys = np.array(sorted(self._reading_shared), np.int64)
        self._write(self.slots(keys), self.absent_rows(keys))

    def _note_shared(self, keys: Array) -> None:
        if self._shared is not None:
            self._reading_shared.update(keys.tolist())

    def _append(self, keys: Array, rows: Array) -> None:
        """Add slots for keys that are sorted, unique and new."""
        if self.spec.num_rows is not None:
            raise IndexError(
                f'Table "{self.spec.name}": key {keys[0]} is outside 0..{self.spec.num_rows - 1}'
            )
        coded, scales = encode(rows, self.dtype)
        slots = self._rows.append(coded)
        if self._scales is not None and scales is not None:
            self._scales.append(scales)
        at = np.searchsorted(self._added_keys, keys)
        self._added_keys = np.insert(self._added_keys, at, keys)
        self._added_slots = np.insert(self._added_slots, at, slots)

    def _write(self, slots: Array, rows: Array) -> None:
        coded, scales = encode(rows, self.dtype)
        self._rows.put(slots, coded)
        if self._scales is not None and scales is not None:
            self._scales.put(slots, scales)


class RowCollection:
    """Tables of one dim and the features that read them, like the trainer's EmbeddingCollection."""

    def __init__(self, rows: Mapping[str, RowTable], features: Sequence[EmbeddingFeature]) -> None:
        self.rows = dict(rows)
        self.features = tuple(features)
        self.dim = next(iter(self.rows.values())).dim
        self._rows_of = {feature.name: self.rows[feature.table] for feature in features}
        self._pooling_of = {feature.name: feature.pooling for feature in features}
        self._mapped: dict[tuple[str, ...], _native.MappedTables] = {}

    @classmethod
    def open(cls, path: Path, features: Sequence[EmbeddingFeature]) -> RowCollection:
        """The tables that the features read; their folders are in `path`."""
        names = dict.fromkeys(feature.table for feature in features)
        return cls({name: RowTable.open(path / file_name(name)) for name in names}, features)

    def pooled(self, keys: Mapping[str, Keys], names: Sequence[str]) -> Array:
        """Vectors of keys, float32 [B, T, D]: for a list, the mean, and zeros when it is empty."""
        columns = [keys[name] for name in names]
        pooled_BTD = np.empty((_size_of(columns), len(names), self.dim), np.float32)
        if not pooled_BTD.size:
            return pooled_BTD
        values = [as_keys(column.values) for column in columns]
        offsets = [None if column.offsets is None else as_keys(column.offsets) for column in columns]
        is_mean = [self._pooling_of[name] == "mean" for name in names]
        tables = self._mapped_tables(tuple(names))
        try:
            missing = tables.pool(values, offsets, is_mean, pooled_BTD, [])
        except ValueError as error:
            raise ValueError(f"features {', '.join(names)}: {error}") from None
        if missing:  # keys without a row of their own, or with one that was added in memory
            own = [(number, self._rows_of[names[number]].lookup(absent)) for number, absent in missing]
            tables.pool(values, offsets, is_mean, pooled_BTD, own)
        return pooled_BTD

    def _mapped_tables(self, names: tuple[str, ...]) -> _native.MappedTables:
        """The tables of some features, opened for native code once: the arrays of a table are never replaced."""
        found = self._mapped.get(names)
        if found is None:
            tables = _native.MappedTables([self._rows_of[name].mapped() for name in names])
            found = self._mapped.setdefault(names, tables)
        return found

    def table_of(self, feature: str) -> RowTable:
        """The table whose rows a feature reads."""
        return self._rows_of[feature]

    def padded(self, name: str, column: Keys) -> tuple[Array, Array]:
        """A feature's lists unpooled: vectors [B, L, D] padded with zeros, and a mask [B, L] of the real ones.

        L is the length of the longest list, and at least 1.
        """
        assert column.offsets is not None
        lengths = np.diff(column.offsets)
        is_real = np.arange(int(lengths.max(initial=1))) < lengths[:, None]
        padded_BLD = np.zeros((*is_real.shape, self.dim), np.float32)
        padded_BLD[is_real] = self._rows_of[name].lookup(column.values)
        return padded_BLD, is_real.astype(np.float32)


def _size_of(columns: Sequence[Keys]) -> int:
    """The number of rows; that all columns have as many is checked where they are read."""
    if not columns:
        return 0
    first = columns[0]
    return len(first.values) if first.offsets is None else len(first.offsets) - 1
