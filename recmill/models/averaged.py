"""An ensemble of rankers of the same shape: each learns on its own, and the mean of their scores is served.

Shapes: B rows, F numbers, T embedded features, X embedding sizes of all members together, N members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recmill.models.sequences import ListVectors


class AveragedRanker(nn.Module):
    """N models, each with its own columns of every embedding: logits [B, N] in training, their mean elsewhere."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, numbers_BF: Tensor, pooled_BTX: Tensor, *inputs: Any) -> Tensor:
        parts = zip(self.models, pooled_BTX.chunk(len(self.models), dim=2), strict=True)
        logits_BN = torch.stack(
            [
                model(numbers_BF, pooled_BTD, *self._inputs_of(index, inputs))
                for index, (model, pooled_BTD) in enumerate(parts)
            ],
            dim=1,
        )
        return logits_BN if self.training else logits_BN.mean(dim=1)

    def _inputs_of(self, index: int, inputs: Sequence[Any]) -> list[Any]:
        """A member's columns of unpooled lists; wide weights are the same for all."""
        return [
            [self._list_of(index, one) for one in some] if isinstance(some, list | tuple) else some
            for some in inputs
        ]

    def _list_of(self, index: int, of_all: ListVectors) -> ListVectors:
        return ListVectors(of_all.vectors.chunk(len(self.models), dim=2)[index], of_all.mask)
