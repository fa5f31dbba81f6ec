"""Our own floor: the same dense model, threads and optimizer on fixed random vectors. No tables, no data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recmill.dataset.batch import Array, Batch
from recmill.dataset.table import Table
from recmill.embeddings.collection import Looked
from recmill.stages.train.threads import keep_freed_memory

from .race import Task, compete
from .recmill_table import ranker_of, versions


class FixedVectors:
    """In the place of tables: the same vectors for every batch, which nothing changes."""

    features = ()
    tables: Mapping[str, Any] = {}

    def __init__(self, shape: tuple[int, ...]) -> None:
        values = np.random.default_rng(0).uniform(-0.01, 0.01, shape).astype(np.float32)
        self.looked = Looked(values, [], [])

    def lookup(self, columns: Mapping[str, Any], train: bool, step: int = 0) -> Looked:
        return self.looked

    def update(self, looked: Looked, grads: Array, learning_rate: float, step: int = 0) -> None:
        pass


def losses(task: Task) -> Iterator[float]:
    keep_freed_memory()
    torch.set_num_threads(1)  # the ranker's own threads share the batch
    ranker = ranker_of(Table.open(Path(task.folder) / "table"), task)
    for name, collection in ranker.collections.items():
        vectors = FixedVectors((task.batch_size, len(collection.features), collection.dim))
        ranker.collections[name] = vectors  # type: ignore[assignment]
    random = np.random.default_rng(1)
    numbers = random.random((task.batch_size, task.num_numbers), dtype=np.float32)
    labels = (random.random(task.batch_size) < 0.25).astype(np.float32)
    batch = Batch(task.batch_size, numbers, {}, {}, {ranker.spec.label: labels})
    while True:
        yield ranker.step(batch).loss


if __name__ == "__main__":
    compete(losses, versions)
