"""What the peers on PyTorch share: dense models, their optimizer, and the wide part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from recmill.stages.bench.race import Task


class DenseDLRM(nn.Module):
    """Numbers [B, F] and embeddings [B, T * D] -> logits [B]; interaction `cat`."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        bottom, top = task.layers()
        self.bottom = nn.Sequential(*_layers(bottom), nn.ReLU())
        self.top = nn.Sequential(*_layers(top))

    def forward(self, numbers_BF: Tensor, embedded_BX: Tensor) -> Tensor:
        return self.top(torch.cat([self.bottom(numbers_BF), embedded_BX], dim=1)).squeeze(1)  # type: ignore[no-any-return]


class DenseWideDeep(nn.Module):
    """Numbers [B, F], embeddings [B, T * D] and the sum of wide weights [B, 1] -> logits [B]."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.deep = nn.Sequential(*_layers(task.layers()[0]))

    def forward(self, numbers_BF: Tensor, embedded_BX: Tensor, wide_B1: Tensor) -> Tensor:
        return (self.deep(torch.cat([numbers_BF, embedded_BX], dim=1)) + wide_B1).squeeze(1)  # type: ignore[no-any-return]


class WideBag:
    """The linear part: a weight for each id, summed over a row. Adagrad, because torch has no FTRL."""

    def __init__(self, task: Task) -> None:
        self.bag = nn.EmbeddingBag(int(task.offsets[-1]), 1, mode="sum", sparse=True)
        nn.init.zeros_(self.bag.weight)
        self.optimizer = torch.optim.Adagrad(self.bag.parameters(), lr=task.wide_rate)


def allow_sparse() -> None:
    """Sparse gradients without checks: the fastest, and what torch warns about unless it is asked for."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]


def dense_model(task: Task) -> nn.Module:
    return DenseDLRM(task) if task.shape == "dlrm" else DenseWideDeep(task)


def dense_optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """Fused: the fastest that torch has on CPU."""
    if task.shape == "dlrm":
        return torch.optim.Adam(model.parameters(), lr=task.dense_rate, fused=True)
    return torch.optim.Adagrad(model.parameters(), lr=task.dense_rate, fused=True)


def step(
    model: nn.Module, inputs: Sequence[Tensor], labels: Tensor, optimizers: Sequence[torch.optim.Optimizer]
) -> float:
    """One step of training; its loss."""
    loss = functional.binary_cross_entropy_with_logits(model(*inputs), labels)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def _layers(widths: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width, after in pairwise(widths):
        layer = nn.Linear(width, after)
        nn.init.normal_(layer.weight, std=(2.0 / (width + after)) ** 0.5)
        nn.init.normal_(layer.bias, std=(1.0 / after) ** 0.5)
        layers += [layer, nn.ReLU()]
    return layers[:-1]
