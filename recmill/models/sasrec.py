"""SASRec: a user is represented by causal self-attention over the earlier items, in order.

Shapes: B rows, L elements of the longest list, T = L + 1 states, D embedding dim, H heads, N states with a target, K
negatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recmill.models.sequences import ListVectors
from recmill.recipe.recipe import Retrieval

_FIRST_SCALE = 0.02  # scale of learned vectors before training


class Block(nn.Module):
    """Causal self-attention, then an MLP, both as pre-norm residual layers."""

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
        states_BTD = states_BTD + drop(attended, self.dropout, self.training)
        hidden = functional.gelu(self.hidden(self.mlp_norm(states_BTD)))
        return states_BTD + drop(self.output(hidden), self.dropout, self.training)

    def _attend(self, states_BTD: Tensor) -> Tensor:
        # Padding comes after the elements, where causal attention does not look.
        queries, keys, values = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.queries_keys_values(states_BTD).chunk(3, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class SequenceTower(nn.Module):
    """A list of items, oldest first, to the unit vector [B, D] of the predicted next item.

    An empty list has one too.
    """

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
        """Unit vectors [B, T, D]: state t depends on the first t elements."""
        start = self.start.expand(vectors_BLD.shape[0], 1, -1)
        states_BTD = torch.cat([start, vectors_BLD * self.scale], dim=1)
        positions = torch.arange(states_BTD.shape[1]).clamp(max=self.positions.shape[0] - 1)
        states_BTD = states_BTD + self.positions[positions]
        states_BTD = drop(states_BTD, self.dropout, self.training)
        for block in self.blocks:
            states_BTD = block(states_BTD)
        return functional.normalize(self.norm(states_BTD), dim=2)


class ItemTower(nn.Module):
    """The embedding of an item as a unit vector."""

    def forward(self, numbers_BF: Tensor, pooled_BTD: Tensor) -> Tensor:
        return functional.normalize(pooled_BTD.squeeze(1), dim=1)


class SASRec(nn.Module):
    """The user tower, and the item tower of the items in their lists."""

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
    """Softmax loss of each state's target among the negatives; the sum over states.

    `collisions` are the states, and the negatives, where the negative is the state's target: they do not count.
    `negative_offset` is the log of how many items each negative stands for.
    """
    loss: Tensor = _SampledSoftmax.apply(  # type: ignore[no-untyped-call]
        states_ND, targets_ND, negatives_KD, collisions, temperature, negative_offset
    )
    return loss


class _SampledSoftmax(torch.autograd.Function):
    """The loss and its gradients from one matrix of scores, which is overwritten by probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        states_ND: Tensor,
        targets_ND: Tensor,
        negatives_KD: Tensor,
        collisions: tuple[Tensor, Tensor],
        temperature: float,
        negative_offset: float,
    ) -> Tensor:
        negatives_KD = negatives_KD / temperature
        own_N = (states_ND * targets_ND).sum(dim=1) / temperature
        others_NK = states_ND @ negatives_KD.T
        top_N = torch.maximum(others_NK.amax(dim=1) + negative_offset, own_N)
        others_NK.sub_((top_N - negative_offset)[:, None]).exp_()
        others_NK[collisions] = 0.0
        own_exp_N = (own_N - top_N).exp_()
        total_N = others_NK.sum(dim=1) + own_exp_N
        others_NK.div_(total_N[:, None])
        of_own_N1 = ((own_exp_N / total_N - 1) / temperature)[:, None]
        ctx.save_for_backward(
            (others_NK @ negatives_KD).addcmul_(of_own_N1, targets_ND),
            of_own_N1 * states_ND,
            (others_NK.T @ states_ND) / temperature,
        )
        return (top_N + total_N.log() - own_N).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (of_loss,) = grads
        return *(saved * of_loss for saved in ctx.saved_tensors), None, None, None


def drop(values: Tensor, rate: float, training: bool) -> Tensor:
    """Dropout with random numbers of 16 bits: four of them cost what one of torch's does."""
    if not training or rate == 0:
        return values
    num_draws = -(-values.numel() // 4)
    random = torch.empty(num_draws, dtype=torch.int64).random_(-(1 << 63), None).view(torch.int16)
    dropped = round(rate * (1 << 16))
    is_kept = random[: values.numel()].view(values.shape) >= dropped - (1 << 15)
    return values * is_kept.to(values.dtype).mul_((1 << 16) / ((1 << 16) - dropped))
