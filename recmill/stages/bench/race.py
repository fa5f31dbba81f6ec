"""The task of bench train, its batches as plain arrays, and the timed loop. Needs NumPy alone: peers import it too."""

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
    """The model, its learning rates, where the rows are, and how many threads and seconds a run has."""

    shape: str  # dlrm, dlrm_dot, dlrm_cross or wide_deep
    log: str  # folder of the raw log
    folder: str  # the shape's Table and batches
    batch_size: int
    num_numbers: int
    sizes: list[int]  # of each feature's vocabulary
    embedding_dim: int
    bottom: list[int]
    top: list[int]
    hidden: list[int]
    dense_rate: float
    sparse_rate: float
    wide_rate: float
    threads: int
    seconds: float
    min_steps: int  # the first third is warm-up; the mean loss of the last third is compared
    cross: tuple[int, int] = (0, 0)  # of dlrm_cross: layers, and their rank

    @property
    def offsets(self) -> Array:
        """Where each feature's ids start when all features share one table, and the total at the end."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes, dtype=np.int64)])

    def layers(self) -> list[list[int]]:
        """Widths of each MLP of the model, input and logit included."""
        embedded = len(self.sizes) * self.embedding_dim
        if self.shape == "wide_deep":
            return [[self.num_numbers + embedded, *self.hidden, 1]]
        mixed = self._num_pairs() if self.shape == "dlrm_dot" else embedded
        return [[self.num_numbers, *self.bottom], [self.bottom[-1] + mixed, *self.top, 1]]

    def _num_pairs(self) -> int:
        """Of vectors: those of the features, and that of the numbers."""
        return len(self.sizes) * (len(self.sizes) + 1) // 2

    def flops_per_sample(self) -> int:
        """Forward, gradient of weights and gradient of inputs; raw numbers need no gradient."""
        products = sum(width * after for mlp in self.layers() for width, after in itertools.pairwise(mlp))
        if self.shape == "dlrm_dot":
            products += self._num_pairs() * self.embedding_dim
        elif self.shape == "dlrm_cross":
            num_layers, rank = self.cross
            products += num_layers * 2 * rank * self.layers()[-1][0]
        return 6 * products - 2 * self.num_numbers * self.layers()[0][1]


@dataclass(frozen=True)
class MemoryBatch:
    """The rows of one step, in memory."""

    numbers: Array  # float32 [B, numbers]
    ids: Array  # int64 [B, features]
    labels: Array  # float32 [B]


def write_batches(batches: Iterator[MemoryBatch], folder: Path) -> None:
    """Write all batches as three .npy files, which need no recmill to read."""
    in_order = list(batches)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("numbers", "ids", "labels"):
        np.save(folder / f"{name}.npy", np.concatenate([getattr(batch, name) for batch in in_order]))


def memory_batches(task: Task) -> list[MemoryBatch]:
    """All full batches: a peer does not pay for data loading."""
    numbers, ids, labels = (
        np.load(Path(task.folder) / "batches" / f"{name}.npy") for name in ("numbers", "ids", "labels")
    )
    starts = range(0, len(labels) - task.batch_size + 1, task.batch_size)
    slices = [slice(start, start + task.batch_size) for start in starts]
    return [MemoryBatch(numbers[rows], ids[rows], labels[rows]) for rows in slices]


def time_steps(losses: Iterator[float], task: Task) -> dict[str, float]:
    """Train for `task.seconds` after a warm-up: samples a second, and the loss after the same rows for everyone."""
    third = task.min_steps // 3
    history = list(itertools.islice(losses, third))
    started, cpu_before = time.perf_counter(), time.process_time()
    while time.perf_counter() - started < task.seconds or len(history) < task.min_steps:
        history.append(next(losses))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_before
    samples = (len(history) - third) * task.batch_size
    return {
        "samples_per_second": samples / seconds,
        "samples_per_cpu_second": samples / cpu_seconds,  # tells a slow contestant from a busy machine
        "loss": float(np.mean(history[task.min_steps - third : task.min_steps])),
        "steps": len(history),
    }


def main(losses: Callable[[Task], Iterator[float]], versions: Callable[[], dict[str, str]]) -> None:
    """The main program of a contestant: a task as JSON in, a result as JSON out."""
    task = Task(**json.loads(sys.argv[-1]))
    print(json.dumps({**time_steps(losses(task), task), "versions": versions()}))
