"""DIN: earlier items of a user are weighted by how well they fit the scored item (target attention).

Shapes: B rows, F numbers, T pooled features, L elements of a list, D embedding dim, X hidden units.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from recmill.models.layers import MLP, add_wide, scoring_mlp
from recmill.models.sequences import ListVectors
from recmill.recipe.recipe import Ranking


class TargetAttention(nn.Module):
    """A list's vectors, weighted by their fit with a target and summed: [B, L, D] and [B, D] to [B, D].

    The weight is an MLP of element, target and their product. It is not a softmax, so that a list with many fitting
    elements counts for more than one with few. The first layer is split in three, so that elements shared by many
    targets are multiplied only once.
    """

    def __init__(self, dim: int, hidden: Sequence[int]) -> None:
        super().__init__()
        first, *others = hidden
        self.element = nn.Linear(dim, first)
        self.target = nn.Linear(dim, first, bias=False)
        self.product = nn.Linear(dim, first, bias=False)
        self.rest = MLP([first, *others, 1], last_relu=False)

    def forward(self, given: ListVectors, target_BD: Tensor) -> Tensor:
        product_BLD = given.vectors * target_BD.unsqueeze(1)
        hidden_BLX = self.element(given.vectors) + self.product(product_BLD)
        hidden_BLX = functional.relu(hidden_BLX + self.target(target_BD).unsqueeze(1))
        weights_BL = self.rest(hidden_BLX).squeeze(2) * given.mask
        return torch.matmul(weights_BL.unsqueeze(1), given.vectors).squeeze(1)


class DIN(nn.Module):
    """Logits from numbers [B, F], pooled embeddings [B, T, D], unpooled lists and wide weights [B, W].

    Each list is read against its target, the pooled feature that shares its table.
    """

    def __init__(self, spec: Ranking, num_numbers: int, num_embedded: int, targets: Sequence[int]) -> None:
        super().__init__()
        dim = spec.embedding_dim
        self.targets = tuple(targets)
        self.attention = nn.ModuleList(TargetAttention(dim, spec.attention) for _ in targets)
        width = num_numbers + (num_embedded + len(self.targets)) * dim
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
        interests = [
            attention(given, pooled_BTD[:, target])
            for attention, given, target in zip(self.attention, lists, self.targets, strict=True)
        ]
        deep = self.deep(torch.cat([numbers_BF, pooled_BTD.flatten(1), *interests], dim=1)).squeeze(1)
        return add_wide(deep, wide_BW)
