"""Batches whose reading, parsing and features are done by Ray tasks, as a dispatcher hands units to them.

Order of batches and cursors are those of `Batches` and `LogBatches`, so that a run may be fed in one way today and in
another tomorrow.
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
from recmill.distributed.workers import Workers
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
    """One rank's rows of each global batch of a split, from any cursor on. Every rank must read alike.

    `shares` gives the rows of each rank for a batch of some size. It is asked when a unit is about to be dealt, and on
    rank 0 only, so that what is under way keeps its sizes.
    """

    def __init__(
        self, dispatcher: Any, split: str, rank: int, num_units: int, batches_per_epoch: int
    ) -> None:
        self.dispatcher = dispatcher
        self.split = split
        self.rank = rank
        self.units = range(num_units)
        self.batches_per_epoch = batches_per_epoch
        self.shares: Callable[[int], Sequence[float]] | None = None
        self._readings = itertools.count()

    def read(self, cursor: Cursor = Cursor()) -> Iterator[tuple[Batch, Cursor]]:  # noqa: B008, frozen
        """One epoch from the cursor on: this rank's rows of each batch, with the cursor behind it."""
        reading = next(self._readings)
        course: BatchSchedule = get(self.dispatcher.course.remote(self.split, reading, cursor))
        held: list[Batch] = []
        slices = prefetch(self._slices(course, cursor, reading))
        try:
            for unit, found in slices:
                begin = 0
                for part, count in zip(course.parts(unit), found.counts, strict=True):
                    held.append(between(found.rows, begin, begin + count))
                    begin += count
                    if part.offset + part.rows == course.size(part.batch):
                        whole = course.size(part.batch)
                        yield replace(_own(held), whole=whole), course.cursor_after(part.batch)
                        held = []
        finally:  # before `slices` ends, whose thread may wait for the dispatcher
            self.dispatcher.leave.remote(self.split, reading, self.rank)

    def _slices(self, course: BatchSchedule, cursor: Cursor, reading: int) -> Iterator[tuple[int, Slice]]:
        for unit in range(course.first_unit, course.num_units):
            shares = self.shares(course.batch_size) if self.shares is not None and self.rank == 0 else None
            found = self._slice(reading, cursor, unit, shares)
            if found is None:
                return
            yield unit, found

    def _slice(self, reading: int, cursor: Cursor, unit: int, shares: Sequence[float] | None) -> Slice | None:
        """This rank's rows of a unit; None when the rank has left."""
        while True:
            place = get(self.dispatcher.slice_of.remote(self.split, reading, cursor, unit, self.rank, shares))
            try:
                return get(place[0]) if place else None
            except TaskCancelledError:  # it was dealt again
                continue


def _own(parts: Sequence[Batch]) -> Batch:
    """The parts as one batch of memory of its own: the object store can let go of what they lay in."""
    batch = joined(parts)
    return Batch(
        batch.size,
        np.array(batch.numbers),
        {name: _own_keys(keys) for name, keys in batch.keys.items()},
        {name: _own_keys(keys) for name, keys in batch.lists.items()},
        {name: np.array(labels) for name, labels in batch.labels.items()},
    )


def _own_keys(keys: Keys) -> Keys:
    return Keys(np.array(keys.values), None if keys.offsets is None else np.array(keys.offsets))


class FedData:
    """The rows of another source, read by data workers. Only the first rank opens them; the others are told."""

    def __init__(self, inner: TrainingData, workers: Workers, data_workers: DataWorkers) -> None:
        self.inner = inner
        self.workers = workers
        self.data_workers = data_workers
        self.name = inner.name
        self.data = inner.data
        self.columns = inner.columns
        self._opened: tuple[Learners, _Opened] | None = None
        self._dispatcher: Any = None  # lives as long as the first rank holds it
        if isinstance(inner, LogData):
            inner.each = OnTasks(data_workers)

    @property
    def plan(self) -> Plan:
        return self.inner.plan

    def check(self, recipe: r.Recipe) -> None:
        self.inner.check(recipe)

    def batches(self, learner: Learners) -> Feed:
        return self._feed(learner, "train")

    def evaluation(self, learner: Learners) -> Evaluation | None:
        if isinstance(learner, Retriever):
            return self.inner.evaluation(learner)
        if "eval" not in self._open(learner).splits:
            return None
        feed = self._feed(learner, "eval")
        return lambda: learner.evaluate(feed.read()).metrics().as_dict()

    def num_rows(self, learner: Learners, split: str) -> int:
        return self._open(learner).num_rows[split]

    def _feed(self, learner: Learners, split: str) -> Feed:
        opened = self._open(learner)
        return Feed(self._dispatcher, split, self.workers.rank, *opened.splits[split])

    def _open(self, learner: Learners) -> _Opened:
        """Each learner reads other columns, so it has a dispatcher of its own; the one before it ends."""
        if self._opened is None or self._opened[0] is not learner:
            opened = self.workers.by_first(lambda: self._start_dispatcher(learner))
            if not self.workers.is_first:
                self._dispatcher = ray.get_actor(opened.dispatcher)
            self._opened = learner, opened
        return self._opened[1]

    def _start_dispatcher(self, learner: Learners) -> _Opened:
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
        num_rows = {split: self.inner.num_rows(learner, split) for split in ("train", "eval")}
        return _Opened(name, sizes, num_rows)

    def _units(self, learner: Learners) -> dict[str, Units]:
        train: Any = self.inner.batches(learner)
        if isinstance(learner, Retriever) or not self.inner.num_rows(learner, "eval"):
            return {"train": train}
        if isinstance(train, LogBatches):
            return {"train": train, "eval": train.of_split("eval", EVALUATION_BATCH)}
        assert isinstance(self.inner, TableData)
        held_out = Batches(self.inner.table, EVALUATION_BATCH, "eval", learner.layout.features)
        return {"train": train, "eval": held_out}


@dataclass(frozen=True)
class _Opened:
    """What ranks must know to be fed."""

    dispatcher: str  # its name
    splits: Mapping[str, tuple[int, int]]  # units, batches of an epoch
    num_rows: Mapping[str, int]
