"""Numeric labels: the scale of outputs, and losses.

The layers of a model work with numbers around 1, so their outputs are multiplied by the standard deviation of the
label and shifted by its mean, both from the first batch. Losses are on the layers' scale: learning rates, and weights
of tasks, do not depend on whether a duration is in seconds or in hours.

Shapes: B rows, K labels, N parallel models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

LOGARITHMIC = ("squared_log", "weighted_logistic")  # losses for labels of 0 or more
_LEAST = 1e-6

Array = np.ndarray[Any, np.dtype[Any]]


class NumberRanker(nn.Module):
    """A ranker with numeric labels: outputs [B] or [B, K]; [B, N] when several models train."""

    offset: Tensor
    scale: Tensor

    def __init__(self, model: nn.Module, labels: Sequence[str], losses: Mapping[str, str]) -> None:
        super().__init__()
        self.model = model
        self.losses = [losses.get(label, "") for label in labels]
        shape = (len(labels),) if len(labels) > 1 else ()
        self.register_buffer("offset", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))

    def forward(self, *inputs: Any) -> Tensor:
        return self.model(*inputs) * self.scale + self.offset  # type: ignore[no-any-return]

    def start(self, sums: Sequence[tuple[float, float]], num_rows: int) -> None:
        """Set the scale of outputs from the sums of each label, as given by `as_predicted`, and of its squares."""
        means = [first / num_rows for first, _ in sums]
        spreads = [
            math.sqrt(max(0.0, second / num_rows - mean * mean))
            for mean, (_, second) in zip(means, sums, strict=True)
        ]
        placed = [_placed(*of_label) for of_label in zip(self.losses, means, spreads, strict=True)]
        for buffer, values in zip((self.offset, self.scale), zip(*placed, strict=True), strict=True):
            buffer.copy_(torch.tensor(values).reshape(buffer.shape))

    def row_losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each output."""
        if len(self.losses) == 1:
            return _losses(self.losses[0], outputs, labels, self.scale)
        columns = zip(self.losses, outputs.unbind(1), labels.unbind(1), self.scale, strict=True)
        return torch.stack([_losses(*of_label) for of_label in columns], dim=1)


def as_predicted(loss: str, labels: Array) -> Array:
    """Labels in the form that outputs predict."""
    return np.log1p(labels) if loss == "squared_log" else labels


def _placed(loss: str, mean: float, spread: float) -> tuple[float, float]:
    """Shift and scale outputs."""
    if not loss:
        return 0.0, 1.0
    if loss == "weighted_logistic":
        return math.log(max(mean, _LEAST)), 1.0
    return mean, spread or 1.0


def _losses(loss: str, outputs: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
    if not loss:
        return functional.binary_cross_entropy_with_logits(outputs, labels, reduction="none")
    if loss == "weighted_logistic":
        # Each row counts as a negative one, and as a positive one weighted by its label: the odds become its mean.
        return functional.softplus(outputs) + labels * functional.softplus(-outputs)
    errors = (outputs - (torch.log1p(labels) if loss == "squared_log" else labels)) / scale
    if loss == "huber":
        return functional.smooth_l1_loss(errors, torch.zeros_like(errors), reduction="none")
    return errors.square() / 2
