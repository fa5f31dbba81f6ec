"""Which rows of a batch each worker takes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Protocol, runtime_checkable

import numpy as np

from recmill.dataset.batch import Array, Batch, between
from recmill.dataset.schedule import Cursor
from recmill.distributed.parallel import finish_prefetch, prefetch_keys
from recmill.distributed.workers import Workers
from recmill.learner.base import Learner


class SliceSizes:
    """Slice sizes: how many rows of each batch each worker takes. Equal at first, then by the workers' speeds.

    Every worker receives the same numbers and does the same arithmetic. Sizes change only when some worker would gain
    much, and then half of the way, so that noise has no effect.
    """

    EVERY_STEPS = 16
    MIN_GAIN = 0.15  # how far a slice must be from its ideal size to change
    MIN_SLICE = 0.25  # minimum, as a fraction of an equal slice: a worker that recovers must be measured

    def __init__(self, num_workers: int, balance: bool = True) -> None:
        self.balance = balance
        self.fractions = np.full(num_workers, 1 / num_workers)
        self._seconds: list[Array] = []

    def cut(self, num_rows: int) -> list[int]:
        """Rows of a batch for each worker; worker 0 takes the first ones."""
        ends = [round(num_rows * end) for end in accumulate(self.fractions.tolist())]
        return [end - begin for begin, end in pairwise([0, *ends[:-1], num_rows])]

    def slice_rows(self, rows: slice, rank: int) -> slice:
        """A worker's slice of a range of rows."""
        sizes = self.cut(rows.stop - rows.start)
        begin = rows.start + sum(sizes[:rank])
        return slice(begin, begin + sizes[rank])

    def slice_batch(self, batch: Batch, rank: int) -> Batch:
        """A worker's rows of a batch; a batch that is a slice already is returned as it is."""
        if batch.whole is not None:
            return batch
        rows = self.slice_rows(slice(0, batch.size), rank)
        return replace(between(batch, rows.start, rows.stop), whole=batch.size)

    def adapt(self, seconds_per_row: Array) -> None:
        """Update the sizes by how long each worker took for a row of the last step."""
        if not self.balance or not (seconds_per_row > 0).all():
            return
        self._seconds.append(seconds_per_row.astype(np.float64))
        if len(self._seconds) < self.EVERY_STEPS:
            return
        speed = 1 / np.median(self._seconds, axis=0)
        self._seconds = []
        target = np.maximum(speed / speed.sum(), self.MIN_SLICE / len(speed))
        target /= target.sum()
        if np.abs(target / self.fractions - 1).max() > self.MIN_GAIN:
            self.fractions = (self.fractions + target) / 2


@runtime_checkable
class SlicedSource(Protocol):
    """A source of batches that gives each worker its slice, of the sizes that `slice_sizes` gives for a batch."""

    slice_sizes: Callable[[int], Sequence[float]] | None


def worker_batches(
    batches: Iterator[tuple[Batch, Cursor]], learner: Learner, workers: Workers, sizes: SliceSizes
) -> Generator[tuple[Batch, Cursor], None, None]:
    """This worker's rows of each batch. Keys of the next batch are prefetched while the current one trains.

    One batch ahead and no more: when a run stops early, all workers have begun the same exchanges.
    """
    held: tuple[Batch, Cursor] | None = None
    try:
        for batch, after in batches:
            own = sizes.slice_batch(batch, workers.rank)
            prefetch_keys(learner, own)
            if held is not None:
                workers.begin_step(held[0].size)
                yield held
                sizes.adapt(workers.flags_of_all("seconds_per_row"))
            held = own, after
        if held is not None:
            workers.begin_step(held[0].size)
            yield held
    finally:
        finish_prefetch(learner)
