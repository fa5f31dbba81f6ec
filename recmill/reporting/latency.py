"""A histogram of latencies, for the server's live charts and for load tests.

Bins grow by one percent, so that any percentile is within half a percent of the exact one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
NUM_BINS = 2_200  # up to about 50 minutes
_LEAST = 1e-6  # seconds; the lower end of the first bin
_LOG_GROWTH = math.log(1.01)


def bin_of(seconds: float) -> int:
    """The bin of one latency. Plain arithmetic: a server calls it for every request."""
    return min(int(math.log(seconds / _LEAST) / _LOG_GROWTH), NUM_BINS - 1) if seconds > _LEAST else 0


def percentile(counts: Array, fraction: float) -> Array:
    """The latency quantile of counts [..., NUM_BINS], in seconds; NaN without requests."""
    below = np.cumsum(counts, axis=-1)
    totals = below[..., -1:]
    bins = np.argmax(below >= fraction * totals, axis=-1)
    middles = _LEAST * np.exp(_LOG_GROWTH * (bins + 0.5))
    return np.where(totals[..., 0] > 0, middles, np.nan)


@dataclass(frozen=True)
class LatencyHistogram:
    """Counts of latencies; the sum and the largest are exact."""

    counts: Array
    total_seconds: float
    max_seconds: float

    @classmethod
    def of(cls, seconds: Array) -> LatencyHistogram:
        bins = np.log(np.maximum(seconds, _LEAST) / _LEAST) / _LOG_GROWTH
        counts = np.bincount(np.minimum(bins.astype(np.int64), NUM_BINS - 1), minlength=NUM_BINS)
        return cls(counts, float(seconds.sum()), float(seconds.max(initial=0.0)))

    @property
    def num_requests(self) -> int:
        return int(self.counts.sum())

    def percentile(self, fraction: float) -> float:
        """The latency quantile in seconds; NaN without requests."""
        return min(float(percentile(self.counts, fraction)), self.max_seconds)

    def as_dict(self) -> dict[str, float | None]:
        """Milliseconds: the percentiles, the mean and the maximum."""
        seconds = {name: self.percentile(fraction) for name, fraction in PERCENTILES.items()}
        seconds |= {"max": self.max_seconds, "mean": self.total_seconds / max(1, self.num_requests)}
        return {
            f"{name}_ms": round(value * 1e3, 4) if self.num_requests else None
            for name, value in seconds.items()
        }

    def bins(self) -> list[tuple[float, int]]:
        """(upper edge in milliseconds, count) of every bin that is not empty."""
        full = np.flatnonzero(self.counts)
        edges = _LEAST * np.exp(_LOG_GROWTH * (full + 1)) * 1e3
        return list(zip(edges.round(5).tolist(), self.counts[full].tolist(), strict=True))
