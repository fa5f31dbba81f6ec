"""Quality of numeric predictions. All sums are mergeable, so shards may be measured anywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

MAX_PAIRS = 1 << 17  # pairs of label and prediction from which rank correlation is computed
_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, else arbitrary


def rank_correlation(labels: Array, predictions: Array, counts: Array | None = None) -> float:
    """Spearman's rank correlation, equal values sharing their mean rank; 0 when all labels or predictions are equal."""
    weights = np.ones(len(labels)) if counts is None else counts.astype(np.float64)
    ranks = [_middle_ranks(values, weights) for values in (labels, predictions)]
    centred = [values - np.average(values, weights=weights) for values in ranks]
    spread = math.sqrt(math.prod(float((weights * values * values).sum()) for values in centred))
    return float((weights * centred[0] * centred[1]).sum()) / spread if spread else 0.0


def _middle_ranks(values: Array, weights: Array) -> Array:
    _, indices = np.unique(values, return_inverse=True)
    rows = np.bincount(indices, weights)
    return np.asarray((np.cumsum(rows) - rows / 2)[indices])


@dataclass
class NumberSums:
    """Sums over (label, prediction) pairs from which every metric of a predicted number follows.

    Rank correlation needs the pairs themselves. Of more than MAX_PAIRS distinct pairs, those with the smallest hashes
    are kept, with their counts: a sample that does not depend on the order of additions.
    """

    rows: int = 0
    label: float = 0.0
    label_squared: float = 0.0
    prediction: float = 0.0
    error: float = 0.0  # sum of absolute errors
    error_squared: float = 0.0
    pairs: Array = field(default_factory=lambda: np.empty(0, np.uint64))  # label and prediction as float32
    counts: Array = field(default_factory=lambda: np.empty(0, np.int64))

    def add(self, labels: Array, predictions: Array) -> None:
        """Count one batch."""
        if len(labels) != len(predictions):
            raise ValueError(f"{len(labels)} labels for {len(predictions)} predictions")
        known, found = labels.astype(np.float64), predictions.astype(np.float64)
        errors = found - known
        both = np.stack([labels, predictions], axis=1).astype(np.float32)
        pairs = np.ascontiguousarray(both).view(np.uint64)[:, 0]
        added = NumberSums(
            len(labels),
            float(known.sum()),
            float(np.square(known).sum()),
            float(found.sum()),
            float(np.abs(errors).sum()),
            float(np.square(errors).sum()),
            *_smallest(pairs, np.ones(len(pairs), np.int64)),
        )
        vars(self).update(vars(self + added))

    def __add__(self, other: NumberSums) -> NumberSums:
        return NumberSums(
            self.rows + other.rows,
            self.label + other.label,
            self.label_squared + other.label_squared,
            self.prediction + other.prediction,
            self.error + other.error,
            self.error_squared + other.error_squared,
            *_smallest(
                np.concatenate([self.pairs, other.pairs]), np.concatenate([self.counts, other.counts])
            ),
        )

    @property
    def num_rows(self) -> int:
        return self.rows

    def sample(self) -> tuple[Array, Array, Array]:
        """Labels, predictions, and the number of rows of each pair."""
        both = self.pairs.view(np.float32).reshape(-1, 2)
        return both[:, 0], both[:, 1], self.counts

    def metrics(self) -> NumberMetrics:
        """The final metrics; an empty sum is an error."""
        if not self.rows:
            raise ValueError("no rows were measured")
        mean = self.label / self.rows
        variance = max(0.0, self.label_squared / self.rows - mean * mean)
        squared = self.error_squared / self.rows
        return NumberMetrics(
            rows=self.rows,
            mean=mean,
            rmse=math.sqrt(squared),
            constant_rmse=math.sqrt(variance),
            mae=self.error / self.rows,
            r2=1 - squared / variance if variance else -math.inf,
            rank_correlation=rank_correlation(*self.sample()),
            calibration=self.prediction / self.label if self.label else math.inf,
        )

    def curve(self, buckets: int = 10) -> list[tuple[float, float, int]]:
        """Mean prediction, mean label and rows of buckets with about equally many rows, lowest predictions first."""
        labels, predictions, counts = self.sample()
        order = np.argsort(predictions, kind="stable")
        ends = np.cumsum(counts[order])
        cut = np.searchsorted(ends, np.linspace(0, ends[-1], buckets + 1)[1:-1]) + 1
        return [
            (
                float(np.average(predictions[part], weights=counts[part])),
                float(np.average(labels[part], weights=counts[part])),
                int(counts[part].sum()),
            )
            for part in np.split(order, np.unique(cut))
            if len(part)
        ]


def _smallest(pairs: Array, counts: Array) -> tuple[Array, Array]:
    """The distinct pairs with the smallest hashes."""
    known, indices = np.unique(pairs, return_inverse=True)
    summed = np.bincount(indices, counts, minlength=len(known)).astype(np.int64)
    if len(known) <= MAX_PAIRS:
        return known, summed
    mixed = known * _MIX
    mixed ^= mixed >> np.uint64(29)
    kept = np.sort(np.argsort(mixed * _MIX, kind="stable")[:MAX_PAIRS])
    return known[kept], summed[kept]


@dataclass(frozen=True)
class NumberMetrics:
    """Predictions of a number on one set of rows. R2 above 0 beats the mean of these rows as a constant prediction."""

    rows: int
    mean: float  # mean of the labels
    rmse: float
    constant_rmse: float
    mae: float
    r2: float
    rank_correlation: float
    calibration: float

    def as_dict(self) -> dict[str, float]:
        return dict(vars(self))
