"""Batches whose reading, parsing and features are done by Ray tasks, on whatever CPUs or nodes are free.

A dealer hands out one unit (a row group of a Table, a piece of a log) to each task. The task returns one slice for each
rank, so that a rank fetches the rows that it trains on and no others. No more than so many units are under way or wait
to be fetched, so that a slow trainer holds back the tasks and the object store stays small. Order of batches and
cursors are those of `Batches` and `LogBatches`, so that a run may be fed in one way today and in another tomorrow.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayTaskError, TaskCancelledError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recmill.ahead import read_ahead
from recmill.batches import Batch, Batches, Cursor, Keys
from recmill.errors import RecmillError
from recmill.features.plan import Plan
from recmill.learner.retrieval import Retriever
from recmill.log_batches import LogBatches, between, joined
from recmill.spec import recipe as r
from recmill.train.course import Course, cuts_of
from recmill.train.parallel import Workers
from recmill.train.source import EVALUATION_BATCH, Evaluation, Learners, LogSource, Source, TableSource

P = TypeVar("P")
T = TypeVar("T")
_AHEAD = 2  # units that are done and wait, beside those under way
_RETRIES = 10  # of a task whose process or node died
_POLL_SECONDS = 0.2
_MAX_OPENED = 2  # splits of one run share a source; a process outlives a run


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


@dataclass(frozen=True)
class DataWorkers:
    """How many tasks read at once, and the custom resource of the nodes that they run on (any node without one).

    A task has a CPU of its own. When none has come free for `patience_seconds`, since the workers that train have them
    all, tasks run beside whatever else runs there: slowly, but nobody waits for them for ever.
    """

    number: int
    resource: str | None = None
    patience_seconds: float = 30.0

    def options(self, num_cpus: int = 1) -> dict[str, Any]:
        return {
            "num_cpus": num_cpus,
            "resources": a_trifle_of(self.resource),
            "scheduling_strategy": "SPREAD",
            "max_retries": _RETRIES,
        }


def a_trifle_of(resource: str | None) -> dict[str, float]:
    """A custom resource says where to run; how many run there at once is the CPUs' say."""
    return {resource: 0.001} if resource else {}


# in the processes of data tasks


@dataclass(frozen=True)
class Shipped:
    """Something large that every process needs once: put into the object store, unpacked once for each process."""

    key: str
    refs: tuple[ray.ObjectRef[Any], ...]  # inside a tuple, Ray does not unpack it for each task anew

    @classmethod
    def of(cls, thing: Any) -> Shipped:
        return cls(uuid.uuid4().hex, (ray.put(thing),))

    def open(self) -> Any:
        if self.key not in _opened:
            while len(_opened) >= _MAX_OPENED:
                _opened.pop(next(iter(_opened)))
            _opened[self.key] = ray.get(self.refs[0])
        return _opened[self.key]


_opened: dict[str, Any] = {}


@dataclass(frozen=True)
class Slice:
    """One rank's rows of a unit, and how many of them belong to each global batch that the unit is part of."""

    rows: Batch
    counts: tuple[int, ...]


def _read_slices(
    source: Shipped, split: str, number: int, epoch: int, spans: Sequence[Sequence[tuple[int, int]]]
) -> Any:
    """A task: read a unit and cut it; `spans` are, for each rank, the rows of each batch."""
    unit = source.open()[split].unit(number, epoch)
    slices = [
        Slice(
            joined([between(unit, begin, end) for begin, end in of_rank]),
            tuple(end - begin for begin, end in of_rank),
        )
        for of_rank in spans
    ]
    return slices if len(slices) > 1 else slices[0]


def _call(function: Shipped, part: Any) -> Any:
    return function.open()(part)


_slices_task = ray.remote(_read_slices)
_call_task = ray.remote(_call)


# the dealer


@dataclass
class _Dealt:
    """A unit that was given to a task: rows of each rank, batch by batch, and where they will be."""

    spans: list[list[tuple[int, int]]]
    slices: list[ray.ObjectRef[Slice]]


