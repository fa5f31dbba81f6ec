"""Tensors of the Open Inference Protocol as columns: from bytes or lists of values, with their missing values."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from recmill.errors import BadRequest

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


def length_of(name: str, shape: Iterable[int]) -> int:
    shape = list(shape)
    if len(shape) not in (1, 2) or shape[0] < 0 or (len(shape) == 2 and shape[1] != 1):
        raise BadRequest(f'Input "{name}" must have the shape [n] or [n, 1], got {shape[:8]}.')
    return shape[0]


def frame_of(columns: Sequence[pl.Series]) -> pl.DataFrame:
    """Columns side by side, their missing values missing; raises BadRequest when they do not fit together."""
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
    return pl.DataFrame([_with_missing(column) for column in columns])


def _with_missing(column: pl.Series) -> pl.Series:
    if column.dtype.is_float():
        return column.cast(pl.Float64).fill_nan(None)
    if column.dtype == pl.String:
        return column.set(column == "", None)
    return column if column.dtype == pl.Boolean else column.cast(pl.Int64, strict=False)


def column_from_bytes(name: str, datatype: str, num_rows: int, data: bytes) -> pl.Series:
    """A column from a tensor's bytes: numbers in little-endian order, texts with their length before them."""
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
