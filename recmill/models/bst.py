"""BST: one transformer block in which the scored item attends to the user's earlier items, in order.

Shapes: B rows, R rows of lists (B, or 1 that stands for all), L elements of a list, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from recmill.models.layers import add_wide, scoring_mlp
from recmill.models.sequences import ListVectors
from recmill.recipe.recipe import Ranking

NUM_POSITIONS = 128  # counted from the latest element; earlier ones share the last
_FIRST_SCALE = 0.1  # scale of positions before training


class TargetBlock(nn.Module):
    """A target's state [B, D] after attention over a list, and its product with the attended vector."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(NUM_POSITIONS, dim) * _FIRST_SCALE)
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.hidden, self.output = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, given: ListVectors, target_BD: Tensor) -> tuple[Tensor, Tensor]:
        found_BD = self._attend(given, target_BD)
        state_BD = self.attention_norm(target_BD + found_BD)
        state_BD = self.mlp_norm(state_BD + self.output(functional.relu(self.hidden(state_BD))))
        return state_BD, found_BD * target_BD

    def _attend(self, given: ListVectors, target_BD: Tensor) -> Tensor:
        age_RL = given.mask.sum(dim=1, keepdim=True) - 1 - torch.arange(given.mask.shape[1])
        elements_RLD = given.vectors + self.positions[age_RL.clamp(0, NUM_POSITIONS - 1).long()]
        query_BD1 = self.query(target_BD).unsqueeze(2) / target_BD.shape[1] ** 0.5
        scores_BL = torch.matmul(self.key(elements_RLD), query_BD1).squeeze(2)
        weights_BL = torch.softmax(scores_BL.masked_fill(given.mask == 0, -1e9), dim=1) * given.mask
        return torch.matmul(weights_BL.unsqueeze(1), self.value(elements_RLD)).squeeze(1)


class BST(nn.Module):
    """Logits from numbers [B, F], pooled embeddings [B, T, D], unpooled lists and wide weights [B, W].

    Each list is read by its target, the pooled feature that shares its table.
    """

    def __init__(self, spec: Ranking, num_numbers: int, num_embedded: int, targets: Sequence[int]) -> None:
        super().__init__()
        dim = spec.embedding_dim
        self.targets = tuple(targets)
        self.blocks = nn.ModuleList(TargetBlock(dim) for _ in targets)
        width = num_numbers + (num_embedded + 2 * len(self.targets)) * dim
        self.deep = scoring_mlp([width, *spec.hidden], spec.dropout)

    @property
    def output_bias(self) -> nn.Parameter:
        return self.deep.layers[-1].bias  # type: ignore[return-value]

    def forward(
        self,
        numbers_BF: Tensor,
        pooled_BTD: Tensor,
        lists: Sequence[ListVectors],
        wide_BW: Tensor | None = None,
    ) -> Tensor:
        states = [
            part
            for block, given, target in zip(self.blocks, lists, self.targets, strict=True)
            for part in block(given, pooled_BTD[:, target])
        ]
        deep = self.deep(torch.cat([numbers_BF, pooled_BTD.flatten(1), *states], dim=1)).squeeze(1)
        return add_wide(deep, wide_BW)
