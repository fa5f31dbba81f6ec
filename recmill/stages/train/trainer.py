"""The training loop: next batch, step, log, maybe evaluate, maybe save, maybe stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from recmill.artifacts.checkpoint.checkpoint import Checkpoints, StepCheckpoint
from recmill.dataset.batch import Batch
from recmill.dataset.schedule import Cursor
from recmill.distributed.workers import (
    SINGLE_WORKER,
    CutsItself,
    SliceSizes,
    Workers,
    scatter_randomness,
    worker_batches,
)
from recmill.errors import StopTraining
from recmill.learner.base import Learner
from recmill.learner.optimizers import rate_factor
from recmill.metrics import meets

Metrics = Mapping[str, float]


class BatchSource(Protocol):
    """Batches of a Table or of a raw log, from any cursor on.

    Of several workers each has its own; they give the same batches, or each gives its worker's share of them, which
    then says of how many rows it is one.
    """

    @property
    def batches_per_epoch(self) -> int: ...
    def read(self, cursor: Cursor = ...) -> Iterator[tuple[Batch, Cursor]]: ...


@dataclass(frozen=True)
class TrainProgress:
    """How a run is doing since the last time it was asked."""

    step: int
    total_steps: int
    samples: int
    loss: float
    samples_per_second: float
    wait_share: float  # part of the time that training waited for data
    rate_factor: float
    metrics: Metrics = field(default_factory=dict)  # of an evaluation at this step


@dataclass
class State:
    """What a checkpoint must know beside weights for the run to go on as if nothing had happened."""

    cursor: Cursor = Cursor()  # noqa: RUF009, frozen
    samples: int = 0
    seconds: float = 0.0  # in all, evaluations included
    seconds_training: float = 0.0
    seconds_waiting: float = 0.0  # for data, part of the time of training
    drops: int = 0  # evaluations that were worse than the best before them
    evaluations: list[dict[str, float]] = field(default_factory=list)
    stopped_by: str | None = None  # end, steps, minutes, target, patience or callback
    units: int | None = None  # of an epoch; the cursor says which one is next
    workers: int = 1

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> State:
        return cls(**{**saved, "cursor": Cursor(**saved["cursor"])})


class Trainer:
    """Takes a learner through batches as its recipe says, from where its state is."""

    def __init__(
        self,
        learner: Learner,
        batches: BatchSource,
        metric: str,
        evaluate: Callable[[], Metrics] | None = None,
        checkpoints: Checkpoints | None = None,
        report: Callable[[TrainProgress], None] = lambda progress: None,
        workers: Workers = SINGLE_WORKER,
        balance: bool = True,
    ) -> None:
        """`learner` is one of `workers`, if they are several: see `spread`."""
        self.workers = workers
        self.shares = SliceSizes(workers.size, balance)
        self.on_saved: Callable[[TrainProgress, Path], None] = lambda progress, path: None
        self._unpublished: tuple[TrainProgress, Path] | None = None
        self.learner = learner
        self.batches = batches
        self.metric = metric
        self.evaluate = evaluate
        self.checkpoints = checkpoints
        self.report = report
        self._is_stop_requested = False
        self.spec = learner.train_spec
        self.state = State(units=_num_units(batches), workers=workers.size)
        all_steps = max(1, math.ceil(self.spec.epochs * batches.batches_per_epoch))
        self.total_steps = min(all_steps, self.spec.max_steps or all_steps)

    def resume(self, checkpoint: StepCheckpoint) -> None:
        """Go on from a checkpoint: the next batch is the one after its last."""
        assert self.checkpoints is not None
        self.learner.load_arrays(self.checkpoints.restore(checkpoint, self.learner.tables))
        self.learner.steps = checkpoint.step
        self.state = replace(
            State.read(checkpoint.state), units=_num_units(self.batches), workers=self.workers.size
        )
        self.checkpoints.forget_after(checkpoint.step)
        scatter_randomness(self.learner, self.workers)

    def train(self) -> State:
        """Run to the end, or until there is a reason to stop."""
        meter, clock = _Meter(), _Clock(self.spec.saving.every_minutes)
        with closing(self._own_batches()) as batches:
            for batch, after in meter.watch(batches):
                self.state.cursor, factor = after, self._rate_factor()
                self._tell(clock)
                meter.count(self.learner.step(batch, factor).loss, batch.total, self.state)
                self.state.seconds += clock.tick()
                metrics = self._evaluate_when_due()
                progress = meter.progress(
                    self.learner.steps, self.total_steps, self.state.samples, factor, metrics
                )
                self._report(progress)
                self.state.seconds += clock.tick()
                self.state.stopped_by = self._reason_to_stop(metrics)
                self._tell_of_saved()
                if metrics or self.state.stopped_by or self._saving_is_due(clock):
                    self._save(progress)
                    clock.saved()
                if self.state.stopped_by:
                    break
        self._wait_for_saved()
        return self.state

    def _report(self, progress: TrainProgress) -> None:
        try:
            self.report(progress)
        except StopTraining:
            self._is_stop_requested = True

    def _own_batches(self) -> Generator[tuple[Batch, Cursor], None, None]:
        if self.workers.size == 1:
            return self._batches()
        if isinstance(self.batches, CutsItself):
            self.batches.shares = self.shares.cut
        return worker_batches(self._batches(), self.learner, self.workers, self.shares)

    def _batches(self) -> Generator[tuple[Batch, Cursor], None, None]:
        """Epoch after epoch, as many batches as the run still has steps."""
        cursor, steps_left = self.state.cursor, self.total_steps - self.learner.steps
        while steps_left > 0:
            for batch, after in self.batches.read(cursor):
                cursor, steps_left = after, steps_left - 1
                yield batch, after
                if not steps_left:
                    return

    def _tell(self, clock: _Clock) -> None:
        """Worker 0's clock is everybody's; and all must know when a checkpoint is complete."""
        if self.workers.size > 1:
            self.workers.set_flag("out_of_time", self._is_out_of_time())
            self.workers.set_flag("stop", self._is_stop_requested)
            self.workers.set_flag("save", clock.saving_is_due())
            self.workers.set_flag("saved", self.checkpoints is not None and not self.checkpoints.is_writing)

    def _agreed(self, word: str, own: Callable[[], bool]) -> bool:
        """Of one process what it finds now; of several what the first one said with the last step."""
        return own() if self.workers.size == 1 else bool(self.workers.flags_of_all(word)[0])

    def _rate_factor(self) -> float:
        schedule = self.spec.schedule
        done = (self.learner.steps + 0.5) / self.total_steps  # the middle of the step: never quite 0 or 1
        return rate_factor(schedule, done) * (schedule.drop_factor or 1.0) ** self.state.drops

    def _evaluate_when_due(self) -> Metrics:
        every = -(-self.total_steps // self.spec.evaluations)
        step = self.learner.steps
        if self.evaluate is None or (step % every and step < self.total_steps):
            return {}
        metrics = self.evaluate()
        found = [past[self.metric] for past in self.state.evaluations]
        self.state.drops += bool(found) and metrics[self.metric] < max(found)
        self.state.evaluations.append({"step": step, **metrics})
        return metrics

    def _saving_is_due(self, clock: _Clock) -> bool:
        every = self.spec.saving.every_steps
        due = every is not None and self.learner.steps % every == 0
        return due or self._agreed("save", clock.saving_is_due)

    def _reason_to_stop(self, metrics: Metrics) -> str | None:
        if metrics and self.spec.target is not None and meets(self.spec.target, metrics):
            return "target"
        if (
            metrics
            and self.spec.patience is not None
            and self._evaluations_since_best() >= self.spec.patience
        ):
            return "patience"
        if self.learner.steps >= self.total_steps:
            return "steps" if self.total_steps == self.spec.max_steps else "end"
        if self._agreed("stop", lambda: self._is_stop_requested):
            return "callback"
        return "minutes" if self._agreed("out_of_time", self._is_out_of_time) else None

    def _is_out_of_time(self) -> bool:
        return self.spec.max_minutes is not None and self.state.seconds >= 60 * self.spec.max_minutes

    def _evaluations_since_best(self) -> int:
        found = [past[self.metric] for past in self.state.evaluations]
        return len(found) - 1 - found.index(max(found))

    def _save(self, progress: TrainProgress) -> None:
        if self.checkpoints is not None:
            self._wait_for_saved()
            learner = self.learner
            state = asdict(self.state)
            path = self.checkpoints.save(
                learner.steps, learner.arrays(), learner.tables, state, progress.metrics
            )
            self._unpublished = progress, path

    def _wait_for_saved(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.wait()
        self._tell_of_saved(is_known=True)

    def _tell_of_saved(self, is_known: bool = False) -> None:
        """Say that a checkpoint is published, on all workers at the same step."""
        if self._unpublished is None or self.checkpoints is None:
            return
        checkpoints = self.checkpoints
        every = (
            [not checkpoints.is_writing]
            if self.workers.size == 1
            else self.workers.flags_of_all("saved").tolist()
        )
        if is_known or all(every):
            checkpoints.wait()
            found, self._unpublished = self._unpublished, None
            self.on_saved(*found)


def _num_units(batches: BatchSource) -> int | None:
    """Of an epoch, if that is known; only people want to know."""
    units = getattr(batches, "units", None)
    return len(units) if units is not None else None


class _Clock:
    """Time since the last tick, and whether it is time to save."""

    def __init__(self, minutes_between_saves: float | None) -> None:
        self.minutes = minutes_between_saves
        self.last = self.last_save = time.perf_counter()

    def tick(self) -> float:
        now = time.perf_counter()
        passed, self.last = now - self.last, now
        return passed

    def saving_is_due(self) -> bool:
        return self.minutes is not None and time.perf_counter() - self.last_save >= 60 * self.minutes

    def saved(self) -> None:
        self.last_save = time.perf_counter()


class _Meter:
    """Loss, speed and waiting over the last steps. Evaluations and saving do not count."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.samples = self.steps = 0
        self.seconds = self.waited = self.loss = 0.0

    def watch(self, batches: Iterable[tuple[Batch, Cursor]]) -> Iterator[tuple[Batch, Cursor]]:
        waiting = iter(batches)
        while True:
            self.asked = time.perf_counter()
            found = next(waiting, None)
            if found is None:
                return
            self.last_wait = time.perf_counter() - self.asked
            yield found

    def count(self, loss: float, samples: int, state: State) -> None:
        """One step, here and in all."""
        passed = time.perf_counter() - self.asked
        self.seconds += passed
        self.waited += self.last_wait
        self.loss += loss
        self.samples += samples
        self.steps += 1
        state.samples += samples
        state.seconds_training += passed
        state.seconds_waiting += self.last_wait

    def progress(self, step: int, total: int, samples: int, factor: float, metrics: Metrics) -> TrainProgress:
        """Since the beginning, or since the last evaluation."""
        seconds = max(1e-9, self.seconds)
        speed = self.samples / seconds, self.waited / seconds
        found = TrainProgress(step, total, samples, self.loss / max(1, self.steps), *speed, factor, metrics)
        if metrics:
            self.begin()
        return found
