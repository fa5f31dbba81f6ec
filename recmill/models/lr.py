"""Logistic regression: one weight for each number and for each id."""

from __future__ import annotations

from torch import Tensor, nn

from recmill.models.layers import Linear, add_wide
from recmill.recipe.recipe import Ranking


class LogisticRegression(nn.Module):
    """Logits from numbers [B, F], weights of ids as embeddings of size one [B, T, 1] and wide weights [B, W]."""

    def __init__(self, spec: Ranking, num_numbers: int, num_embedded: int) -> None:
        super().__init__()
        self.linear = Linear(num_numbers)

    @property
    def output_bias(self) -> nn.Parameter:
        return self.linear.bias

    def forward(self, numbers_BF: Tensor, pooled_BTD: Tensor, wide_BW: Tensor | None = None) -> Tensor:
        return add_wide(self.linear(numbers_BF) + pooled_BTD.sum(dim=(1, 2)), wide_BW)
