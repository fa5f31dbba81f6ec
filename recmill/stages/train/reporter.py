"""Reports of a run: to the progress bar and callbacks at every step, to trackers at some."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recmill.learner.base import Learner
from recmill.recipe import recipe as r
from recmill.reporting.progress import ProgressBar
from recmill.reporting.tracking import Trackers
from recmill.stages.train.source import Evaluation
from recmill.stages.train.threads import Threads
from recmill.stages.train.trainer import Metrics, Trainer, TrainProgress

_STEPS_BETWEEN_LINES = 50
_SAME_EVERY_TIME = {"rows", "positive_rate", "constant_accuracy", "auc_margin", "mean", "constant_rmse"}
_SHOWN = ("auc", "r2", "ndcg@10")  # shown with the loss: the first of these that the last evaluation has


class Reporter:
    """Reports every step to the bar and callbacks, and every N steps and all evaluations to trackers."""

    def __init__(
        self,
        trackers: Trackers,
        bar: ProgressBar,
        callbacks: Sequence[Callable[[TrainProgress], None]],
        step: int,
    ) -> None:
        self.trackers = trackers
        self.bar = bar
        self.callbacks = callbacks
        self.last: TrainProgress | None = None
        self.metrics: Metrics = {}
        self.bar.done = step

    def announced(self, evaluate: Evaluation, learner: Learner) -> Evaluation:
        """The reporter, with an event for trackers at the start; the event at the end follows its numbers."""

        def announce() -> Metrics:
            self.trackers.event("eval_start", step=learner.steps)
            self.bar.set_note(f"step {learner.steps:,}  evaluating on held-out rows")
            return evaluate()

        return announce

    def report(self, progress: TrainProgress) -> None:
        samples = progress.samples - (self.last.samples if self.last else 0)
        self.last = progress
        self.metrics = progress.metrics or self.metrics
        if progress.metrics or progress.step % _STEPS_BETWEEN_LINES == 0:
            self.trackers.log(progress.step, values_of(progress))
        if progress.metrics:
            self.trackers.event("eval_stop", step=progress.step)
        self.bar.note = _note(progress, self.metrics)
        self.bar.advance(1, samples)
        for callback in self.callbacks:
            callback(progress)


def values_of(progress: TrainProgress) -> dict[str, float]:
    return {
        "loss": progress.loss,
        "samples": progress.samples,
        "samples_per_second": progress.samples_per_second,
        "data_wait": progress.data_wait,
        "rate_factor": progress.rate_factor,
        **{name: value for name, value in progress.metrics.items() if name not in _SAME_EVERY_TIME},
    }


def _note(progress: TrainProgress, metrics: Metrics) -> str:
    known = next((f"  {name} {metrics[name]:.4f}" for name in _SHOWN if name in metrics), "")
    return (
        f"step {progress.step:,}/{progress.total_steps:,}  loss {progress.loss:.4f}{known}  "
        f"data wait {progress.data_wait:.0%}"
    )


def run_facts(recipe: r.Recipe, model: str, trainer: Trainer, threads: Threads) -> dict[str, str | float]:
    train, total = trainer.spec, trainer.total_steps
    decay_start = round((train.schedule.decay_from or 0.0) * total)
    return {
        "recipe": recipe.name,
        "model": model,
        "batch_size": trainer.learner.batch_size,
        "optimizer": train.dense.name,
        "learning_rate": train.dense.learning_rate,
        "embedding_optimizer": train.sparse.name,
        "embedding_learning_rate": train.sparse.learning_rate,
        "seed": train.seed,
        "steps_per_epoch": trainer.batches.batches_per_epoch,
        "total_steps": total,
        "warmup_steps": round(train.schedule.warmup * total),
        "decay_start_step": decay_start,
        "decay_steps": total - decay_start,
        "threads": threads.number,
        "workers": trainer.workers.size,
    }
