"""The workers of a run: their connections, the control flags that travel with each step, and failure detection."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import reduce
from operator import add
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from recmill.dataset.batch import Array
from recmill.distributed.collectives import GlooGroup
from recmill.distributed.shared_memory import share_memory
from recmill.errors import RecmillError, TrainingError
from recmill.metrics import RankerSums, RankingSums

S = TypeVar("S")
T = TypeVar("T")
Sums = TypeVar("Sums", RankerSums, RankingSums, float)

# Numbers that every worker sends to all others with each step, in the message that sums gradients.
FLAGS = ("seconds_per_row", "out_of_time", "stop", "save", "saved")
TIMEOUT_MINUTES = 10.0
_FAILED = "recmill/failed"
_ROLL_CALL_SECONDS = 3.0


class WorkerLost(TrainingError):
    """Another worker failed or disappeared."""


class Workers:
    """All workers of a run, from the point of view of one. Worker 0 prints, tracks and publishes.

    There are three groups, one for each thread that uses them: training steps, prefetching, and saving.
    """

    def __init__(self, rank: int, size: int, groups: Sequence[GlooGroup] = (), store: Any = None) -> None:
        self.rank, self.size = rank, size
        self.made_group = False  # whether we created torch's process group and must destroy it
        self._groups, self._store = groups, store
        self._own_flags = dict.fromkeys(FLAGS, 0.0)
        self._received_flags = np.zeros((size, len(FLAGS)), np.float32)
        self._step = _StepClock()
        self._prefetch_thread: ThreadPoolExecutor | None = None
        for group in groups:
            group.members = self
        names = self.steps.all_gather(socket.gethostname()) if size > 1 else [""]
        self.num_here = names.count(names[rank])  # workers on this machine

    def share_memory(self, timeout_seconds: float) -> None:
        """Exchange rows through memory instead of connections, where all workers are on one machine."""
        *exchanging, saving = self._groups
        self._groups = [*share_memory(exchanging, timeout_seconds), saving]

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def steps(self) -> GlooGroup:
        """The group of the training thread."""
        return self._groups[0]

    @property
    def prefetching(self) -> GlooGroup:
        """The group of the thread of `run_ahead`."""
        return self._groups[1]

    @property
    def saving(self) -> GlooGroup:
        """The group of the thread that writes checkpoints."""
        return self._groups[2]

    @property
    def sent_bytes(self) -> int:
        return sum(group.sent_bytes for group in self._groups)

    @property
    def seconds_waiting(self) -> float:
        """Seconds that training waited for other workers."""
        return self.steps.seconds_waiting if self._groups else 0.0

    def run_ahead(self, begin: Callable[[], S], finish: Callable[[S], T]) -> Callable[[], T]:
        """Begin an exchange over `prefetching`, after earlier ones. Call the result to wait for its end."""
        if not self.prefetching.needs_thread:
            begun = begin()
            return lambda: finish(begun)
        if self._prefetch_thread is None:
            self._prefetch_thread = ThreadPoolExecutor(1, "prefetch-keys")
        return self._prefetch_thread.submit(lambda: finish(begin())).result

    # Flags: numbers that travel with the sum of gradients

    def set_flag(self, name: str, value: float) -> None:
        """Set a number that all workers receive with the next step."""
        self._own_flags[name] = value

    def begin_step(self, num_rows: int) -> None:
        """Start measuring this worker's time per row."""
        self._step = _StepClock(num_rows, time.perf_counter(), self.seconds_waiting)

    def take_flags(self) -> Array:
        """This worker's flags, and zeros in the places of all others: the sum over workers has the flags of all."""
        self.set_flag("seconds_per_row", self._step.seconds_per_row(self.seconds_waiting))
        flags = np.zeros((self.size, len(FLAGS)), np.float32)
        flags[self.rank] = [self._own_flags[name] for name in FLAGS]
        self._own_flags = dict.fromkeys(FLAGS, 0.0)
        return flags.reshape(-1)

    def receive_flags(self, flags: Array) -> None:
        """Store the sum of all workers' flags."""
        self._received_flags = flags.reshape(self.size, len(FLAGS))

    def flags_of_all(self, name: str) -> Array:
        """A flag of each worker, from the last step."""
        return np.asarray(self._received_flags[:, FLAGS.index(name)])

    def sum(self, sums: Sums) -> Sums:
        """The sum of a measurement over all workers."""
        return sums if self.size == 1 else reduce(add, self.steps.all_gather(sums))

    def by_first(self, function: Callable[[], T]) -> T:
        """The result of worker 0 on all workers; its error too."""
        if self.size == 1:
            return function()
        result: T | None = None
        problem: RecmillError | None = None
        if self.is_first:
            try:
                result = function()
            except RecmillError as error:
                problem = error
        result, message = self.steps.all_gather((result, str(problem) if problem else None))[0]
        if message is not None:
            raise problem or RecmillError(message)
        return result  # type: ignore[return-value]

    # failures

    def fail(self, error: BaseException) -> None:
        """Tell the other workers that this one failed, and why: otherwise they would wait for it."""
        if self.size == 1:
            return
        if not isinstance(error, WorkerLost):
            with suppress(Exception):
                message = (
                    str(error) if isinstance(error, RecmillError) else f"{type(error).__name__}: {error}"
                )
                self._store.set(_FAILED, f"{self.rank}\n{message}")
        self.close()

    @contextmanager
    def noticing_loss(self) -> Iterator[None]:
        """Name the worker that failed or is missing when a connection breaks."""
        try:
            yield
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: BaseException) -> WorkerLost:
        message = ""
        with suppress(Exception):
            self._store.set(f"recmill/noticed/{self.rank}", "")
            message = self._reason() or self._roll_call()
        first_line = str(error).strip().partition("\n")[0]
        return WorkerLost(message or f"The connection to another worker broke: {first_line}")

    def _reason(self) -> str:
        if not self._store.check([_FAILED]):
            return ""
        rank, _, message = self._store.get(_FAILED).decode().partition("\n")
        return f"Worker {rank} of {self.size} failed: {message}"

    def _roll_call(self) -> str:
        """The missing workers: each one that notices the loss signs in at the store within some seconds."""
        end = time.monotonic() + _ROLL_CALL_SECONDS
        missing: list[int] = []
        while time.monotonic() < end:
            missing = [
                rank for rank in range(self.size) if not self._store.check([f"recmill/noticed/{rank}"])
            ]
            if reason := self._reason():
                return reason
            if not missing:
                return ""
            time.sleep(0.05)
        names = ", ".join(map(str, missing))
        return (
            f"Worker {names} of {self.size} is gone: it was killed, or its machine does not answer. "
            "Start again with --resume; the run goes on from its last checkpoint, with any number of workers."
        )

    def close(self) -> None:
        """Close the connections of these workers. A process group that existed before stays."""
        if self._prefetch_thread is not None:
            self._prefetch_thread.shutdown(wait=False, cancel_futures=True)
            self._prefetch_thread = None
        for group in self._groups:
            group.close()
        if self._groups and self.made_group:
            with suppress(Exception):  # it may be broken
                dist.destroy_process_group()
        self._groups = ()


