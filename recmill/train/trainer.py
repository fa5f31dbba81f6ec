"""The training loop: next batch, step, log, maybe evaluate, maybe stop."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from recmill.batches import Batch, Batches, Cursor
from recmill.errors import FeatureError
from recmill.metrics import BinaryMetrics, ScoreSums
from recmill.spec import recipe as r
from recmill.train.optimizers import rate_factor
from recmill.train.ranking import Ranker


@dataclass(frozen=True)
class Progress:
    """How a run is doing at one step."""

    step: int
    total_steps: int
    loss: float
    samples_per_second: float
    wait_share: float  # part of the time that training waited for data
    metrics: BinaryMetrics | None = None


@dataclass
class Trained:
    """How a run ended."""

    steps: int = 0
    stopped_by: str = "end"  # end, target or patience
    best: BinaryMetrics | None = None
    history: list[Progress] = field(default_factory=list)


class Trainer:
    """Takes a ranker through the batches of a Table, as its recipe says."""

    def __init__(self, ranker: Ranker, batches: Batches, evaluation: Batches | None = None) -> None:
        self.ranker = ranker
        self.batches = batches
        self.evaluation = evaluation
        self.spec: r.Training = ranker.spec.train
        self.total_steps = max(1, math.ceil(self.spec.epochs * batches.batches_per_epoch))

    def train(self, report: Callable[[Progress], None] = lambda progress: None) -> Trained:
        """Run to the end, to the target or until patience is over; `report` hears of every evaluation."""
        trained = Trained()
        meter = _Meter()
        evaluate_every = -(-self.total_steps // max(1, self.spec.evaluations))
        for batch in meter.watch(self._all_batches()):
            done = (self.ranker.steps + 0.5) / self.total_steps  # the middle of the step: never quite 0 or 1
            meter.count(self.ranker.step(batch, rate_factor(self.spec.schedule, done)).loss, batch.size)
            trained.steps = self.ranker.steps
            if trained.steps % evaluate_every and trained.steps < self.total_steps:
                continue
            speed = meter.read()
            progress = Progress(trained.steps, self.total_steps, *speed, self.evaluate())
            meter.begin()
            trained.history.append(progress)
            report(progress)
            trained.stopped_by = self._reason_to_stop(trained) or "end"
            if trained.stopped_by != "end":
                break
        return trained

    def evaluate(self) -> BinaryMetrics | None:
        """Metrics of the held-out rows; None when there are none."""
        if self.evaluation is None:
            return None
        sums = ScoreSums()
        for batch, _ in self.evaluation.read():
            sums.add(batch.labels[self.ranker.spec.label], self.ranker.predict(batch))
        return sums.metrics()

    def _all_batches(self) -> Iterator[Batch]:
        """Epoch after epoch, as many batches as the run has steps."""
        cursor, left = Cursor(), self.total_steps
        while left:
            for batch, after in self.batches.read(cursor):
                yield batch
                cursor, left = after, left - 1
                if not left:
                    return

    def _reason_to_stop(self, trained: Trained) -> str | None:
        found = [progress.metrics for progress in trained.history if progress.metrics is not None]
        if not found:
            return None
        trained.best = max(found, key=lambda metrics: metrics.auc)
        if self.spec.target is not None and meets(self.spec.target, found[-1]):
            return "target"
        since_best = len(found) - 1 - found.index(trained.best)
        return "patience" if self.spec.patience is not None and since_best >= self.spec.patience else None


def meets(target: str, metrics: BinaryMetrics) -> bool:
    """Whether `auc >= 0.8025` or the like is so."""
    match = re.fullmatch(r"\s*(\w+)\s*(>=|<=)\s*([-+.\deE]+)\s*", target)
    value = getattr(metrics, match[1], None) if match else None
    if match is None or value is None:
        known = ", ".join(name for name in vars(metrics) if name != "rows")
        raise FeatureError(f'Target "{target}" must look like "auc >= 0.8025"; metrics are: {known}.')
    return bool(value >= float(match[3]) if match[2] == ">=" else value <= float(match[3]))


class _Meter:
    """Loss, speed and waiting since the last report. Evaluations do not count."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.started = time.perf_counter()
        self.waited = self.loss = 0.0
        self.samples = self.steps = 0

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            self.waited += time.perf_counter() - asked
            yield batch

    def count(self, loss: float, samples: int) -> None:
        self.loss += loss
        self.samples += samples
        self.steps += 1

    def read(self) -> tuple[float, float, float]:
        """Mean loss, samples per second and share of waiting."""
        seconds = max(1e-9, time.perf_counter() - self.started)
        return self.loss / max(1, self.steps), self.samples / seconds, self.waited / seconds
