"""Steps over text, lists and several columns at once."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import polars as pl

from recmill.errors import FeatureError
from recmill.features.base import Transform, to_lists
from recmill.features.numeric import dtype_of
from recmill.spec import steps


class Split(Transform[steps.Split]):
    def apply_one(self, series: pl.Series) -> pl.Series:
        tokens = series.fill_null("").str.split(self.step.separator)
        return tokens.list.filter(pl.element() != "")


class First(Transform[steps.First]):
    def apply_one(self, series: pl.Series) -> pl.Series:
        return series.list.head(self.step.count)


class Concat(Transform[steps.Concat]):
    def apply_one(self, series: pl.Series) -> pl.Series:
        return series.list.join(self.step.separator)


class Length(Transform[steps.Length]):
    def apply_one(self, series: pl.Series) -> pl.Series:
        return series.list.len().fill_null(0).cast(pl.Int64)


class Pad(Transform[steps.Pad]):
    def apply_one(self, series: pl.Series) -> pl.Series:
        element = series.dtype.inner  # type: ignore[attr-defined]
        padding = pl.Series([self.step.value], dtype=pl.Float64).cast(element)
        length = self.step.length
        lists = series.list.tail(length).fill_null(pl.Series([[]], dtype=series.dtype).first())
        filled = padding.new_from_index(0, length).implode().new_from_index(0, len(series))
        return pl.DataFrame({"a": lists, "b": filled}).select(pl.concat_list("a", "b").list.head(length)).to_series().alias(series.name)


class Mask(Transform[steps.Mask]):
    def apply_one(self, series: pl.Series) -> pl.Series:
        length = self.step.length
        real = series.list.len().fill_null(0).clip(0, length).to_numpy()
        flags = (pl.int_range(length, eager=True).to_numpy()[None, :] < real[:, None]).astype("int64")
        return to_lists(series.name, pl.Series(flags.reshape(-1)), pl.repeat(length, len(series), dtype=pl.Int64, eager=True))


class Pack(Transform[steps.Pack]):
    def apply(self, columns: Sequence[pl.Series], frame: pl.DataFrame) -> pl.Series:
        kinds = {column.dtype for column in columns}
        columns = [column.cast(pl.Float64) for column in columns] if len(kinds) > 1 else list(columns)
        named = [column.alias(str(number)) for number, column in enumerate(columns)]
        return pl.DataFrame(named).select(pl.concat_list(pl.all())).to_series().alias(columns[0].name)


class Expression(Transform[steps.Expression]):
    def apply(self, columns: Sequence[pl.Series], frame: pl.DataFrame) -> pl.Series:
        rows = pl.DataFrame(list(columns))
        try:
            result = rows.select(pl.sql_expr(self.step.sql).alias("result")).to_series()
        except (pl.exceptions.PolarsError, pl.exceptions.ColumnNotFoundError) as error:
            raise FeatureError(f'Feature "{self.name}": expression "{self.step.sql}" failed: {error}') from None
        return _checked(result, len(rows), self.name, self.step.type)


class Function(Transform[steps.Function]):
    def apply(self, columns: Sequence[pl.Series], frame: pl.DataFrame) -> pl.Series:
        result = import_function(self.step.path)(*columns)
        if not isinstance(result, pl.Series):
            raise FeatureError(f'Feature "{self.name}": {self.step.path} must return a Polars series, got {type(result).__name__}.')
        return _checked(result, len(columns[0]), self.name, self.step.type)


def import_function(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise FeatureError(f"Function {path} cannot be imported: {error}. Is its package installed here?") from None


def _checked(result: pl.Series, rows: int, name: str, kind: str) -> pl.Series:
    if len(result) != rows:
        raise FeatureError(f'Feature "{name}" got {len(result)} values for {rows} rows; it must give one for each row.')
    try:
        return result.cast(dtype_of(kind))
    except pl.exceptions.PolarsError as error:
        raise FeatureError(f'Feature "{name}" gave {result.dtype}, which is no {kind}: {error}') from None
