"""Collectives between all workers over gloo: rows and weights are NumPy arrays in main memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from recmill.dataset.batch import Array

T = TypeVar("T")

_CHUNK_FLOATS = 4 << 20  # a larger sum is split into chunks that are reduced concurrently


class Members(Protocol):
    """The workers of a group, from the point of view of one of them."""

    rank: int
    size: int

    def noticing_loss(self) -> AbstractContextManager[None]:
        """Convert a connection error into one that names the lost worker."""


class GlooGroup:
    """A process group for one thread, so that collectives have the same order on all workers."""

    needs_thread = True  # to exchange anything while another thread computes

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group: dist.ProcessGroup | None = group
        self.members: Members  # set by Workers, which is made of its groups
        self.sent_bytes = 0
        self.seconds_waiting = 0.0

    def all_to_all(self, rows: Array, sizes: Array, their_sizes: Array) -> PendingTransfer:
        """Send the first sizes[0] rows to worker 0, the next to worker 1; get their_sizes[w] rows from worker w."""
        rows = np.ascontiguousarray(rows)
        out = np.empty((int(their_sizes.sum()), *rows.shape[1:]), rows.dtype)
        width = rows.itemsize * int(np.prod(rows.shape[1:]))
        self.sent_bytes += (int(sizes.sum()) - int(sizes[self.members.rank])) * width
        sent, received = [int(size) * width for size in sizes], [int(size) * width for size in their_sizes]
        with self.members.noticing_loss():
            work = dist.all_to_all_single(
                _bytes(out), _bytes(rows), received, sent, group=self.group, async_op=True
            )
        return PendingTransfer(self, [work], out, rows)

    def exchange(self, rows: Array, sizes_WT: Array) -> PendingExchange:
        """Like all_to_all, with sizes that only the sender has: of each worker's rows, those of each table."""
        return PendingExchange(self, rows, sizes_WT)

    def all_reduce(self, values: Array) -> PendingTransfer:
        """Sum the values of all workers in place. Each chunk is summed at one worker, so that all get the same bits."""
        size = self.members.size
        self.sent_bytes += 2 * (size - 1) * values.nbytes // size
        chunks = [values[first : first + _CHUNK_FLOATS] for first in range(0, len(values), _CHUNK_FLOATS)]
        with self.members.noticing_loss():
            works = [
                dist.all_reduce(torch.from_numpy(chunk), group=self.group, async_op=True) for chunk in chunks
            ]
        return PendingTransfer(self, works, values, values)

    def all_gather(self, value: T) -> list[T]:
        """The values of all workers, in order of rank. They are pickled: for small values, now and then."""
        values: list[Any] = [None] * self.members.size
        with self.members.noticing_loss():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def all_gather_rows(self, rows: Array) -> tuple[Array, Array]:
        """The rows of all workers, in order of rank, and how many each has."""
        size = self.members.size
        ones = np.ones(size, np.int64)
        sizes = self.all_to_all(np.full(size, len(rows), np.int64), ones, ones).wait()
        return self.all_to_all(np.concatenate([rows] * size), ones * len(rows), sizes).wait(), sizes

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of a block as waiting for other workers."""
        began = time.perf_counter()
        yield
        self.seconds_waiting += time.perf_counter() - began

    def close(self) -> None:
        if self.group is not None:
            group, self.group = self.group, None
            with suppress(Exception):  # the peer may be gone already
                dist.destroy_process_group(group)


class PendingTransfer:
    """A collective in progress, with the arrays that it reads and writes: they must outlive it."""

    def __init__(self, group: GlooGroup, works: Sequence[Any], out: Array, source: Array) -> None:
        self.group, self.works, self.out, self.source = group, works, out, source

    def wait(self) -> Array:
        with self.group.waiting(), self.group.members.noticing_loss():
            for work in self.works:
                work.wait()
        return self.out


class PendingExchange:
    """Rows of all workers, which arrive once their sizes have."""

    def __init__(self, group: GlooGroup, rows: Array, sizes_WT: Array) -> None:
        self._group, self._rows, self._sizes_W = group, rows, sizes_WT.sum(axis=1)
        ones = np.ones(len(sizes_WT), np.int64)
        self._arriving = group.all_to_all(sizes_WT, ones, ones)

    def wait(self) -> tuple[Array, Array]:
        """What arrived, and the sizes of its parts by worker and table."""
        sizes_WT = self._arriving.wait()
        return self._group.all_to_all(self._rows, self._sizes_W, sizes_WT.sum(axis=1)).wait(), sizes_WT


def _bytes(rows: Array) -> torch.Tensor:
    return torch.from_numpy(rows.reshape(-1).view(np.uint8))
