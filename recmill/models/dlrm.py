"""DLRM: numbers through a bottom MLP, vectors interact, a top MLP scores."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recmill import _native
from recmill.models.layers import MLP, CrossNetwork, DotInteraction, add_wide, scoring_mlp
from recmill.recipe.recipe import DLRM_CROSS_RANK, Ranking


class Interaction(nn.Module):
    """One vector a row [B, width] of numbers [B, F] and pooled embeddings [B, T, D].

    `dot`, `cat` or low-rank `cross` interaction.
    """

    def __init__(self, spec: Ranking, num_numbers: int, num_embedded: int) -> None:
        super().__init__()
        self.bottom = MLP([num_numbers, *spec.bottom], last_relu=True, dropout=spec.dropout)
        self.dot = self.cross = None
        self.width_below = spec.bottom[-1] if spec.bottom and num_numbers else num_numbers
        self.width = self.width_below + num_embedded * spec.embedding_dim
        if spec.interaction == "dot":
            self.dot = DotInteraction(num_embedded + bool(num_numbers))
            self.width = self.width_below + self.dot.num_pairs
        elif spec.interaction == "cross":
            self.cross = CrossNetwork(self.width, spec.cross_layers, spec.cross_rank or DLRM_CROSS_RANK)

    def mix(self, numbers_BF: Tensor, pooled_BTD: Tensor) -> Tensor:
        below = self.bottom(numbers_BF) if numbers_BF.shape[1] else numbers_BF
        if self.dot is not None:
            vectors = [below.unsqueeze(1), pooled_BTD] if below.shape[1] else [pooled_BTD]
            return torch.cat([below, self.dot(torch.cat(vectors, dim=1))], dim=1)
        mixed = torch.cat([below, pooled_BTD.flatten(1)], dim=1)
        return self.cross(mixed) if self.cross is not None else mixed


class DLRM(Interaction):
    """Logits from numbers [B, F], pooled embeddings [B, T, D] and wide weights [B, W]."""

    def __init__(self, spec: Ranking, num_numbers: int, num_embedded: int) -> None:
        super().__init__(spec, num_numbers, num_embedded)
        self.top = scoring_mlp([self.width, *spec.top], spec.dropout)
        self.takes_repeats = spec.interaction == "cat"

    @property
    def output_bias(self) -> nn.Parameter:
        return self.top.layers[-1].bias  # type: ignore[return-value]

    def forward(
        self,
        numbers_BF: Tensor,
        pooled_BTD: Tensor,
        wide_BW: Tensor | None = None,
        repeats: _native.Repeats | None = None,
    ) -> Tensor:
        mixed_BX = self.mix(numbers_BF, pooled_BTD)
        return add_wide(self.top(mixed_BX, repeats, self.width_below).squeeze(1), wide_BW)
