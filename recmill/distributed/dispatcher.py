"""The dispatcher: an actor that hands one unit (a row group of a Table, a piece of a log) to each data task.

The task returns one slice for each rank, so that a rank fetches the rows that it trains on and no others. No more than
so many units are under way or wait to be fetched, so that a slow trainer holds back the tasks and the object store
stays small.
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
from recmill.distributed.data_tasks import AHEAD, Broadcast, DataWorkers, Slice, slices_task

_POLL_SECONDS = 0.2


class Units(Protocol):
    """What `Batches` and `LogBatches` have in common: rows in units, in an order that each epoch may change."""

    @property
    def units(self) -> Sequence[Any]: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def batches_per_epoch(self) -> int: ...
    def order(self, epoch: int) -> list[int]: ...
    def unit(self, number: int, epoch: int) -> Batch: ...


@dataclass
class _Dealt:
    """A unit that was given to a task: rows of each rank, batch by batch, and where they will be."""

    spans: list[list[tuple[int, int]]]
    slices: list[ray.ObjectRef[Slice]]


@dataclass
class _EpochPass:
    """One pass over what is left of an epoch: what was dealt, and how far each rank is."""

    split: str
    course: BatchSchedule
    order: list[int]
    reached: list[int]  # the unit that each rank asked for last
    next: int  # the unit to be dealt next
    dealt: dict[int, _Dealt] = field(default_factory=dict)
    cuts: dict[int, list[int]] = field(default_factory=dict)  # of batches that were dealt in part


class Dispatcher:
    """Deals units to tasks and their slices to ranks. An actor; methods may be called by all ranks at once."""

    def __init__(self, splits: Mapping[str, Units], world: int, workers: DataWorkers) -> None:
        self.splits = splits
        self.source = Broadcast.of(dict(splits))
        self.world = world
        self.workers = workers
        self.readings: dict[tuple[str, int], _EpochPass] = {}
        self.left: dict[tuple[str, int], int] = {}  # the last pass that each rank has left
        self.shares: Sequence[float] = [1.0] * world
        self.running: dict[ray.ObjectRef[Any], None] = {}
        self.last_end = time.monotonic()  # of a task
        self.waits_for_cpus = True
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        threading.Thread(target=self._deal_on, daemon=True, name="dispatcher").start()

    def slice_of(
        self, split: str, reading: int, cursor: Cursor, unit: int, rank: int, shares: Sequence[float] | None
    ) -> list[ray.ObjectRef[Slice]]:
        """Where a rank's rows of a unit are, or will be; waits until it is dealt. The rank is done with all before it.

        `reading` numbers the passes over a split. A rank that has left this one gets nothing.
        """
        with self.changed:
            if self._has_left(split, reading, rank):
                return []
            self.shares = shares or self.shares
            pass_ = self._reading(split, reading, cursor)
            pass_.reached[rank] = unit
            for done in [place for place in pass_.dealt if place < min(pass_.reached)]:
                del pass_.dealt[done]
            self.changed.notify_all()
            self.changed.wait_for(
                lambda: (
                    self.failure is not None or unit in pass_.dealt or self._has_left(split, reading, rank)
                )
            )
            if self.failure is not None:
                raise self.failure
            return [pass_.dealt[unit].slices[rank]] if unit in pass_.dealt else []

    def course(self, split: str, reading: int, cursor: Cursor) -> BatchSchedule:
        """Where the batches of a pass lie."""
        with self.changed:
            return self._reading(split, reading, cursor).course

    def leave(self, split: str, reading: int, rank: int) -> None:
        """A rank is done with a pass, at its end or before, and with those before it."""
        with self.changed:
            self.left[split, rank] = max(reading, self.left.get((split, rank), -1))
            for (of_split, number), pass_ in list(self.readings.items()):
                if of_split == split and number <= reading:
                    pass_.reached[rank] = pass_.course.num_units
                    if min(pass_.reached) == pass_.course.num_units:
                        del self.readings[of_split, number]
            self.changed.notify_all()

    def _has_left(self, split: str, reading: int, rank: int) -> bool:
        return reading <= self.left.get((split, rank), -1)

    def under_way(self) -> int:
        """Units that are dealt and not yet used by all ranks."""
        with self.changed:
            return sum(len(reading.dealt) for reading in self.readings.values())

    def _reading(self, split: str, reading: int, cursor: Cursor) -> _EpochPass:
        if (split, reading) not in self.readings:
            units = self.splits[split]
            order = units.order(cursor.epoch)
            course = BatchSchedule([units.units[number].rows for number in order], units.batch_size, cursor)
            self.readings[split, reading] = _EpochPass(
                split, course, order, [cursor.unit] * self.world, cursor.unit
            )
        return self.readings[split, reading]

    def _deal_on(self) -> None:
        """Keep tasks under way, as many as are allowed. What goes wrong is raised by the next call of each rank."""
        try:
            while True:
                self._deal_once()
        except BaseException as error:
            with self.changed:
                self.failure = error
                self.changed.notify_all()

    def _deal_once(self) -> None:
        with self.changed:
            self._deal()
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
                self._deal_again()

    def _deal(self) -> None:
        for pass_ in self.readings.values():
            while len(self.running) < self.workers.number and self._has_room(pass_):
                spans = [self._spans(pass_, rank) for rank in range(self.world)]
                pass_.dealt[pass_.next] = _Dealt(spans, self._start(pass_, pass_.next, spans))
                pass_.next += 1
                self.changed.notify_all()

    def _start(
        self, pass_: _EpochPass, unit: int, spans: list[list[tuple[int, int]]]
    ) -> list[ray.ObjectRef[Slice]]:
        options = self.workers.options(num_cpus=1 if self.waits_for_cpus else 0)
        task: Any = slices_task.options(num_returns=self.world, **options)
        found = task.remote(self.source, pass_.split, pass_.order[unit], pass_.course.epoch, spans)
        slices: list[ray.ObjectRef[Slice]] = found if self.world > 1 else [found]
        self.running[slices[0]] = None
        return slices

    def _deal_again(self) -> None:
        """No task has ended for long: those under way, and all after them, do without a CPU of their own."""
        self.waits_for_cpus = False
        for pass_ in self.readings.values():
            for unit, dealt in pass_.dealt.items():
                if (waiting := dealt.slices[0]) in self.running:
                    del self.running[waiting]
                    dealt.slices = self._start(pass_, unit, dealt.spans)
                    ray.cancel(waiting)

    def _has_room(self, pass_: _EpochPass) -> bool:
        waiting = pass_.next - min(pass_.reached)
        return pass_.next < pass_.course.num_units and waiting < self.workers.number + AHEAD

    def _spans(self, pass_: _EpochPass, rank: int) -> list[tuple[int, int]]:
        """Rows of the next unit that a rank has, batch by batch. A batch is cut once, however many units it spans."""
        parts = pass_.course.parts(pass_.next)
        for batch in [batch for batch in pass_.cuts if batch < parts[0].batch]:
            del pass_.cuts[batch]
        for part in parts:
            if part.batch not in pass_.cuts:
                pass_.cuts[part.batch] = cuts_of(self.shares, pass_.course.size(part.batch))
        return [part.of_rank(pass_.cuts[part.batch], rank) for part in parts]
