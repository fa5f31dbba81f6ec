"""What a contestant is told, the batches it trains on, and how it is timed. Needs NumPy, but not recmill."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Task:
    """The model, the rates of its optimizers, where the rows are, and what the machine may give."""

    shape: str  # dlrm or wide_deep
    log: str  # folder of the raw log
    folder: str  # the shape's Table and batches
    batch_size: int
    num_numbers: int
    sizes: list[int]  # for each feature: its ids are below
    embedding_dim: int
    bottom: list[int]
    top: list[int]
    hidden: list[int]
    dense_rate: float
    sparse_rate: float
    wide_rate: float
    threads: int
    seconds: float
    least_steps: int  # the first third is not timed; the losses of the last third are compared

    @property
    def offsets(self) -> Array:
        """Where each feature's ids begin when all of them share one table; one more than features."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes, dtype=np.int64)])

    def layers(self) -> list[list[int]]:
        """Widths of each MLP of the model, input and logit included."""
        embedded = len(self.sizes) * self.embedding_dim
        if self.shape == "dlrm":
            return [[self.num_numbers, *self.bottom], [self.bottom[-1] + embedded, *self.top, 1]]
        return [[self.num_numbers + embedded, *self.hidden, 1]]

    def flops_per_sample(self) -> int:
        """Useful work of one row: forward, gradient of weights, gradient of inputs; numbers need no gradient."""
        products = sum(width * after for mlp in self.layers() for width, after in itertools.pairwise(mlp))
        return 6 * products - 2 * self.num_numbers * self.layers()[0][1]


@dataclass(frozen=True)
class MemoryBatch:
    """One step's rows, as arrays that are ready to use."""

    numbers: Array  # float32 [B, numbers]
    ids: Array  # int64 [B, features]
    labels: Array  # float32 [B]


def write_batches(batches: Iterator[MemoryBatch], folder: Path) -> None:
    """Keep batches as three .npy files that any program reads."""
    parts = list(batches)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("numbers", "ids", "labels"):
        np.save(folder / f"{name}.npy", np.concatenate([getattr(part, name) for part in parts]))


def memory_batches(task: Task) -> list[MemoryBatch]:
    """All full batches, in memory: a peer's best case."""
    numbers, ids, labels = (
        np.load(Path(task.folder) / "batches" / f"{name}.npy") for name in ("numbers", "ids", "labels")
    )
    starts = range(0, len(labels) - task.batch_size + 1, task.batch_size)
    cuts = [slice(start, start + task.batch_size) for start in starts]
    return [MemoryBatch(numbers[rows], ids[rows], labels[rows]) for rows in cuts]


def race(losses: Iterator[float], task: Task) -> dict[str, float]:
    """Train for `task.seconds` after the warm-up: samples a second, and a loss that all reach by the same rows."""
    third = task.least_steps // 3
    seen = list(itertools.islice(losses, third))
    started, busy_before = time.perf_counter(), time.process_time()
    while time.perf_counter() - started < task.seconds or len(seen) < task.least_steps:
        seen.append(next(losses))
    seconds, busy = time.perf_counter() - started, time.process_time() - busy_before
    samples = (len(seen) - third) * task.batch_size
    return {
        "samples_per_second": samples / seconds,
        "samples_per_cpu_second": samples / busy,  # tells a slow contestant from a busy machine
        "loss": float(np.mean(seen[task.least_steps - third : task.least_steps])),
        "steps": len(seen),
    }


def compete(losses: Callable[[Task], Iterator[float]], versions: Callable[[], dict[str, str]]) -> None:
    """The main program of a contestant: a task in, as JSON, and a result out, as JSON."""
    task = Task(**json.loads(sys.argv[1]))
    print(json.dumps({**race(losses(task), task), "versions": versions()}))
