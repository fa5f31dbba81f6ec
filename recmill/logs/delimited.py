"""TSV, CSV and similar formats, parsed by the native core directly into Arrow buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from recmill import _native
from recmill.dataset.positions import position
from recmill.errors import LogError
from recmill.logs.base import BadRow, LogBatch, LogFile, LogFiles, LogRange
from recmill.logs.columns import Problems, add_problems, allowed_values, parse_column, without_rows
from recmill.logs.text import TextSource, Window
from recmill.recipe.recipe import POSITION, Column, Log, SideTable

_MAX_BAD_IN_BATCH = 4096  # bounds memory for a log of nothing but bad rows
_ARROW_TYPES = {
    "int": pa.int64(),
    "float": pa.float64(),
    "text": pa.large_string(),
    "hex": pa.int64(),
    "bool": pa.bool_(),
    "time": pa.large_string(),  # as returned by the native core
}


@dataclass(frozen=True)
class FieldLayout:
    """The number of fields of one file's rows, and the field of each declared column."""

    num_fields: int
    field_of: tuple[int, ...]


class DelimitedSource(TextSource):
    """Rows of separated fields. Quoted files are unsplittable: a field may contain a newline."""

    def __init__(self, spec: Log | SideTable, files: tuple[LogFile, ...], may_grow: bool = False) -> None:
        super().__init__(spec, files, may_grow)
        text = spec.text
        # encoding of the text that is parsed
        self._encoding = "latin-1" if text.encoding == "latin-1" else "utf-8"
        self._separator = text.separator.encode(self._encoding, "ignore")
        self._quote = text.quote.encode(self._encoding, "ignore")
        if not self._separator or set(self._separator) & set(b"\r\n" + self._quote):
            raise LogError(f"separator {text.separator!r} must be text without line ends and quotes.")
        if len(self._quote) > 1 or self._quote in (b"\r", b"\n"):
            raise LogError(f"quote {text.quote!r} must be one ASCII character, or empty for none.")

    def can_cut(self, file: LogFile) -> bool:
        return super().can_cut(file) and not self._quote

    def _batches(self, window: Window, unit: LogRange) -> Iterator[LogBatch]:
        stop = self.stop_of(unit)
        parser = self._parser(self.seek_unit(window, unit))
        while window.is_before(stop):
            window.fill(stop)
            batch, num_bytes = self._parse(parser, window, unit.file_index, stop)
            window.skip(num_bytes)
            if batch.num_rows:
                yield batch

    def count_rows(self, unit: LogRange) -> int:
        if self._quote:
            return sum(batch.num_rows for batch in self.read(unit))
        return super().count_rows(unit)

    def row_offsets(self, unit: LogRange, numbers: Sequence[int]) -> list[int]:
        return (
            LogFiles.row_offsets(self, unit, numbers) if self._quote else super().row_offsets(unit, numbers)
        )

    def read_preamble(self, window: Window) -> FieldLayout:
        num_columns = len(self.columns)
        if not self.spec.header or not window.has_more():
            return FieldLayout(num_columns, tuple(range(num_columns)))
        while (row := _native.split_row(window.view, self._separator, self._quote, window.ended)) is None:
            window.fill(0)
        names, num_bytes = row
        window.skip(num_bytes)
        return self._match_header(
            [name.decode(self._encoding, "replace").strip() for name in names], window.file
        )

    def _match_header(self, names: list[str], file: LogFile) -> FieldLayout:
        self.check_names(names, file)
        return FieldLayout(len(names), tuple(names.index(column.name_in_file) for column in self.columns))

    def _parser(self, layout: FieldLayout) -> Any:
        columns = [
            ("text", field, column.required, None)
            if column.type == "time"
            else (column.type, field, column.required, allowed_values(column))
            for column, field in zip(self.columns, layout.field_of, strict=True)
        ]
        is_latin1 = self._encoding == "latin-1"
        return _native.DelimitedParser(self._separator, self._quote, is_latin1, layout.num_fields, columns)

    def _parse(self, parser: Any, window: Window, file_index: int, stop: int) -> tuple[LogBatch, int]:
        num_bytes, num_good, positions, columns, bad = parser.parse(
            window.view,
            stop - window.offset,
            window.ended,
            position(file_index, window.offset),
            _MAX_BAD_IN_BATCH,
        )
        arrays = [_arrow(c, num_good, buffers) for c, buffers in zip(self.columns, columns, strict=True)]
        arrays.append(pa.Array.from_buffers(pa.int64(), num_good, [None, pa.py_buffer(positions)]))
        names = [column.name for column in self.columns]
        frame = pl.DataFrame(pa.table(arrays, names=[*names, POSITION]))
        bad_rows = tuple(
            window.bad_row(begin, end, reason, names[column] if column >= 0 else None)
            for begin, end, reason, column in bad
        )
        frame, bad_times = self._parse_times(frame, window, file_index)
        bad_rows = tuple(sorted((*bad_rows, *bad_times), key=lambda row: row.offset))
        return LogBatch(frame, bad_rows, num_good + len(bad_rows) - len(bad_times)), num_bytes

    def _parse_times(
        self, frame: pl.DataFrame, window: Window, file_index: int
    ) -> tuple[pl.DataFrame, list[BadRow]]:
        """Parse columns of times to numbers; rows with invalid times are rejected."""
        problems: Problems = {}
        for column in self.columns:
            if column.type == "time":
                times, unreadable = parse_column(column, frame[column.name])
                add_problems(problems, column, times, unreadable)
                frame = frame.with_columns(times.alias(column.name))
        if not problems:
            return frame, []
        begins = frame[POSITION] - position(file_index, window.offset)
        bad = [window.bad_line(begins[row], *problems[row]) for row in sorted(problems)]
        return without_rows(frame, problems), bad


def _arrow(column: Column, num_rows: int, buffers: tuple[Any, ...]) -> pa.Array:
    wrapped = [None if buffer is None else pa.py_buffer(buffer) for buffer in buffers]
    return pa.Array.from_buffers(_ARROW_TYPES[column.type], num_rows, wrapped)
