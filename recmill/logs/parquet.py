"""Parquet logs: row groups read by column name, each value cast to the recipe's type or its row rejected."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recmill import _native
from recmill.dataset.positions import position
from recmill.errors import LogError, first_line
from recmill.logs.base import BadRow, LogBatch, LogFile, LogFiles, LogRange
from recmill.logs.columns import (
    Problems,
    add_problems,
    empty_as_null,
    parse_column,
    parse_texts,
    without_rows,
)
from recmill.logs.files import open_bytes
from recmill.logs.times import seconds_of_numbers
from recmill.recipe.recipe import POSITION, Column

_MAX_BATCH_ROWS = 1 << 17
_Cast = tuple[pl.Series, pl.Series]  # the values, and a mask of those that could not be cast


class ParquetSource(LogFiles):
    """Rows of Parquet files. An offset is a row number; units are ranges of row groups."""

    def _cut(self, index: int, file: LogFile, target_bytes: int) -> list[LogRange]:
        with _opened(file) as parquet:
            edges = _row_edges(parquet.metadata)
        target_rows = max(1, target_bytes * edges[-1] // max(file.size, 1))
        units, start = [], 0
        for edge in edges[1:]:
            if edge - start >= target_rows:
                units.append(LogRange(index, start, edge))
                start = edge
        return [*units, LogRange(index, start, edges[-1])] if start < edges[-1] or not units else units

    def row_offsets(self, unit: LogRange, numbers: Sequence[int]) -> list[int]:
        return [unit.start + number for number in numbers]

    def text_bytes(self, unit: LogRange) -> int:
        with _opened(self.files[unit.file_index]) as parquet:
            metadata = parquet.metadata
            num_bytes = sum(metadata.row_group(n).total_byte_size for n in range(metadata.num_row_groups))
            return int(num_bytes * (unit.end - unit.start) // max(1, metadata.num_rows))

    def max_offset(self) -> int:
        return max(unit.end for unit in self.units())

    def count_rows(self, unit: LogRange) -> int:
        return unit.end - unit.start

    def _read(self, unit: LogRange, chunk_bytes: int) -> Iterator[LogBatch]:
        file = self.files[unit.file_index]
        offset = unit.start
        with _opened(file) as parquet:
            self.check_names(parquet.schema_arrow.names, file)
            batches = _read_rows(parquet, [c.name_in_file for c in self.columns], unit, chunk_bytes)
            while (rows := _next(batches, file)) is not None:
                yield self._batch(rows, file, unit.file_index, offset)
                offset += len(rows)
            if offset != unit.end:
                raise LogError(
                    f"{file.path}: has {offset:,} rows, but its footer says {unit.end:,}. Copy it again."
                )

    def _batch(self, rows: pa.RecordBatch, file: LogFile, file_index: int, offset: int) -> LogBatch:
        problems: Problems = {}
        frame = pl.DataFrame([*self._series(rows, file, problems), _positions(file_index, offset, len(rows))])
        bad = tuple(
            BadRow(file.name, offset + row, *problems[row], _as_json(rows.slice(row, 1)))
            for row in sorted(problems)
        )
        return LogBatch(without_rows(frame, problems), bad, len(rows))

    def _series(self, rows: pa.RecordBatch, file: LogFile, problems: Problems) -> Iterator[pl.Series]:
        for column in self.columns:
            array = rows.column(column.name_in_file)
            cast = _cast(column, array)
            if cast is None:
                raise LogError(
                    f'{file.path}: column "{column.name_in_file}" is {array.type}, which cannot be read as '
                    f"{column.type}. Change its type in the recipe or in the file."
                )
            values, unreadable = cast
            add_problems(problems, column, values, unreadable)
            yield values.alias(column.name)


@contextmanager
def _opened(file: LogFile) -> Iterator[pq.ParquetFile]:
    with open_bytes(file) as stream:
        with _damage_explained(file):
            # Without pre-buffering and with small buffers, memory does not grow with the row groups.
            parquet = pq.ParquetFile(
                stream, pre_buffer=False, buffer_size=1 << 16, page_checksum_verification=True
            )
        yield parquet


@contextmanager
def _damage_explained(file: LogFile) -> Iterator[None]:
    """Convert any pyarrow error about a file to a LogError."""
    try:
        yield
    except (OSError, pa.ArrowException, ValueError, OverflowError) as error:
        reason = first_line(error).rstrip(".")
        raise LogError(
            f"{file.path}: is not a whole Parquet file ({reason}). Write or copy it again."
        ) from error


def _next(batches: Iterator[pa.RecordBatch], file: LogFile) -> pa.RecordBatch | None:
    with _damage_explained(file):
        return next(batches, None)


def _row_edges(metadata: Any) -> list[int]:
    """The row number at which each row group starts, and the end."""
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    return [0, *np.cumsum(sizes, dtype=np.int64).tolist()]


def _read_rows(
    parquet: pq.ParquetFile, names: list[str], unit: LogRange, chunk_bytes: int
) -> Iterator[pa.RecordBatch]:
    edges = _row_edges(parquet.metadata)
    groups = [i for i in range(len(edges) - 1) if edges[i] < unit.end and edges[i + 1] > unit.start]
    if not groups:
        return
    row_bytes = max(1, _total_bytes(parquet.metadata, groups) // (edges[groups[-1] + 1] - edges[groups[0]]))
    batch_size = min(max(1, chunk_bytes // row_bytes), _MAX_BATCH_ROWS)
    offset = edges[groups[0]]
    # One thread here: engines read several units at once.
    for batch in parquet.iter_batches(batch_size, row_groups=groups, columns=names, use_threads=False):
        batch.validate()
        first, last = max(unit.start - offset, 0), min(unit.end - offset, len(batch))
        offset += len(batch)
        if first < last:
            yield batch.slice(first, last - first)


def _total_bytes(metadata: Any, groups: list[int]) -> int:
    return sum(metadata.row_group(i).total_byte_size for i in groups)


def _positions(file_index: int, offset: int, num_rows: int) -> pl.Series:
    start = position(file_index, offset)
    return pl.Series(POSITION, np.arange(start, start + num_rows, dtype=np.int64))


def _as_json(row: pa.RecordBatch) -> bytes:
    cells = {name: _plain(row.column(i)) for i, name in enumerate(row.schema.names)}
    return json.dumps(cells, ensure_ascii=False, default=str).encode(errors="replace")


def _plain(array: pa.Array) -> Any:
    if _is_text(array.type):
        value = array.cast(pa.large_binary())[0].as_py()
        return None if value is None else value.decode(errors="replace")
    try:
        return array[0].as_py()
    except UnicodeDecodeError:
        return "(invalid UTF-8)"


def _is_text(kind: pa.DataType) -> bool:
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    tests = (*texts, pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    return any(test(kind) for test in tests)


def _is_number(kind: pa.DataType) -> bool:
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean)
    return any(test(kind) for test in tests)


def is_readable(column: Column, kind: pa.DataType) -> bool:
    """Whether values of this Arrow type can be converted to the recipe's type."""
    return _cast(column, pa.nulls(0, kind)) is not None


