"""Encodes rows as bytes, for key-value stores. See docs/stores.md for the format.

NumPy encodes and decodes all rows at once: the fixed-size part first, then the elements of lists. Every row ends in a
checksum.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from recmill.dataset.batch import Batch, Keys, Layout
from recmill.features.kernels import hash_bytes

Array = np.ndarray[Any, np.dtype[Any]]

DIGEST_BYTES = 8
CHECKSUM_BYTES = 8
_FORMAT = 2
_WORD = 4  # every part is made of whole words
_NARROW = 1 << 31  # ids below it take one word, other keys two


class CodedRows(NamedTuple):
    """Rows by position: which were found, and which values were damaged or of another bundle."""

    batch: Batch  # default features where nothing was found
    found: Array  # bool
    unreadable: Array  # bool


class RowCodec:
    """Encodes rows of one layout. Rows of any other layout, or of other features with the same names, are not found."""

    def __init__(self, layout: Layout, unknown_row: Batch, plan_digest: str) -> None:
        """`unknown_row` is one row, returned for missing ones. Its offsets show which features are lists."""
        self.layout = layout
        self.number_lists = layout.lists
        self.key_lists = tuple(name for name in layout.keys if unknown_row.keys[name].offsets is not None)
        single = [name for name in layout.keys if name not in self.key_lists]
        self.narrow = tuple(name for name in single if self._is_narrow(name))
        self.wide = tuple(name for name in single if not self._is_narrow(name))
        self.fixed = np.dtype(
            [
                ("digest", "<u4", (2,)),
                ("numbers", "<f4", (len(layout.number_columns),)),
                ("narrow", "<i4", (len(self.narrow),)),
                ("wide", "<i8", (len(self.wide),)),
                ("lengths", "<u4", (len(self.key_lists) + len(self.number_lists),)),
            ]
        )
        self._narrow_bounds = np.array([layout.bounds[name] for name in self.narrow], "<u4")
        self.digest = self._digest(plan_digest)
        self.unknown_row = self.encode(unknown_row)[0]

    def _is_narrow(self, name: str) -> bool:
        return self.layout.bounds.get(name, _NARROW + 1) <= _NARROW

    def _digest(self, plan_digest: str) -> bytes:
        narrow_lists = [name for name in self.key_lists if self._is_narrow(name)]
        parts = [
            self.layout.number_columns,
            self.narrow,
            self.wide,
            self.key_lists,
            narrow_lists,
            self.number_lists,
        ]
        bounds = sorted(self.layout.bounds.items())
        return _digest(plan_digest, parts, bounds)

    @property
    def _lists(self) -> list[tuple[str, Any]]:
        """Names of lists in the order of their tails, with the type of their elements."""
        of_keys = [(name, np.dtype("<i4" if self._is_narrow(name) else "<i8")) for name in self.key_lists]
        return of_keys + [(name, np.dtype("<f4")) for name in self.number_lists]

    def encode(self, batch: Batch) -> list[bytes]:
        """One value for each row."""
        return add_checksums(self._encode(batch))

    def _encode(self, batch: Batch) -> list[bytes]:
        fixed = np.zeros(batch.size, self.fixed)
        fixed["digest"] = np.frombuffer(self.digest, "<u4")
        fixed["numbers"] = batch.numbers
        for column, name in enumerate(self.narrow):
            fixed["narrow"][:, column] = batch.keys[name].values
        for column, name in enumerate(self.wide):
            fixed["wide"][:, column] = batch.keys[name].values
        lists = [(*_list_of(batch, name), dtype) for name, dtype in self._lists]
        for column, (_, offsets, _) in enumerate(lists):
            fixed["lengths"][:, column] = np.diff(offsets)
        sizes = self._sizes(fixed["lengths"])
        starts = _starts(sizes)
        words = np.empty(starts[-1], "<u4")
        _put(words, starts[:-1], fixed.view("<u4").reshape(-1, self._num_fixed_words))
        tails = starts[:-1] + self._num_fixed_words
        for values, offsets, dtype in lists:
            width = dtype.itemsize // _WORD
            elements = values.astype(dtype).view("<u4").reshape(-1, width)
            _put(words, _element_offsets(tails, offsets, width), elements)
            tails = tails + np.diff(offsets) * width
        coded, ends = words.tobytes(), (starts * _WORD).tolist()
        return [coded[start:end] for start, end in pairwise(ends)]

    def decode(self, rows: Sequence[bytes | None]) -> CodedRows:
        """Decode rows to a batch. A row that is damaged or has ids out of range counts as not found."""
        least, unknown_row = self.fixed.itemsize + CHECKSUM_BYTES, self.unknown_row
        kept = [row if row is not None and len(row) >= least else unknown_row for row in rows]
        found = np.fromiter((row is not unknown_row for row in kept), bool, len(kept))
        batch, found = self._decode(kept, found)
        if found.all():
            return CodedRows(batch, found, np.zeros(len(kept), bool))
        there = np.fromiter(map(bool, rows), bool, len(kept))
        return CodedRows(batch, found, there & ~found)

    def _decode(self, rows: list[bytes], found: Array) -> tuple[Batch, Array]:
        num_bytes = np.fromiter(map(len, rows), np.int64, len(rows))
        if (num_bytes % _WORD).any():
            return self._decode_others(rows, found, num_bytes % _WORD == 0)
        joined, ends = b"".join(rows), np.cumsum(num_bytes)
        words, starts = np.frombuffer(joined, "<u4"), _starts(num_bytes // _WORD)
        fixed = self._fixed_parts(words, starts)
        whole = has_checksum(joined, ends)
        whole &= (fixed["digest"] == np.frombuffer(self.digest, "<u4")).all(axis=1)
        whole &= self._sizes(fixed["lengths"]) * _WORD + CHECKSUM_BYTES == num_bytes
        whole &= self._has_ids_in_range(fixed)
        if not whole.all():
            return self._decode_others(rows, found, whole)
        keys = {
            name: Keys(fixed["narrow"][:, column].astype(np.int64)) for column, name in enumerate(self.narrow)
        }
        keys |= {name: Keys(fixed["wide"][:, column].copy()) for column, name in enumerate(self.wide)}
        tails = starts[:-1] + self._num_fixed_words
        lists: dict[str, Keys] = {}
        for column, (name, dtype) in enumerate(self._lists):
            offsets = _starts(fixed["lengths"][:, column])
            width = dtype.itemsize // _WORD
            elements = _take(words, _element_offsets(tails, offsets, width), width).view(dtype).reshape(-1)
            if (outside := self._rows_outside(name, elements, offsets)) is not None:
                return self._decode_others(rows, found, ~outside)
            to = lists if name in self.number_lists else keys
            to[name] = Keys(elements.astype(np.float32 if to is lists else np.int64), offsets)
            tails = tails + np.diff(offsets) * width
        numbers = np.ascontiguousarray(fixed["numbers"])
        ordered = {name: keys[name] for name in self.layout.keys}
        return Batch(len(rows), numbers, ordered, lists, {}), found

    def _decode_others(self, rows: list[bytes], found: Array, whole: Array) -> tuple[Batch, Array]:
        """Decode again without damaged rows, which count as not found."""
        kept = [row if is_whole else self.unknown_row for row, is_whole in zip(rows, whole, strict=True)]
        return self._decode(kept, found & whole)

    def _has_ids_in_range(self, fixed: Array) -> Array:
        """Which rows have all their single ids within the tables."""
        inside = np.asarray((fixed["narrow"].view("<u4") < self._narrow_bounds).all(axis=1))
        for column, name in enumerate(self.wide):
            if name in self.layout.bounds:
                inside &= _is_below(fixed["wide"][:, column], self.layout.bounds[name])
        return inside

    def _rows_outside(self, name: str, elements: Array, offsets: Array) -> Array | None:
        """Which rows have a list with an id out of range; None when there are none."""
        bound = self.layout.bounds.get(name) if name in self.key_lists else None
        if bound is None or (inside := _is_below(elements, bound)).all():
            return None
        outside = np.zeros(len(offsets) - 1, bool)
        outside[np.searchsorted(offsets, np.flatnonzero(~inside), "right") - 1] = True
        return outside

    def _fixed_parts(self, words: Array, starts: Array) -> Array:
        return _take(words, starts[:-1], self._num_fixed_words).view(self.fixed).reshape(-1)

    @property
    def _num_fixed_words(self) -> int:
        return self.fixed.itemsize // _WORD

    def _sizes(self, lengths: Array) -> Array:
        """Words of each row."""
        widths = np.array([dtype.itemsize // _WORD for _, dtype in self._lists], np.int64)
        sizes: Array = self._num_fixed_words + lengths.astype(np.int64) @ widths
        return sizes


class RawCodec:
    """Encodes raw columns of one side. A value that is damaged, or of a bundle with other columns, decodes to None."""

    def __init__(self, side: str, columns: Sequence[tuple[str, str]]) -> None:
        """`columns` are names and types."""
        self.digest = _digest(side, list(columns))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(dict[str, Any])

    def encode(self, rows: Iterable[dict[str, Any]]) -> list[bytes]:
        """One value for each row."""
        return add_checksums([self.digest + self._encoder.encode(row) for row in rows])

    def decode(self, value: bytes | None) -> dict[str, Any] | None:
        row = _without_checksum(value) if value is not None and value.startswith(self.digest) else None
        try:
            return self._decoder.decode(row[DIGEST_BYTES:]) if row is not None else None
        except msgspec.MsgspecError:
            return None


def _digest(*facts: Any) -> bytes:
    return hashlib.sha256(json.dumps([_FORMAT, *facts]).encode()).digest()[:DIGEST_BYTES]


def _is_below(ids: Array, bound: int) -> Array:
    """Which ids are from 0 up to a bound: as unsigned numbers, negative ones are out of range too."""
    below: Array = ids.view(f"<u{ids.dtype.itemsize}") < bound
    return below


def _list_of(batch: Batch, name: str) -> tuple[Array, Array]:
    column = batch.keys[name] if name in batch.keys else batch.lists[name]
    assert column.offsets is not None
    return column.values, column.offsets


def _starts(sizes: Array) -> Array:
    """The offset of each part, and the end of the last one."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def _element_offsets(tails: Array, offsets: Array, width: int) -> Array:
    """First word of each element of a list feature, whose elements begin at a row's tail."""
    lengths = np.diff(offsets)
    starts: Array = np.repeat(tails - offsets[:-1] * width, lengths) + np.arange(offsets[-1]) * width
    return starts


