"""Tensors of the Open Inference Protocol as columns: from bytes or lists of values, with their missing values."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from recmill.errors import BadRequest

Array = np.ndarray[Any, np.dtype[Any]]

_NUMPY: dict[str, str] = {
    "BOOL": "?",
    "INT8": "<i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "UINT8": "<u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "FP32": "<f4",
    "FP64": "<f8",
}


LENGTHS = ".lengths"  # suffix of an input with the lengths of the lists of another input
MAX_LIST = 10_000


@dataclass(frozen=True)
class Shape:
    """Shape of a tensor: rows of one value, or of lists that are padded to `width`."""

    rows: int
    width: int | None = None

    @classmethod
    def of(cls, name: str, sizes: Iterable[int]) -> Shape:
        """Parse a shape; raises BadRequest for any other.

        [n, 1] may be either: it holds lists where columns hold lists.
        """
        sizes = list(sizes)
        if len(sizes) not in (1, 2) or sizes[0] < 0 or (len(sizes) == 2 and not 1 <= sizes[1] <= MAX_LIST):
            raise BadRequest(
                f'Input "{name}" must have the shape [n], or [n, length] for lists of 1 to {MAX_LIST:,} values; '
                f"got {sizes[:8]}."
            )
        return cls(sizes[0], sizes[1] if len(sizes) == 2 and sizes[1] != 1 else None)

    @property
    def num_values(self) -> int:
        return self.rows * (1 if self.width is None else self.width)

    def column(self, values: pl.Series) -> pl.Series:
        """The tensor's values as rows. Missing values at the end of a list are padding and are dropped."""
        if self.width is None:
            return values
        values = _with_missing(values)
        is_there = values.is_not_null().to_numpy().reshape(self.rows, self.width)
        lengths = (is_there * np.arange(1, self.width + 1)).max(axis=1, initial=0)
        return list_column(values, np.full(self.rows, self.width), lengths)


def list_column(values: pl.Series, widths: Array, lengths: Array) -> pl.Series:
    """Lists from flat values: `widths` is the padded length of each list, `lengths` the values that are kept."""
    starts = np.cumsum(widths) - widths
    index_in_list = np.arange(len(values)) - np.repeat(starts, widths)
    kept = values.filter(pl.Series(index_in_list < np.repeat(lengths, widths)))
    offsets = np.concatenate([[0], np.cumsum(np.minimum(lengths, widths))]).astype(np.int64)
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), kept.to_arrow())
    return pl.Series(values.name, lists)


def frame_of(columns: Sequence[pl.Series]) -> pl.DataFrame:
    """Columns side by side, with nulls for missing values; raises BadRequest when they do not fit together."""
    if not columns:
        raise BadRequest("inputs is empty; expected one tensor for each raw column of the log.")
    names = [column.name for column in columns]
    if len(set(names)) < len(names):
        raise BadRequest(f'Input "{next(name for name in names if names.count(name) > 1)}" occurs twice.')
    heights = {len(column) for column in columns}
    if len(heights) > 1:
        raise BadRequest(
            f"All inputs must have the same number of rows, got {', '.join(map(str, sorted(heights)[:8]))}."
        )
    return _with_lengths(pl.DataFrame([_with_missing(column) for column in columns]))


def _with_lengths(frame: pl.DataFrame) -> pl.DataFrame:
    """Cut lists to their lengths, where an input has them: padding of integers is an integer too."""
    for name in [name for name in frame.columns if name.endswith(LENGTHS)]:
        lists, lengths = name.removesuffix(LENGTHS), frame[name]
        if lists not in frame.columns:
            raise BadRequest(f'Input "{name}" has the lengths of "{lists}", which is not among the inputs.')
        if not lengths.dtype.is_integer() or lengths.has_nulls() or not lengths.is_between(0, MAX_LIST).all():
            raise BadRequest(f'Input "{name}" must have integers from 0 to {MAX_LIST:,}.')
        column = pl.col(lists) if frame.schema[lists] == pl.List else pl.concat_list(lists)
        frame = frame.with_columns(column.list.head(pl.col(name))).drop(name)
    return frame


def _with_missing(column: pl.Series) -> pl.Series:
    if column.dtype == pl.List:
        return column
    if column.dtype.is_float():
        return column.cast(pl.Float64).fill_nan(None)
    if column.dtype == pl.String:
        return column.set(column == "", None)
    return column if column.dtype == pl.Boolean else column.cast(pl.Int64, strict=False)


def column_from_bytes(name: str, datatype: str, num_rows: int, data: bytes) -> pl.Series:
    """A column from a tensor's bytes: little-endian numbers, or texts with their length in front."""
    if datatype == "BYTES":
        return _texts(name, num_rows, data)
    if datatype not in _NUMPY:
        raise BadRequest(
            f'Input "{name}" has the datatype "{datatype[:20]}"; expected BYTES, {", ".join(_NUMPY)}.'
        )
    dtype = np.dtype(_NUMPY[datatype])
    if len(data) != num_rows * dtype.itemsize:
        wanted = num_rows * dtype.itemsize
        raise BadRequest(
            f'Input "{name}" has {len(data):,} bytes; {num_rows:,} values of {datatype} have {wanted:,}.'
        )
    values = np.frombuffer(data, np.uint8) != 0 if datatype == "BOOL" else np.frombuffer(data, dtype)
    return pl.Series(name, values)


def _texts(name: str, num_rows: int, data: bytes) -> pl.Series:
    offsets = np.zeros(num_rows + 1, np.int32) if num_rows <= len(data) // 4 else None
    offset, texts = 0, []
    for number in range(num_rows if offsets is not None else 0):
        begin = offset + 4
        if begin > len(data):
            break
        offset = begin + _LENGTH(data, offset)[0]
        if offset > len(data):
            break
        texts.append(data[begin:offset])
        offsets[number + 1] = offsets[number] + offset - begin  # type: ignore[index]
    if offsets is None or offset != len(data) or len(texts) != num_rows:
        raise BadRequest(f'Input "{name}" must hold {num_rows:,} texts, each after its length in 4 bytes.')
    joined = pa.py_buffer(b"".join(texts))
    array = pa.StringArray.from_buffers(num_rows, pa.py_buffer(offsets.tobytes()), joined)
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        raise BadRequest(f'Input "{name}" is not all UTF-8.') from None
    return pl.Series(name, array)


_LENGTH: Callable[[bytes, int], tuple[int]] = struct.Struct("<I").unpack_from


def column_from_values(name: str, datatype: str, num_rows: int, values: Sequence[Any]) -> pl.Series:
    """A column from a list of values, from JSON or protobuf."""
    if values and isinstance(values[0], list):
        values = [one for row in values for one in (row if isinstance(row, list) else [row])]
    if len(values) != num_rows:
        raise BadRequest(f'Input "{name}" has {len(values):,} values, but its shape has {num_rows:,}.')
    if datatype == "BYTES":
        values = [value.decode("utf-8", "replace") if isinstance(value, bytes) else value for value in values]
    try:
        return pl.Series(name, values, _POLARS.get(datatype, pl.Int64()), strict=True)
    except (TypeError, OverflowError, ValueError, pl.exceptions.PolarsError):
        raise BadRequest(f'Input "{name}" must hold values of {datatype} alone.') from None


_POLARS: dict[str, pl.DataType] = {
    "BYTES": pl.String(),
    "BOOL": pl.Boolean(),
    "FP32": pl.Float64(),
    "FP64": pl.Float64(),
}
