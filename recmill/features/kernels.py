"""The native kernels over Polars series: the hash function, exact moments, counting, lookup and the row digest."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from recmill import _native
from recmill.artifacts.manifest import unique_aside
from recmill.errors import ResourceError

Array = np.ndarray[Any, np.dtype[Any]]


def mask_of(series: pl.Series) -> Array | None:
    """One byte per row, 1 where there is a value; None when nothing is missing."""
    return _mask(series.to_arrow()) if series.null_count() else None


def _mask(array: Any) -> Array | None:
    validity = array.buffers()[0]
    if validity is None:
        return None
    bits = np.frombuffer(validity, dtype=np.uint8)
    return np.unpackbits(bits, count=array.offset + len(array), bitorder="little")[array.offset :]


def ints_of(series: pl.Series) -> tuple[Array, Array | None]:
    """The values as int64, undefined where they are missing, and the mask."""
    if series.dtype != pl.Int64:
        series = series.cast(pl.Int64)
    if not series.null_count():
        return series.to_numpy(), None
    array = series.rechunk().to_arrow()
    values = np.frombuffer(array.buffers()[1], dtype=np.int64, count=array.offset + len(array))
    return values[array.offset :], _mask(array)


def texts_of(series: pl.Series) -> tuple[Array, Array, Array | None]:
    """Arrow's layout of text: int64 offsets (one more than rows), the bytes, and the mask."""
    array = series.rechunk().to_arrow()
    _, offsets, data = array.buffers()
    starts = np.frombuffer(offsets, dtype=np.int64, count=len(array) + 1, offset=array.offset * 8)
    text = np.frombuffer(data, dtype=np.uint8) if data is not None else np.empty(0, np.uint8)
    return starts, text, _mask(array) if series.null_count() else None


def buffers_of(series: pl.Series) -> tuple[Array | None, ...]:
    """A column's buffers as the kernels take them: texts or ints, then the mask."""
    return texts_of(series) if is_text(series.dtype) else ints_of(series)


def texts_to_series(name: str, offsets: Array, data: Array) -> pl.Series:
    """The inverse of `texts_of`, for rows without missing values."""
    import pyarrow as pa

    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pl.Series(name, pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, buffers))


def is_text(dtype: pl.DataType) -> bool:
    return dtype == pl.String


def hash64(series: pl.Series, seed: int) -> Array:
    """XXH64 of each value: text as UTF-8, integers as 8 little-endian bytes. The hash of a missing row is undefined."""
    if is_text(series.dtype):
        return _native.hash_texts(*texts_of(series)[:2], seed)
    return _native.hash_ints(ints_of(series)[0], seed)


def hash_bytes(data: bytes, offsets: Array) -> Array:
    """XXH64 of each part of some bytes, from one offset to the next."""
    return _native.hash_texts(offsets, np.frombuffer(data, np.uint8), 0)


def checksum(content: bytes) -> str:
    """XXH64 of some bytes of a file, in hex: shows damage, not tampering."""
    return f"{int(hash_bytes(content, np.array([0, len(content)], np.int64))[0]):016x}"


def hash_positions(positions: pl.Series, seed: int) -> Array:
    """Pseudo-random 64-bit numbers that depend on nothing but a row's position in the log."""
    return _native.hash_ints(positions.to_numpy(), seed)


@dataclass(frozen=True)
class Moments:
    """Count, exact sum and exact sum of squares, minimum and maximum. Adding two is exact in any order."""

    count: int = 0
    sum_units: int = 0
    square_units: int = 0
    min: float = float("inf")
    max: float = float("-inf")

    @classmethod
    def of(cls, series: pl.Series) -> Moments:
        # Missing numbers become NaN, which the kernel skips.
        values = series.cast(pl.Float64).to_numpy()
        count, sums, squares, low, high = _native.exact_moments(values, None)
        # Adding 0.0 turns -0.0 into 0.0: the minimum must not depend on the order of the two.
        return cls(count, _from_digits(sums), _from_digits(squares), low + 0.0, high + 0.0)

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.count + other.count,
            self.sum_units + other.sum_units,
            self.square_units + other.square_units,
            min(self.min, other.min),
            max(self.max, other.max),
        )

    @property
    def mean(self) -> float:
        return self.sum_units / (self.count << _SUM_BITS) if self.count else 0.0

    @property
    def std(self) -> float:
        """Population standard deviation, rounded once."""
        if not self.count:
            return 0.0
        spread = self.count * self.square_units - self.sum_units * self.sum_units
        return _root(spread, self.count * self.count << _SQUARE_BITS)


# The smallest double is 2^-1074, so sums are whole numbers of 2^-1074 and squares of 2^-2148.
_SUM_BITS = 1074
_SQUARE_BITS = 2 * _SUM_BITS


