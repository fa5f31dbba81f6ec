"""Steps over numbers."""

from __future__ import annotations

import math

import numpy as np
import polars as pl

from recmill.features.base import Need, NeedsCounts, NeedsMoments, Transform, over_elements
from recmill.kernels import CountOptions, Counts, Moments
from recmill.spec import steps

# A histogram bucket keeps 12 bits after the leading one: whole numbers below 8192 are exact, and a quantile
# is at most 0.025% too close to 0. Unlike sketches, it does not depend on the order of the rows.
_DROPPED_BITS = 40


def histogram_keys(series: pl.Series) -> pl.Series:
    """Numbers as histogram buckets, written as the bits of the bucket's edge; missing and non-finite are missing."""
    values = series.cast(pl.Float64)
    values = values.set(~values.is_finite(), None)
    bits = (values.fill_null(0.0).to_numpy(allow_copy=True) + 0.0).view(np.int64) >> _DROPPED_BITS << _DROPPED_BITS
    return pl.Series(series.name, bits).set(values.is_null(), None)


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
    def need(self, kind: str) -> Need | None:
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

    def apply_one(self, series: pl.Series) -> pl.Series:
        value = self.state.get("value", self.step.value)
        if isinstance(value, float) and series.dtype.is_integer():
            series = series.cast(pl.Float64)
        if series.dtype == pl.Boolean:
            value = bool(value)
        return series.fill_null(pl.Series([value], dtype=series.dtype).item())


class Clip(Transform[steps.Clip]):
    def apply_one(self, series: pl.Series) -> pl.Series:
        return over_elements(series, self._clip)

    def _clip(self, series: pl.Series) -> pl.Series:
        if not series.dtype.is_integer():
            return series.cast(pl.Float64).clip(self.step.min, self.step.max)
        low = None if self.step.min is None else math.ceil(self.step.min)
        high = None if self.step.max is None else math.floor(self.step.max)
        return series.clip(low, high)


class Log(Transform[steps.Log]):
    def apply_one(self, series: pl.Series) -> pl.Series:
        return over_elements(series, lambda x: (x.cast(pl.Float64) + self.step.add).clip(self.step.at_least).log())


_DTYPES: dict[str, type[pl.DataType]] = {"int": pl.Int64, "float": pl.Float64, "text": pl.String, "bool": pl.Boolean}


def dtype_of(kind: str) -> pl.DataType:
    """`list of int` -> List(Int64)."""
    element = _DTYPES[kind.removeprefix("list of ")]()
    return pl.List(element) if kind.startswith("list of ") else element


class Cast(Transform[steps.Cast]):
    def apply_one(self, series: pl.Series) -> pl.Series:
        return over_elements(series, self._cast)

    def _cast(self, series: pl.Series) -> pl.Series:
        if self.step.to == "bool" and series.dtype == pl.String:
            return series.replace_strict({"true": True, "1": True, "false": False, "0": False}, default=None, return_dtype=pl.Boolean)
        return series.cast(_DTYPES[self.step.to], strict=False)


class Add(Transform[steps.Add]):
    def apply_one(self, series: pl.Series) -> pl.Series:
        return over_elements(series, lambda x: x.cast(pl.Float64) + self.step.value)


class Standardise(Transform[steps.Standardise]):
    def need(self, kind: str) -> Need | None:
        return NeedsMoments()

    def learn_moments(self, moments: Moments) -> None:
        self.state = {"mean": moments.mean, "std": moments.std}

    def apply_one(self, series: pl.Series) -> pl.Series:
        return (series.cast(pl.Float64) - self.state["mean"]) / (self.state["std"] or 1.0)


class MinMax(Transform[steps.MinMax]):
    def need(self, kind: str) -> Need | None:
        return NeedsMoments()

    def learn_moments(self, moments: Moments) -> None:
        found = moments.count > 0
        self.state = {"min": moments.min if found else 0.0, "max": moments.max if found else 0.0}

    def apply_one(self, series: pl.Series) -> pl.Series:
        low, high = self.state["min"], self.state["max"]
        share = (series.cast(pl.Float64).clip(low, high) - low) / ((high - low) or 1.0)
        return share * (self.step.max - self.step.min) + self.step.min


def bucket_ids(series: pl.Series, edges: np.ndarray[tuple[int], np.dtype[np.float64]]) -> pl.Series:
    """1 + number of edges at or below x; missing is 0."""
    values = series.cast(pl.Float64)
    ids = np.searchsorted(edges, values.fill_null(0.0).to_numpy(allow_copy=True), side="right") + 1
    return pl.Series(series.name, ids.astype(np.int32)).set(values.is_null() | values.is_nan().fill_null(False), 0)


class Buckets(Transform[steps.Buckets]):
    def apply_one(self, series: pl.Series) -> pl.Series:
        edges = np.asarray(self.step.edges, dtype=np.float64)
        return over_elements(series, lambda x: bucket_ids(x, edges))

    def size(self) -> int:
        return len(self.step.edges) + 2


class Quantiles(Transform[steps.Quantiles]):
    def need(self, kind: str) -> Need | None:
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
    def apply_one(self, series: pl.Series) -> pl.Series:
        per_second = {"s": 1, "ms": 1_000, "us": 1_000_000}[self.step.unit]
        micros = series.cast(pl.Int64) * (1_000_000 // per_second)
        moments = micros.cast(pl.Datetime("us"))
        part = self.step.part
        if part == "weekday":
            return moments.dt.weekday().cast(pl.Int64) - 1
        if part == "day_of_year":
            return moments.dt.ordinal_day().cast(pl.Int64)
        result: pl.Series = getattr(moments.dt, part)()
        return result.cast(pl.Int64)
