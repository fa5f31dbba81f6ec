"""Our contestants of bench train: `python -m recmill.stages.bench.trainers NAME TASK`.

recmill_table   rows read from a Table while training, data loading included
recmill_log     rows read from the raw log, features applied on the fly
dense_floor     the dense model alone on fixed vectors: no embedding tables, no data
gemm_peak       float32 products, by torch and by our own kernels: the machine's own limit is the better of both
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recmill import _native
from recmill.dataset.batch import Array, Batch
from recmill.dataset.loader import Batches
from recmill.dataset.log_loader import LogBatches
from recmill.dataset.table import Table
from recmill.embeddings.collection import BatchLookup
from recmill.learner.ranking import Ranker
from recmill.stages.bench import race
from recmill.stages.bench.race import Task
from recmill.stages.train.threads import keep_freed_memory

_GEMM_SIZE = 1024  # large enough for the peak, short enough to fall between interruptions
_GEMM_SECONDS = 1.5


def train_from_table(task: Task) -> Iterator[float]:
    table, ranker = _open(task)
    yield from _train(ranker, Batches(table, task.batch_size, features=ranker.spec.features or None), task)


def train_from_log(task: Task) -> Iterator[float]:
    table, ranker = _open(task)
    features = ranker.spec.features or None
    yield from _train(
        ranker, LogBatches(table.recipe, table.plan, task.log, task.batch_size, features=features), task
    )


def train_dense_only(task: Task) -> Iterator[float]:
    _, ranker = _open(task)
    for name, collection in ranker.collections.items():
        vectors = FixedVectors((task.batch_size, len(collection.features), collection.dim))
        ranker.collections[name] = vectors  # type: ignore[assignment]
    random = np.random.default_rng(1)
    numbers = random.random((task.batch_size, task.num_numbers), dtype=np.float32)
    labels = (random.random(task.batch_size) < 0.25).astype(np.float32)
    batch = Batch(task.batch_size, numbers, {}, {}, {ranker.spec.label: labels})
    while True:
        yield ranker.step(batch).loss


class FixedVectors:
    """Stands in for embedding tables: the same vectors for every batch, never updated."""

    features = ()
    tables: Mapping[str, Any] = {}

    def __init__(self, shape: tuple[int, ...]) -> None:
        values = np.random.default_rng(0).uniform(-0.01, 0.01, shape).astype(np.float32)
        self.result = BatchLookup(values, {}, [], [])

    def lookup(self, columns: Mapping[str, Any], train: bool, step: int = 0) -> BatchLookup:
        return self.result

    def update(
        self,
        lookup: BatchLookup,
        grads: Array,
        learning_rate: float,
        step: int = 0,
        sequence_grads: Mapping[str, Array] | None = None,
    ) -> None:
        pass


def gemm_peak(threads: int) -> float:
    """The best GFLOP/s of several products. MKL does not use AVX-512 on CPUs of AMD, our kernels do."""
    return max(_torch_peak(threads), _native_peak(threads))


def _torch_peak(threads: int) -> float:
    """Of large square matrices."""
    torch.set_num_threads(threads)
    left, right, product = (torch.rand(_GEMM_SIZE, _GEMM_SIZE) for _ in range(3))
    torch.mm(left, right, out=product)
    best, until = float("inf"), time.perf_counter() + _GEMM_SECONDS
    while time.perf_counter() < until:
        started = time.perf_counter()
        torch.mm(left, right, out=product)
        best = min(best, time.perf_counter() - started)
    return 2 * _GEMM_SIZE**3 / best / 1e9


def _native_peak(threads: int) -> float:
    """Of layers that fit the cache, each thread with its own."""

    def measure(_: int) -> float:
        return max(_native.measure_dense_kernels(_native.dense_target(), 256, 512, 256, _GEMM_SECONDS / 3))

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(measure, range(threads)))


def _open(task: Task) -> tuple[Table, Ranker]:
    keep_freed_memory()
    torch.set_num_threads(1)  # the ranker's own threads split the batch
    table = Table.open(Path(task.folder) / "table")
    spec = table.recipe.ranking
    assert spec is not None  # bench train wrote this Table
    return table, Ranker(spec, table.columns, num_threads=task.threads)


def _train(ranker: Ranker, batches: Batches | LogBatches, task: Task) -> Iterator[float]:
    """Losses, epoch after epoch, without the smaller batch at the end of each."""
    while True:
        for batch, _ in batches.read():
            if batch.size == task.batch_size:
                yield ranker.step(batch).loss


LOSSES = {"recmill_table": train_from_table, "recmill_log": train_from_log, "dense_floor": train_dense_only}

if __name__ == "__main__":
    if sys.argv[1] == "gemm_peak":
        print(json.dumps({"gflops": gemm_peak(Task(**json.loads(sys.argv[2])).threads)}))
    else:
        race.main(LOSSES[sys.argv[1]], lambda: {"torch": torch.__version__})