@dataclass
class _Reading:
    """One pass over what is left of an epoch: what was dealt, and how far each rank is."""

    split: str
    course: Course
    order: list[int]
    reached: list[int]  # the unit that each rank asked for last
    next: int  # the unit to be dealt next
    dealt: dict[int, _Dealt] = field(default_factory=dict)
    cuts: dict[int, list[int]] = field(default_factory=dict)  # of batches that were dealt in part


class Dealer:
    """Deals units to tasks and their slices to ranks. An actor; methods may be called by all ranks at once."""

    def __init__(self, splits: Mapping[str, Units], world: int, workers: DataWorkers) -> None:
        self.splits = splits
        self.source = Shipped.of(dict(splits))
        self.world = world
        self.workers = workers
        self.readings: dict[tuple[str, int], _Reading] = {}
        self.left: dict[tuple[str, int], int] = {}  # the last pass that each rank has left
        self.shares: Sequence[float] = [1.0] * world
        self.running: dict[ray.ObjectRef[Any], None] = {}
        self.last_end = time.monotonic()  # of a task
        self.waits_for_cpus = True
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        threading.Thread(target=self._deal_on, daemon=True, name="dealer").start()

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

    def course(self, split: str, reading: int, cursor: Cursor) -> Course:
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

    def _reading(self, split: str, reading: int, cursor: Cursor) -> _Reading:
        if (split, reading) not in self.readings:
            units = self.splits[split]
            order = units.order(cursor.epoch)
            course = Course([units.units[number].rows for number in order], units.batch_size, cursor)
            self.readings[split, reading] = _Reading(
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
        self, pass_: _Reading, unit: int, spans: list[list[tuple[int, int]]]
    ) -> list[ray.ObjectRef[Slice]]:
        options = self.workers.options(num_cpus=1 if self.waits_for_cpus else 0)
        task: Any = _slices_task.options(num_returns=self.world, **options)
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

    def _has_room(self, pass_: _Reading) -> bool:
        waiting = pass_.next - min(pass_.reached)
        return pass_.next < pass_.course.num_units and waiting < self.workers.number + _AHEAD

    def _spans(self, pass_: _Reading, rank: int) -> list[tuple[int, int]]:
        """Rows of the next unit that a rank has, batch by batch. A batch is cut once, however many units it spans."""
        parts = pass_.course.parts(pass_.next)
        for batch in [batch for batch in pass_.cuts if batch < parts[0].batch]:
            del pass_.cuts[batch]
        for part in parts:
            if part.batch not in pass_.cuts:
                pass_.cuts[part.batch] = cuts_of(self.shares, pass_.course.size(part.batch))
        return [part.of_rank(pass_.cuts[part.batch], rank) for part in parts]


# in the processes of ranks


class Feed:
    """One rank's rows of each global batch of a split, from any cursor on. Every rank must read alike.

    `shares` gives the rows of each rank for a batch of some size. It is asked when a unit is about to be dealt, and on
    rank 0 only, so that what is under way keeps its sizes.
    """

    def __init__(self, dealer: Any, split: str, rank: int, num_units: int, batches_per_epoch: int) -> None:
        self.dealer = dealer
        self.split = split
        self.rank = rank
        self.units = range(num_units)
        self.batches_per_epoch = batches_per_epoch
        self.shares: Callable[[int], Sequence[float]] | None = None
        self._readings = itertools.count()

    def read(self, cursor: Cursor = Cursor()) -> Iterator[tuple[Batch, Cursor]]:  # noqa: B008, frozen
        """One epoch from the cursor on: this rank's rows of each batch, with the cursor behind it."""
        reading = next(self._readings)
        course: Course = get(self.dealer.course.remote(self.split, reading, cursor))
        held: list[Batch] = []
        slices = read_ahead(self._slices(course, cursor, reading))
        try:
            for unit, found in slices:
                begin = 0
                for part, count in zip(course.parts(unit), found.counts, strict=True):
                    held.append(between(found.rows, begin, begin + count))
                    begin += count
                    if part.place + part.rows == course.size(part.batch):
                        whole = course.size(part.batch)
                        yield replace(_own(held), whole=whole), course.cursor_after(part.batch)
                        held = []
        finally:  # before `slices` ends, whose thread may wait for the dealer
            self.dealer.leave.remote(self.split, reading, self.rank)

    def _slices(self, course: Course, cursor: Cursor, reading: int) -> Iterator[tuple[int, Slice]]:
        for unit in range(course.first_unit, course.num_units):
            shares = self.shares(course.batch_size) if self.shares is not None and self.rank == 0 else None
            found = self._slice(reading, cursor, unit, shares)
            if found is None:
                return
            yield unit, found

    def _slice(self, reading: int, cursor: Cursor, unit: int, shares: Sequence[float] | None) -> Slice | None:
        """This rank's rows of a unit; None when the rank has left."""
        while True:
            place = get(self.dealer.slice_of.remote(self.split, reading, cursor, unit, self.rank, shares))
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


