"""The dispatcher: an actor that assigns units (row groups of a Table, ranges of a log) to data tasks.

A task returns one slice for each rank, so that a rank fetches only the rows that it trains on. The number of units in
progress or waiting to be fetched is limited, so that a slow trainer holds back the tasks and the object store stays
small.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray

from recmill.dataset.batch import Batch
from recmill.dataset.schedule import BatchSchedule, Cursor, cuts_of
from recmill.distributed.data_tasks import PREFETCHED, Broadcast, DataWorkers, Slice, slices_task

_POLL_SECONDS = 0.2


class Units(Protocol):
    """The interface of `Batches` and `LogBatches`: rows in units, in an order that may differ in each epoch."""

    @property
    def units(self) -> Sequence[Any]: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def batches_per_epoch(self) -> int: ...
    def order(self, epoch: int) -> list[int]: ...
    def unit(self, number: int, epoch: int) -> Batch: ...


@dataclass
class _UnitTask:
    """A unit that was assigned to a task: rows of each rank, batch by batch, and references to the results."""

    spans: list[list[tuple[int, int]]]
    slices: list[ray.ObjectRef[Slice]]


@dataclass
class _EpochPass:
    """One pass over the rest of an epoch: which units have a task, and how far each rank is."""

    split: str
    schedule: BatchSchedule
    order: list[int]
    reached: list[int]  # the unit that each rank requested last
    next_unit: int  # the first unit without a task
    tasks: dict[int, _UnitTask] = field(default_factory=dict)
    cuts: dict[int, list[int]] = field(default_factory=dict)  # of batches whose rows are in several units


class Dispatcher:
    """Assigns units to tasks and their slices to ranks. An actor; all ranks may call its methods at once."""

    def __init__(self, splits: Mapping[str, Units], world: int, workers: DataWorkers) -> None:
        self.splits = splits
        self.source = Broadcast.of(dict(splits))
        self.world = world
        self.workers = workers
        self.passes: dict[tuple[str, int], _EpochPass] = {}
        self.left: dict[tuple[str, int], int] = {}  # the last pass that each rank has left
        self.slice_sizes: Sequence[float] = [1.0] * world
        self.running: dict[ray.ObjectRef[Any], None] = {}
        self.last_end = time.monotonic()  # when a task last finished
        self.waits_for_cpus = True
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        threading.Thread(target=self._run, daemon=True, name="dispatcher").start()

    def slice_of(
        self, split: str, number: int, cursor: Cursor, unit: int, rank: int, sizes: Sequence[float] | None
    ) -> list[ray.ObjectRef[Slice]]:
        """The reference to a rank's rows of a unit; waits until the unit has a task.

        The rank is done with earlier units.

        `number` counts the passes over a split. A rank that has left this pass gets None. `sizes` are the sizes of
        the ranks' slices from now on.
        """
        with self.changed:
            if self._has_left(split, number, rank):
                return []
            self.slice_sizes = sizes or self.slice_sizes
            pass_ = self._pass(split, number, cursor)
            pass_.reached[rank] = unit
            for done in [index for index in pass_.tasks if index < min(pass_.reached)]:
                del pass_.tasks[done]
            self.changed.notify_all()
            self.changed.wait_for(
                lambda: self.failure is not None or unit in pass_.tasks or self._has_left(split, number, rank)
            )
            if self.failure is not None:
                raise self.failure
            return [pass_.tasks[unit].slices[rank]] if unit in pass_.tasks else []

    def schedule(self, split: str, number: int, cursor: Cursor) -> BatchSchedule:
        """The batch schedule of a pass."""
        with self.changed:
            return self._pass(split, number, cursor).schedule

    def leave(self, split: str, number: int, rank: int) -> None:
        """Record that a rank is done with a pass, at its end or before, and with earlier passes."""
        with self.changed:
            self.left[split, rank] = max(number, self.left.get((split, rank), -1))
            for (of_split, index), pass_ in list(self.passes.items()):
                if of_split == split and index <= number:
                    pass_.reached[rank] = pass_.schedule.num_units
                    if min(pass_.reached) == pass_.schedule.num_units:
                        del self.passes[of_split, index]
            self.changed.notify_all()

    def _has_left(self, split: str, number: int, rank: int) -> bool:
        return number <= self.left.get((split, rank), -1)

    def under_way(self) -> int:
        """Units that have a task and that some rank still needs."""
        with self.changed:
            return sum(len(pass_.tasks) for pass_ in self.passes.values())

    def _pass(self, split: str, number: int, cursor: Cursor) -> _EpochPass:
        if (split, number) not in self.passes:
            units = self.splits[split]
            order = units.order(cursor.epoch)
            schedule = BatchSchedule([units.units[unit].rows for unit in order], units.batch_size, cursor)
            reached = [cursor.unit] * self.world
            self.passes[split, number] = _EpochPass(split, schedule, order, reached, cursor.unit)
        return self.passes[split, number]

    def _run(self) -> None:
        """Keep as many tasks in progress as allowed. An error is raised by the next call of each rank."""
        try:
            while True:
                self._dispatch()
        except BaseException as error:
            with self.changed:
                self.failure = error
                self.changed.notify_all()

    def _dispatch(self) -> None:
        """Start tasks up to the limit, then wait until something changes."""
        with self.changed:
            self._start_tasks()
            running = list(self.running)
            if not running:
                self.changed.wait()
                self.last_end = time.monotonic()
                return
        done, _ = ray.wait(running, timeout=_POLL_SECONDS, fetch_local=False)
        with self.changed:
            for ref in done:
                del self.running[ref]
                self.last_end = time.monotonic()
            is_starved = time.monotonic() - self.last_end > self.workers.patience_seconds
            if is_starved and self.waits_for_cpus:
                self._restart_without_cpus()

    def _start_tasks(self) -> None:
        for pass_ in self.passes.values():
            while len(self.running) < self.workers.number and self._has_room(pass_):
                spans = [self._spans(pass_, rank) for rank in range(self.world)]
                pass_.tasks[pass_.next_unit] = _UnitTask(spans, self._start(pass_, pass_.next_unit, spans))
                pass_.next_unit += 1
                self.changed.notify_all()

    def _start(
        self, pass_: _EpochPass, unit: int, spans: list[list[tuple[int, int]]]
    ) -> list[ray.ObjectRef[Slice]]:
        options = self.workers.options(num_cpus=1 if self.waits_for_cpus else 0)
        task: Any = slices_task.options(num_returns=self.world, **options)
        refs = task.remote(self.source, pass_.split, pass_.order[unit], pass_.schedule.epoch, spans)
        slices: list[ray.ObjectRef[Slice]] = refs if self.world > 1 else [refs]
        self.running[slices[0]] = None
        return slices

    def _restart_without_cpus(self) -> None:
        """Restart tasks without a CPU reservation when none has finished for long, and start later ones without it."""
        self.waits_for_cpus = False
        for pass_ in self.passes.values():
            for unit, task in pass_.tasks.items():
                if (waiting := task.slices[0]) in self.running:
                    del self.running[waiting]
                    task.slices = self._start(pass_, unit, task.spans)
                    ray.cancel(waiting)

    def _has_room(self, pass_: _EpochPass) -> bool:
        num_waiting = pass_.next_unit - min(pass_.reached)
        return pass_.next_unit < pass_.schedule.num_units and num_waiting < self.workers.number + PREFETCHED

    def _spans(self, pass_: _EpochPass, rank: int) -> list[tuple[int, int]]:
        """A rank's rows of the next unit, batch by batch. A batch is cut once, however many units it spans."""
        parts = pass_.schedule.parts(pass_.next_unit)
        for batch in [batch for batch in pass_.cuts if batch < parts[0].batch]:
            del pass_.cuts[batch]
        for part in parts:
            if part.batch not in pass_.cuts:
                pass_.cuts[part.batch] = cuts_of(self.slice_sizes, pass_.schedule.size(part.batch))
        return [part.of_rank(pass_.cuts[part.batch], rank) for part in parts]
