"""Embeddings of several dims converted to one, for models whose features must all have the same."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Projection(nn.Module):
    """Pooled embeddings [B, T, d] of each dim d to [B, T of all, D], in the order of the dims.

    Features whose dim is not D are multiplied by a matrix of their own. It starts as the identity: short vectors are
    padded with zeros, long ones truncated. Each of several members has its own columns of D, initialised alike.
    """

    def __init__(self, num_features: Mapping[int, int], dim: int, members: int = 1) -> None:
        """`num_features` of each dim."""
        super().__init__()
        self.dim, self.dims = dim, tuple(num_features)
        self.weights = nn.ParameterDict(
            {
                str(other): nn.Parameter(torch.eye(other, dim // members).repeat(number, 1, members))
                for other, number in num_features.items()
                if other != dim
            }
        )

    def forward(self, pooled: Mapping[int, Tensor]) -> Tensor:
        return project(pooled, {other: self.weights[str(other)] for other in self.dims if other != self.dim})


def project(pooled: Mapping[int, Tensor], weights: Mapping[int, Tensor]) -> Tensor:
    """All features in one tensor; dims without weights stay as they are."""
    parts = [
        torch.einsum("btd,tdx->btx", vectors, weights[dim]) if dim in weights else vectors
        for dim, vectors in pooled.items()
    ]
    return torch.cat(parts, dim=1)
