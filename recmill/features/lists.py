"""Steps over text, lists and several columns at once."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from recmill.errors import FeatureError
from recmill.features.base import Transform, selected, to_lists
from recmill.features.numeric import dtype_of
from recmill.spec import steps


class Split(Transform[steps.Split]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        tokens = columns[0].fill_null("").str.split(self.step.separator)
        return tokens.list.eval(pl.element().filter(pl.element() != ""))


class First(Transform[steps.First]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        return columns[0].list.head(self.step.count)


class Concat(Transform[steps.Concat]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        return columns[0].list.join(self.step.separator)


class Length(Transform[steps.Length]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        return columns[0].list.len().fill_null(0).cast(pl.Int64)


class Pad(Transform[steps.Pad]):
    def apply_one(self, series: pl.Series) -> pl.Series:
        length, rows = self.step.length, len(series)
        lengths = series.list.len().fill_null(0).to_numpy().astype(np.int64)
        elements = series.filter(lengths > 0).explode()
        starts = np.cumsum(lengths) - lengths
        kept = np.minimum(lengths, length)
        # The last `kept` elements of each list, then the one past the end, which is the filling.
        slot = np.arange(length)
        source = np.where(slot < kept[:, None], (starts + lengths - kept)[:, None] + slot, len(elements))
        filling = pl.Series([self.step.value], dtype=pl.Float64).cast(elements.dtype)
        padded = elements.append(filling).gather(pl.Series(source.reshape(-1), dtype=pl.UInt32))
        return to_lists(series.name, padded, pl.repeat(length, rows, dtype=pl.Int64, eager=True))


class Mask(Transform[steps.Mask]):
    def apply_one(self, series: pl.Series) -> pl.Series:
        length = self.step.length
        real = series.list.len().fill_null(0).clip(0, length).to_numpy()
        flags = (pl.int_range(length, eager=True).to_numpy()[None, :] < real[:, None]).astype("int64")
        return to_lists(
            series.name,
            pl.Series(flags.reshape(-1)),
            pl.repeat(length, len(series), dtype=pl.Int64, eager=True),
        )


class Pack(Transform[steps.Pack]):
    def apply(self, columns: Sequence[pl.Series], frame: pl.DataFrame) -> pl.Series:
        kinds = {column.dtype for column in columns}
        columns = [column.cast(pl.Float64) for column in columns] if len(kinds) > 1 else list(columns)
        named = [column.alias(str(number)) for number, column in enumerate(columns)]
        return pl.DataFrame(named).select(pl.concat_list(pl.all())).to_series().alias(columns[0].name)


class Expression(Transform[steps.Expression]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        return pl.sql_expr(self.step.sql).cast(dtype_of(self.step.type))

    def check(self, kinds: Mapping[str, str]) -> None:
        """Try the expression on a few rows: it must be SQL, fit the columns and treat rows one by one."""
        probe = pl.DataFrame(
            {name: pl.Series(_PROBES[kind], dtype=dtype_of(kind)) for name, kind in kinds.items()}
        )
        try:
            expression = self.express([])
            together = selected(probe, [expression]).to_series()
            alone = pl.concat([selected(probe[row], [expression]).to_series() for row in range(probe.height)])
        except pl.exceptions.PolarsError as error:
            raise FeatureError(
                f'Feature "{self.name}": expression "{self.step.sql}" fails: {error}. '
                "Columns called like a word of SQL, such as user or when, need double quotes."
            ) from None
        if not together.equals(alone):
            raise FeatureError(
                f'Feature "{self.name}": "{self.step.sql}" looks at several rows at once; '
                "an expression must treat rows one by one. Use aggregate, count or target for statistics."
            )


_PROBES: dict[str, list[Any]] = {
    "int": [7, -3, 1_000_000, 12],
    "float": [0.5, -2.0, 30.25, 4e6],
    "bool": [True, False, True, False],
    "text": ["b", "a", "", "zz"],
    "list of int": [[3], [], [1, 2], [9]],
    "list of float": [[0.5], [], [1.0, 2.0], [9.5]],
    "list of bool": [[True], [], [False, True], [False]],
    "list of text": [["b"], [], ["a", "c"], ["zz"]],
}


class Function(Transform[steps.Function]):
    def apply(self, columns: Sequence[pl.Series], frame: pl.DataFrame) -> pl.Series:
        result = import_function(self.step.path)(*columns)
        if not isinstance(result, pl.Series):
            raise FeatureError(
                f'Feature "{self.name}": {self.step.path} must return a Polars series, got {type(result).__name__}.'
            )
        return _checked(result, len(columns[0]), self.name, self.step.type)


def import_function(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise FeatureError(
            f"Function {path} cannot be imported: {error}. Is its package installed here?"
        ) from None


def _checked(result: pl.Series, rows: int, name: str, kind: str) -> pl.Series:
    if len(result) != rows:
        raise FeatureError(
            f'Feature "{name}" got {len(result)} values for {rows} rows; it must give one for each row.'
        )
    try:
        return result.cast(dtype_of(kind))
    except pl.exceptions.PolarsError as error:
        raise FeatureError(f'Feature "{name}" gave {result.dtype}, which is no {kind}: {error}') from None
