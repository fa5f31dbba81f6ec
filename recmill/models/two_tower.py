"""Two towers: users and items as unit vectors whose dot product says how well they fit."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from recmill.models.layers import mlp
from recmill.spec.recipe import Retrieval


class Tower(nn.Module):
    """Numbers [B, F] and pooled embeddings [B, T, D] of one side to unit vectors [B, last of hidden]."""

    def __init__(self, spec: Retrieval, num_numbers: int, num_embedded: int) -> None:
        super().__init__()
        self.layers = mlp([num_numbers + num_embedded * spec.embedding_dim, *spec.hidden], last_relu=False)

    def forward(self, numbers_BF: Tensor, pooled_BTD: Tensor) -> Tensor:
        vectors = self.layers(torch.cat([numbers_BF, pooled_BTD.flatten(1)], dim=1))
        return functional.normalize(vectors, dim=1)


class TwoTower(nn.Module):
    """A tower for users and one for items."""

    def __init__(self, spec: Retrieval, user: tuple[int, int], item: tuple[int, int]) -> None:
        """`user` and `item` are numbers of number features and of embedded features."""
        super().__init__()
        self.user = Tower(spec, *user)
        self.item = Tower(spec, *item)


def in_batch_softmax(
    users_BV: Tensor,
    items_BV: Tensor,
    item_keys_B: Tensor,
    temperature: float,
    log_q_B: Tensor | None = None,
    weights_B: Tensor | None = None,
) -> Tensor:
    """Each user must find its own item among those of the batch.

    `log_q` is the log of how often each item is drawn; taking it off keeps popular items from being pushed away for
    being popular. The same item in other rows is no negative. Rows of weight 0 (no click) ask nothing, but their items
    serve as negatives.
    """
    logits = users_BV @ items_BV.T / temperature
    if log_q_B is not None:
        logits = logits - log_q_B
    same = item_keys_B[:, None] == item_keys_B[None, :]
    others_like_mine = same & ~torch.eye(len(item_keys_B), dtype=torch.bool, device=same.device)
    logits = logits.masked_fill(others_like_mine, float("-inf"))
    losses = functional.cross_entropy(
        logits, torch.arange(len(logits), device=logits.device), reduction="none"
    )
    if weights_B is None:
        return losses.mean()
    return (losses * weights_B).sum() / weights_B.sum().clamp(min=1e-12)


def pairwise_bce(users_BV: Tensor, items_BV: Tensor, labels_B: Tensor, temperature: float) -> Tensor:
    """Click or not from the scaled cosine: for logs that hold impressions, or sampled negatives."""
    logits = (users_BV * items_BV).sum(dim=1) / temperature
    return functional.binary_cross_entropy_with_logits(logits, labels_B)
