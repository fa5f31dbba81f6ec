"""The interface of all feature steps.

A stateless step only applies. A fitted step first requests a statistic of the training rows (`Moments`, `Counts` or
`Groups`); the plan has it measured and passes it to `learn`. Afterwards the step applies like any other, to a million
rows or to one: each row's result depends on that row alone.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar
from urllib.parse import quote

import numpy as np
import polars as pl
import pyarrow as pa

from recmill.features.kernels import (
    CountOptions,
    Moments,
    RowDigest,
    StoredCounts,
    ValueCounts,
    ValueIndex,
    is_text,
)
from recmill.recipe.steps import Step

S = TypeVar("S", bound=Step)
Numbers = TypeVar("Numbers", pl.Expr, pl.Series)


@dataclass(frozen=True)
class NeedsMoments:
    """Count, sum, squares and range of the step's numeric input."""


@dataclass(frozen=True)
class NeedsCounts:
    """Counts of the distinct values in the step's input. Requests of one `name` are counted together."""

    name: str
    options: CountOptions


@dataclass(frozen=True)
class NeedsGroups:
    """Statistics of a column or label over the rows that share a value.

    `aggregate` gets columns key, value and fold, with all rows of a key, and returns one row for each key.
    """

    aggregate: Callable[[pl.DataFrame], pl.DataFrame]
    column: str | None = None
    label: str | None = None
    folds: int = 1
    seed: int = 0


Need = NeedsMoments | NeedsCounts | NeedsGroups


class ValueTable:
    """Values with their data: a vocabulary, a count, a code. Row k, from 0, has id k + 1."""

    def __init__(self, frame: pl.DataFrame, facts: Mapping[str, int] | None = None) -> None:
        self._frame = frame
        self.facts = dict(facts or {})
        self._lookup: ValueIndex | None = None
        self._building = threading.Lock()

    @property
    def frame(self) -> pl.DataFrame:
        return self._frame

    @property
    def is_text(self) -> bool:
        return is_text(self.frame["value"].dtype)

    def __len__(self) -> int:
        return self.frame.height

    @property
    def lookup(self) -> ValueIndex:
        """Built on first use and cached."""
        with self._building:
            if self._lookup is None:
                self._lookup = ValueIndex(self.frame["value"])
            return self._lookup

    def __reduce__(self) -> tuple[type[ValueTable], tuple[Any, ...]]:
        return ValueTable, (self.frame, self.facts)

    def digest(self) -> str:
        """Digest of the values, their data, and their ids."""
        return RowDigest.of(self.frame.with_row_index("__id")).hex()

    def as_values(self, series: pl.Series) -> pl.Series:
        """A column in the type of the table's values: text or int64."""
        return series.cast(pl.String if self.is_text else pl.Int64)

    def row_numbers(self, series: pl.Series) -> pl.Series:
        """The row of each value, from 1; 0 for unknown values."""
        return self.lookup.find(self.as_values(series))

    def ids(self, series: pl.Series) -> pl.Series:
        return self.ids_at(self.row_numbers(series))

    def ids_at(self, row_numbers: pl.Series) -> pl.Series:
        """The id of each row."""
        return row_numbers

    def column(self, name: str, row_numbers: pl.Series, missing: float | None) -> pl.Series:
        """A column's entry for each row; `missing` for row 0."""
        known = self.frame[name].cast(pl.Float64)
        padded = pl.concat([pl.Series(name, [missing], dtype=pl.Float64), known])
        return padded.gather(row_numbers.cast(pl.UInt32))

    def top(self, num: int) -> pl.DataFrame:
        """The values with the largest counts; ties by value. None without counts."""
        if "count" not in self.frame.columns:
            return pl.DataFrame(schema=["value", "count"])
        best = self.frame.select("value", "count").top_k(num, by=["count", "value"], reverse=[False, True])
        return best.sort("count", "value", descending=[True, False])

    def save(self, path: Path) -> None:
        self.frame.write_parquet(path, compression="zstd", compression_level=1)