def _cast(column: Column, array: pa.Array) -> _Cast | None:
    """The column in the recipe's type, or None if values of this type cannot be converted."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_timestamp(array.type) or pa.types.is_date(array.type):
        reader = _TIME_READERS.get(column.type)
        return None if reader is None else _with_mask(_as_microseconds(array), reader)
    if column.type == "text" and (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        return _joined(array)
    if _is_text(array.type) or pa.types.is_null(array.type):
        return _from_texts(column, array)
    if not _is_number(array.type):
        return None
    series = pl.Series(array)
    reader = _NUMBER_READERS.get((column.type, _family(series.dtype)))
    return None if reader is None else _with_mask(series, reader)


def _joined(lists: pa.Array) -> _Cast | None:
    """Lists of text as one text each, joined by tabs."""
    if not (_is_text(lists.type.value_type) or pa.types.is_integer(lists.type.value_type)):
        return None
    texts = lists.values if _is_text(lists.type.value_type) else lists.values.cast(pa.string())
    items = texts.cast(pa.large_binary()).fill_null(b"")
    offsets = lists.offsets.cast(pa.int64())
    return _from_texts(
        Column("list", "text"),
        pc.binary_join(pa.LargeListArray.from_arrays(offsets, items), pa.scalar(b"\t", pa.large_binary())),
    )


def _from_texts(column: Column, array: pa.Array) -> _Cast:
    # Parquet requires UTF-8, but writers do not check, and Polars trusts it: so we check the bytes.
    binary = array.cast(pa.large_binary())
    _, offsets, data = binary.buffers()
    _, is_utf8 = _native.parse_text(
        "text",
        np.frombuffer(offsets, dtype=np.int64)[binary.offset : binary.offset + len(binary) + 1],
        np.frombuffer(data or b"", dtype=np.uint8),
    )
    broken = pl.Series(~is_utf8.view(np.bool_)) & pl.Series(binary.is_valid())
    # The broken bytes must be replaced in the buffer too, or Polars refuses all of it.
    valid = pc.if_else(pa.array(is_utf8.view(np.bool_)), binary, pa.scalar(b"", pa.large_binary()))
    texts = empty_as_null(pl.Series(valid).cast(pl.String))
    if column.type == "text":
        return texts, broken
    values, unreadable = parse_column(column, texts)
    return values, unreadable | broken


def _as_microseconds(times: pa.Array) -> pl.Series:
    """Times as microseconds since 1970; those without a time zone count as UTC."""
    zone = getattr(times.type, "tz", None)
    return pl.Series(times.cast(pa.timestamp("us", zone), safe=False).view(pa.int64()))


def _family(dtype: pl.DataType) -> str:
    if dtype == pl.Boolean:
        return "bool"
    return "int" if dtype.is_integer() else "float" if dtype.is_float() else "decimal"


def _with_mask(series: pl.Series, reader: Callable[[pl.Series], pl.Series]) -> _Cast:
    present = series.fill_nan(None) if series.dtype.is_float() else series  # pandas writes a null as NaN
    values = reader(present)
    return values, values.is_null() & present.is_not_null()


def _float_to_int(series: pl.Series) -> pl.Series:
    whole = series.cast(pl.Int64, strict=False)
    return whole.set((whole.cast(series.dtype) != series).fill_null(True), None)


def _to_float(series: pl.Series) -> pl.Series:
    numbers = series.cast(pl.Float64)
    return numbers.set(numbers.is_infinite(), None)


def _int_to_bool(series: pl.Series) -> pl.Series:
    return series.set((series != 0) & (series != 1), None).cast(pl.Boolean)


# Logs count time in seconds since 1970.
_TIME_READERS: dict[str, Callable[[pl.Series], pl.Series]] = {
    "int": lambda microseconds: microseconds // 1_000_000,
    "float": lambda microseconds: microseconds / 1_000_000,
    "time": lambda microseconds: microseconds / 1_000_000,
    "text": lambda microseconds: microseconds.cast(pl.Datetime("us")).dt.to_string("%Y-%m-%dT%H:%M:%S%.f"),
}
_NUMBER_READERS: dict[tuple[str, str], Callable[[pl.Series], pl.Series]] = {
    ("int", "int"): lambda series: series.cast(pl.Int64, strict=False),
    ("int", "bool"): lambda series: series.cast(pl.Int64),
    ("int", "float"): _float_to_int,
    ("int", "decimal"): lambda series: parse_texts("int", series.cast(pl.String))[0],
    ("hex", "int"): lambda series: series.cast(pl.Int64, wrap_numerical=True),
    ("float", "int"): _to_float,
    ("float", "float"): _to_float,
    ("float", "decimal"): _to_float,
    ("time", "int"): seconds_of_numbers,
    ("time", "float"): lambda series: seconds_of_numbers(_to_float(series)),
    ("bool", "bool"): lambda series: series,
    ("bool", "int"): _int_to_bool,
    ("text", "int"): lambda series: series.cast(pl.String),
    ("text", "bool"): lambda series: series.cast(pl.String),
}
