"""Layers that models share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(sizes: Sequence[int], last_relu: bool, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers with ReLU between them; no batch statistics, so a row's result depends on that row alone."""
    layers: list[nn.Module] = []
    for number, (width, next_width) in enumerate(pairwise(sizes)):
        layers.append(_linear(width, next_width))
        if last_relu or number < len(sizes) - 2:
            layers.append(nn.ReLU())
            if dropout:
                layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


def _linear(width: int, next_width: int) -> nn.Linear:
    """Weights as DLRM draws them: normal, with a spread that keeps the size of activations."""
    layer = nn.Linear(width, next_width)
    nn.init.normal_(layer.weight, std=(2.0 / (width + next_width)) ** 0.5)
    nn.init.normal_(layer.bias, std=(1.0 / next_width) ** 0.5)
    return layer


class DotInteraction(nn.Module):
    """Dot products of all pairs of vectors: [B, N, D] -> [B, N (N - 1) / 2]."""

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("pairs", rows * num_vectors + columns, persistent=False)
        self.num_pairs = len(rows)

    def forward(self, vectors_BND: Tensor) -> Tensor:
        products = torch.bmm(vectors_BND, vectors_BND.transpose(1, 2)).flatten(1)
        return products.index_select(1, self.get_buffer("pairs"))


class CrossNetwork(nn.Module):
    """Low-rank cross layers (DCNv2): x <- x0 * (U V x + b) + x."""

    def __init__(self, width: int, num_layers: int, rank: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(num_layers))
        self.up = nn.ModuleList(nn.Linear(rank, width) for _ in range(num_layers))
        for layer in (*self.down, *self.up):
            nn.init.xavier_normal_(layer.weight)

    def forward(self, inputs_BX: Tensor) -> Tensor:
        state = inputs_BX
        for down, up in zip(self.down, self.up, strict=True):
            state = inputs_BX * up(down(state)) + state
        return state
