"""Two towers: users and items as unit vectors whose dot product is their affinity.

Shapes: B rows, N distinct items among them, F numbers, T embedded features, D embedding dim, V vector size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from recmill.errors import TrainingError
from recmill.models.layers import MLP
from recmill.models.own import own_model
from recmill.recipe.recipe import Retrieval


class Tower(nn.Module):
    """Numbers [B, F] and pooled embeddings [B, T, D] of one side to unit vectors [B, V].

    With hidden layers, V is the last of them. Without, the vector is a weighted sum of the embeddings and of a linear
    map of the numbers, so V is D.
    """

    def __init__(self, spec: Retrieval, num_numbers: int, num_embedded: int) -> None:
        super().__init__()
        dim = spec.embedding_dim
        if spec.hidden:
            self.layers = MLP([num_numbers + num_embedded * dim, *spec.hidden], last_relu=False)
        else:
            self.weights = nn.Parameter(torch.ones(num_embedded))
            self.numbers = nn.Linear(num_numbers, dim, bias=False) if num_numbers else None
        self.has_layers = bool(spec.hidden)

    def forward(self, numbers_BF: Tensor, pooled_BTD: Tensor) -> Tensor:
        if self.has_layers:
            vectors = self.layers(torch.cat([numbers_BF, pooled_BTD.flatten(1)], dim=1))
        else:
            vectors = torch.einsum("btd,t->bd", pooled_BTD, self.weights)
            if self.numbers is not None:
                vectors = vectors + self.numbers(numbers_BF)
        return functional.normalize(vectors, dim=1)


class OwnTower(nn.Module):
    """A tower from the user's code, whose vectors may have any length."""

    def __init__(self, tower: nn.Module, path: str, size: int) -> None:
        super().__init__()
        self.tower, self.path, self.size = tower, path, size

    def forward(self, numbers_BF: Tensor, pooled_BTD: Tensor) -> Tensor:
        vectors = self.tower(numbers_BF, pooled_BTD)
        if vectors.dim() != 2 or vectors.shape[1] != self.size:
            raise TrainingError(
                f'retrieval.model "{self.path}" gave {tuple(vectors.shape)} for {numbers_BF.shape[0]} rows; expected '
                f"[rows, {self.size}]: the last of retrieval.hidden or, without any, embedding_dim."
            )
        return functional.normalize(vectors, dim=1)


def own_tower(path: str) -> Callable[[Retrieval, int, int], nn.Module]:
    """Towers of the user's class, for users and for items."""
    make = own_model(path, "retrieval.model")
    return lambda spec, *sizes: OwnTower(make(spec, *sizes), path, spec.vector_size)


class TwoTower(nn.Module):
    """A tower for users and one for items."""

    def __init__(
        self,
        spec: Retrieval,
        user: tuple[int, int],
        item: tuple[int, int],
        make: Callable[[Retrieval, int, int], nn.Module] = Tower,
    ) -> None:
        """`user` and `item` are the numbers of number features and of embedded features."""
        super().__init__()
        self.user = make(spec, *user)
        self.item = make(spec, *item)
        # Clicks are rare: without a bias a cosine of 0 would have to mean one half.
        self.bias = nn.Parameter(torch.zeros(())) if spec.loss == "bce" else None


def in_batch_softmax(
    users_BV: Tensor,
    items_NV: Tensor,
    own_B: Tensor,
    counts_N: Tensor,
    temperature: float,
    log_q_N: Tensor | None = None,
) -> Tensor:
    """Softmax loss of each user's own item, items[own], among those of all rows; the sum over rows.

    Items are distinct; `counts` is the number of rows of each, and an item counts that often for the users of other
    items, but once for its own. `log_q` is the log of each item's sampling probability; subtracting it keeps popular
    items from being penalised for being popular.
    """
    log_counts_N = counts_N.log()
    offsets_N = log_counts_N if log_q_N is None else log_counts_N - log_q_N
    logits_BN = torch.addmm(offsets_N, users_BV, items_NV.T, alpha=1 / temperature)
    once = (torch.arange(len(own_B)), own_B)
    logits_BN = logits_BN.index_put(once, -log_counts_N[own_B], accumulate=True)
    return functional.cross_entropy(logits_BN, own_B, reduction="sum")


def pairwise_bce(
    users_BV: Tensor, items_NV: Tensor, own_B: Tensor, labels_B: Tensor, bias: Tensor, temperature: float
) -> Tensor:
    """Binary loss of the scaled cosine of each user and its item; the sum over rows.

    For logs with impressions, or sampled negatives.
    """
    logits_B = (users_BV * items_NV[own_B]).sum(dim=1) / temperature + bias
    return functional.binary_cross_entropy_with_logits(logits_B, labels_B, reduction="sum")
