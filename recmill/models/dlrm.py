"""DLRM: numbers through a bottom MLP, vectors interact, a top MLP scores."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recmill.models.layers import CrossNetwork, DotInteraction, mlp
from recmill.spec.recipe import Ranking


class DLRM(nn.Module):
    """Logits from numbers [B, F] and pooled embeddings [B, T, D]. `dot`, `cat` or low-rank `cross` interaction."""

    def __init__(self, spec: Ranking, num_numbers: int, num_embedded: int) -> None:
        super().__init__()
        dim = spec.embedding_dim
        self.bottom = mlp([num_numbers, *spec.bottom], last_relu=True) if num_numbers else None
        num_vectors = num_embedded + (self.bottom is not None)
        width = num_vectors * dim
        self.dot = DotInteraction(num_vectors) if spec.interaction == "dot" else None
        self.cross = (
            CrossNetwork(width, spec.cross_layers, spec.cross_rank) if spec.interaction == "cross" else None
        )
        if self.dot is not None:
            width = self.dot.num_pairs + (dim if self.bottom is not None else 0)
        self.top = mlp([width, *spec.top, 1], last_relu=False)

    def forward(self, numbers_BF: Tensor, pooled_BTD: Tensor) -> Tensor:
        vectors = pooled_BTD
        below = self.bottom(numbers_BF) if self.bottom is not None else None
        if below is not None:
            vectors = torch.cat([below.unsqueeze(1), pooled_BTD], dim=1)
        if self.dot is not None:
            products = self.dot(vectors)
            mixed = products if below is None else torch.cat([below, products], dim=1)
        else:
            mixed = vectors.flatten(1)
            mixed = self.cross(mixed) if self.cross is not None else mixed
        return self.top(mixed).squeeze(1)  # type: ignore[no-any-return]
