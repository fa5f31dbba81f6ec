"""Logistic and linear regression over hashed ids, in NumPy: baselines of rankers, and the reference for crosses.

Shapes: B rows, C columns of ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_SLOTS = 1 << 20
_MAX_BATCH, _STEPS = 256, 400  # small batches for few rows, so that an epoch has enough steps
_RATE = 0.05
_FIRST_SUM = 1.0  # initial sum of squared gradients, on the scale of single rows
_BUCKETS = 32  # buckets per number
_MIX, _COLUMN_MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0x2545F4914F6CDD1D)  # odd, else arbitrary


def hashed(columns: Sequence[Array]) -> Array:
    """Columns of ids as slots [B, C] of one table of weights."""
    of_column = np.arange(1, len(columns) + 1, dtype=np.uint64) * _COLUMN_MIX
    slots = np.empty((len(columns[0]), len(columns)), np.int64)
    for number, ids in enumerate(columns):
        mixed = ids.astype(np.int64).view(np.uint64) * _MIX + of_column[number]
        mixed ^= mixed >> np.uint64(29)
        slots[:, number] = (mixed * _MIX >> np.uint64(32)) % np.uint64(_SLOTS)
    return slots


def bucket_edges(numbers: Array) -> Array:
    """Bucket edges with about equally many values in each bucket."""
    return np.unique(np.quantile(numbers, np.linspace(0, 1, _BUCKETS + 1)[1:-1]))


class LogisticRegression:
    """One weight for each slot, learned by Adagrad in a few passes over shuffled rows."""

    name = "logistic regression"

    def __init__(self) -> None:
        self.weights = np.zeros(_SLOTS, np.float32)
        self.bias = 0.0

    def fit(self, slots_BC: Array, labels_B: Array, epochs: int = 2) -> LogisticRegression:
        labels_B = self._begin(labels_B)
        gradients, squares = np.zeros_like(self.weights), np.full_like(self.weights, _FIRST_SUM)
        random, batch = np.random.default_rng(0), min(_MAX_BATCH, max(1, len(labels_B) // _STEPS))
        for _ in range(epochs):
            order = random.permutation(len(labels_B))
            for start in range(0, len(order), batch):
                rows = order[start : start + batch]
                self._step(slots_BC[rows], labels_B[rows], gradients, squares)
        return self

    def _begin(self, labels_B: Array) -> Array:
        """Start from a constant prediction for all rows; returns the targets."""
        rate = (labels_B.sum() + 0.5) / (len(labels_B) + 1)
        self.bias = float(np.log(rate / (1 - rate)))
        return labels_B

    def _outputs(self, slots_BC: Array) -> Array:
        return np.asarray(1 / (1 + np.exp(-self.sums(slots_BC))))

    def _step(self, slots_BC: Array, labels_B: Array, gradients: Array, squares: Array) -> None:
        errors = (self._outputs(slots_BC) - labels_B).astype(np.float32)
        slots = slots_BC.ravel()
        np.add.at(gradients, slots, np.repeat(errors, slots_BC.shape[1]))
        # A slot that occurs twice is read before it is written, and gets the same value twice.
        gradient = gradients[slots]
        squared = squares[slots] + gradient * gradient
        squares[slots] = squared
        self.weights[slots] -= _RATE * gradient / np.sqrt(squared)
        gradients[slots] = 0

    def sums(self, slots_BC: Array) -> Array:
        """The sum of each row's weights: logits [B]."""
        return np.asarray(self.weights[slots_BC].sum(axis=1, dtype=np.float64) + self.bias)

    def predict(self, slots_BC: Array) -> Array:
        """Probabilities [B]."""
        return self._outputs(slots_BC)


class LinearRegression(LogisticRegression):
    """Linear regression for numeric labels, trained on standard deviations from their mean."""

    name = "linear regression"

    def _begin(self, labels_B: Array) -> Array:
        self.mean, self.spread = float(labels_B.mean()), float(labels_B.std()) or 1.0
        return np.asarray((labels_B - self.mean) / self.spread)

    def _outputs(self, slots_BC: Array) -> Array:
        return self.sums(slots_BC)

    def predict(self, slots_BC: Array) -> Array:
        """Predictions [B], in the unit of the labels."""
        return self._outputs(slots_BC) * self.spread + self.mean
