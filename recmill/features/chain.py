"""Chains of steps, and running many features at once.

Steps that are Polars expressions run together, in one call for all features: separate calls would cost more than the
work itself, above all for single rows in the server.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from recmill.errors import FeatureError
from recmill.features import category, lists, numeric
from recmill.features.base import Need, Transform, ValueTable, selected
from recmill.features.stored import StoredValueTable, SubsetValueTable
from recmill.recipe import steps
from recmill.recipe.kinds import LIST_OF, NUMBERS, kinds_along, width_of
from recmill.recipe.recipe import Feature, Label

TRANSFORMS: dict[type[steps.Step], type[Transform[Any]]] = {
    steps.Fill: numeric.FillTransform,
    steps.Clip: numeric.ClipTransform,
    steps.Log: numeric.LogTransform,
    steps.Cast: numeric.CastTransform,
    steps.Add: numeric.AddTransform,
    steps.Standardise: numeric.StandardiseTransform,
    steps.MinMax: numeric.MinMaxTransform,
    steps.Buckets: numeric.BucketsTransform,
    steps.Quantiles: numeric.QuantilesTransform,
    steps.DatePart: numeric.DatePartTransform,
    steps.Map: category.MapTransform,
    steps.Vocabulary: category.VocabularyTransform,
    steps.Lookup: category.LookupTransform,
    steps.Hash: category.HashTransform,
    steps.Key: category.KeyTransform,
    steps.Cross: category.CrossTransform,
    steps.Count: category.CountTransform,
    steps.Frequency: category.FrequencyTransform,
    steps.Target: category.TargetTransform,
    steps.Aggregate: category.AggregateTransform,
    steps.OneHot: category.OneHotTransform,
    steps.Split: lists.SplitTransform,
    steps.First: lists.FirstTransform,
    steps.Concat: lists.ConcatTransform,
    steps.Length: lists.LengthTransform,
    steps.Pad: lists.PadTransform,
    steps.Mask: lists.MaskTransform,
    steps.Pack: lists.PackTransform,
    steps.Expression: lists.ExpressionTransform,
    steps.Function: lists.FunctionTransform,
}


_LISTS_OF_NUMBERS = tuple(LIST_OF + kind for kind in NUMBERS)


@dataclass(frozen=True)
class ColumnInfo:
    """A column of a Table, as models see it."""

    name: str
    kind: str  # number, id, key, numbers, ids or keys; the last three are lists
    role: str  # feature or label
    of: str = "context"
    size: int | None = None  # upper bound of ids; the fixed length of lists of numbers
    dim: int | None = None
    vocabulary: str | None = None


class Finish(Transform[steps.Step]):
    """The final conversion for Tables and models: float32, int32 ids, int64 keys; missing values become 0."""

    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        if not self.takes_lists:
            return _finished_values(columns[0], self.dtype)
        lists = columns[0].list.eval(_finished_values(pl.element(), self.dtype)).cast(pl.List(self.dtype))
        return lists.fill_null(pl.lit([], dtype=pl.List(self.dtype)))

    @property
    def dtype(self) -> pl.DataType:
        return {"id": pl.Int32(), "key": pl.Int64()}.get(self.kind.removeprefix("list of "), pl.Float32())

    def changes_nothing(self, column: pl.Series) -> bool:
        """Ids from lookups need no conversion, which saves the call."""
        return self.dtype.is_integer() and column.dtype == self.dtype and not column.null_count()


def _finished_values(values: pl.Expr, dtype: pl.DataType) -> pl.Expr:
    found = values.cast(dtype)
    if dtype.is_integer():
        return found.fill_null(0)
    # This normalises -0.0 to 0 too: which of the two zeros Polars returns depends on other rows.
    return pl.when(found != 0).then(found).otherwise(pl.lit(0, dtype=dtype))


class Chain:
    """The steps of one feature or label, in order."""

    def __init__(self, feature: Feature | Label, kinds: Mapping[str, str]) -> None:
        self.feature = feature
        self.kinds = kinds_along(feature, kinds)
        self.transforms = [
            TRANSFORMS[type(step)](step, f"{feature.name}/{number}", self.kinds[number])
            for number, step in enumerate(feature.steps)
        ]
        self.finish = Finish(steps.Step(), f"{feature.name}/finish", self.kinds[-1])
        self.all_steps = [*self.transforms, self.finish]
        self.num_ready = 0
        self._expressions: dict[tuple[int, int, bool], tuple[int, pl.Expr | None]] = {}
        written = [
            transform for transform in self.transforms if isinstance(transform, lists.ExpressionTransform)
        ]
        self.has_users_expression = bool(written)
        for transform in written:
            transform.resolve({name: kinds[name] for name in feature.columns})

    def advance(self, tables: Mapping[str, ValueTable]) -> tuple[Transform[Any], Need] | None:
        """Advance over all steps that can apply; returns the first step that must learn, and its request."""
        while self.num_ready < len(self.transforms):
            transform = self.transforms[self.num_ready]
            need = transform.need()
            if need is not None and not self.is_fitted(transform, tables):
                return transform, need
            if isinstance(transform, category.LookupTransform):
                if transform.step.named not in tables:
                    return None
                transform.table = tables[transform.step.named]
            self.num_ready += 1
        return None

    @property
    def is_ready(self) -> bool:
        return self.num_ready == len(self.transforms)

    @staticmethod
    def is_fitted(transform: Transform[Any], tables: Mapping[str, ValueTable]) -> bool:
        if transform.table is None and transform.table_name in tables:
            transform.table = tables[transform.table_name]
        return bool(transform.state) or transform.table is not None

    def stored_steps(self, stop: int) -> list[int]:
        """Indices of the first steps whose vocabulary is not in memory, or only a subset of it."""
        kinds = (StoredValueTable, SubsetValueTable)
        return [number for number, step in enumerate(self.all_steps[:stop]) if isinstance(step.table, kinds)]

    def with_subsets(self, subsets: Mapping[str, SubsetValueTable]) -> Chain:
        """The chain with subsets in place of stored vocabularies."""
        chain = copy.copy(self)
        chain.transforms = [
            transform.with_table(subsets[transform.table_name])
            if isinstance(transform.table, StoredValueTable)
            else transform
            for transform in self.transforms
        ]
        chain.all_steps = [*chain.transforms, self.finish]
        chain._expressions = self._expressions  # expressions contain no vocabulary
        return chain

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_expressions": {}}  # rebuilt where they are needed

    def expression(self, start: int, stop: int, from_result: bool) -> tuple[int, pl.Expr | None]:
        """The steps from `start` that are expressions, combined, and the index after them.

        Cached, because building expressions costs more than running them on one row.
        """
        key = (start, stop, from_result)
        if key not in self._expressions:
            inputs = (
                [pl.col(f"__{self.feature.name}")]
                if from_result
                else [pl.col(n) for n in self.feature.columns]
            )
            expression: pl.Expr | None = None
            while start < stop and (following := self.all_steps[start].express(inputs)) is not None:
                expression, inputs = following, [following]
                start += 1
            named = expression.alias(self.feature.name) if expression is not None else None
            self._expressions[key] = start, named
        return self._expressions[key]

    def info(self) -> ColumnInfo:
        kind = self.kinds[-1]
        element = kind.removeprefix("list of ")
        name = element if element in ("id", "key") else "number"
        last = self.transforms[-1] if self.transforms else None
        return ColumnInfo(
            name=self.feature.name,
            kind=name if kind == element else f"{name}s",
            role="feature" if isinstance(self.feature, Feature) else "label",
            of=getattr(self.feature, "of", "context"),
            size=self._size(),
            dim=getattr(self.feature, "dim", None),
            vocabulary=last.vocabulary() if last else None,
        )

    def _size(self) -> int | None:
        if self.kinds[-1] in _LISTS_OF_NUMBERS:
            return width_of(self.feature)
        sizes = [transform.size() for transform in self.transforms]
        return (
            next((size for size in reversed(sizes) if size is not None), None)
            if "id" in self.kinds[-1]
            else None
        )


def run_chains(frame: pl.DataFrame, jobs: Sequence[tuple[Chain, int]]) -> list[pl.Series]:
    """Run each chain's first steps. Steps of all chains that are expressions run together, in one call."""
    results: dict[str, pl.Series] = {}
    done = [0] * len(jobs)
    while True:
        waiting: list[tuple[Chain, pl.Expr]] = []
        for job, (chain, num_steps) in enumerate(jobs):
            done[job], expression = _advance(frame, chain, done[job], num_steps, results)
            if expression is not None:
                waiting.append((chain, expression))
        if not waiting:
            return [_result(frame, chain, results) for chain, _ in jobs]
        results.update(_evaluate(frame, waiting, results))


