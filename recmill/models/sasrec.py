"""SASRec: a user is what causal self-attention makes of the items before, in their order.

Shapes: B rows, L elements of the longest list, T = L + 1 states, D embedding dim, H heads, N states with a target,
K negatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from recmill.models.sequences import ListVectors
from recmill.recipe.recipe import Retrieval

_FIRST_SCALE = 0.02  # of vectors that are learned, before training


class Block(nn.Module):
    """Causal self-attention, then an MLP; each adds to what goes through, and reads it normalised."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.queries_keys_values = nn.Linear(dim, 3 * dim)
        self.attended = nn.Linear(dim, dim)
        self.hidden = nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, states_BTD: Tensor) -> Tensor:
        attended = self.attended(self._attend(self.attention_norm(states_BTD)))
        states_BTD = states_BTD + functional.dropout(attended, self.dropout, self.training)
        hidden = functional.gelu(self.hidden(self.mlp_norm(states_BTD)))
        return states_BTD + functional.dropout(self.output(hidden), self.dropout, self.training)

    def _attend(self, states_BTD: Tensor) -> Tensor:
        # What fills up short lists stands behind them, where causal attention does not look.
        queries, keys, values = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.queries_keys_values(states_BTD).chunk(3, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class SequenceTower(nn.Module):
    """A list of items, oldest first, to the unit vector [B, D] of what comes next. An empty list has one too."""

    def __init__(self, spec: Retrieval, num_positions: int) -> None:
        """`num_positions`: elements of longer lists share the last position."""
        super().__init__()
        dim = spec.embedding_dim
        self.scale, self.dropout = dim**0.5, spec.dropout
        self.start = nn.Parameter(torch.randn(dim) * _FIRST_SCALE)
        self.positions = nn.Parameter(torch.randn(num_positions + 1, dim) * _FIRST_SCALE)
        self.blocks = nn.ModuleList(Block(dim, spec.heads, spec.dropout) for _ in range(spec.blocks))
        self.norm = nn.LayerNorm(dim)

    def forward(self, numbers_BF: Tensor, pooled_BTD: Tensor, lists: Sequence[ListVectors]) -> Tensor:
        (given,) = lists
        last_B = given.mask.sum(dim=1).long()
        states_BTD = self.states(given.vectors)
        index = last_B[:, None, None].expand(-1, 1, states_BTD.shape[2])
        return states_BTD.gather(1, index).squeeze(1)

    def states(self, vectors_BLD: Tensor) -> Tensor:
        """Unit vectors [B, T, D]: state t is made of the first t elements."""
        start = self.start.expand(vectors_BLD.shape[0], 1, -1)
        states_BTD = torch.cat([start, vectors_BLD * self.scale], dim=1)
        positions = torch.arange(states_BTD.shape[1]).clamp(max=self.positions.shape[0] - 1)
        states_BTD = states_BTD + self.positions[positions]
        states_BTD = functional.dropout(states_BTD, self.dropout, self.training)
        for block in self.blocks:
            states_BTD = block(states_BTD)
        return functional.normalize(self.norm(states_BTD), dim=2)


class ItemTower(nn.Module):
    """The embedding of an item as a unit vector."""

    def forward(self, numbers_BF: Tensor, pooled_BTD: Tensor) -> Tensor:
        return functional.normalize(pooled_BTD.squeeze(1), dim=1)


class SASRec(nn.Module):
    """The tower of users, and that of the items of their lists."""

    def __init__(self, spec: Retrieval, num_positions: int) -> None:
        super().__init__()
        self.user = SequenceTower(spec, num_positions)
        self.item = ItemTower()


def sampled_softmax(
    states_ND: Tensor,
    targets_ND: Tensor,
    negatives_KD: Tensor,
    collisions: tuple[Tensor, Tensor],
    temperature: float,
    negative_offset: float,
) -> Tensor:
    """Each state must find its target among the negatives; the sum of the losses.

    `collisions` are the states, and the negatives, where the negative is the state's target: they do not count.
    `negative_offset` is the log of how many items each negative stands for.
    """
    own_N = (states_ND * targets_ND).sum(dim=1) / temperature
    offset = states_ND.new_full((1,), negative_offset)
    others_NK = torch.addmm(offset, states_ND, negatives_KD.T, alpha=1 / temperature)
    others_NK = others_NK.index_put(collisions, others_NK.new_full((), -torch.inf))
    # Not the logarithm of nothing: a state whose only negative is its target has a loss of 0.
    others_N = others_NK.logsumexp(dim=1) if others_NK.shape[1] > 1 else others_NK.squeeze(1)
    return (torch.logaddexp(own_N, others_N) - own_N).sum()