class Transform(Generic[S]):
    """The implementation of a step."""

    def __init__(self, step: S, name: str, kind: str) -> None:
        self.step = step
        self.name = name  # "<feature>/<number of the step>"
        self.kind = kind  # the kind of the step's input, as in `recmill.recipe.check`
        self.state: dict[str, Any] = {}  # learned state, as plain JSON values
        self.table: ValueTable | None = None  # learned state, value by value

    @property
    def takes_lists(self) -> bool:
        return self.kind.startswith("list of ")

    def need(self) -> Need | None:
        """The statistic that the step needs before it can apply; None for a stateless step."""
        return None

    def learn_moments(self, moments: Moments) -> None:
        raise AssertionError(self.name)

    def counted(self, series: pl.Series) -> pl.Series:
        """The values to count of a column that reaches the step: text or int64."""
        return over_elements(series, as_category)

    def learn_counts(self, counts: ValueCounts | StoredCounts) -> ValueTable | None:
        raise AssertionError(self.name)

    def learn_groups(self, groups: pl.DataFrame) -> ValueTable:
        raise AssertionError(self.name)

    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr | None:
        """The step as a Polars expression, so that many steps run in one call; None when it has no such form."""
        return None

    def apply(self, columns: Sequence[pl.Series], frame: pl.DataFrame) -> pl.Series:
        """The result of a step without expression; `frame` has the raw rows, for steps that read other columns."""
        return self.apply_one(columns[0])

    def apply_one(self, series: pl.Series) -> pl.Series:
        raise AssertionError(self.name)

    def size(self) -> int | None:
        """Number of ids when the step yields ids: they are 0 to size - 1."""
        return None

    def vocabulary(self) -> str | None:
        """Name under which ids are shared with other features."""
        return None

    @property
    def table_name(self) -> str:
        """Name of the value table, which features may share."""
        return self.vocabulary() or self.name

    def with_table(self, table: ValueTable) -> Self:
        """The step with another table."""
        other = copy.copy(self)
        other.table = table
        return other


def as_category(series: pl.Series) -> pl.Series:
    """Text as it is, anything else as int64."""
    return series if is_text(series.dtype) else series.cast(pl.Int64)


def is_list(series: pl.Series) -> bool:
    return isinstance(series.dtype, pl.List)


def elements_of(series: pl.Series) -> pl.Series:
    """The values of a column, or the elements of all its lists concatenated."""
    return series.filter(series.list.len() > 0).explode() if is_list(series) else series


def each(columns: Sequence[pl.Expr], is_list: bool, function: Callable[[pl.Expr], pl.Expr]) -> pl.Expr:
    """Apply `function` to a column, or to each element of a list column."""
    return columns[0].list.eval(function(pl.element())) if is_list else function(columns[0])


def selected(frame: pl.DataFrame, expressions: Sequence[pl.Expr]) -> pl.DataFrame:
    """Evaluate user-defined expressions, with the same last bit for many rows and for one.

    Polars divides by a scalar, a constant column or a single row with other operations than by many numbers, so every
    column is materialised and a single row is padded.
    """
    rows = frame if frame.height > 1 else pl.concat([frame, frame])
    return pl.DataFrame([rows[name] for name in rows.columns]).select(expressions).head(frame.height)


def divided(numbers: Numbers, by: float) -> Numbers:
    """Multiply by the reciprocal, as Polars divides a column by a number.

    Polars would divide a single row exactly.
    """
    return numbers * (1.0 / by)


def over_elements(series: pl.Series, apply: Callable[[pl.Series], pl.Series]) -> pl.Series:
    """Apply to a column, or to the elements of a list column; a missing list is an empty one."""
    if not is_list(series):
        return apply(series)
    return to_lists(series.name, apply(elements_of(series)), series.list.len().fill_null(0))


def to_lists(name: str, elements: pl.Series, lengths: pl.Series) -> pl.Series:
    """Split a column of elements into lists of the given lengths."""
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths.to_numpy(), dtype=np.int64)])
    return pl.Series(name, pa.LargeListArray.from_arrays(pa.array(offsets), elements.rechunk().to_arrow()))


def table_file(name: str) -> str:
    """The file of a vocabulary or code table, whatever characters its name has."""
    return quote(name, safe="") + ".parquet"
