"""Predictions from a ranker's outputs: probabilities of binary labels, and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
_MAX_LOGARITHM = 80.0  # exp of much more overflows float32


def predictions_of(outputs: Array, labels: Sequence[str], losses: Mapping[str, str]) -> Array:
    """Probabilities, or numbers for the labels in `losses`; [B], of several labels [B, K]. Always finite."""
    if not losses:
        return sigmoid(outputs)
    columns = outputs.reshape(len(outputs), -1)
    found = [_number(column, losses.get(label, "")) for label, column in zip(labels, columns.T, strict=True)]
    return np.stack(found, axis=1).reshape(outputs.shape)


def _number(outputs: Array, loss: str) -> Array:
    if not loss:
        return sigmoid(outputs)
    if loss == "squared_log":
        return np.asarray(np.maximum(np.expm1(np.minimum(outputs, _MAX_LOGARITHM)), 0))
    if loss == "weighted_logistic":
        return np.asarray(np.exp(np.clip(outputs, -_MAX_LOGARITHM, _MAX_LOGARITHM)))
    return outputs


def sigmoid(logits: Array) -> Array:
    """The logistic function in float32, as torch computes it, without overflow."""
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1 / (1 + small), small / (1 + small)).astype(np.float32)
