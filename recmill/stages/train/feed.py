"""Batches that Ray tasks read, parse and transform; a dispatcher assigns units to the tasks.

The order of batches and the cursors are those of `Batches` and `LogBatches`, so that a run may resume with or without
data workers.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import TaskCancelledError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recmill.dataset.batch import Batch, Keys, between, joined
from recmill.dataset.loader import Batches
from recmill.dataset.log_loader import LogBatches
from recmill.dataset.prefetch import prefetch
from recmill.dataset.schedule import BatchSchedule, Cursor
from recmill.distributed.data_tasks import DataWorkers, OnTasks, Slice, get
from recmill.distributed.dispatcher import Dispatcher, Units
from recmill.distributed.evaluation import evaluate_ranker
from recmill.distributed.workers import SINGLE_WORKER, Workers
from recmill.errors import RecmillError
from recmill.features.plan import Plan
from recmill.learner.retrieval import Retriever
from recmill.recipe import recipe as r
from recmill.stages.train.source import (
    EVALUATION_BATCH,
    Evaluation,
    Learners,
    LogData,
    TableData,
    TrainingData,
)


class Feed:
    """One rank's rows of each global batch of a split, from any cursor. All ranks must read in the same order.

    `slice_sizes` gives the rows of each rank for a batch of some size. It is called when a unit is about to be
    scheduled, on rank 0 only, so that units in progress keep their sizes.
    """

    def __init__(
        self, dispatcher: Any, split: str, rank: int, num_units: int, batches_per_epoch: int
    ) -> None:
        self.dispatcher = dispatcher
        self.split = split
        self.rank = rank
        self.units = range(num_units)
        self.batches_per_epoch = batches_per_epoch
        self.slice_sizes: Callable[[int], Sequence[float]] | None = None
        self._passes = itertools.count()

    def read(self, cursor: Cursor = Cursor()) -> Iterator[tuple[Batch, Cursor]]:  # noqa: B008, frozen
        """Read one epoch from the cursor: this rank's rows of each batch, with the cursor after it."""
        number = next(self._passes)
        schedule: BatchSchedule = get(self.dispatcher.schedule.remote(self.split, number, cursor))
        held: list[Batch] = []
        slices = prefetch(self._slices(schedule, cursor, number))
        try:
            for unit, own in slices:
                begin = 0
                for part, count in zip(schedule.parts(unit), own.counts, strict=True):
                    held.append(between(own.rows, begin, begin + count))
                    begin += count
                    if part.offset + part.rows == schedule.size(part.batch):
                        whole = schedule.size(part.batch)
                        yield replace(_copy(held), whole=whole), schedule.cursor_after(part.batch)
                        held = []
        finally:  # before `slices` ends: its thread may be waiting for the dispatcher
            self.dispatcher.leave.remote(self.split, number, self.rank)

    def _slices(self, schedule: BatchSchedule, cursor: Cursor, number: int) -> Iterator[tuple[int, Slice]]:
        for unit in range(schedule.first_unit, schedule.num_units):
            own = self._slice(number, cursor, unit, self._new_sizes(schedule.batch_size))
            if own is None:
                return
            yield unit, own

    def _new_sizes(self, batch_size: int) -> Sequence[float] | None:
        if self.slice_sizes is None or self.rank != 0:
            return None
        return self.slice_sizes(batch_size)

    def _slice(self, number: int, cursor: Cursor, unit: int, sizes: Sequence[float] | None) -> Slice | None:
        """This rank's rows of a unit; None when the rank has left the pass."""
        while True:
            refs = get(self.dispatcher.slice_of.remote(self.split, number, cursor, unit, self.rank, sizes))
            try:
                return get(refs[0]) if refs else None
            except TaskCancelledError:  # the task was restarted without a CPU reservation
                continue


def _copy(parts: Sequence[Batch]) -> Batch:
    """Copy the slices into one batch, so that the object store can free their memory."""
    batch = joined(parts)
    return Batch(
        batch.size,
        np.array(batch.numbers),
        {name: _copy_keys(keys) for name, keys in batch.keys.items()},
        {name: _copy_keys(keys) for name, keys in batch.lists.items()},
        {name: np.array(labels) for name, labels in batch.labels.items()},
    )