class _StepClock:
    """Seconds that this worker needed per row of a step, without waiting for others."""

    def __init__(self, num_rows: int = 0, began: float = 0.0, waited_before: float = 0.0) -> None:
        self.num_rows, self.began, self.waited_before = num_rows, began, waited_before

    def seconds_per_row(self, waited: float) -> float:
        """0 when there was no row to measure."""
        if not self.num_rows:
            return 0.0
        return (time.perf_counter() - self.began - (waited - self.waited_before)) / self.num_rows


SINGLE_WORKER = Workers(0, 1)


def from_environment(timeout_minutes: float = TIMEOUT_MINUTES) -> Workers:
    """The workers described by the environment of torchrun or Ray Train; a single worker without any."""
    if dist.is_initialized():
        return of_process_group(timeout_minutes)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return SINGLE_WORKER
    return _own_group(timeout_minutes)


def connect(
    rank: int,
    size: int,
    address: str,
    timeout_minutes: float = TIMEOUT_MINUTES,
    use_shared_memory: bool = True,
) -> Workers:
    """Workers that meet at HOST:PORT, which is worker 0's."""
    if size == 1:
        return SINGLE_WORKER
    where = {"init_method": f"tcp://{address}", "rank": rank, "world_size": size}
    return _own_group(timeout_minutes, use_shared_memory, **where)


def _own_group(timeout_minutes: float, use_shared_memory: bool = True, **where: Any) -> Workers:
    dist.init_process_group("gloo", timeout=timedelta(minutes=timeout_minutes), **where)
    workers = of_process_group(timeout_minutes, use_shared_memory)
    workers.made_group = True
    return workers


def of_process_group(timeout_minutes: float = TIMEOUT_MINUTES, use_shared_memory: bool = True) -> Workers:
    """The workers of torch's process group, over connections of our own: rows and weights are in main memory.

    On one machine, steps and what runs ahead of them go through memory that all workers share.
    """
    if dist.get_world_size() == 1:
        return SINGLE_WORKER
    timeout = timedelta(minutes=timeout_minutes)
    groups = [GlooGroup(dist.new_group(backend="gloo", timeout=timeout)) for _ in range(3)]
    # torch has no public access to its store. We only keep the reasons of failures in it.
    store = dist.distributed_c10d._get_default_store()
    workers = Workers(dist.get_rank(), dist.get_world_size(), groups, store)
    if use_shared_memory and workers.num_here == workers.size:
        workers.share_memory(60 * timeout_minutes)
    return workers
