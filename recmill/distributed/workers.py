"""Several workers train one model: how they are connected, who reads which rows, and what the others are told.

Models and learners are written for one process; `spread` puts the others beside a learner. The sequence of batches is
that of one process: each worker has a share of every batch, and a step is one of all of them.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist

from recmill.dataset.batch import Array, Batch, between
from recmill.dataset.schedule import Cursor
from recmill.embeddings.placement import TablePlacement, plan_placement
from recmill.embeddings.placement import explain as explain_tables
from recmill.embeddings.sharding import WIRES, ShardedCollection
from recmill.embeddings.table import EmbeddingTable, KeyShard
from recmill.errors import RecmillError, TrainingError
from recmill.learner.base import Learner

T = TypeVar("T")

# What workers tell each other with every step.
FLAGS = ("seconds_per_row", "out_of_time", "stop", "save", "saved")
TIMEOUT_MINUTES = 10.0
_FAILED = "recmill/failed"
_ROLL_CALL_SECONDS = 3.0
_BUCKET_FLOATS = 4 << 20  # a larger sum goes in several pieces, which travel side by side
_KEYS_OF_A_LIST = 8  # a guess, where placement is planned


class WorkerLost(TrainingError):
    """Another worker failed or is gone."""


class Workers:
    """All workers of a run, as one of them sees them. Worker 0 is the one that prints, tracks and publishes."""

    def __init__(self, rank: int, size: int, groups: Sequence[GlooGroup] = (), store: Any = None) -> None:
        self.rank, self.size = rank, size
        self.made_group = False  # torch's process group is ours to end
        self.sent_bytes = 0
        self.seconds_waiting = 0.0
        self._groups, self._store = groups, store
        self._own_flags = dict.fromkeys(FLAGS, 0.0)
        self._received_flags = np.zeros((size, len(FLAGS)), np.float32)
        self._ahead: ThreadPoolExecutor | None = None
        for group in groups:
            group.workers = self
        names = self.steps.all_gather(socket.gethostname()) if size > 1 else [""]
        self.num_here = names.count(names[rank])  # on this machine

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def steps(self) -> GlooGroup:
        return self._groups[0]

    @property
    def ahead(self) -> GlooGroup:
        return self._groups[1]

    @property
    def saving(self) -> GlooGroup:
        return self._groups[2]

    def run_ahead(self, function: Callable[[], T]) -> Future[T]:
        if self._ahead is None:
            self._ahead = ThreadPoolExecutor(1, "ahead")
        return self._ahead.submit(function)

    def set_flag(self, name: str, value: float) -> None:
        self._own_flags[name] = value

    def own_flags(self) -> Array:
        """In this worker's place; what is said once is not repeated."""
        flags = np.zeros((self.size, len(FLAGS)), np.float32)
        flags[self.rank] = [self._own_flags[name] for name in FLAGS]
        self._own_flags = dict.fromkeys(FLAGS, 0.0)
        return flags.reshape(-1)

    def receive_flags(self, flags: Array) -> None:
        self._received_flags = flags.reshape(self.size, len(FLAGS))

    def flags_of_all(self, name: str) -> Array:
        """What each worker said with the last step."""
        return np.asarray(self._received_flags[:, FLAGS.index(name)])

    def by_first(self, function: Callable[[], T]) -> T:
        """What worker 0 makes of it, for all; an error of its is everybody's."""
        if self.size == 1:
            return function()
        found: T | None = None
        problem: RecmillError | None = None
        if self.is_first:
            try:
                found = function()
            except RecmillError as error:
                problem = error
        found, message = self.steps.all_gather((found, str(problem) if problem else None))[0]
        if message is not None:
            raise problem or RecmillError(message)
        return found  # type: ignore[return-value]

    def fail(self, error: BaseException) -> None:
        """Let the others know that this worker cannot go on, and why: they would wait for it."""
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
        """Say who failed, or who is missing, when the others do not answer."""
        try:
            yield
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: BaseException) -> WorkerLost:
        note = ""
        with suppress(Exception):
            self._store.set(f"recmill/noticed/{self.rank}", "")
            note = self._note() or self._roll_call()
        reason = str(error).strip().partition("\n")[0]
        return WorkerLost(note or f"The connection to another worker broke: {reason}")

    def _note(self) -> str:
        if not self._store.check([_FAILED]):
            return ""
        rank, _, message = self._store.get(_FAILED).decode().partition("\n")
        return f"Worker {rank} of {self.size} failed: {message}"

    def _roll_call(self) -> str:
        """Workers that noticed the loss say so; who says nothing for some seconds is gone."""
        end = time.monotonic() + _ROLL_CALL_SECONDS
        silent: list[int] = []
        while time.monotonic() < end:
            silent = [rank for rank in range(self.size) if not self._store.check([f"recmill/noticed/{rank}"])]
            if note := self._note():
                return note
            if not silent:
                return ""
            time.sleep(0.05)
        names = ", ".join(map(str, silent))
        return (
            f"Worker {names} of {self.size} is gone: it was killed, or its machine does not answer. "
            "Start again with --resume; the run goes on from its last checkpoint, with any number of workers."
        )

    def close(self) -> None:
        """End the connections of these workers. A process group that somebody else made stays."""
        if self._ahead is not None:
            self._ahead.shutdown(wait=False, cancel_futures=True)
            self._ahead = None
        for group in self._groups:
            group.close()
        if self._groups and self.made_group:
            with suppress(Exception):  # it may be broken
                dist.destroy_process_group()
        self._groups = ()