def _copy_keys(keys: Keys) -> Keys:
    return Keys(np.array(keys.values), None if keys.offsets is None else np.array(keys.offsets))


class FedData:
    """The rows of another source, read by data workers. Only the first rank opens it and shares the result."""

    def __init__(self, inner: TrainingData, workers: Workers, data_workers: DataWorkers) -> None:
        self.inner = inner
        self.workers = workers
        self.data_workers = data_workers
        self.name = inner.name
        self.data = inner.data
        self.columns = inner.columns
        self._opened: tuple[Learners, _DispatcherInfo] | None = None
        self._dispatcher: Any = None  # the actor lives as long as the first rank holds this handle
        if isinstance(inner, LogData):
            inner.each = OnTasks(data_workers)

    @property
    def plan(self) -> Plan:
        return self.inner.plan

    def check(self, recipe: r.Recipe) -> None:
        self.inner.check(recipe)
        if recipe.refit:
            self.with_eval_rows()

    def batches(self, learner: Learners) -> Feed:
        return self._feed(learner, "train")

    def evaluation(self, learner: Learners, workers: Workers = SINGLE_WORKER) -> Evaluation | None:
        if isinstance(learner, Retriever):
            return self.inner.evaluation(learner, workers)
        if "eval" not in self._open(learner).splits:
            return None
        feed = self._feed(learner, "eval")
        return lambda: evaluate_ranker(learner, feed.read(), workers).metrics().as_dict()

    def num_rows(self, split: str) -> int:
        return self.workers.by_first(lambda: self.inner.num_rows(split))

    def with_eval_rows(self) -> TrainingData:
        raise RecmillError(
            "refit = true reads a Table's rows in the workers themselves: train without --data-workers, or "
            "remove refit."
        )

    def _feed(self, learner: Learners, split: str) -> Feed:
        opened = self._open(learner)
        return Feed(self._dispatcher, split, self.workers.rank, *opened.splits[split])

    def _open(self, learner: Learners) -> _DispatcherInfo:
        """Open a dispatcher. The previous one ends: each learner reads other columns."""
        if self._opened is None or self._opened[0] is not learner:
            opened = self.workers.by_first(lambda: self._start_dispatcher(learner))
            if not self.workers.is_first:
                self._dispatcher = ray.get_actor(opened.dispatcher)
            self._opened = learner, opened
        return self._opened[1]

    def _start_dispatcher(self, learner: Learners) -> _DispatcherInfo:
        if self._dispatcher is not None:
            ray.kill(self._dispatcher)
        splits = self._units(learner)
        name = f"recmill-dispatcher-{uuid.uuid4().hex}"
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._dispatcher = (
            ray.remote(Dispatcher)
            .options(
                name=name, num_cpus=0, scheduling_strategy=here, max_concurrency=4 + 2 * self.workers.size
            )
            .remote(splits, self.workers.size, self.data_workers)
        )
        sizes = {split: (len(units.units), units.batches_per_epoch) for split, units in splits.items()}
        return _DispatcherInfo(name, sizes)

    def _units(self, learner: Learners) -> dict[str, Units]:
        train: Any = self.inner.batches(learner)
        if isinstance(learner, Retriever) or not self.inner.num_rows("eval"):
            return {"train": train}
        if isinstance(train, LogBatches):
            return {"train": train, "eval": train.of_split("eval", EVALUATION_BATCH)}
        assert isinstance(self.inner, TableData)
        held_out = Batches(self.inner.table, EVALUATION_BATCH, "eval", learner.layout.features)
        return {"train": train, "eval": held_out}


@dataclass(frozen=True)
class _DispatcherInfo:
    """What all ranks need to read from a dispatcher."""

    dispatcher: str  # its actor name
    splits: Mapping[str, tuple[int, int]]  # units and batches of an epoch
