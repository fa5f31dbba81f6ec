"""Exchanges between workers of one machine: rows go through memory that they share, not through connections."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from recmill import _native
from recmill.dataset.batch import Array
from recmill.distributed.collectives import GlooGroup, PendingExchange, PendingTransfer

_FOLDER = Path("/dev/shm")
_MAX_RING_BYTES = 8 << 20  # for each sender and receiver: a larger message moves while both take part in it
_MAX_BYTES = 24 << 20  # all rings of a group: two groups fit into the 64 MB that containers have
_LINE = 64
_CHECK_SECONDS = 0.5  # between looks at whether the others are still there


class SharedFile:
    """Memory that all workers map. Each locks its own byte of the file, which the system unlocks when it dies."""

    def __init__(self, path: Path, rank: int, num_bytes: int, create: bool) -> None:
        self._file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        if create:
            os.posix_fallocate(
                self._file, 0, num_bytes
            )  # a full /dev/shm is an error here, not a SIGBUS later
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, rank)
        self.memory = np.frombuffer(mmap.mmap(self._file, num_bytes), np.uint8)

    def is_alive(self, rank: int) -> bool:
        """Whether another worker still has its lock."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return False


class SharedMemoryGroup(GlooGroup):
    """A group whose rows and sums go through rings of shared memory; small values still go through gloo."""

    needs_thread = False  # what was sent waits in the rings

    def __init__(
        self, group: GlooGroup, file: SharedFile, memory: Array, ring_bytes: int, seconds: float
    ) -> None:
        """`seconds`: how long to wait for a worker that lives."""
        assert group.group is not None
        super().__init__(group.group)
        self.members = group.members
        self._file, self._seconds = file, seconds
        rank, size = self.members.rank, self.members.size
        self._others = [other for other in range(size) if other != rank]
        self._rings = _native.Rings(memory, rank, size, ring_bytes)
        self._under_way: dict[int, tuple[Sequence[Array], Sequence[Array]]] = {}  # they must outlive it

    def all_to_all(self, rows: Array, sizes: Array, their_sizes: Array) -> PendingTransfer:
        rows = np.ascontiguousarray(rows)
        out = np.empty((int(their_sizes.sum()), *rows.shape[1:]), rows.dtype)
        width, rank = rows.itemsize * math.prod(rows.shape[1:]), self.members.rank
        sent, received = _split(rows, sizes * width), _split(out, their_sizes * width)
        received[rank][:] = sent[rank]
        self.sent_bytes += rows.nbytes - len(sent[rank])
        return PendingTransfer(self, [_Transfer(self, sent, received)], out, rows)

    def exchange(self, rows: Array, sizes_WT: Array) -> PendingExchange:
        """What was begun first must be awaited first."""
        return _Exchange(self, rows, sizes_WT)

    def all_reduce(self, values: Array) -> PendingTransfer:
        size = self.members.size
        self.sent_bytes += 2 * (size - 1) * values.nbytes // size
        return PendingTransfer(self, [_Sum(self, values)], values, values)

    def start(self, sent: Sequence[Array], received: Sequence[Array]) -> int:
        """Begin to send bytes to each worker and to receive bytes from each; the number of the transfer."""
        number = self._rings.start(sent, received)
        self._under_way[number] = sent, received
        return number

    def finish(self, number: int) -> None:
        end = time.monotonic() + self._seconds
        while not self._rings.wait(number, _CHECK_SECONDS):
            if time.monotonic() > end or not all(map(self._file.is_alive, self._others)):
                raise RuntimeError(
                    f"another worker of this machine did not answer within {self._seconds:g} s"
                )
        del self._under_way[number]

    def close(self) -> None:
        self._rings.close()
        super().close()


class _Transfer:
    """Bytes to each worker and from each, under way."""

    def __init__(self, group: SharedMemoryGroup, sent: Sequence[Array], received: Sequence[Array]) -> None:
        self._group = group
        with group.members.noticing_loss():
            self._number = group.start(sent, received)

    def wait(self) -> None:
        self._group.finish(self._number)


