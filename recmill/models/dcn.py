"""DCN v2: cross layers and an MLP side by side, both over all features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recmill.models.layers import MLP, CrossNetwork, add_wide, scoring_mlp
from recmill.recipe.recipe import Ranking


class DCN(nn.Module):
    """Logits from numbers [B, F], pooled embeddings [B, T, D] and wide weights [B, W]."""

    def __init__(self, spec: Ranking, num_numbers: int, num_embedded: int) -> None:
        super().__init__()
        width = num_numbers + num_embedded * spec.embedding_dim
        self.cross = CrossNetwork(width, spec.cross_layers, spec.cross_rank)
        self.deep = MLP([width, *spec.hidden], last_relu=True, dropout=spec.dropout)
        self.last = scoring_mlp([width + (spec.hidden[-1] if spec.hidden else 0)])

    @property
    def output_bias(self) -> nn.Parameter:
        return self.last.layers[-1].bias  # type: ignore[return-value]

    def forward(self, numbers_BF: Tensor, pooled_BTD: Tensor, wide_BW: Tensor | None = None) -> Tensor:
        inputs_BX = torch.cat([numbers_BF, pooled_BTD.flatten(1)], dim=1)
        both = [self.cross(inputs_BX), *([self.deep(inputs_BX)] if len(self.deep.layers) else [])]
        return add_wide(self.last(torch.cat(both, dim=1)).squeeze(1), wide_BW)
