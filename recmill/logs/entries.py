"""Entries of an event stream as rows of the log, with one rule for the trainer and the servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from recmill.artifacts.event_stream import Entry, written_at
from recmill.features.numeric import dtype_of
from recmill.logs.columns import UNREADABLE, Problems, add_problems, empty_as_null, parse_column, without_rows
from recmill.recipe.kinds import kind_of
from recmill.recipe.recipe import POSITION, Column


def parse_entries(columns: Sequence[Column], entries: Sequence[Entry]) -> tuple[pl.DataFrame, Problems]:
    """The valid rows, with the entries' numbers as POSITION, and the problems of the others.

    Fields are parsed like cells of delimited files: an absent or empty field is a missing value.
    """
    problems: Problems = {}
    series = [
        _parsed(column, [entry.fields.get(column.name) for entry in entries], problems) for column in columns
    ]
    numbers = pl.Series(POSITION, [entry.number for entry in entries], pl.Int64)
    return without_rows(pl.DataFrame([*series, numbers]), problems), problems


def _parsed(column: Column, cells: Sequence[bytes | None], problems: Problems) -> pl.Series:
    texts = [_text(cell) for cell in cells]
    for row, (cell, text) in enumerate(zip(cells, texts, strict=True)):
        if cell is not None and text is None:
            problems.setdefault(row, (UNREADABLE["text"], column.name))
    present = empty_as_null(pl.Series(column.name, texts, pl.String))
    if column.type == "text":
        values, unreadable = present, None
    else:
        values, unreadable = parse_column(column, present)
    add_problems(problems, column, values, unreadable)
    return values.cast(dtype_of(kind_of(column))).alias(column.name)


def _text(cell: bytes | None) -> str | None:
    try:
        return None if cell is None else cell.decode("utf-8")
    except UnicodeDecodeError:
        return None


def after_export(rows: pl.DataFrame, time: str, bundle: Mapping[str, Any]) -> pl.DataFrame:
    """The rows that the log did not have when a bundle was exported from it.

    These are rows with a time after the log's end, and rows that were written after the export.
    """
    end, created_at = bundle.get("log_end"), float(bundle.get("created_at", 0.0))
    if end is None:
        return rows
    late = pl.Series([written_at(number) > created_at for number in rows[POSITION]], dtype=pl.Boolean)
    return rows.filter((rows[time] > end).fill_null(False) | late)


def described(entries: Iterable[Entry]) -> bytes:
    """Fields of entries, as they are shown in bad rows."""
    return b"\n".join(
        b" ".join(b"%b=%b" % (name.encode(), value) for name, value in entry.fields.items())
        for entry in entries
    )