def _put(words: Array, starts: Array, parts: Array) -> None:
    words[starts[:, None] + np.arange(parts.shape[1])] = parts


def _take(words: Array, starts: Array, size: int) -> Array:
    taken: Array = words[starts[:, None] + np.arange(size)]
    return taken


# checksums


def add_checksums(values: Sequence[bytes]) -> list[bytes]:
    """Each value, followed by its checksum: XXH64 of its bytes, little-endian."""
    offsets = np.concatenate([[0], np.cumsum([len(value) for value in values], dtype=np.int64)])
    sums = hash_bytes(b"".join(values), offsets.astype(np.int64)).astype("<u8").tobytes()
    starts = range(0, len(sums), CHECKSUM_BYTES)
    return [value + sums[start : start + CHECKSUM_BYTES] for value, start in zip(values, starts, strict=True)]


def has_checksum(joined: bytes, ends: Array) -> Array:
    """Which of some concatenated values have a valid checksum. Each has at least that many bytes."""
    offsets = np.zeros(2 * len(ends) + 1, np.int64)
    offsets[1::2], offsets[2::2] = ends - CHECKSUM_BYTES, ends
    expected = hash_bytes(joined, offsets)[::2]
    positions = offsets[1::2, None] + np.arange(CHECKSUM_BYTES)
    stored = np.frombuffer(joined, np.uint8)[positions].view("<u8").reshape(-1)
    valid: Array = stored == expected
    return valid


def _without_checksum(value: bytes) -> bytes | None:
    """A value without its checksum; None when it is damaged."""
    if len(value) < CHECKSUM_BYTES or not has_checksum(value, np.array([len(value)])).all():
        return None
    return value[:-CHECKSUM_BYTES]