SINGLE_WORKER = Workers(0, 1)


def single_worker() -> Workers:
    """One process, no others."""
    return SINGLE_WORKER


def from_environment(timeout_minutes: float = TIMEOUT_MINUTES) -> Workers:
    """The workers that torchrun, Ray Train or whoever started this process told it of; alone without any."""
    if dist.is_initialized():
        return of_process_group(timeout_minutes)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return SINGLE_WORKER
    return _own_group(timeout_minutes)


def connect(rank: int, size: int, address: str, timeout_minutes: float = TIMEOUT_MINUTES) -> Workers:
    """Workers that meet at HOST:PORT, which is worker 0's."""
    if size == 1:
        return SINGLE_WORKER
    return _own_group(timeout_minutes, init_method=f"tcp://{address}", rank=rank, world_size=size)


def _own_group(timeout_minutes: float, **where: Any) -> Workers:
    dist.init_process_group("gloo", timeout=timedelta(minutes=timeout_minutes), **where)
    workers = of_process_group(timeout_minutes)
    workers.made_group = True
    return workers


def of_process_group(timeout_minutes: float = TIMEOUT_MINUTES) -> Workers:
    """The workers of torch's process group, over connections of our own: rows and weights are in main memory."""
    if dist.get_world_size() == 1:
        return SINGLE_WORKER
    timeout = timedelta(minutes=timeout_minutes)
    groups = [GlooGroup(dist.new_group(backend="gloo", timeout=timeout)) for _ in range(3)]
    # torch offers no public way to its store; we only leave notes there for errors.
    store = dist.distributed_c10d._get_default_store()
    return Workers(dist.get_rank(), dist.get_world_size(), groups, store)


