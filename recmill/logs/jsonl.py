"""JSON lines: one object per line. A chunk is decoded in one call, or line by line after a problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from recmill import _native
from recmill.dataset.positions import position
from recmill.errors import LogError
from recmill.logs.base import LogBatch, LogRange
from recmill.logs.columns import Problems, add_problems, empty_as_null, parse_column, without_rows
from recmill.logs.text import TextSource, Window
from recmill.recipe.recipe import POSITION, Column

_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1
_JSON_TYPES: dict[str, Any] = {
    "int": Annotated[int, msgspec.Meta(ge=_INT64_MIN, le=_INT64_MAX)],
    "float": float,
    "text": str,
    "hex": str,
    "bool": bool,
    "time": int | float | str,
}
_MAX_BATCH_LINES = 1 << 16
_Positions = npt.NDArray[np.int64]


class JsonLinesSource(TextSource):
    """Objects, one per line. Keys that the recipe does not name are ignored; a missing key is a null."""

    def _batches(self, window: Window, unit: LogRange) -> Iterator[LogBatch]:
        stop = self.stop_of(unit)
        decoder = LineDecoder(self.columns)
        self.seek_unit(window, unit)
        while window.is_before(stop):
            window.fill(stop)
            starts = _native.line_starts(window.view, stop - window.offset, window.ended, _MAX_BATCH_LINES)
            batch = self._batch(decoder, window, starts, unit.file_index) if len(starts) > 1 else None
            window.skip(int(starts[-1]))
            if batch is not None:
                yield batch

    def _batch(self, decoder: LineDecoder, window: Window, starts: _Positions, file_index: int) -> LogBatch:
        values, problems = decoder.decode(window.view[: starts[-1]], starts)
        frame = pl.DataFrame([*self._series(values, problems), self._positions(window, starts, file_index)])
        bad = tuple(
            window.bad_row(int(starts[row]), int(starts[row + 1]), *problems[row]) for row in sorted(problems)
        )
        return LogBatch(without_rows(frame, problems), bad, len(frame))

    def _series(self, values: list[list[Any]], problems: Problems) -> Iterator[pl.Series]:
        for column, column_values in zip(self.columns, values, strict=True):
            unreadable = None
            if column.type == "time":
                column_values = [None if cell is None else str(cell) for cell in column_values]
            if column.type in ("text", "hex", "time"):
                series = empty_as_null(pl.Series(column_values, dtype=pl.String))
            else:
                series = pl.Series(column_values, dtype=self.schema[column.name])
            if column.type in ("hex", "time"):
                series, unreadable = parse_column(column, series)
            add_problems(problems, column, series, unreadable)
            yield series.alias(column.name)

    def _positions(self, window: Window, starts: _Positions, file_index: int) -> pl.Series:
        return pl.Series(POSITION, starts[:-1] + position(file_index, window.offset))


class LineDecoder:
    """Lines of JSON -> one list of values for each column."""

    def __init__(self, columns: tuple[Column, ...]) -> None:
        self.columns = columns
        self._typed = _decoder(columns, lambda column: _JSON_TYPES[column.type] | None)
        self._untyped = _decoder(columns, lambda _: Any)

    def decode(self, text: npt.NDArray[np.uint8], starts: _Positions) -> tuple[list[list[Any]], Problems]:
        if _each_line_looks_whole(text, starts):
            try:
                rows = self._typed.decode_lines(text.data)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                rows = []
            if len(rows) == len(starts) - 1:
                return self._columns_of(rows), {}
        return self._decode_each(text.data, starts)

    def _columns_of(self, rows: list[Any]) -> list[list[Any]]:
        return [[getattr(row, f"f{i}") for row in rows] for i in range(len(self.columns))]

    def _decode_each(self, text: memoryview, starts: _Positions) -> tuple[list[list[Any]], Problems]:
        values: list[list[Any]] = [[] for _ in self.columns]
        problems: Problems = {}
        edges = starts.tolist()
        for row, (begin, end) in enumerate(pairwise(edges)):
            cells = self._decode_line(text[begin:end])
            if not isinstance(cells, list):
                problems[row] = cells
                cells = [None] * len(values)
            for column_values, cell in zip(values, cells, strict=True):
                column_values.append(cell)
        return values, problems

    def _decode_line(self, line: memoryview) -> list[Any] | tuple[str, str | None]:
        try:
            found = self._untyped.decode(line)
        except msgspec.ValidationError as error:
            return ("not an object" if "`object`" in str(error) else "number out of range"), None
        except UnicodeDecodeError:
            return "invalid UTF-8", None
        except (msgspec.DecodeError, RecursionError):
            return "not JSON", None
        cells = []
        for i, column in enumerate(self.columns):
            cell = getattr(found, f"f{i}")
            try:
                cells.append(None if cell is None else _CELL_READERS[column.type](cell))
            except (TypeError, ValueError, OverflowError) as error:
                return ("wrong type" if isinstance(error, TypeError) else str(error)), column.name
        return cells


def _decoder(columns: tuple[Column, ...], type_of: Callable[[Column], Any]) -> Any:
    fields = [(f"f{i}", type_of(column), None) for i, column in enumerate(columns)]
    names = {f"f{i}": column.name_in_file for i, column in enumerate(columns)}
    try:
        return msgspec.json.Decoder(msgspec.defstruct("Line", fields, rename=names, gc=False))
    except ValueError as error:
        raise LogError(f"A column's name cannot be a JSON key here ({error}). Rename it.") from error


def _each_line_looks_whole(text: npt.NDArray[np.uint8], starts: _Positions) -> bool:
    """Whether each line is {...}. Decoding many at once would also accept two objects in a line, or one over two."""
    last = starts[1:] - 1
    last = last - (text[last] == ord("\n"))
    last = last - (text[last] == ord("\r"))
    return bool(np.all(text[starts[:-1]] == ord("{")) and np.all(text[last] == ord("}")))


def _read_int(cell: Any) -> int:
    if type(cell) is float and cell.is_integer():
        cell = int(cell)
    if type(cell) not in (int, float):
        raise TypeError
    if type(cell) is float or not _INT64_MIN <= cell <= _INT64_MAX:
        raise ValueError("not an integer")
    return int(cell)


def _read_float(cell: Any) -> float:
    if type(cell) not in (int, float):
        raise TypeError
    try:
        return float(cell)
    except OverflowError:
        raise ValueError("not a number") from None


def _read_time(cell: Any) -> Any:
    if type(cell) not in (int, float, str):
        raise TypeError
    return cell


def _read_as(kind: type, cell: Any) -> Any:
    if type(cell) is not kind:
        raise TypeError
    return cell


_CELL_READERS: dict[str, Callable[[Any], Any]] = {
    "int": _read_int,
    "float": _read_float,
    "text": partial(_read_as, str),
    "hex": partial(_read_as, str),
    "bool": partial(_read_as, bool),
    "time": _read_time,
}
