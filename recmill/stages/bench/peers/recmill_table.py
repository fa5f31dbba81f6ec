"""Ours, rows read from a prepared Table while training: data loading included."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from recmill.dataset.batch import Batch, Batches
from recmill.dataset.log_loader import LogBatches
from recmill.dataset.table import Table
from recmill.learner.ranking import Ranker
from recmill.stages.train.threads import keep_freed_memory

from .race import Task, compete


def losses(task: Task) -> Iterator[float]:
    keep_freed_memory()
    torch.set_num_threads(1)  # the ranker's own threads share the batch
    table = Table.open(Path(task.folder) / "table")
    ranker = ranker_of(table, task)
    batches = Batches(table, task.batch_size, features=ranker.spec.features or None)
    for batch in full_batches(batches, task):
        yield ranker.step(batch).loss


def ranker_of(table: Table, task: Task) -> Ranker:
    spec = table.recipe.ranking
    assert spec is not None  # bench train wrote this Table
    return Ranker(spec, table.columns, num_threads=task.threads)


def full_batches(batches: Batches | LogBatches, task: Task) -> Iterator[Batch]:
    """Epoch after epoch, without the smaller batch at the end of each."""
    while True:
        yield from (batch for batch, _ in batches.read() if batch.size == task.batch_size)


def versions() -> dict[str, str]:
    return {"torch": torch.__version__}


if __name__ == "__main__":
    compete(losses, versions)
