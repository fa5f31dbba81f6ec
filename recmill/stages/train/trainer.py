"""The training loop: next batch, step, log, maybe evaluate, maybe save, maybe stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from recmill.artifacts.checkpoint.checkpoints import Checkpoints
from recmill.artifacts.checkpoint.step import StepCheckpoint
from recmill.dataset.batch import Batch
from recmill.dataset.schedule import Cursor
from recmill.distributed.parallel import scatter_randomness
from recmill.distributed.slices import SlicedSource, SliceSizes, worker_batches
from recmill.distributed.workers import SINGLE_WORKER, Workers
from recmill.errors import StopTraining
from recmill.learner.base import Learner
from recmill.learner.optimizers import rate_factor
from recmill.metrics import meets

Metrics = Mapping[str, float]


class BatchSource(Protocol):
    """Batches of a Table or of a raw log, from any cursor.

    Each worker has its own source. They give the same batches, or each gives its worker's slice of them, with the
    size of the whole batch in `Batch.whole`.
    """

    @property
    def batches_per_epoch(self) -> int: ...
    def read(self, cursor: Cursor = ...) -> Iterator[tuple[Batch, Cursor]]: ...


@dataclass(frozen=True)
class TrainProgress:
    """Loss and speed of the recent steps: since the run began, or since the last evaluation."""

    step: int
    total_steps: int
    samples: int
    loss: float
    samples_per_second: float
    data_wait: float  # data wait: the fraction of time that training waited for data
    rate_factor: float
    metrics: Metrics = field(default_factory=dict)  # metrics of an evaluation at this step


@dataclass
class State:
    """What a checkpoint holds besides weights, so that a resumed run continues exactly."""

    cursor: Cursor = Cursor()  # noqa: RUF009, frozen
    samples: int = 0
    seconds: float = 0.0  # total seconds, evaluations included
    seconds_training: float = 0.0
    seconds_waiting: float = 0.0  # seconds of data wait, which are part of the training time
    drops: int = 0  # evaluations that were worse than the best before them
    evaluations: list[dict[str, float]] = field(default_factory=list)
    stopped_by: str | None = None  # reason: end, steps, minutes, target, patience or callback
    units: int | None = None  # units of an epoch; the cursor holds the index of the next one
    workers: int = 1

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> State:
        return cls(**{**saved, "cursor": Cursor(**saved["cursor"])})


class Trainer:
    """Runs a learner through batches as its recipe specifies, from its current state."""

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
        stop_at: float | None = None,
    ) -> None:
        """`learner` belongs to one of `workers`, if there are several: see `distribute`.

        With `stop_at` the run ends after this fraction of its steps and for no other reason: the best point of
        another run. The schedule stays that of all steps.
        """
        self.workers = workers
        self.slice_sizes = SliceSizes(workers.size, balance)
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
        self.last_step = self.total_steps
        if stop_at is not None:
            self.last_step = max(1, round(self.total_steps * stop_at))
            self.spec = replace(self.spec, max_minutes=None)

    def resume(self, checkpoint: StepCheckpoint) -> None:
        """Continue from a checkpoint: the next batch is the one after its last."""
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
        with closing(self._worker_batches()) as batches:
            for batch, after in meter.watch(batches):
                self.state.cursor, factor = after, self._rate_factor()
                if not self.learner.steps:
                    self.learner.start(batch, self.workers.sum)
                self._send_flags(clock)
                loss = self.learner.step(batch, factor).loss
                meter.count(loss, batch.total, self.state)
                self.state.seconds += clock.tick()
                metrics = self._evaluate_when_due()
                progress = meter.progress(
                    self.learner.steps, self.total_steps, self.state.samples, factor, metrics
                )
                self._report(progress)
                self.state.seconds += clock.tick()
                self.state.stopped_by = self._reason_to_stop(metrics)
                self._report_saved()
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

    def _worker_batches(self) -> Generator[tuple[Batch, Cursor], None, None]:
        if self.workers.size == 1:
            return self._batches()
        if isinstance(self.batches, SlicedSource):
            self.batches.slice_sizes = self.slice_sizes.cut
        return worker_batches(self._batches(), self.learner, self.workers, self.slice_sizes)

    def _batches(self) -> Generator[tuple[Batch, Cursor], None, None]:
        """Batches of one epoch after another, up to the number of steps that are left."""
        cursor, steps_left = self.state.cursor, self.last_step - self.learner.steps
        while steps_left > 0:
            for batch, after in self.batches.read(cursor):
                cursor, steps_left = after, steps_left - 1
                yield batch, after
                if not steps_left:
                    return

    def _send_flags(self, clock: _Clock) -> None:
        """Send the control flags of a step.

        Clocks differ, so worker 0's decides; a checkpoint is complete when all have written.
        """
        if self.workers.size > 1:
            self.workers.set_flag("out_of_time", self._is_out_of_time())
            self.workers.set_flag("stop", self._is_stop_requested)
            self.workers.set_flag("save", clock.saving_is_due())
            self.workers.set_flag("saved", self.checkpoints is not None and not self.checkpoints.is_writing)

    def _decided_by_first(self, flag: str, decide: Callable[[], bool]) -> bool:
        """A single process decides now; several workers follow the flag that the first one sent with the last step."""
        return decide() if self.workers.size == 1 else bool(self.workers.flags_of_all(flag)[0])

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
        values = [past[self.metric] for past in self.state.evaluations]
        self.state.drops += bool(values) and metrics[self.metric] < max(values)
        self.state.evaluations.append({"step": step, **metrics})
        return metrics

    def _saving_is_due(self, clock: _Clock) -> bool:
        every = self.spec.saving.every_steps
        due = every is not None and self.learner.steps % every == 0
        return due or self._decided_by_first("save", clock.saving_is_due)

    def _reason_to_stop(self, metrics: Metrics) -> str | None:
        if metrics and self.spec.target is not None and meets(self.spec.target, metrics):
            return "target"
        if (
            metrics
            and self.spec.patience is not None
            and self._evaluations_since_best() >= self.spec.patience
        ):
            return "patience"
        if self.learner.steps >= self.last_step:
            return "steps" if self.total_steps == self.spec.max_steps else "end"
        if self._decided_by_first("stop", lambda: self._is_stop_requested):
            return "callback"
        return "minutes" if self._decided_by_first("out_of_time", self._is_out_of_time) else None

    def _is_out_of_time(self) -> bool:
        return self.spec.max_minutes is not None and self.state.seconds >= 60 * self.spec.max_minutes

    def _evaluations_since_best(self) -> int:
        values = [past[self.metric] for past in self.state.evaluations]
        return len(values) - 1 - values.index(max(values))

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
        self._report_saved(is_complete=True)

    def _report_saved(self, is_complete: bool = False) -> None:
        """Call `on_saved` with a published checkpoint, on all workers at the same step."""
        if self._unpublished is None or self.checkpoints is None:
            return
        if self.workers.size == 1:
            is_complete = is_complete or not self.checkpoints.is_writing
        else:
            is_complete = is_complete or bool(self.workers.flags_of_all("saved").all())
        if is_complete:
            self.checkpoints.wait()
            saved, self._unpublished = self._unpublished, None
            self.on_saved(*saved)


def _num_units(batches: BatchSource) -> int | None:
    """Units of an epoch, if known; for display only."""
    units = getattr(batches, "units", None)
    return len(units) if units is not None else None


class _Clock:
    """Time since the last tick, and whether a save is due."""

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
    """Loss, speed and data wait over the recent steps. Evaluations and saving do not count."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.samples = self.steps = 0
        self.seconds = self.waited = self.loss = 0.0

    def watch(self, batches: Iterable[tuple[Batch, Cursor]]) -> Iterator[tuple[Batch, Cursor]]:
        source = iter(batches)
        while True:
            self.began = time.perf_counter()
            batch = next(source, None)
            if batch is None:
                return
            self.last_wait = time.perf_counter() - self.began
            yield batch

    def count(self, loss: float, samples: int, state: State) -> None:
        """Count a step, in the recent window and in total."""
        passed = time.perf_counter() - self.began
        self.seconds += passed
        self.waited += self.last_wait
        self.loss += loss
        self.samples += samples
        self.steps += 1
        state.samples += samples
        state.seconds_training += passed
        state.seconds_waiting += self.last_wait

    def progress(self, step: int, total: int, samples: int, factor: float, metrics: Metrics) -> TrainProgress:
        """Progress since the beginning, or since the last evaluation."""
        seconds = max(1e-9, self.seconds)
        speed = self.samples / seconds, self.waited / seconds
        loss = self.loss / max(1, self.steps)
        if metrics:
            self.reset()
        return TrainProgress(step, total, samples, loss, *speed, factor, metrics)