def get(ref: Any, timeout: float | None = None) -> Any:
    """`ray.get`, but errors of our own come as they were raised, not wrapped into the task that raised them."""
    try:
        return ray.get(ref, timeout=timeout)
    except RayTaskError as error:
        if isinstance(error.cause, RecmillError):
            raise error.cause from None
        raise


# a source of a run


class FedSource:
    """The rows of another source, read by data workers. Only the first rank opens them; the others are told."""

    def __init__(self, inner: Source, workers: Workers, data_workers: DataWorkers) -> None:
        self.inner = inner
        self.workers = workers
        self.data_workers = data_workers
        self.name = inner.name
        self.data = inner.data
        self.columns = inner.columns
        self._opened: tuple[Learners, _Opened] | None = None
        self._dealer: Any = None  # lives as long as the first rank holds it
        if isinstance(inner, LogSource):
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
        return Feed(self._dealer, split, self.workers.rank, *opened.splits[split])

    def _open(self, learner: Learners) -> _Opened:
        """Each learner reads other columns, so it has a dealer of its own; the one before it ends."""
        if self._opened is None or self._opened[0] is not learner:
            opened = self.workers.by_first(lambda: self._start_dealer(learner))
            if not self.workers.is_first:
                self._dealer = ray.get_actor(opened.dealer)
            self._opened = learner, opened
        return self._opened[1]

    def _start_dealer(self, learner: Learners) -> _Opened:
        if self._dealer is not None:
            ray.kill(self._dealer)
        splits = self._units(learner)
        name = f"recmill-dealer-{uuid.uuid4().hex}"
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._dealer = (
            ray.remote(Dealer)
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
        assert isinstance(self.inner, TableSource)
        held_out = Batches(self.inner.table, EVALUATION_BATCH, "eval", learner.layout.features)
        return {"train": train, "eval": held_out}


@dataclass(frozen=True)
class _Opened:
    """What ranks must know to be fed."""

    dealer: str  # its name
    splits: Mapping[str, tuple[int, int]]  # units, batches of an epoch
    num_rows: Mapping[str, int]


class OnTasks:
    """Calls a function for every part in Ray tasks; results in the order of parts, some of them ahead."""

    def __init__(self, workers: DataWorkers) -> None:
        self.workers = workers

    def __call__(self, function: Callable[[P], T], parts: Sequence[P]) -> Iterator[T]:
        task: Any = _call_task.options(**self.workers.options())
        shipped = Shipped.of(function)
        window = self.workers.number + _AHEAD
        waiting = [task.remote(shipped, part) for part in parts[:window]]
        for place in range(len(parts)):
            try:
                result = get(waiting[0], self.workers.patience_seconds)
            except GetTimeoutError:
                for ref in waiting:
                    ray.cancel(ref)
                task = _call_task.options(**self.workers.options(num_cpus=0))
                waiting = [task.remote(shipped, part) for part in parts[place : place + window]]
                result = get(waiting[0])
            del waiting[0]
            if place + window < len(parts):
                waiting.append(task.remote(shipped, parts[place + window]))
            yield result
