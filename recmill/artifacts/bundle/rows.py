"""Embedding rows of a bundle: mapped from disk, read by key or by slot, changed in memory.

    spec.json    what the table is
    keys.npy     int64, sorted; the slot of a key is its place here (not there for bounded tables: slot = key)
    rows.npy     [n, dim] float32, float16 or int8
    scales.npy   float32 [n], int8 only: a row is its int8 values times its scale
    shared.npy   float32 [shared_rows, dim]: what keys read that have no row of their own yet

Shapes: B rows of a request, T features, D embedding dim.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

import numpy as np
from numpy.lib.format import open_memmap

from recmill import _native
from recmill.artifacts.bundle.arrays import GrowingArray, map_array, search
from recmill.artifacts.manifest import write_whole
from recmill.dataset.batch import Keys
from recmill.embeddings.collection import EmbeddingFeature
from recmill.embeddings.table import AdmissionState, Array, EmbeddingTable, KeyRecords, TableSpec, as_keys
from recmill.errors import ArtifactError

DTYPES = ("float32", "float16", "int8")
_ROWS_AT_ONCE = 1 << 16
_MANY_KEYS = 64  # at once: from here on, a hash table that is built once pays
_MOST_INT8 = 127
_MOST_FLOAT16 = float(np.finfo(np.float16).max)


# writing


def write_rows(into: Path, table: EmbeddingTable, dtype: str = "float32") -> None:
    """All rows of a table as files in the folder `into`. Counts as a snapshot: the table's next delta builds on it."""
    with table.begin_snapshot() as snapshot:
        write_records(into, table.spec, snapshot, snapshot.waiting.shared_rows, dtype)


def write_records(
    into: Path, spec: TableSpec, pieces: Iterable[KeyRecords], shared_rows: Array, dtype: str = "float32"
) -> None:
    """The same for records that come from elsewhere, each key once. Holds no more than one table's rows in memory."""
    if dtype not in DTYPES:
        raise ValueError(f'rows are {", ".join(DTYPES)}, got "{dtype}"')
    into.mkdir(parents=True, exist_ok=True)
    shared_rows = np.asarray(shared_rows, np.float32).reshape(spec.shared_rows, spec.dim)
    if spec.shared_rows:
        np.save(into / "shared.npy", shared_rows)
    if spec.num_rows is None:
        _write_keyed(into, spec, pieces, dtype)
    else:
        _write_bounded(into, spec, pieces, absent_table(spec, shared_rows), dtype)
    write_whole(into / "spec.json", json.dumps(_spec_to_dict(spec), indent=1) + "\n")


def _write_keyed(into: Path, spec: TableSpec, pieces: Iterable[KeyRecords], dtype: str) -> None:
    keys = [np.empty(0, np.int64)]
    rows = [np.empty((0, spec.dim), dtype)]
    scales = [np.empty(0, np.float32)]
    for piece in pieces:
        coded, coded_scales = encode(piece.rows, dtype)
        keys.append(as_keys(piece.keys))
        rows.append(coded)
        if coded_scales is not None:
            scales.append(coded_scales)
    all_keys, order = np.unique(np.concatenate(keys), return_index=True)
    np.save(into / "keys.npy", all_keys)
    _save_in_order(into / "rows.npy", rows, order)
    if dtype == "int8":
        _save_in_order(into / "scales.npy", scales, order)


