"""Factorization machine: a linear part and the dot products of all pairs of features."""

from __future__ import annotations

from torch import Tensor, nn

from recmill.models.layers import Linear, PairwiseSum, add_wide
from recmill.recipe.recipe import Ranking


class FM(nn.Module):
    """Logits from numbers [B, F], pooled embeddings [B, T, D] and wide weights [B, W], the linear part of ids."""

    def __init__(self, spec: Ranking, num_numbers: int, num_embedded: int) -> None:
        super().__init__()
        self.linear = Linear(num_numbers)
        self.pairs = PairwiseSum(num_numbers, spec.embedding_dim)

    @property
    def output_bias(self) -> nn.Parameter:
        return self.linear.bias

    def forward(self, numbers_BF: Tensor, pooled_BTD: Tensor, wide_BW: Tensor | None = None) -> Tensor:
        return add_wide(self.linear(numbers_BF) + self.pairs(numbers_BF, pooled_BTD), wide_BW)
