"""Steps over text, lists and several columns at once."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from recmill.errors import ExpressionError, FeatureError
from recmill.features.base import Transform, to_lists
from recmill.features.expressions import compiled
from recmill.features.numeric import dtype_of
from recmill.recipe import steps
from recmill.recipe.expressions import Node, parse_expression
from recmill.recipe.expressions.rules import need_result


class SplitTransform(Transform[steps.Split]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        tokens = columns[0].fill_null("").str.split(self.step.separator)
        return tokens.list.eval(pl.element().filter(pl.element() != ""))


class FirstTransform(Transform[steps.First]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        return columns[0].list.head(self.step.count)


class ConcatTransform(Transform[steps.Concat]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        return columns[0].list.join(self.step.separator)


class LengthTransform(Transform[steps.Length]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        return columns[0].list.len().fill_null(0).cast(pl.Int64)


class PadTransform(Transform[steps.Pad]):
    def apply_one(self, series: pl.Series) -> pl.Series:
        length, rows = self.step.length, len(series)
        lengths = series.list.len().fill_null(0).to_numpy().astype(np.int64)
        elements = series.filter(lengths > 0).explode()
        starts = np.cumsum(lengths) - lengths
        kept = np.minimum(lengths, length)
        # The last `kept` elements of each list, then the one past the end, which is the padding.
        slot = np.arange(length)
        source = np.where(slot < kept[:, None], (starts + lengths - kept)[:, None] + slot, len(elements))
        filling = pl.Series([self.step.value], dtype=pl.Float64).cast(elements.dtype)
        padded = elements.append(filling).gather(pl.Series(source.reshape(-1), dtype=pl.UInt32))
        return to_lists(series.name, padded, pl.repeat(length, rows, dtype=pl.Int64, eager=True))


class MaskTransform(Transform[steps.Mask]):
    def apply_one(self, series: pl.Series) -> pl.Series:
        length = self.step.length
        real = series.list.len().fill_null(0).clip(0, length).to_numpy()
        flags = (pl.int_range(length, eager=True).to_numpy()[None, :] < real[:, None]).astype("int64")
        return to_lists(
            series.name,
            pl.Series(flags.reshape(-1)),
            pl.repeat(length, len(series), dtype=pl.Int64, eager=True),
        )


class PackTransform(Transform[steps.Pack]):
    def apply(self, columns: Sequence[pl.Series], frame: pl.DataFrame) -> pl.Series:
        kinds = {column.dtype for column in columns}
        columns = [column.cast(pl.Float64) for column in columns] if len(kinds) > 1 else list(columns)
        named = [column.alias(str(number)) for number, column in enumerate(columns)]
        return pl.DataFrame(named).select(pl.concat_list(pl.all())).to_series().alias(columns[0].name)


class ExpressionTransform(Transform[steps.Expression]):
    tree: Node | None = None

    def resolve(self, kinds: Mapping[str, str]) -> None:
        """Parse the expression over columns of these kinds; must be called before the first use."""
        try:
            self.tree = parse_expression(self.step.sql, kinds)
            need_result(self.tree, self.step.type)
        except ExpressionError as error:
            raise FeatureError(f'Feature "{self.name}": expression "{self.step.sql}", {error}.') from None

    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        assert self.tree is not None
        return compiled(self.tree).cast(dtype_of(self.step.type))


class FunctionTransform(Transform[steps.Function]):
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
        raise FeatureError(f'Feature "{name}" gave {result.dtype}, which is not {kind}: {error}') from None
