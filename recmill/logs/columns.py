"""The recipe's rules for column values, for readers that check whole columns at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

import numpy as np
import polars as pl

from recmill import _native
from recmill.features.kernels import texts_of
from recmill.logs.times import NOT_A_TIME, parse_times
from recmill.recipe.recipe import Column

UNREADABLE = {
    "int": "not an integer",
    "float": "not a number",
    "text": "invalid UTF-8",
    "hex": "not hexadecimal",
    "bool": "not a boolean",
    "time": NOT_A_TIME,
}
Problems = dict[int, tuple[str, str | None]]  # row -> the reason and the column


def allowed_values(column: Column) -> list[int] | list[float] | list[str] | None:
    """The allowed values in the column's type. Those of `hex` may be hexadecimal."""
    if column.allowed is None:
        return None
    if column.type == "text":
        return [str(value) for value in column.allowed]
    if column.type in ("float", "time"):
        return [float(value) for value in column.allowed]
    return [_integer(value, column.type) for value in column.allowed]


def _integer(value: bool | int | float | str, type_name: str) -> int:
    number = int(value, 16 if type_name == "hex" else 10) if isinstance(value, str) else int(value)
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def explain_missing(name: str, names: Sequence[str]) -> str:
    """Why a declared column is not one of a file's columns, and what may help."""
    found = f"the file has: {', '.join(names)}"
    if name in names:
        return f'column "{name}" occurs more than once; {found}. Give each column its own name.'
    nearest = get_close_matches(name, names, n=1, cutoff=0.5)
    if nearest:
        hint = f'Did you mean "{nearest[0]}"? Then add in_file = "{nearest[0]}" to the column, or rename it.'
    else:
        hint = "Correct the column's name or the file."
    return f'no column "{name}"; {found}. {hint}'


def add_problems(problems: Problems, column: Column, values: pl.Series, unreadable: pl.Series | None) -> None:
    """Record each row's first problem: call this for the columns in recipe order."""
    if unreadable is not None:
        _note(problems, column, unreadable, UNREADABLE[column.type])
    if column.required:
        _note(problems, column, values.is_null(), "missing required value")
    allowed = allowed_values(column)
    if allowed is not None:
        stored = values.cast(pl.Int64) if column.type == "bool" else values
        allowed_series = pl.Series(allowed, dtype=stored.dtype)
        _note(
            problems,
            column,
            ~stored.is_in(allowed_series.implode()) & stored.is_not_null(),
            "value not allowed",
        )


def _note(problems: Problems, column: Column, mask: pl.Series, reason: str) -> None:
    for row in mask.arg_true():
        problems.setdefault(row, (reason, column.name))


def without_rows(frame: pl.DataFrame, rows: Iterable[int]) -> pl.DataFrame:
    """The frame without some rows; the same frame if there are none."""
    drop = np.fromiter(rows, dtype=np.int64)
    if len(drop) == 0:
        return frame
    keep = np.ones(len(frame), dtype=np.bool_)
    keep[drop] = False
    return frame.filter(pl.Series(keep))


def empty_as_null(texts: pl.Series) -> pl.Series:
    """An empty text is a missing value, as in delimited files."""
    return texts.set(texts == "", None)


def parse_column(column: Column, texts: pl.Series) -> tuple[pl.Series, pl.Series]:
    """Parse texts to the type of a column; returns the values and a mask of invalid ones."""
    if column.type == "time":
        return parse_times(texts, column.format)
    return parse_texts(column.type, texts)


def parse_texts(type_name: str, texts: pl.Series) -> tuple[pl.Series, pl.Series]:
    """Parse texts to a column type by the rules of delimited files; returns the values and a mask of invalid ones."""
    present = empty_as_null(texts)
    values, readable = _native.parse_text(type_name, *texts_of(present)[:2])
    is_readable = pl.Series(readable.view(np.bool_))
    numbers = pl.Series(values.view(np.float64 if type_name == "float" else np.int64))
    parsed = pl.select(pl.when(is_readable).then(numbers)).to_series()
    return (parsed.cast(pl.Boolean) if type_name == "bool" else parsed), ~is_readable & present.is_not_null()