class GlooGroup:
    """A process group of its own, so that nothing else comes between."""

    workers: Workers

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group: dist.ProcessGroup | None = group

    def all_to_all(self, rows: Array, sizes: Array, their_sizes: Array) -> _PendingTransfer:
        rows = np.ascontiguousarray(rows)
        out = np.empty((int(their_sizes.sum()), *rows.shape[1:]), rows.dtype)
        width = rows.itemsize * int(np.prod(rows.shape[1:]))
        self.workers.sent_bytes += (int(sizes.sum()) - int(sizes[self.workers.rank])) * width
        sent, received = [int(size) * width for size in sizes], [int(size) * width for size in their_sizes]
        with self.workers.noticing_loss():
            work = dist.all_to_all_single(
                _bytes(out), _bytes(rows), received, sent, group=self.group, async_op=True
            )
        return _PendingTransfer(self.workers, [work], out, rows)

    def all_reduce(self, values: Array) -> _PendingTransfer:
        size = self.workers.size
        self.workers.sent_bytes += 2 * (size - 1) * values.nbytes // size
        pieces = [values[first : first + _BUCKET_FLOATS] for first in range(0, len(values), _BUCKET_FLOATS)]
        with self.workers.noticing_loss():
            works = [
                dist.all_reduce(torch.from_numpy(piece), group=self.group, async_op=True) for piece in pieces
            ]
        return _PendingTransfer(self.workers, works, values, values)

    def all_gather(self, thing: T) -> list[T]:
        found: list[Any] = [None] * self.workers.size
        with self.workers.noticing_loss():
            dist.all_gather_object(found, thing, group=self.group)
        return found

    def close(self) -> None:
        if self.group is not None:
            group, self.group = self.group, None
            with suppress(Exception):  # it may be gone already
                dist.destroy_process_group(group)


class _PendingTransfer:
    """What is under way, with the arrays that it is read from and written to."""

    def __init__(self, workers: Workers, works: Sequence[Any], out: Array, source: Array) -> None:
        self.workers, self.works, self.out, self.source = workers, works, out, source

    def wait(self) -> Array:
        began = time.perf_counter()
        with self.workers.noticing_loss():
            for work in self.works:
                work.wait()
        self.workers.seconds_waiting += time.perf_counter() - began
        return self.out


def _bytes(rows: Array) -> torch.Tensor:
    return torch.from_numpy(rows.reshape(-1).view(np.uint8))


# Who reads which rows of a batch


class SliceSizes:
    """How many rows of each batch every worker takes: equal parts at first, then by how fast each one is.

    Every worker hears the same numbers and does the same arithmetic. Parts change only when some worker would gain
    much, and then half of the way, so that noise moves nothing.
    """

    EVERY_STEPS = 16
    WORTH_IT = 0.15  # how far a part must be from the one it ought to have
    LEAST = 0.25  # of an equal part: a worker that recovers must be heard

    def __init__(self, num_workers: int, balance: bool = True) -> None:
        self.balance = balance
        self.parts = np.full(num_workers, 1 / num_workers)
        self._seconds: list[Array] = []

    def cut(self, num_rows: int) -> list[int]:
        """How many rows of a batch each worker has, the first ones worker 0."""
        ends = [round(num_rows * end) for end in accumulate(self.parts.tolist())]
        return [end - begin for begin, end in pairwise([0, *ends[:-1], num_rows])]

    def own(self, batch: Batch, rank: int) -> Batch:
        """A worker's rows of a batch; what is a share already stays as it is."""
        if batch.whole is not None:
            return batch
        sizes = self.cut(batch.size)
        begin = sum(sizes[:rank])
        return replace(between(batch, begin, begin + sizes[rank]), whole=batch.size)

    def learn(self, seconds_per_row: Array) -> None:
        """Hear how long each worker took for a row of the last step."""
        if not self.balance or not (seconds_per_row > 0).all():
            return
        self._seconds.append(seconds_per_row.astype(np.float64))
        if len(self._seconds) < self.EVERY_STEPS:
            return
        speed = 1 / np.median(self._seconds, axis=0)
        self._seconds = []
        wanted = np.maximum(speed / speed.sum(), self.LEAST / len(speed))
        wanted /= wanted.sum()
        if np.abs(wanted / self.parts - 1).max() > self.WORTH_IT:
            self.parts = (self.parts + wanted) / 2


@runtime_checkable
class CutsItself(Protocol):
    """A source of batches that gives each worker its share, and would know how large it should be now."""

    shares: Callable[[int], Sequence[int]]