def _result(frame: pl.DataFrame, chain: Chain, results: Mapping[str, pl.Series]) -> pl.Series:
    name = chain.feature.name
    return (results[name] if name in results else frame[chain.feature.columns[0]]).alias(name)


def _advance(
    frame: pl.DataFrame, chain: Chain, done: int, num_steps: int, results: dict[str, pl.Series]
) -> tuple[int, pl.Expr | None]:
    """Run the steps without expression; returns the expression of the following ones."""
    name = chain.feature.name
    while done < num_steps:
        if done == len(chain.transforms) and name in results and chain.finish.changes_nothing(results[name]):
            return num_steps, None
        stop, expression = chain.expression(done, num_steps, name in results)
        if expression is not None:
            return stop, expression
        columns = [results[name]] if name in results else [frame[column] for column in chain.feature.columns]
        results[name] = chain.all_steps[done].apply(columns, frame)
        done += 1
    return done, None


def _evaluate(
    frame: pl.DataFrame, waiting: Sequence[tuple[Chain, pl.Expr]], results: Mapping[str, pl.Series]
) -> dict[str, pl.Series]:
    names = [chain.feature.name for chain, _ in waiting]
    rows = frame.with_columns([results[name].alias(f"__{name}") for name in names if name in results])
    try:
        select = selected if any(chain.has_users_expression for chain, _ in waiting) else pl.DataFrame.select
        found = select(rows, [expression for _, expression in waiting])
    except pl.exceptions.PolarsError:
        for chain, expression in waiting:
            _evaluate_alone(rows, chain, expression)
        raise
    return {name: found[name] for name in names}


def _evaluate_alone(rows: pl.DataFrame, chain: Chain, expression: pl.Expr) -> None:
    """Find the feature whose expression fails."""
    try:
        rows.select(expression)
    except pl.exceptions.PolarsError as error:
        raise FeatureError(f'Feature "{chain.feature.name}" failed: {error}') from None


def check_finite(columns: Sequence[pl.Series]) -> None:
    """Raise for a number that is not finite, which would poison a model."""
    for column in columns:
        if column.dtype not in (pl.Float32, pl.List(pl.Float32)):
            continue
        values = column if column.dtype == pl.Float32 else column.explode()
        # With NumPy: for a single row, a query of Polars takes ten times as long.
        numbers = (values.drop_nulls() if values.null_count() else values).to_numpy()
        is_finite = np.isfinite(numbers)
        if not is_finite.all():
            found = numbers[~is_finite][0]
            raise FeatureError(
                f'Feature "{column.name}" gives {found}; numbers must be finite. Add clip before its last step.'
            )
