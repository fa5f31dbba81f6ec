"""Ours, straight from the raw log: features are applied on the fly while training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from recmill.dataset.log_loader import LogBatches
from recmill.dataset.table import Table
from recmill.stages.train.threads import keep_freed_memory

from .race import Task, compete
from .recmill_table import full_batches, ranker_of, versions


def losses(task: Task) -> Iterator[float]:
    keep_freed_memory()
    torch.set_num_threads(1)  # the ranker's own threads share the batch
    table = Table.open(Path(task.folder) / "table")
    ranker = ranker_of(table, task)
    features = ranker.spec.features or None
    batches = LogBatches(table.recipe, table.plan, task.log, task.batch_size, features=features)
    for batch in full_batches(batches, task):
        yield ranker.step(batch).loss


if __name__ == "__main__":
    compete(losses, versions)
