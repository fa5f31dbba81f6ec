"""MaskNet: parallel blocks, each of which multiplies its normalised inputs by a mask computed from all features."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from recmill.models.layers import MLP, add_wide, scoring_mlp
from recmill.recipe.recipe import Ranking


class MaskBlock(nn.Module):
    """[B, X] to [B, Y]: the row decides which inputs count."""

    def __init__(self, width: int, next_width: int) -> None:
        super().__init__()
        self.mask = MLP([width, next_width, width], last_relu=False)
        self.output = nn.Linear(width, next_width, bias=False)
        self.norm = nn.LayerNorm(next_width)

    def forward(self, inputs_BX: Tensor, normed_BX: Tensor) -> Tensor:
        return functional.relu(self.norm(self.output(normed_BX * self.mask(inputs_BX))))


class MaskNet(nn.Module):
    """Logits from numbers [B, F], pooled embeddings [B, T, D] and wide weights [B, W]."""

    def __init__(self, spec: Ranking, num_numbers: int, num_embedded: int) -> None:
        super().__init__()
        width = num_numbers + num_embedded * spec.embedding_dim
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(MaskBlock(width, spec.mask_width) for _ in range(spec.mask_blocks))
        self.deep = scoring_mlp([spec.mask_blocks * spec.mask_width, *spec.hidden], spec.dropout)

    @property
    def output_bias(self) -> nn.Parameter:
        return self.deep.layers[-1].bias  # type: ignore[return-value]

    def forward(self, numbers_BF: Tensor, pooled_BTD: Tensor, wide_BW: Tensor | None = None) -> Tensor:
        inputs_BX = torch.cat([numbers_BF, pooled_BTD.flatten(1)], dim=1)
        normed_BX = self.norm(inputs_BX)
        masked = torch.cat([block(inputs_BX, normed_BX) for block in self.blocks], dim=1)
        return add_wide(self.deep(masked).squeeze(1), wide_BW)