def _root(over: int, under: int) -> float:
    """The square root of a ratio, rounded once; the ratio itself may exceed the range of floats."""
    shift = max(0, (under.bit_length() - over.bit_length()) // 2 + 64)
    root = math.isqrt((over << 2 * shift) // under)
    inexact = root * root * under != over << 2 * shift
    return (root | inexact) / (1 << shift)  # the last bit stands for all that isqrt cut off


def _from_digits(digits: Array) -> int:
    return sum(int(digit) << (32 * index) for index, digit in enumerate(digits) if digit)


@dataclass(frozen=True)
class CountOptions:
    """What to count: text or integers, the minimal count of kept values, and whether first positions are tracked."""

    is_text: bool
    min_count: int = 1
    track_first: bool = False


@dataclass(frozen=True)
class ValueCounts:
    """Values with their counts and, if tracked, their first positions. Rows are unordered."""

    values: pl.Series
    counts: pl.Series
    firsts: pl.Series | None
    num_values: int
    num_missing: int
    num_distinct: int

    def load(self, name: str) -> ValueCounts:
        """The counts in memory, where these are."""
        return self


@dataclass(frozen=True)
class StoredCounts:
    """Counts on disk: `num_runs` files, each with the values of one hash range, sorted.

    A run is sorted by count, the largest first, or by first position if tracked; ties by value.
    """

    folder: Path
    num_runs: int
    options: CountOptions
    num_values: int
    num_missing: int
    num_distinct: int
    num_bytes: int  # of the kept values, in memory
    memory: int  # that a process may use to load them all
    small_bytes: int = 0  # below this size, the kept values need not stay on disk

    def runs(self) -> list[tuple[int, Path]]:
        """Number and file of each run that has values."""
        files = ((number, run_file(self.folder, number)) for number in range(self.num_runs))
        return [(number, file) for number, file in files if file.exists()]

    def load(self, name: str) -> ValueCounts:
        """Read all values, if memory allows."""
        check_fits(name, self.num_bytes, self.memory)
        frame = pl.concat([no_counts(self.options), *(read_run(file) for _, file in self.runs())])
        firsts = frame["first"] if self.options.track_first else None
        return ValueCounts(
            frame["value"], frame["count"], firsts, self.num_values, self.num_missing, self.num_distinct
        )


BYTES_FOR_LOOKUP = 4  # per byte of a value and its count: a sorted copy and a lookup table
_MERGE_BYTES = 2 << 20  # per run, for a chunk of it
_MIN_CHUNK_BYTES = 1 << 14


def check_fits(name: str, num_bytes: int, memory: int) -> None:
    """Check that values fit into memory, with their lookup and room to sort them."""
    if num_bytes * BYTES_FOR_LOOKUP > memory:
        raise ResourceError(
            f'The values of "{name}" need {num_bytes * BYTES_FOR_LOOKUP >> 20:,} MB in one process, more than --memory '
            f"({memory >> 20:,} MB). Raise --memory, raise min_count or set max_size, or use hash or key instead."
        )


def no_counts(options: CountOptions) -> pl.DataFrame:
    value = {"value": pl.String() if options.is_text else pl.Int64(), "count": pl.Int64()}
    return pl.DataFrame(schema={**value, "first": pl.Int64()} if options.track_first else value)


def runs_of_values(values: pl.Series, num_runs: int) -> Array:
    """The run of each value."""
    return (hash64(values, 1) % np.uint64(num_runs)).astype(np.int64)


def run_file(folder: Path, number: int) -> Path:
    """The file of a run, which is absent when it is empty."""
    return folder / f"{number:05d}.arrow"


def write_run(frame: pl.DataFrame, path: Path, num_runs: int) -> int:
    """Write a run in small chunks, so that one of each run fits in memory; returns its total size in memory.

    The file is written atomically.
    """
    import pyarrow as pa

    table = frame.to_arrow().combine_chunks()
    chunk_bytes = max(_MIN_CHUNK_BYTES, _MERGE_BYTES // num_runs)
    rows = max(1, frame.height * chunk_bytes // max(1, table.nbytes))
    aside = unique_aside(path)
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with (
        pa.OSFile(str(aside), "wb") as file,
        pa.ipc.new_stream(file, table.schema, options=options) as writer,
    ):
        writer.write_table(table, max_chunksize=rows)
    os.replace(aside, path)
    return int(table.nbytes)


def read_run(path: Path) -> pl.DataFrame:
    """All rows of a run, in order."""
    import pyarrow as pa

    # Plain reads: a memory map would count as our memory while its pages stay.
    with pa.OSFile(str(path), "rb") as file:
        return pl.DataFrame(pl.from_arrow(pa.ipc.open_stream(file).read_all()))


class RunReader:
    """Reads a run chunk by chunk. Keeps no file open: there may be more runs than file descriptors."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self.path = path
        with pa.OSFile(str(path), "rb") as file:
            self._schema = pa.ipc.read_schema(file)
            self._next = file.tell()

    def read_chunk(self) -> pl.DataFrame | None:
        """The next rows; None when there are no more."""
        import pyarrow as pa

        with pa.OSFile(str(self.path), "rb") as file:
            file.seek(self._next)
            try:
                message = pa.ipc.read_message(file)
            except EOFError:
                return None
            self._next = file.tell()
        return pl.DataFrame(pl.from_arrow(pa.ipc.read_record_batch(message, self._schema)))


@dataclass(frozen=True)
class ExtractedValues:
    """A batch's contribution to a pass: columns of numbers, and columns to count with the positions of their rows."""

    rows: int
    moments: Mapping[str, pl.Series]
    counts: Mapping[str, list[tuple[pl.Series, pl.Series]]]


@dataclass(frozen=True)
class Measurements:
    """The results of a pass over the rows."""

    rows: int = 0
    moments: Mapping[str, Moments] = field(default_factory=dict)
    counts: Mapping[str, ValueCounts | StoredCounts] = field(default_factory=dict)


class Counter:
    """Counts the values of one or more columns. Threads may add concurrently; the order does not matter."""

    def __init__(self, options: CountOptions) -> None:
        self.is_text = options.is_text
        self.track_first = options.track_first
        self._native: Any = (_native.TextCounter if self.is_text else _native.IntCounter)(self.track_first)

    def add(self, series: pl.Series, positions: pl.Series | None = None) -> None:
        firsts = positions.to_numpy() if self.track_first and positions is not None else None
        self._native.add(*buffers_of(series), None, firsts)

    def add_counts(self, values: pl.Series, counts: pl.Series, firsts: pl.Series | None) -> None:
        """Add the drained counts of another counter."""
        self._native.add(
            *buffers_of(values), counts.to_numpy(), firsts.to_numpy() if firsts is not None else None
        )

    @property
    def num_bytes(self) -> int:
        return int(self._native.num_bytes)

    @property
    def num_missing(self) -> int:
        return int(self._native.missing)

    def drain(self) -> pl.DataFrame:
        """Columns value, count and, if tracked, first; the counter is empty afterwards."""
        *values, counts, firsts = self._native.drain()
        value = texts_to_series("value", *values) if self.is_text else pl.Series("value", values[0])
        columns = [value, pl.Series("count", counts)]
        return pl.DataFrame([*columns, pl.Series("first", firsts)] if self.track_first else columns)


class ValueIndex:
    """Value to id: value k, from 0, has id k + 1; unknown and missing values have id 0."""

    def __init__(self, values: pl.Series) -> None:
        self.is_text = is_text(values.dtype)
        kind: Any = _native.TextLookup if self.is_text else _native.IntLookup
        self._native: Any = kind(*buffers_of(values)[:-1])

    def find(self, series: pl.Series) -> pl.Series:
        return pl.Series(series.name, self._native.find(*buffers_of(series)))

    @property
    def num_bytes(self) -> int:
        return int(self._native.num_bytes)


@dataclass(frozen=True)
class RowDigest:
    """Order-free digest of a multiset of rows: independent of order and partitioning."""

    rows: int = 0
    low: int = 0
    high: int = 0

    def __add__(self, other: RowDigest) -> RowDigest:
        size = 1 << 64
        return RowDigest(
            self.rows + other.rows, (self.low + other.low) % size, (self.high + other.high) % size
        )

    @classmethod
    def of(cls, frame: pl.DataFrame) -> RowDigest:
        """Columns are digested in the order of their names, not of the frame."""
        states = np.zeros(frame.height, dtype=np.uint64)
        for name in sorted(frame.columns):
            _fold(states, frame[name])
        low, high = _native.sum_states(states)
        return cls(frame.height, low, high)

    def hex(self) -> str:
        return f"{self.low:016x}{self.high:016x}"

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> RowDigest:
        text = str(saved["digest"])
        return cls(int(saved["rows"]), int(text[:16], 16), int(text[16:], 16))


def _fold(states: Array, series: pl.Series) -> None:
    _native.fold_column(states, *_digestible(series))


def _digestible(series: pl.Series) -> tuple[Array, Array | None]:
    """Integers that represent the values, whatever their width: an Int32 7 and an Int64 7 are equal."""
    dtype = series.dtype
    mask = mask_of(series)
    if isinstance(dtype, pl.Array):
        series = series.arr.to_list()
    if isinstance(series.dtype, pl.List):
        return _list_hashes(series), mask
    if is_text(dtype):
        return hash64(series, 0), mask
    if dtype in (pl.Float32, pl.Float64):
        return series.to_numpy(), mask
    if dtype == pl.Int32 and mask is None:
        return series.to_numpy(), None
    return ints_of(series)


def _list_hashes(series: pl.Series) -> Array:
    lengths = series.list.len().fill_null(0).to_numpy()
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    elements = series.filter(series.list.len() > 0).explode()
    hashes = np.zeros(len(elements), dtype=np.uint64)
    if len(elements):
        _fold(hashes, elements)
    return _native.hash_lists(offsets, hashes)