def _save_in_order(path: Path, pieces: list[Array], order: Array) -> None:
    """Rows of the pieces together, in another order, written part by part."""
    values = np.concatenate(pieces)
    pieces.clear()
    file = open_memmap(path, mode="w+", dtype=values.dtype, shape=(len(order), *values.shape[1:]))
    for start in range(0, len(order), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        file[part] = values[order[part]]
    file.flush()


def _write_bounded(
    into: Path, spec: TableSpec, pieces: Iterable[KeyRecords], absent: EmbeddingTable, dtype: str
) -> None:
    assert spec.num_rows is not None
    rows = open_memmap(into / "rows.npy", mode="w+", dtype=dtype, shape=(spec.num_rows, spec.dim))
    scales = None
    if dtype == "int8":
        scales = open_memmap(into / "scales.npy", mode="w+", dtype=np.float32, shape=(spec.num_rows,))

    def put(keys: Array, values: Array) -> None:
        coded, coded_scales = encode(values, dtype)
        rows[keys] = coded
        if scales is not None:
            scales[keys] = coded_scales

    for start in range(0, spec.num_rows, _ROWS_AT_ONCE):
        keys = np.arange(start, min(start + _ROWS_AT_ONCE, spec.num_rows))
        put(keys, absent.pool(absent.lookup(keys, train=False)))
    for piece in pieces:
        put(piece.keys, piece.rows)
    for file in (rows, scales):
        if file is not None:
            file.flush()


def _spec_to_dict(spec: TableSpec) -> dict[str, object]:
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return {**values, "parameters": dict(spec.parameters)}


def encode(rows: Array, dtype: str) -> tuple[Array, Array | None]:
    """Rows as they are stored; for int8 also the scale of each row, its largest value / 127."""
    if dtype == "float32":
        return np.asarray(rows, np.float32), None
    if dtype == "float16":
        return np.clip(rows, -_MOST_FLOAT16, _MOST_FLOAT16).astype(np.float16), None
    scales = (np.abs(rows).max(axis=1, initial=0) / np.float32(_MOST_INT8)).astype(np.float32)
    steps = np.rint(rows / np.where(scales > 0, scales, np.float32(1))[:, None])
    return np.clip(steps, -_MOST_INT8, _MOST_INT8).astype(np.int8), scales


def absent_table(spec: TableSpec, shared_rows: Array | None) -> EmbeddingTable:
    """An empty table of this spec, where every key reads as absent. Only training counts sightings, so it does not."""
    table = EmbeddingTable(replace(spec, bloom_counters=None))
    if spec.shared_rows:
        assert shared_rows is not None
        none = np.empty(0, np.int64)
        states = np.zeros((spec.shared_rows, table.num_states), np.float32)
        table.load_waiting(AdmissionState(none, none, none, none, shared_rows, states))
    return table


def table_folder(name: str) -> str:
    """Folder of a table, whatever characters its name has."""
    return quote(name, safe="").replace(".", "%2E")


# reading

Segment = tuple[_native.IntLookup | None, Array, Array | None, Array, Array]


class RowTable:
    """One table. Reading is safe from many threads; a change must be alone, which is the caller's part."""

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
                f"{path} is no table of a bundle: {error}. Run `recmill export` again."
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
        """Slots, those that were added in memory included."""
        return len(self._rows)

    @property
    def num_bytes_in_memory(self) -> int:
        """New keys and what finds keys. Mapped files are not counted, nor pages of them that changes made our own."""
        scales = self._scales.num_bytes_in_memory if self._scales is not None else 0
        index = self._index.num_bytes if "_index" in self.__dict__ else 0
        return self._rows.num_bytes_in_memory + scales + 2 * self._added_keys.nbytes + index

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
            # As unsigned numbers, negative keys are beyond the bound too.
            if not len(keys) or keys.view(np.uint64).max() < self.spec.num_rows:
                return keys
            return np.where((keys >= 0) & (keys < self.spec.num_rows), keys, -1)
        found = self._find(keys)
        if len(self._added_keys) and found.min(initial=0) < 0:
            missing = found < 0
            places = search(self._added_keys, keys[missing])
            found[missing] = np.where(places < 0, -1, self._added_slots[places])
        return found

    def _find(self, keys: Array) -> Array:
        """Slots of keys that the file has; -1 for others. Binary search for a user's few keys, hashing for many."""
        if len(keys) < _MANY_KEYS:
            return search(self._keys, keys)
        return self._index.find(keys, None).astype(np.int64) - 1

    @cached_property
    def _index(self) -> _native.IntLookup:
        return _native.IntLookup(self._keys)

    def segment(self, keys: Array, out: Array) -> Segment | None:
        """What `_native.gather_rows` needs to read rows of these keys from the file; None if it cannot."""
        if self.dtype == "float16":
            return None
        index = self._index if self.spec.num_rows is None else None
        scales = self._scales.mapped if self._scales is not None else None
        return index, self._rows.mapped, scales, as_keys(keys), out

    def gather(self, slots: Array, out: Array | None = None) -> Array:
        """Rows of slots (all of them >= 0), float32 [n, dim]; `out` may be a view whose rows lie apart."""
        rows = self._rows.take(slots)
        if self._scales is not None:
            scales = self._scales.take(slots)
            return np.multiply(rows, scales[:, None], out=out)
        if out is None:
            return rows.astype(np.float32, copy=False)
        out[...] = rows
        return out

    def lookup(self, keys: Array, out: Array | None = None) -> Array:
        """Rows of keys, float32 [n, dim]. An absent key reads what the trainer's prediction reads for it."""
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
        """What keys read that have no row; a key outside a bounded table is an IndexError."""
        return self._absent.pool(self._absent.lookup(keys, train=False))

    @cached_property
    def _absent(self) -> EmbeddingTable:
        return absent_table(self.spec, self._shared)

    # changing

    def update(self, keys: Array, rows: Array) -> None:
        """Rows of keys change, new keys are appended; in memory only. Of equal keys the last one counts."""
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
        """Keys read as absent from now on. They keep their slots, for those who know them by slot."""
        keys = np.unique(as_keys(keys))
        slots = self.slots(keys)
        keys = keys[slots >= 0]
        if len(keys):
            self._write(slots[slots >= 0], self.absent_rows(keys))
            self._note_shared(keys)

    def update_shared(self, shared_rows: Array) -> None:
        """Other rows for keys that have none of their own yet. A number that is not finite is a ValueError."""
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
        """Slots for keys that are sorted, unique and new."""
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
    """Tables of one dim and the features that read them, as the trainer's EmbeddingCollection."""

    def __init__(self, rows: Mapping[str, RowTable], features: Sequence[EmbeddingFeature]) -> None:
        self.rows = dict(rows)
        self.features = tuple(features)
        self.dim = next(iter(self.rows.values())).dim
        self._rows_of = {feature.name: self.rows[feature.table] for feature in features}
        self._pooling_of = {feature.name: feature.pooling for feature in features}

    @classmethod
    def open(cls, path: Path, features: Sequence[EmbeddingFeature]) -> RowCollection:
        """The tables that the features read; their folders are in `path`."""
        names = dict.fromkeys(feature.table for feature in features)
        return cls({name: RowTable.open(path / table_folder(name)) for name in names}, features)

    @property
    def num_bytes_in_memory(self) -> int:
        return sum(rows.num_bytes_in_memory for rows in self.rows.values())

    def pooled(self, keys: Mapping[str, Keys], names: Sequence[str]) -> Array:
        """Vectors of keys, float32 [B, T, D]: of a list, the mean, and zeros when it is empty."""
        pooled_BTD = np.empty((_size_of(keys, names), len(names), self.dim), np.float32)
        if not pooled_BTD.size:
            return pooled_BTD
        at_once = [
            (place, segment)
            for place, name in enumerate(names)
            if keys[name].offsets is None
            and (segment := self._rows_of[name].segment(keys[name].values, pooled_BTD[:, place])) is not None
        ]
        missing = _native.gather_rows([segment for _, segment in at_once])
        done = {place for (place, _), number in zip(at_once, missing, strict=True) if not number}
        for place, name in enumerate(names):
            if place not in done:
                self._fill(name, keys[name], pooled_BTD[:, place])
        return pooled_BTD

    def _fill(self, name: str, column: Keys, pooled_BD: Array) -> None:
        """One feature's vectors."""
        rows = self._rows_of[name]
        if column.offsets is None:
            rows.lookup(column.values, pooled_BD)
        else:
            pool_lists(rows.lookup(column.values), column.offsets, self._pooling_of[name], pooled_BD)


def _size_of(columns: Mapping[str, Keys], names: Sequence[str]) -> int:
    """How many rows the columns have, which must be as many in each: one row would be taken for all of them."""
    sizes = {
        len(column.values) if column.offsets is None else len(column.offsets) - 1
        for column in (columns[name] for name in names)
    }
    if len(sizes) > 1:
        raise ValueError(f"features {', '.join(names)} must have the same number of rows, got {sizes}")
    return sizes.pop() if sizes else 0


def pool_lists(values: Array, offsets: Array, pooling: str, out: Array) -> None:
    """Sum or mean of each list's vectors; zeros for an empty one."""
    starts, lengths = offsets[:-1], np.diff(offsets)
    is_full = lengths > 0
    if not is_full.all():
        out[~is_full] = 0
        starts, lengths = starts[is_full], lengths[is_full]
    if not len(starts):
        return
    sums = np.add.reduceat(values, starts, axis=0)
    if pooling == "mean":
        sums /= lengths[:, None].astype(np.float32)
    out[is_full] = sums
