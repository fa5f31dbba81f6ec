"""Steps over numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import polars as pl

from recmill.features.base import (
    Need,
    NeedsCounts,
    NeedsMoments,
    Transform,
    divided,
    each,
    over_elements,
)
from recmill.features.kernels import CountOptions, Moments, StoredCounts, ValueCounts
from recmill.recipe import steps

# A histogram bucket keeps 12 bits after the leading one: whole numbers below 8192 are exact, and a quantile is at
# most 0.025% below the true one. Unlike sketches, it does not depend on the order of the rows.
_DROPPED_BITS = 40


def histogram_keys(series: pl.Series) -> pl.Series:
    """Numbers as histogram buckets, in the bits of the lower edge; missing and non-finite values are missing."""
    values = series.cast(pl.Float64).to_numpy() + 0.0  # -0.0 becomes 0.0
    # Dropping bits moves a number towards 0, so a negative one is first moved away from it.
    away = np.where(values < 0, (1 << _DROPPED_BITS) - 1, 0)
    bits = (values.view(np.int64) + away) >> _DROPPED_BITS << _DROPPED_BITS
    return pl.Series(series.name, bits).set(pl.Series(~np.isfinite(values)), None)


class BucketCounts:
    """Sorted bucket edges with their counts."""

    def __init__(self, counts: ValueCounts) -> None:
        edges = counts.values.to_numpy().view(np.float64)
        order = np.argsort(edges, kind="stable")
        self.edges = edges[order]
        self.cumulative = np.cumsum(counts.counts.to_numpy()[order])

    def median(self) -> float:
        """The median; the lower one of the two when their number is even."""
        return float(self.edges[self._bucket(1, 2)]) if len(self.edges) else 0.0

    def edges_between(self, parts: int) -> list[float]:
        """Edges that cut the values into parts of about equal size; fewer when one value fills several parts."""
        if not len(self.edges):
            return []
        above = {self._bucket(number, parts) + 1 for number in range(1, parts)}
        return [float(self.edges[bucket]) for bucket in sorted(above) if bucket < len(self.edges)]

    def _bucket(self, number: int, parts: int) -> int:
        """The first bucket with at least number / parts of the values at or below it."""
        rank = max(1, -(-int(self.cumulative[-1]) * number // parts))
        return int(np.searchsorted(self.cumulative, rank))


class FillTransform(Transform[steps.Fill]):
    def need(self) -> Need | None:
        if self.step.statistic == "mean":
            return NeedsMoments()
        if self.step.statistic == "median":
            return NeedsCounts(self.name, CountOptions(is_text=False))
        return None

    def learn_moments(self, moments: Moments) -> None:
        self.state = {"value": moments.mean}

    def counted(self, series: pl.Series) -> pl.Series:
        return histogram_keys(series)

    def learn_counts(self, counts: ValueCounts | StoredCounts) -> None:
        self.state = {"value": BucketCounts(counts.load(self.name)).median()}

    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        value = self.state.get("value", self.step.value)
        column = (
            columns[0].cast(pl.Float64) if isinstance(value, float) and self.kind != "text" else columns[0]
        )
        return column.fill_null(
            bool(value) if self.kind == "bool" and not isinstance(value, float) else value
        )


class ClipTransform(Transform[steps.Clip]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        low, high = self.step.min, self.step.max
        if self.kind.endswith("float"):
            return each(columns, self.takes_lists, lambda x: x.clip(low, high))
        least = None if low is None else math.ceil(low)
        most = None if high is None else math.floor(high)
        return each(columns, self.takes_lists, lambda x: x.cast(pl.Int64).clip(least, most))


class LogTransform(Transform[steps.Log]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        return each(
            columns,
            self.takes_lists,
            lambda x: (x.cast(pl.Float64) + self.step.add).clip(self.step.at_least).log(),
        )


_DTYPES: dict[str, type[pl.DataType]] = {
    "int": pl.Int64,
    "float": pl.Float64,
    "text": pl.String,
    "bool": pl.Boolean,
}


def dtype_of(kind: str) -> pl.DataType:
    """`list of int` -> List(Int64)."""
    element = _DTYPES[kind.removeprefix("list of ")]()
    return pl.List(element) if kind.startswith("list of ") else element


_TRUTHS = {"true": True, "True": True, "1": True, "false": False, "False": False, "0": False}


class CastTransform(Transform[steps.Cast]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        return each(columns, self.takes_lists, self._cast)

    def _cast(self, column: pl.Expr) -> pl.Expr:
        if self.step.to == "bool" and self.kind.endswith("text"):
            return column.replace_strict(_TRUTHS, default=None, return_dtype=pl.Boolean)
        result = column.cast(_DTYPES[self.step.to], strict=False)
        return pl.when(result.is_finite()).then(result) if self.step.to == "float" else result


class AddTransform(Transform[steps.Add]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        return each(columns, self.takes_lists, lambda x: x.cast(pl.Float64) + self.step.value)


class StandardiseTransform(Transform[steps.Standardise]):
    def need(self) -> Need | None:
        return NeedsMoments()

    def learn_moments(self, moments: Moments) -> None:
        self.state = {"mean": moments.mean, "std": moments.std}

    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        mean, std = float(self.state["mean"]), float(self.state["std"])
        return divided(columns[0].cast(pl.Float64) - mean, std or 1.0)


class MinMaxTransform(Transform[steps.MinMax]):
    def need(self) -> Need | None:
        return NeedsMoments()

    def learn_moments(self, moments: Moments) -> None:
        found = moments.count > 0
        self.state = {"min": moments.min if found else 0.0, "max": moments.max if found else 0.0}

    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        low, high = float(self.state["min"]), float(self.state["max"])
        share = divided(columns[0].cast(pl.Float64).clip(low, high) - low, (high - low) or 1.0)
        return share * (self.step.max - self.step.min) + self.step.min


def bucket_ids(series: pl.Series, edges: np.ndarray[tuple[int], np.dtype[np.float64]]) -> pl.Series:
    """1 + number of edges at or below x; missing is 0."""
    values = series.cast(pl.Float64).to_numpy()  # missing becomes NaN
    ids = np.searchsorted(edges, values, side="right") + 1
    return pl.Series(series.name, np.where(np.isnan(values), 0, ids).astype(np.int32))


class BucketsTransform(Transform[steps.Buckets]):
    def apply_one(self, series: pl.Series) -> pl.Series:
        edges = np.asarray(self.step.edges, dtype=np.float64)
        return over_elements(series, lambda x: bucket_ids(x, edges))

    def size(self) -> int:
        return len(self.step.edges) + 2


class QuantilesTransform(Transform[steps.Quantiles]):
    def need(self) -> Need | None:
        return NeedsCounts(self.name, CountOptions(is_text=False))

    def counted(self, series: pl.Series) -> pl.Series:
        return histogram_keys(series)

    def learn_counts(self, counts: ValueCounts | StoredCounts) -> None:
        self.state = {"edges": BucketCounts(counts.load(self.name)).edges_between(self.step.buckets)}

    def apply_one(self, series: pl.Series) -> pl.Series:
        return bucket_ids(series, np.asarray(self.state["edges"], dtype=np.float64))

    def size(self) -> int:
        return len(self.state.get("edges", ())) + 2


class DatePartTransform(Transform[steps.DatePart]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        micros = {"s": 1_000_000, "ms": 1_000, "us": 1}[self.step.unit]
        number = columns[0].floor() if self.kind == "float" else columns[0]
        count = number.cast(pl.Int64, strict=False)
        limit = (2**63 - 1) // micros
        moments = (pl.when(count.is_between(-limit, limit)).then(count) * micros).cast(pl.Datetime("us")).dt
        if self.step.part == "weekday":
            return moments.weekday().cast(pl.Int64) - 1
        if self.step.part == "day_of_year":
            return moments.ordinal_day().cast(pl.Int64)
        part: pl.Expr = getattr(moments, self.step.part)()
        return part.cast(pl.Int64)
