"""Wide & Deep: a linear part that remembers, and an MLP that generalises."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recmill.models.layers import MLP
from recmill.recipe.recipe import Ranking


class WideDeep(nn.Module):
    """Logits from numbers [B, F], pooled embeddings [B, T, D] and wide weights [B, W].

    A wide feature is a table of dimension 1, so its weights are learned by the table's own optimizer (FTRL).
    """

    def __init__(self, spec: Ranking, num_numbers: int, num_embedded: int) -> None:
        super().__init__()
        width = num_numbers + num_embedded * spec.embedding_dim
        self.deep = MLP([width, *spec.hidden, 1], last_relu=False, dropout=spec.dropout)

    def forward(self, numbers_BF: Tensor, pooled_BTD: Tensor, wide_BW: Tensor | None = None) -> Tensor:
        deep = self.deep(torch.cat([numbers_BF, pooled_BTD.flatten(1)], dim=1)).squeeze(1)
        return deep if wide_BW is None else deep + wide_BW.sum(dim=1)  # type: ignore[no-any-return]
