"""DeepFM: a factorization machine and an MLP over the same embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recmill.models.layers import PairwiseSum, add_wide, scoring_mlp
from recmill.recipe.recipe import Ranking


class DeepFM(nn.Module):
    """Logits from numbers [B, F], pooled embeddings [B, T, D] and wide weights [B, W], the linear part of ids."""

    def __init__(self, spec: Ranking, num_numbers: int, num_embedded: int) -> None:
        super().__init__()
        self.pairs = PairwiseSum(num_numbers, spec.embedding_dim)
        width = num_numbers + num_embedded * spec.embedding_dim
        self.deep = scoring_mlp([width, *spec.hidden], spec.dropout)

    @property
    def output_bias(self) -> nn.Parameter:
        return self.deep.layers[-1].bias  # type: ignore[return-value]

    def forward(self, numbers_BF: Tensor, pooled_BTD: Tensor, wide_BW: Tensor | None = None) -> Tensor:
        deep = self.deep(torch.cat([numbers_BF, pooled_BTD.flatten(1)], dim=1)).squeeze(1)
        return add_wide(deep + self.pairs(numbers_BF, pooled_BTD), wide_BW)
