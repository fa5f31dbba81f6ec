"""Wide & Deep: a linear part that memorises, and an MLP that generalises."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recmill import _native
from recmill.models.layers import add_wide, scoring_mlp
from recmill.recipe.recipe import Ranking


class WideDeep(nn.Module):
    """Logits from numbers [B, F], pooled embeddings [B, T, D] and wide weights [B, W].

    A wide feature is a table of dimension 1, so its weights are learned by the table's own optimizer (FTRL).
    """

    takes_repeats = True

    def __init__(self, spec: Ranking, num_numbers: int, num_embedded: int) -> None:
        super().__init__()
        width = num_numbers + num_embedded * spec.embedding_dim
        self.deep = scoring_mlp([width, *spec.hidden], spec.dropout)

    @property
    def output_bias(self) -> nn.Parameter:
        return self.deep.layers[-1].bias  # type: ignore[return-value]

    def forward(
        self,
        numbers_BF: Tensor,
        pooled_BTD: Tensor,
        wide_BW: Tensor | None = None,
        repeats: _native.Repeats | None = None,
    ) -> Tensor:
        inputs_BX = torch.cat([numbers_BF, pooled_BTD.flatten(1)], dim=1)
        return add_wide(self.deep(inputs_BX, repeats, numbers_BF.shape[1]).squeeze(1), wide_BW)
