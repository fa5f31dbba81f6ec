"""Ids of the users or items of a bundle, and their indices. See entities.py for the files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from recmill import _native
from recmill.artifacts.bundle.arrays import map_array
from recmill.dataset.batch import Array
from recmill.features.kernels import hash64

Id = str | int
_SEED = 0
_IDS_AT_ONCE = 1 << 17
_INT64 = range(-(1 << 63), 1 << 63)


def write_ids(into: Path, ids: pl.Series) -> None:
    """Write the sorted hashes of the ids, and the index of each."""
    hashes = hash64(ids, _SEED)
    order = np.argsort(hashes, kind="stable")
    np.save(into / "hashes.npy", hashes[order])
    np.save(into / "indices.npy", order.astype(np.int64))


class EntityIds:
    """Ids by index. Ids in the files are found by hash, appended ones by a dict."""

    def __init__(self, path: Path, column: pa.ChunkedArray) -> None:
        self._hashes = map_array(path / "hashes.npy")
        self._hash_indices = map_array(path / "indices.npy")
        self._mapped = column.chunk(0) if column.num_chunks else pa.array([], column.type)
        self._has_text = bool(pa.types.is_large_string(column.type))
        self._new: list[Id] = []
        self._new_indices: dict[Id, int] = {}

    @property
    def file_sizes(self) -> set[int]:
        return {len(self._hashes), len(self._hash_indices)}

    def indices(self, ids: Sequence[Id]) -> Array:
        """The index of each id, -1 for an unknown one. "7" and 7 are the same id."""
        indices = np.full(len(ids), -1)
        valid = self._typed(ids)
        if valid:
            indices[list(valid)] = self._search(list(valid.values()))
        return indices

    def ids(self, indices: Array) -> list[Id]:
        """Raw ids of indices, which must be >= 0."""
        if len(indices) and indices.min() < 0:
            raise IndexError("an index below 0 has no id")
        num_mapped = len(self._mapped)
        if len(indices) and indices.max() >= num_mapped:
            is_mapped = indices < num_mapped
            mapped = iter(self.ids(indices[is_mapped]))
            return [
                next(mapped) if index < num_mapped else self._new[index - num_mapped]
                for index in indices.tolist()
            ]
        if not self._has_text:
            return self._ints[indices].tolist()  # type: ignore[no-any-return]
        return self._mapped.take(pa.array(indices, pa.int64())).to_pylist()  # type: ignore[no-any-return]

    def with_prefix(self, prefix: str, limit: int) -> list[Id]:
        """The first ids, in the order of indices, that begin with a prefix."""
        ids: list[Id] = []
        if not _is_unicode(prefix):
            return ids
        for start in range(0, len(self._mapped), _IDS_AT_ONCE):
            if len(ids) >= limit:
                return ids[:limit]
            chunk = self._mapped.slice(start, _IDS_AT_ONCE)
            texts = chunk if self._has_text else chunk.cast(pa.large_string())
            ids += chunk.filter(pc.starts_with(texts, prefix)).slice(0, limit).to_pylist()
        ids += [one for one in self._new if str(one).startswith(prefix)]
        return ids[:limit]

    def append(self, ids: Sequence[Id]) -> None:
        """Append new ids."""
        start = len(self._mapped) + len(self._new)
        self._new_indices.update((id, start + offset) for offset, id in enumerate(ids))
        self._new += ids

    @cached_property
    def _ints(self) -> Array:
        return np.asarray(self._mapped.to_numpy(zero_copy_only=False), np.int64)

    def _typed(self, ids: Sequence[Id]) -> dict[int, Id]:
        """Position in `ids` -> id in this side's type, text or int, for those that can be converted."""
        if self._has_text:
            texts = [one if type(one) is str else str(one) for one in ids]
            is_fine = _is_unicode("".join(texts))
            return {number: text for number, text in enumerate(texts) if is_fine or _is_unicode(text)}
        ints = ((number, _as_int(one)) for number, one in enumerate(ids))
        return {number: value for number, value in ints if value is not None}

    def _search(self, ids: list[Id]) -> Array:
        indices = self._by_hash.find(ids) if len(self._mapped) else np.full(len(ids), -1)
        if self._new:
            for number in np.flatnonzero(indices < 0).tolist():
                indices[number] = self._new_indices.get(ids[number], -1)
        return indices

    @cached_property
    def _by_hash(self) -> _native.MappedIds:
        ids: Array | tuple[Array, Array] = self._texts() if self._has_text else self._ints
        return _native.MappedIds(self._hashes, self._hash_indices, ids)

    def _texts(self) -> tuple[Array, Array]:
        """Offsets and bytes of the mapped texts."""
        _, offsets, texts = self._mapped.buffers()
        start = self._mapped.offset
        used = np.frombuffer(offsets, np.int64)[start : start + len(self._mapped) + 1]
        return used, np.frombuffer(texts or b"", np.uint8)


def _is_unicode(text: str) -> bool:
    """No id contains lone surrogates, which JSON can carry."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def _as_int(one: Id) -> int | None:
    """A text is an int id only in the canonical form of that int."""
    if isinstance(one, str):
        digits = one[1:] if one.startswith("-") else one
        if len(digits) > 19 or not (digits.isascii() and digits.isdigit()) or str(int(one)) != one:
            return None
        one = int(one)
    return one if one in _INT64 else None
