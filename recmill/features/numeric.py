"""Steps over numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import polars as pl

from recmill.features.base import Need, NeedsCounts, NeedsMoments, Transform, each, over_elements
from recmill.kernels import CountOptions, Counts, Moments
from recmill.spec import steps

# A histogram bucket keeps 12 bits after the leading one: whole numbers below 8192 are exact, and a quantile
# is at most 0.025% too close to 0. Unlike sketches, it does not depend on the order of the rows.
_DROPPED_BITS = 40


def histogram_keys(series: pl.Series) -> pl.Series:
    """Numbers as histogram buckets, written as the bits of the bucket's edge; missing and non-finite are missing."""
    values = series.cast(pl.Float64).to_numpy() + 0.0  # -0.0 becomes 0.0
    bits = values.view(np.int64) >> _DROPPED_BITS << _DROPPED_BITS
    return pl.Series(series.name, bits).set(pl.Series(~np.isfinite(values)), None)


class Histogram:
    """Sorted bucket edges with their counts."""

    def __init__(self, counts: Counts) -> None:
        edges = counts.values.to_numpy().view(np.float64)
        order = np.argsort(edges, kind="stable")
        self.edges = edges[order]
        self.cumulative = np.cumsum(counts.counts.to_numpy()[order])

    def quantile(self, share: float) -> float:
        """The least edge with at least `share` of the values at or below it."""
        if not len(self.edges):
            return 0.0
        rank = max(1, math.ceil(share * int(self.cumulative[-1])))
        return float(self.edges[np.searchsorted(self.cumulative, rank)])


class Fill(Transform[steps.Fill]):
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

    def learn_counts(self, counts: Counts) -> None:
        self.state = {"value": Histogram(counts).quantile(0.5)}

    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        value = self.state.get("value", self.step.value)
        column = columns[0].cast(pl.Float64) if isinstance(value, float) and self.kind != "text" else columns[0]
        return column.fill_null(bool(value) if self.kind == "bool" and not isinstance(value, float) else value)


class Clip(Transform[steps.Clip]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        low, high = self.step.min, self.step.max
        if self.kind.endswith("float"):
            return each(columns, self.takes_lists, lambda x: x.clip(low, high))
        least = None if low is None else math.ceil(low)
        most = None if high is None else math.floor(high)
        return each(columns, self.takes_lists, lambda x: x.cast(pl.Int64).clip(least, most))


class Log(Transform[steps.Log]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        return each(
            columns, self.takes_lists, lambda x: (x.cast(pl.Float64) + self.step.add).clip(self.step.at_least).log()
        )


_DTYPES: dict[str, type[pl.DataType]] = {"int": pl.Int64, "float": pl.Float64, "text": pl.String, "bool": pl.Boolean}


def dtype_of(kind: str) -> pl.DataType:
    """`list of int` -> List(Int64)."""
    element = _DTYPES[kind.removeprefix("list of ")]()
    return pl.List(element) if kind.startswith("list of ") else element


_TRUTHS = {"true": True, "True": True, "1": True, "false": False, "False": False, "0": False}


class Cast(Transform[steps.Cast]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        return each(columns, self.takes_lists, self._cast)

    def _cast(self, column: pl.Expr) -> pl.Expr:
        if self.step.to == "bool" and self.kind.endswith("text"):
            return column.replace_strict(_TRUTHS, default=None, return_dtype=pl.Boolean)
        return column.cast(_DTYPES[self.step.to], strict=False)


class Add(Transform[steps.Add]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        return each(columns, self.takes_lists, lambda x: x.cast(pl.Float64) + self.step.value)


class Standardise(Transform[steps.Standardise]):
    def need(self) -> Need | None:
        return NeedsMoments()

    def learn_moments(self, moments: Moments) -> None:
        self.state = {"mean": moments.mean, "std": moments.std}

    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        return (columns[0].cast(pl.Float64) - self.state["mean"]) / (self.state["std"] or 1.0)


class MinMax(Transform[steps.MinMax]):
    def need(self) -> Need | None:
        return NeedsMoments()

    def learn_moments(self, moments: Moments) -> None:
        found = moments.count > 0
        self.state = {"min": moments.min if found else 0.0, "max": moments.max if found else 0.0}

    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        low, high = self.state["min"], self.state["max"]
        share = (columns[0].cast(pl.Float64).clip(low, high) - low) / ((high - low) or 1.0)
        return share * (self.step.max - self.step.min) + self.step.min


def bucket_ids(series: pl.Series, edges: np.ndarray[tuple[int], np.dtype[np.float64]]) -> pl.Series:
    """1 + number of edges at or below x; missing is 0."""
    values = series.cast(pl.Float64).to_numpy()  # missing becomes NaN
    ids = np.searchsorted(edges, values, side="right") + 1
    return pl.Series(series.name, np.where(np.isnan(values), 0, ids).astype(np.int32))


class Buckets(Transform[steps.Buckets]):
    def apply_one(self, series: pl.Series) -> pl.Series:
        edges = np.asarray(self.step.edges, dtype=np.float64)
        return over_elements(series, lambda x: bucket_ids(x, edges))

    def size(self) -> int:
        return len(self.step.edges) + 2


class Quantiles(Transform[steps.Quantiles]):
    def need(self) -> Need | None:
        return NeedsCounts(self.name, CountOptions(is_text=False))

    def counted(self, series: pl.Series) -> pl.Series:
        return histogram_keys(series)

    def learn_counts(self, counts: Counts) -> None:
        histogram = Histogram(counts)
        shares = [number / self.step.buckets for number in range(1, self.step.buckets)]
        self.state = {"edges": sorted({histogram.quantile(share) for share in shares})}

    def apply_one(self, series: pl.Series) -> pl.Series:
        return bucket_ids(series, np.asarray(self.state["edges"], dtype=np.float64))

    def size(self) -> int:
        return len(self.state.get("edges", ())) + 2


class DatePart(Transform[steps.DatePart]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        micros = {"s": 1_000_000, "ms": 1_000, "us": 1}[self.step.unit]
        moments = (columns[0].cast(pl.Int64) * micros).cast(pl.Datetime("us")).dt
        if self.step.part == "weekday":
            return moments.weekday().cast(pl.Int64) - 1
        if self.step.part == "day_of_year":
            return moments.ordinal_day().cast(pl.Int64)
        part: pl.Expr = getattr(moments, self.step.part)()
        return part.cast(pl.Int64)