class _Exchange(PendingExchange):
    """Sizes and rows are sent at once, and received when they are awaited."""

    def __init__(self, group: SharedMemoryGroup, rows: Array, sizes_WT: Array) -> None:
        self._rings, self._rank = group, group.members.rank
        self._sizes_WT, self._nothing = sizes_WT, [np.empty(0, np.uint8)] * len(sizes_WT)
        self._width, self._dtype = rows.itemsize, rows.dtype
        self._parts = _split(rows, sizes_WT.sum(axis=1) * rows.itemsize)
        group.sent_bytes += rows.nbytes - len(self._parts[self._rank])
        self._sent = [
            _Transfer(group, _bytes(list(sizes_WT)), self._nothing),
            _Transfer(group, self._parts, self._nothing),
        ]

    def wait(self) -> tuple[Array, Array]:
        sizes_WT = self._sizes_WT.copy()
        self._receive(_bytes(list(sizes_WT)))
        rows = np.empty(int(sizes_WT.sum()), self._dtype)
        received = _split(rows, sizes_WT.sum(axis=1) * self._width)
        received[self._rank][:] = self._parts[self._rank]
        self._receive(received)
        return rows, sizes_WT

    def _receive(self, into: Sequence[Array]) -> None:
        with self._rings.waiting(), self._rings.members.noticing_loss():
            for transfer in (_Transfer(self._rings, self._nothing, into), *self._sent):
                transfer.wait()
        self._sent = []


class _Sum:
    """Each worker adds up a part of the values and sends the sums to all: all get the same bits."""

    def __init__(self, group: SharedMemoryGroup, values: Array) -> None:
        self._group, rank, size = group, group.members.rank, group.members.size
        edges = [len(values) * index // size for index in range(size + 1)]
        self._chunks = [values[begin:end] for begin, end in pairwise(edges)]
        own = self._chunks[rank]
        self._parts = [np.empty(0 if worker == rank else len(own), own.dtype) for worker in range(size)]
        self._arriving = _Transfer(group, _bytes(self._chunks), _bytes(self._parts))

    def wait(self) -> None:
        self._arriving.wait()
        own = self._chunks[self._group.members.rank]
        for part in self._parts:
            if len(part):
                own += part
        _Transfer(self._group, _bytes([own] * len(self._chunks)), _bytes(self._chunks)).wait()


def share_memory(groups: Sequence[GlooGroup], seconds: float) -> list[GlooGroup]:
    """These groups over shared memory, or as they are when their workers have none in common. All workers call it."""
    gloo, rank, size = groups[0], groups[0].members.rank, groups[0].members.size
    ring_bytes = min(_MAX_RING_BYTES, _MAX_BYTES // size**2 // _LINE * _LINE)
    each = _native.Rings.memory_size(size, ring_bytes)
    path = Path(tempfile.mktemp(prefix="recmill-workers-", dir=_FOLDER)) if rank == 0 else None
    file = _open(path, rank, each * len(groups), create=True) if path is not None else None
    path = gloo.all_gather(path if file is not None else None)[0]
    if path is not None and file is None:
        file = _open(path, rank, each * len(groups), create=False)
    have_all = all(gloo.all_gather(file is not None))
    if rank == 0 and path is not None:
        path.unlink()  # it lives as long as somebody maps it
    if file is None or not have_all:
        return list(groups)
    memories = np.split(file.memory, len(groups))
    return [
        SharedMemoryGroup(group, file, memory, ring_bytes, seconds)
        for group, memory in zip(groups, memories, strict=True)
    ]


def _open(path: Path, rank: int, num_bytes: int, create: bool) -> SharedFile | None:
    try:
        return SharedFile(path, rank, num_bytes, create)
    except OSError:  # no such folder, no room in it, or another machine's
        if create:
            path.unlink(missing_ok=True)
        return None


def _split(rows: Array, sizes: Array) -> list[Array]:
    """The bytes of each worker, which follow each other."""
    flat, edges = rows.reshape(-1).view(np.uint8), [0, *accumulate(sizes.tolist())]
    return [flat[begin:end] for begin, end in pairwise(edges)]


def _bytes(parts: Sequence[Array]) -> list[Array]:
    return [part.view(np.uint8) for part in parts]
