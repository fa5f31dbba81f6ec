"""Users or items of a bundle: their raw columns and finished features, found by id.

    raw.arrow     Arrow IPC, mapped: the id column first, then every raw column of that side
    hashes.npy    uint64, sorted: the hash of each id;  places.npy  int64: whose hash it is
    numbers.npy   float32 [n, number features];  keys.npy  int64 [n, features with one key], both in the layout's order
    lists/        <feature>.npy int64: keys of all rows;  <feature>.offsets.npy int64 [n + 1]

A place is the number of a user or item inside the bundle. What changes and what is new stays in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from recmill.artifacts.bundle.arrays import GrowingArray, map_array
from recmill.dataset.batch import Array, Batch, Keys, Layout, collate
from recmill.errors import ArtifactError
from recmill.features.kernels import hash64, is_text

Side = Literal["user", "item"]
Id = str | int
_SEED = 0
_IDS_AT_ONCE = 1 << 17
_INT64 = range(-(1 << 63), 1 << 63)


def write_entities(
    into: Path, side: Side, raw: pl.DataFrame, features: pl.DataFrame, layout: Layout, id_column: str
) -> None:
    """Row i of `raw` and of `features` is place i. Ids must be there and differ."""
    raw = _id_first(raw, id_column)
    ids = raw[id_column]
    if raw.height != features.height or ids.null_count() or ids.n_unique() != raw.height:
        raise ValueError(
            f"{raw.height} {side}s need as many rows of features, got {features.height}, and one id each"
        )
    into.mkdir(parents=True, exist_ok=True)
    hashes = hash64(ids, _SEED)
    order = np.argsort(hashes, kind="stable")
    np.save(into / "hashes.npy", hashes[order])
    np.save(into / "places.npy", order.astype(np.int64))
    _write_raw(into / "raw.arrow", raw)
    _write_features(into, collate(features, layout, with_labels=False))


def _id_first(raw: pl.DataFrame, id_column: str) -> pl.DataFrame:
    ids = raw[id_column]
    ids = ids if is_text(ids.dtype) else ids.cast(pl.Int64)
    return raw.select(ids, pl.exclude(id_column))


def _write_raw(path: Path, raw: pl.DataFrame) -> None:
    """One uncompressed record batch, so that rows can be taken out of the mapped file as they lie there."""
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
            np.save(into / "lists" / f"{_file(name)}.npy", keys.values)
            np.save(into / "lists" / f"{_file(name)}.offsets.npy", keys.offsets)


def _file(feature: str) -> str:
    return quote(feature, safe="").replace(".", "%2E")


@dataclass
class EntityUpdate:
    """What is known in memory of a user or item that was put: lists of keys by feature, and the raw row."""

    lists: Mapping[str, Array]
    raw: tuple[Any, ...]


class Entities:
    """All users or all items. Reading is safe from many threads; `put` must be alone, which is the caller's part."""

    def __init__(self, path: Path, side: Side, layout: Layout, id_column: str) -> None:
        self.path = path
        self.side = side
        self.layout = layout
        self.id_column = id_column
        self._hashes = map_array(path / "hashes.npy")
        self._hash_places = map_array(path / "places.npy")
        self._raw = _map_table(path / "raw.arrow")
        self._numbers = GrowingArray(map_array(path / "numbers.npy"))
        self._keys = GrowingArray(map_array(path / "keys.npy"))
        self._lists = {
            name: (
                map_array(path / "lists" / f"{_file(name)}.npy"),
                map_array(path / "lists" / f"{_file(name)}.offsets.npy"),
            )
            for name in layout.keys
            if (path / "lists" / f"{_file(name)}.npy").exists()
        }
        self._single = [name for name in layout.keys if name not in self._lists]
        self._num_mapped = self._raw.num_rows
        self._changed: dict[int, EntityUpdate] = {}
        self._is_changed = GrowingArray(np.zeros(self._num_mapped, bool))
        self._new_places: dict[Id, int] = {}
        self._columns: dict[str, pl.Series] = {}
        self._check()
        self.make_unknown_row: Callable[[], Batch] | None = (
            None  # a bundle puts its Plan's answer to nulls here
        )

    @classmethod
    def open(cls, path: Path, side: Side, layout: Layout, id_column: str) -> Entities:
        """Map the files that `write_entities` wrote with the same layout."""
        return cls(path, side, layout, id_column)

    def _check(self) -> None:
        sizes = {len(self._hashes), len(self._hash_places), len(self._numbers), len(self._keys)}
        sizes |= {len(offsets) - 1 for _, offsets in self._lists.values()}
        none = np.empty(0, np.int64)
        widths = (self._numbers.take(none).shape[1], self._keys.take(none).shape[1])
        expected = (len(self.layout.numbers), len(self._single))
        if sizes != {self._num_mapped} or widths != expected or self._raw.column_names[0] != self.id_column:
            raise ArtifactError(
                f"{self.path} is damaged: its files do not fit each other and the recipe. Run `recmill export` again."
            )

    def __len__(self) -> int:
        return len(self._numbers)

    @cached_property
    def unknown_row(self) -> Batch:
        """The features of one of which nothing is known."""
        found = self._blank() if self.make_unknown_row is None else self.make_unknown_row()
        self.make_unknown_row = (
            None  # it holds the bundle, which holds us: files would wait for the collector
        )
        return found

    @cached_property
    def raw_schema(self) -> pl.Schema:
        return _frame(self._raw.slice(0, 0)).schema

    @property
    def num_bytes_in_memory(self) -> int:
        """About what changes and new rows took; the mapped files are not counted."""
        arrays = (self._numbers, self._keys, self._is_changed)
        lists = sum(values.nbytes for changed in self._changed.values() for values in changed.lists.values())
        return sum(array.num_bytes_in_memory for array in arrays) + lists + _ROW_BYTES * len(self._changed)

    def _blank(self) -> Batch:
        """A row of zeros and empty lists."""
        empty = Keys(np.empty(0, np.int64), np.zeros(2, np.int64))
        zero = Keys(np.zeros(1, np.int64))
        keys = {name: empty if name in self._lists else zero for name in self.layout.keys}
        return Batch(1, np.zeros((1, len(self.layout.numbers)), np.float32), keys, {}, {})

    # ids

    @cached_property
    def _ids(self) -> pa.Array:
        column = self._raw.column(0)
        return column.chunk(0) if column.num_chunks else pa.array([], column.type)

    @cached_property
    def _has_text_ids(self) -> bool:
        return bool(pa.types.is_large_string(self._raw.schema.field(0).type))

    @cached_property
    def _int_ids(self) -> Array:
        return np.asarray(self._ids.to_numpy(zero_copy_only=False), np.int64)

    def places(self, ids: Sequence[Id]) -> Array:
        """The place of each id, -1 for one that is not known. "7" and 7 are the same id."""
        found = np.full(len(ids), -1)
        known = self._typed(ids)
        if known:
            rows = list(known)
            found[rows] = self._search(list(known.values()))
        return found

    def _typed(self, ids: Sequence[Id]) -> dict[int, Id]:
        """Number in `ids` -> id as this side's ids are, text or int; without those that cannot be one."""
        if self._has_text_ids:
            texts = [one if type(one) is str else str(one) for one in ids]
            is_fine = _is_unicode("".join(texts))
            return {number: text for number, text in enumerate(texts) if is_fine or _is_unicode(text)}
        ints = ((number, _as_int(one)) for number, one in enumerate(ids))
        return {number: value for number, value in ints if value is not None}

    def _search(self, ids: list[Id]) -> Array:
        found = self._search_mapped(ids) if self._num_mapped else np.full(len(ids), -1)
        if self._new_places:
            for number in np.flatnonzero(found < 0).tolist():
                found[number] = self._new_places.get(ids[number], -1)
        return found

    def _search_mapped(self, ids: list[Id]) -> Array:
        """By hash, then by the id itself: of ids with one hash each is still found, and no other is taken for it."""
        wanted = pl.Series(ids, dtype=pl.String if self._has_text_ids else pl.Int64)
        hashes = hash64(wanted, _SEED)
        at = self._hashes.searchsorted(hashes)
        found = np.full(len(ids), -1)
        pending = np.arange(len(ids))
        while True:
            pending = pending[at[pending] < self._num_mapped]
            pending = pending[self._hashes[at[pending]] == hashes[pending]]
            if not len(pending):
                return found
            places = self._hash_places[at[pending]]
            is_same = self._has_ids(places, wanted, pending)
            found[pending[is_same]] = places[is_same]
            pending = pending[~is_same]
            at[pending] += 1

    def _has_ids(self, places: Array, wanted: pl.Series, numbers: Array) -> Array:
        """Whether these places have these ids."""
        if not self._has_text_ids:
            return np.asarray(self._int_ids[places] == wanted.to_numpy()[numbers])
        stored = self._ids.take(pa.array(places))
        same = pc.equal(stored, wanted.to_arrow(compat_level=pl.CompatLevel.oldest()).take(pa.array(numbers)))
        return np.asarray(same.to_numpy(zero_copy_only=False))

    def ids(self, places: Array) -> list[Id]:
        """Raw ids of places, all of them >= 0."""
        if len(places) and places.min() < 0:
            raise IndexError("a place below 0 has no id")
        if len(places) and places.max() >= self._num_mapped:
            mapped = places < self._num_mapped
            old = iter(self.ids(places[mapped]))
            return [
                next(old) if is_old else self._changed[place].raw[0]
                for place, is_old in zip(places.tolist(), mapped.tolist(), strict=True)
            ]
        if not self._has_text_ids:
            return self._int_ids[places].tolist()  # type: ignore[no-any-return]
        return self._ids.take(pa.array(places, pa.int64())).to_pylist()  # type: ignore[no-any-return]

    def ids_with_prefix(self, prefix: str, limit: int) -> list[Id]:
        """The first ids, in the order of places, whose text begins so."""
        found: list[Id] = []
        if not _is_unicode(prefix):
            return found
        for start in range(0, self._num_mapped, _IDS_AT_ONCE):
            if len(found) >= limit:
                return found[:limit]
            part = self._ids.slice(start, _IDS_AT_ONCE)
            texts = part if self._has_text_ids else part.cast(pa.large_string())
            found += part.filter(pc.starts_with(texts, prefix)).slice(0, limit).to_pylist()
        found += [one for one in self._new_places if str(one).startswith(prefix)]
        return found[:limit]

    # raw columns

    def raw(self, places: Array, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Raw rows in the order of the places; place -1 gives nulls. Reads those rows of the file only."""
        names = list(self.raw_schema) if columns is None else list(columns)
        table = self._raw if columns is None else self._raw.select(names)
        special = self._special(places)
        if special is None:
            return _frame(table.take(pa.array(places, pa.int64())))
        mapped = _frame(table.take(pa.array(places[~special], pa.int64())))
        own = self._own_rows(places[special].tolist(), names)
        order = np.argsort(np.concatenate([np.flatnonzero(~special), np.flatnonzero(special)]))
        return pl.concat([mapped, own])[order]

    def _own_rows(self, places: Sequence[int], names: Sequence[str]) -> pl.DataFrame:
        nothing = EntityUpdate({}, (None,) * len(self.raw_schema))
        rows = [self._changed.get(place, nothing).raw for place in places]
        numbers = {name: number for number, name in enumerate(self.raw_schema)}
        return pl.DataFrame(
            [
                pl.Series(name, [row[numbers[name]] for row in rows], dtype=self.raw_schema[name])
                for name in names
            ]
        )

    def column(self, name: str) -> pl.Series:
        """One raw column of all places."""
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

    def features(self, places: Array) -> Batch:
        """Finished features in the layout's order; place -1 has an unknown entity's."""
        special = self._special(places)
        unknown = places < 0 if special is not None else None
        if unknown is not None and unknown.any():
            places = np.where(unknown, 0, places)
            if not len(self):
                return self._unknown_rows(len(places))
        else:
            unknown = None
        numbers = self._numbers.take(places)
        # One row of keys at a time lies together in memory; one feature at a time is what is asked for.
        single = np.ascontiguousarray(self._keys.take(places).T)
        keys = {name: Keys(single[place]) for place, name in enumerate(self._single)}
        if unknown is not None:
            numbers[unknown] = self.unknown_row.numbers[0]
            for name, column in keys.items():
                column.values[unknown] = self.unknown_row.keys[name].values[0]
        for name in self._lists:
            keys[name] = self._list_keys(name, places, special, unknown)
        return Batch(len(places), numbers, {name: keys[name] for name in self.layout.keys}, {}, {})

    def _special(self, places: Array) -> Array | None:
        """Which places are not as the mapped files have them: unknown, changed or new; None when all are."""
        if not len(places):
            return None
        if not self._changed:
            special = places < 0
        else:
            special = self._is_changed.take(np.maximum(places, 0)) | (places < 0) if len(self) else places < 0
        return special if special.any() else None

    def _list_keys(self, name: str, places: Array, special: Array | None, unknown: Array | None) -> Keys:
        values, offsets = self._lists[name]
        if special is None:
            return _take_lists(values, offsets, places)
        mapped = _take_lists(values, offsets, places[~special])
        assert mapped.offsets is not None
        unknown_rows = np.zeros(len(places), bool) if unknown is None else unknown
        own = [
            self.unknown_row.keys[name].values
            if unknown_rows[number]
            else self._changed[places[number]].lists[name]
            for number in np.flatnonzero(special).tolist()
        ]
        lengths = np.empty(len(places), np.int64)
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
        """Replace rows of known ids, append new ones, in memory; the place of each row. Of equal ids, the last."""
        raw, batch = self.fitted(raw, features)
        ids = raw[self.id_column].to_list()
        new = list(
            dict.fromkeys(one for one, place in zip(ids, self.places(ids).tolist(), strict=True) if place < 0)
        )
        self._append(new)
        places = self.places(ids)
        single = [batch.keys[name].values for name in self._single]
        last = np.array(
            list({place: number for number, place in enumerate(places.tolist())}.values()), np.int64
        )
        self._numbers.put(places[last], batch.numbers[last])
        if single:
            self._keys.put(places[last], np.stack(single, axis=1)[last])
        lists = {name: _split(batch.keys[name]) for name in self._lists}
        for number, (place, row) in enumerate(zip(places.tolist(), raw.iter_rows(), strict=True)):
            self._changed[place] = EntityUpdate({name: parts[number] for name, parts in lists.items()}, row)
        self._is_changed.put(places, np.ones(len(places), bool))
        return places

    def fitted(self, raw: pl.DataFrame, features: pl.DataFrame) -> tuple[pl.DataFrame, Batch]:
        """Rows as `put` takes them; an error when they do not fit."""
        raw, batch = self._with_columns(raw), collate(features, self.layout, with_labels=False)
        if raw[self.id_column].null_count() or raw.height != batch.size:
            raise ValueError(
                f"{raw.height} {self.side}s need an id each and {raw.height} rows of features, got {batch.size}"
            )
        return raw, batch

    def _with_columns(self, raw: pl.DataFrame) -> pl.DataFrame:
        """The columns of raw.arrow, with nulls where the given rows have none."""
        # Column by column: a query would take longer than all the rest of `put` for the few rows that it mostly gets.
        columns = [
            raw[name].cast(dtype)
            if name in raw.columns
            else pl.Series(name, [None], dtype).new_from_index(0, raw.height)
            for name, dtype in self.raw_schema.items()
        ]
        return pl.DataFrame(columns)

    def _append(self, ids: Sequence[Id]) -> None:
        """Places for ids that are new."""
        count = len(ids)
        self._keys.append(np.zeros((count, len(self._single)), np.int64))
        self._is_changed.append(np.ones(count, bool))
        places = self._numbers.append(np.zeros((count, len(self.layout.numbers)), np.float32))
        self._new_places.update(zip(ids, places.tolist(), strict=True))


_ROW_BYTES = 1000  # a raw row as Python values, and the tables that find it


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


def _is_unicode(text: str) -> bool:
    """Lone surrogates, which JSON can carry, are in no id."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def _as_int(one: Id) -> int | None:
    """A text is an int id only if it is how that int is written."""
    if isinstance(one, str):
        digits = one[1:] if one.startswith("-") else one
        if len(digits) > 19 or not (digits.isascii() and digits.isdigit()) or str(int(one)) != one:
            return None
        one = int(one)
    return one if one in _INT64 else None


def _take_lists(values: Array, offsets: Array, places: Array) -> Keys:
    """The lists of some places, one behind the other."""
    starts = offsets.take(places)
    lengths = offsets.take(places + 1) - starts
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    numbers = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], lengths)
    return Keys(values.take(numbers), ends)


def _split(keys: Keys) -> list[Array]:
    """Each row's own copy of its keys: a view would keep the whole batch in memory."""
    assert keys.offsets is not None
    bounds = keys.offsets.tolist()
    return [keys.values[start:stop].copy() for start, stop in pairwise(bounds)]