def worker_batches(
    batches: Iterator[tuple[Batch, Cursor]], learner: Learner, workers: Workers, shares: SliceSizes
) -> Generator[tuple[Batch, Cursor], None, None]:
    """This worker's rows of each batch. Keys of the next one are asked for while the one before is learned."""
    held: tuple[Batch, Cursor] | None = None
    try:
        for batch, after in batches:
            own = shares.own(batch, workers.rank)
            learner.expect(own)
            if held is not None:
                yield held
                shares.learn(workers.flags_of_all("seconds_per_row"))
            held = own, after
        if held is not None:
            yield held
    finally:
        learner.expect_no_more()


# Where tables go


def distribute(learner: Learner, workers: Workers, wire: str = "float32") -> None:
    """Make a new learner one of several: it holds its part of the tables, and learns from all workers' rows."""
    if workers.size == 1:
        return
    if wire not in WIRES:
        raise RecmillError(f'Rows cannot travel as "{wire}"; known: {", ".join(WIRES)}.')
    _check(learner)
    places = {placed.name: placed.placement for placed in placement_of(learner, workers.size, wire)}
    shard = KeyShard(workers.rank, workers.size)
    for name, collection in learner.collections.items():
        tables = [
            EmbeddingTable(
                table.spec,
                disk=learner.disk,
                shard=shard if places[f"{name}/{table.spec.name}"] == "sharded" else None,
            )
            for table in collection.tables.values()
        ]
        learner.collections[name] = ShardedCollection(
            tables, collection.features, workers, learner.num_threads, wire
        )
    learner.peers = workers
    _same_weights(learner, workers)


def _check(learner: Learner) -> None:
    """Some options count or compare keys of a whole table, which no worker sees."""
    for name, table in learner.tables.items():
        for option in ("bloom_counters", "shared_rows"):
            if getattr(table.spec, option):
                raise RecmillError(
                    f'Table "{name}" has {option}, which several workers cannot share. '
                    "Remove it from ranking.dynamic, or train with one worker."
                )
    if learner.dynamic is not None and learner.dynamic.capacity is not None:
        raise RecmillError(
            "ranking.dynamic.capacity compares all keys of a table, which several workers cannot. "
            "Use evict_after_steps or evict_below_norm, or train with one worker."
        )


def _same_weights(learner: Learner, workers: Workers) -> None:
    """All begin with worker 0's dense weights, whatever machine made them; dropout differs from worker to worker."""
    for weight in learner.parameters:
        values = weight.detach().numpy().reshape(-1)
        if not workers.is_first:
            values[:] = 0
        workers.steps.all_reduce(values).wait()
    scatter_randomness(learner, workers)


def scatter_randomness(learner: Learner, workers: Workers) -> None:
    if not workers.is_first:
        torch.manual_seed(learner.train_spec.seed + 1_000_003 * workers.rank + learner.steps)


def placement_of(learner: Learner, num_workers: int, wire: str = "float32") -> list[TablePlacement]:
    """Where the tables of a learner go, and what that costs."""
    keys_per_row: dict[str, float] = dict.fromkeys(learner.tables, 0.0)
    for name, collection in learner.collections.items():
        for feature in collection.features:
            is_list = feature.pooling != "none"
            keys_per_row[f"{name}/{feature.table}"] += _KEYS_OF_A_LIST if is_list else 1
    specs = {name: table.spec for name, table in learner.tables.items()}
    return plan_placement(specs, keys_per_row, learner.train_spec.batch_size, num_workers, wire)


def explain(learner: Learner, num_workers: int, wire: str = "float32") -> list[str]:
    """The placement of a learner's tables as lines of text."""
    num_weights = sum(weight.numel() for weight in learner.parameters)
    placed = placement_of(learner, num_workers, wire)
    return explain_tables(placed, num_workers, learner.train_spec.batch_size, num_weights)
