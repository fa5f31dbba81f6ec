"""Latencies in bins that grow by one percent, so that any percentile is right within half a percent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
_LEAST = 1e-6  # seconds; whatever is shorter counts as this
_LOG_GROWTH = math.log(1.01)
_NUM_BINS = 2200  # up to about 50 minutes


@dataclass(frozen=True)
class Latencies:
    """How often each latency was seen; the sum and the largest are exact."""

    counts: Array
    seconds: float
    longest: float

    @staticmethod
    def of(seconds: Array) -> Latencies:
        bins = np.log(np.maximum(seconds, _LEAST) / _LEAST) / _LOG_GROWTH
        counts = np.bincount(np.minimum(bins.astype(np.int64), _NUM_BINS - 1), minlength=_NUM_BINS)
        return Latencies(counts, float(seconds.sum()), float(seconds.max(initial=0.0)))

    @property
    def number(self) -> int:
        return int(self.counts.sum())

    def percentile(self, share: float) -> float:
        """Seconds within which that share was answered; not a number when there was no answer."""
        if not self.number:
            return math.nan
        place = int(np.searchsorted(np.cumsum(self.counts), math.ceil(share * self.number)))
        return min(_middle(place), self.longest)

    def as_dict(self) -> dict[str, float | None]:
        """Milliseconds: the percentiles, the mean and the maximum."""
        found = {name: self.percentile(share) for name, share in PERCENTILES.items()}
        found |= {"max": self.longest, "mean": self.seconds / max(1, self.number)}
        return {
            f"{name}_ms": round(value * 1e3, 4) if self.number and math.isfinite(value) else None
            for name, value in found.items()
        }

    def bins(self) -> list[tuple[float, int]]:
        """(upper edge in milliseconds, count) of every bin that is not empty."""
        places = np.flatnonzero(self.counts)
        return [(round(_edge(int(place) + 1) * 1e3, 5), int(self.counts[place])) for place in places]


def _edge(place: int) -> float:
    return _LEAST * math.exp(place * _LOG_GROWTH)


def _middle(place: int) -> float:
    return _edge(place) * math.exp(_LOG_GROWTH / 2)
