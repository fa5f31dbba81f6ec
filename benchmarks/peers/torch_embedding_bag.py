"""Plain PyTorch: nn.EmbeddingBag(sparse=True) and torch's sparse Adagrad.

All features share one table, their ids moved apart beforehand: measured faster than a table each.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import torch
from torch import nn

from benchmarks.peers.torch_parts import WideBag, allow_sparse, dense_model, dense_optimizer, step
from recmill.stages.bench.race import Task, main, memory_batches


def losses(task: Task) -> Iterator[float]:
    torch.set_num_threads(task.threads)
    torch.manual_seed(0)
    allow_sparse()
    model = dense_model(task)
    deep = nn.EmbeddingBag(int(task.offsets[-1]), task.embedding_dim, mode="sum", sparse=True)
    for size, rows in zip(task.sizes, torch.split(deep.weight.data, task.sizes), strict=True):
        rows.uniform_(-(size**-0.5), size**-0.5)
    optimizers = [dense_optimizer(task, model), torch.optim.Adagrad(deep.parameters(), lr=task.sparse_rate)]
    wide = WideBag(task) if task.shape == "wide_deep" else None
    if wide is not None:
        optimizers.append(wide.optimizer)
    batches = [
        tuple(map(torch.from_numpy, (batch.numbers, batch.ids + task.offsets[:-1], batch.labels)))
        for batch in memory_batches(task)
    ]
    for numbers, ids, labels in cycle(batches):
        inputs = [numbers, deep(ids.view(-1, 1)).view(task.batch_size, -1)]
        if wide is not None:
            inputs.append(wide.bag(ids))
        yield step(model, inputs, labels, optimizers)


def versions() -> dict[str, str]:
    return {"torch": torch.__version__}


if __name__ == "__main__":
    main(losses, versions)
