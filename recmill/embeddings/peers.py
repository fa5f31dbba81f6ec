"""What a worker can ask of the others. Training connects them; here is only what is promised."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

import numpy as np

from recmill.embeddings.table import Array

T = TypeVar("T")


class PendingResult(Protocol):
    """Something under way between workers."""

    def wait(self) -> Array: ...


class ProcessGroup(Protocol):
    """A connection of all workers that one thread uses, so that what is asked on it has the same order everywhere."""

    def all_to_all(self, rows: Array, sizes: Array, their_sizes: Array) -> PendingResult:
        """Send the first sizes[0] rows to worker 0, the next to worker 1; get their_sizes[w] rows from worker w."""

    def all_reduce(self, values: Array) -> PendingResult:
        """Everybody's values added up, in place and bit for bit the same for all."""

    def all_gather(self, thing: T) -> list[T]:
        """Everybody's, in the order of workers. For small things, now and then."""


class Peers(Protocol):
    """All workers of a run, as one of them sees them."""

    rank: int
    size: int

    @property
    def steps(self) -> ProcessGroup:
        """For the thread that trains."""

    @property
    def ahead(self) -> ProcessGroup:
        """For what runs ahead of it."""

    @property
    def saving(self) -> ProcessGroup:
        """For the thread that writes checkpoints."""

    def run_ahead(self, function: Callable[[], T]) -> Future[T]:
        """Call it on the one thread that may use `ahead`, after what was given before."""

    def set_flag(self, name: str, value: float) -> None:
        """Tell all workers a number with the next step."""

    def own_flags(self) -> Array:
        """What is said with this step, as numbers that add up to what all say."""

    def receive_flags(self, flags: Array) -> None:
        """What all said."""


def gather_rows(peers: Peers, rows: Array) -> tuple[Array, Array]:
    """Everybody's rows, in the order of workers, and how many each has."""
    ones = np.ones(peers.size, np.int64)
    sizes = peers.steps.all_to_all(np.full(peers.size, len(rows), np.int64), ones, ones).wait()
    for_all = np.concatenate([rows] * peers.size)
    return peers.steps.all_to_all(for_all, ones * len(rows), sizes).wait(), sizes
