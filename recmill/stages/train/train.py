"""train: Table or raw log -> Checkpoint, in one process or in several workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from recmill.artifacts.checkpoint.checkpoint import REFIT, Checkpoint
from recmill.artifacts.checkpoint.checkpoints import Checkpoints
from recmill.artifacts.checkpoint.files import remove_folder
from recmill.artifacts.checkpoint.step import StepCheckpoint
from recmill.artifacts.lock import lock_folder
from recmill.artifacts.manifest import WORK, is_published
from recmill.distributed.parallel import distribute
from recmill.distributed.workers import SINGLE_WORKER, Workers
from recmill.embeddings.table import DiskTier
from recmill.errors import ArtifactError, RecmillError, StorageError
from recmill.learner.saved import models_of, new_learner
from recmill.recipe import recipe as r
from recmill.recipe.defaults import as_prepared, is_resolved, resolve
from recmill.reporting.machine import available_cores
from recmill.reporting.progress import Progress as Bars
from recmill.reporting.tracking import Trackers, open_trackers
from recmill.stages.train.config import TrainConfig
from recmill.stages.train.profile import profiled
from recmill.stages.train.reporter import Reporter, run_facts, values_of
from recmill.stages.train.source import TrainingData, fit_ranker_trees
from recmill.stages.train.threads import Threads, choose_threads, keep_freed_memory
from recmill.stages.train.trainer import Metrics, State, Trainer, TrainProgress
from recmill.storage.index import read_index
from recmill.storage.objects import ObjectStore, is_url
from recmill.storage.workspace import written

OnReport = Callable[[Metrics, Path | None], None]
OnStep = Callable[[str, TrainProgress], None]  # the model's name, and its progress


@dataclass(frozen=True)
class TrainContext:
    """The workers of a run, and its callbacks: what neither the recipe nor the config decides."""

    workers: Workers = SINGLE_WORKER  # all of them call `train`, with the same recipe, rows and folder
    on_report: OnReport | None = None  # called with each published checkpoint, on every worker
    on_step: OnStep | None = None  # called on the first worker; may raise StopTraining
    on_evaluation: OnStep | None = None  # likewise, after steps with metrics
    publish: Callable[[], None] | None = None  # called after each checkpoint, on the thread that wrote it
    warn: Callable[[str], None] = field(default=lambda message: None)


ALONE = TrainContext()


@dataclass(frozen=True)
class TrainResult:
    """The result of one model's run."""

    model: str
    path: Path
    state: State
    best: StepCheckpoint
    threads: Threads
    resumed_from: int | None = None  # number of steps
    was_complete: bool = False  # the run was finished already
    workers: int = 1
    best_at: float = 1.0  # fraction of all steps after which the best step came
    is_refit: bool = False  # trained on the eval rows too
    wire_bytes: int = 0  # bytes that this worker sent to others
    seconds_waiting_for_others: float = 0.0  # seconds that this worker waited for others

    @property
    def samples_per_second(self) -> float:
        return self.state.samples / max(1e-9, self.state.seconds_training)

    @property
    def data_wait(self) -> float:
        return self.state.seconds_waiting / max(1e-9, self.state.seconds_training)


def train(
    recipe: r.Recipe,
    source: TrainingData,
    into: Path,
    options: TrainConfig = TrainConfig(),  # noqa: B008, frozen
    bars: Bars | None = None,
    report: Callable[[TrainResult], None] = lambda trained: None,
    context: TrainContext = ALONE,
) -> list[TrainResult]:
    """Train every model of the recipe, one after the other, as the only writer of `into`.

    All workers call this: the first one holds the folder's lock for all. `report` is called for each model when it
    ends; `report`, bars, trackers and warnings are the first worker's.
    """
    with ExitStack() as held:
        context.workers.by_first(lambda: held.enter_context(lock_folder(into)))
        return train_locked(recipe, source, into, options, bars, report, context)


def train_at(
    recipe: r.Recipe,
    source: TrainingData,
    address: str | Path,
    options: TrainConfig,
    bars: Bars | None = None,
    report: Callable[[TrainResult], None] = lambda trained: None,
    context: TrainContext = ALONE,
) -> list[TrainResult]:
    """`train` for an address that may be a URL: a run on another machine can resume from its last checkpoint."""
    if not is_url(address):
        return train(recipe, source, Path(address), options, bars, report, context)
    check_can_publish(address, options, context.workers.size)
    with written(address) as target:

        def publish() -> None:
            try:
                target.push()
            except StorageError as error:
                context.warn(f"{error} Training goes on; the next checkpoint is published with this one.")

        context = replace(context, publish=publish)
        trained = train(recipe, source, target.path, options, bars, report, context)
        target.push()
    return trained


def check_can_publish(
    address: str | Path, options: TrainConfig, num_workers: int, is_on_cluster: bool = False
) -> None:
    """Raise before any work when a run cannot write to a URL."""
    if not is_url(address):
        return
    if num_workers > 1 or is_on_cluster:
        raise ArtifactError(
            f"{address}: several workers write one checkpoint together, on a disk that they share. Give --into a "
            "directory of such a disk."
        )
    if not options.resume and read_index(ObjectStore(str(address))) is not None:
        raise _holds_checkpoints(address)


def _holds_checkpoints(where: str | Path) -> ArtifactError:
    return ArtifactError(
        f"{where} holds checkpoints already. Add --resume to go on with them, or choose another --into."
    )


def train_locked(
    recipe: r.Recipe,
    source: TrainingData,
    into: Path,
    options: TrainConfig,
    bars: Bars | None = None,
    report: Callable[[TrainResult], None] = lambda trained: None,
    context: TrainContext = ALONE,
) -> list[TrainResult]:
    """`train` for workers whose driver holds the lock."""
    workers = context.workers
    if not workers.is_first:
        bars, report, context = None, lambda trained: None, replace(context, warn=lambda message: None)
    try:
        models = _chosen(recipe, options)
        recipe = resolved(recipe, source)
        folder = open_folder(recipe, source, into, options, workers)
        threads = _threads(options, workers)
        keep_freed_memory()
        bars = bars or Bars(quiet=True)

        def train_all(
            folder: Checkpoint, source: TrainingData, best_at: Mapping[str, float]
        ) -> list[TrainResult]:
            results = []
            for model in models:
                part = best_at.get(model)
                results.append(
                    _train_model(folder, recipe, model, source, threads, options, bars, context, part)
                )
                report(results[-1])
            return results

        results = train_all(folder, source, {})
        if not recipe.refit:
            return results
        source = source.with_eval_rows()
        refit = _open_refit(
            folder, recipe, source, options, workers, goes_on=all(one.was_complete for one in results)
        )
        return results + train_all(refit, source, {one.model: one.best_at for one in results})
    except BaseException as error:
        workers.fail(error)
        raise


def _threads(options: TrainConfig, workers: Workers) -> Threads:
    """Workers of one machine divide its cores, and do not probe them at the same time."""
    if workers.size == 1 or options.threads is not None:
        return choose_threads(options.threads)
    cores = available_cores()
    threads = choose_threads(max(1, cores // workers.num_here))
    return replace(threads, reason=f"{cores} cores for {workers.num_here} workers")


def resolved(recipe: r.Recipe, source: TrainingData) -> r.Recipe:
    """The recipe with everything that depends on its rows. A log is counted only when something depends on it."""
    recipe = as_prepared(recipe, source.plan.recipe)
    return recipe if is_resolved(recipe) else resolve(recipe, source.num_rows("train"))


def _chosen(recipe: r.Recipe, options: TrainConfig) -> list[str]:
    known = models_of(recipe)
    if not known:
        raise RecmillError(
            f'Recipe "{recipe.name}" has neither [ranking] nor [retrieval]: there is nothing to train.'
        )
    if options.only is not None and options.only not in known:
        raise RecmillError(f'Recipe "{recipe.name}" has no [{options.only}]; its models: {", ".join(known)}.')
    return [options.only] if options.only is not None else known


def open_folder(
    recipe: r.Recipe, source: TrainingData, into: Path, options: TrainConfig, workers: Workers = SINGLE_WORKER
) -> Checkpoint:
    """Open the folder for checkpoints of this run; an existing one must match."""
    source.check(recipe)

    def open_or_create() -> None:
        if is_published(into):
            folder = Checkpoint.open(into)
            _check_goes_on(folder, recipe, source, options)
            if folder.recipe == recipe:
                return
        if (into / WORK).exists():
            raise ArtifactError(
                f"{into} holds unfinished work of `recmill prepare` or `recmill score`. Choose another --into."
            )
        Checkpoint.create(into, recipe, source.columns, source.plan, source.name, source.data)

    workers.by_first(open_or_create)
    if not is_published(into):
        raise ArtifactError(
            f"Worker {workers.rank} does not see {into}, which worker 0 has just made. "
            "--into must be on a disk that all workers share."
        )
    return Checkpoint.open(into)


def _open_refit(
    folder: Checkpoint,
    recipe: r.Recipe,
    source: TrainingData,
    options: TrainConfig,
    workers: Workers,
    goes_on: bool,
) -> Checkpoint:
    """Open the folder for models that also train on the eval rows.

    An existing folder is useless when the first run continued.
    """
    into = folder.path / REFIT
    workers.by_first(lambda: None if goes_on else remove_folder(into))
    return open_folder(recipe, source, into, replace(options, resume=True), workers)


def _check_goes_on(folder: Checkpoint, recipe: r.Recipe, source: TrainingData, options: TrainConfig) -> None:
    if not options.resume:
        raise _holds_checkpoints(folder.path)
    if folder.manifest["source"] != source.name:
        raise ArtifactError(
            f"{folder.path} was trained from {folder.manifest['source']}, not from {source.name}. "
            "Choose another --into."
        )
    _check_same_models(folder, recipe)


def _check_same_models(folder: Checkpoint, recipe: r.Recipe) -> None:
    """Check that the model and its optimizers are the same; a run may be longer or shorter than planned."""

    def shape(model: r.Ranking | r.Retrieval | None) -> Any:
        if model is None:
            return None
        same = r.Training(dense=model.train.dense, sparse=model.train.sparse, seed=model.train.seed)
        return replace(model, train=replace(same, batch_size=model.train.batch_size))

    for name in ("ranking", "retrieval"):
        if shape(getattr(recipe, name)) != shape(getattr(folder.recipe, name)):
            raise ArtifactError(
                f"{folder.path} was trained with another [{name}] than the recipe has now. Choose another --into."
            )


def _train_model(
    folder: Checkpoint,
    recipe: r.Recipe,
    model: str,
    source: TrainingData,
    threads: Threads,
    options: TrainConfig,
    bars: Bars,
    context: TrainContext,
    stop_at: float | None = None,
) -> TrainResult:
    """Train a model. `stop_at` is the fraction of all steps after which a refit ends, wherever its schedule is then."""
    workers = context.workers
    disk = DiskTier(folder.path, options.table_memory) if options.table_memory is not None else None
    learner = new_learner(recipe, model, source.columns, threads.number, disk)
    distribute(learner, workers, options.wire)
    checkpoints = folder.of(model, learner.train_spec.saving, workers if workers.size > 1 else None)
    trainer = Trainer(
        learner,
        source.batches(learner),
        folder.metric(model),
        source.evaluation(learner, workers),
        checkpoints,
        workers=workers,
        balance=options.balance,
        stop_at=stop_at,
    )
    checkpoints.on_published = context.publish
    last = _last_good(checkpoints, context)
    ended = partial(_ended, model, folder, checkpoints, threads, last, workers, trainer.total_steps)
    if last is not None and _is_finished(last, trainer):
        checkpoints.forget_after(last.step)
        return ended(State.read(last.state), was_complete=True)
    if last is not None:
        trainer.resume(last)
    else:
        checkpoints.forget_after(0)
        rounds = recipe.ranking.trees.rounds if recipe.ranking is not None and recipe.ranking.trees else 0
        with bars.stage("trees", rounds) if rounds else nullcontext() as bar:
            fit_ranker_trees(source, learner, workers, lambda done: bar.advance(done, 0) if bar else None)
    with (
        _trackers(options, folder.path / model, last, workers) as trackers,
        profiled(
            options.profile if workers.is_first else None, folder.path / model / "trace.json"
        ) as after_step,
        bars.stage(f"{model} refit" if folder.is_refit else model, trainer.last_step) as bar,
    ):
        rows = {f"{split}_rows": source.num_rows(split) for split in ("train", "eval")}
        trackers.begin({**run_facts(recipe, model, trainer, threads), **rows})
        trackers.event("init_stop")
        trackers.event("run_start")
        callbacks: list[Callable[[TrainProgress], None]] = [lambda progress: after_step()]
        if context.on_step is not None and workers.is_first:
            callbacks.append(partial(context.on_step, model))
        if context.on_evaluation is not None and workers.is_first:
            callbacks.append(partial(_after_evaluation, partial(context.on_evaluation, model)))
        reporter = Reporter(trackers, bar, callbacks, trainer.learner.steps)
        trainer.report = reporter.report
        if context.on_report is not None:
            trainer.on_saved = partial(_report_saved, context.on_report)
        if trainer.evaluate is not None:
            trainer.evaluate = reporter.announced(trainer.evaluate, learner)
        try:
            trainer.train()
        finally:
            checkpoints.settle()  # the folder's lock must outlast the writing thread
    return ended(trainer.state)


def _last_good(checkpoints: Checkpoints, context: TrainContext) -> StepCheckpoint | None:
    """The last good checkpoint.

    The first worker looks for it and sets damaged ones aside; all resume from the same one.
    """

    def path_of_last() -> Path | None:
        last = checkpoints.last_good(context.warn)
        return last.path if last is not None else None

    path = context.workers.by_first(path_of_last)
    return StepCheckpoint.open(path) if path is not None else None


def _ended(
    model: str,
    folder: Checkpoint,
    checkpoints: Checkpoints,
    threads: Threads,
    last: StepCheckpoint | None,
    workers: Workers,
    total_steps: int,
    state: State,
    was_complete: bool = False,
) -> TrainResult:
    best = checkpoints.find("best")
    return TrainResult(
        model,
        folder.path / model,
        state,
        best,
        threads,
        last.step if last else None,
        was_complete,
        workers.size,
        min(1.0, best.step / total_steps),
        folder.is_refit,
        workers.sent_bytes,
        workers.seconds_waiting,
    )


def _trackers(options: TrainConfig, path: Path, last: StepCheckpoint | None, workers: Workers) -> Trackers:
    """The trackers of the run; only the first worker has any."""
    if workers.is_first:
        return open_trackers(options.track, path, last.step if last else None)
    return Trackers([])


def _is_finished(last: StepCheckpoint, trainer: Trainer) -> bool:
    """Whether there is nothing left to do. A finished run continues when its recipe now asks for more."""
    reason = last.state["stopped_by"]
    return reason is not None and (
        reason not in ("end", "steps", "callback") or last.step >= trainer.last_step
    )


def _report_saved(report: OnReport, progress: TrainProgress, path: Path) -> None:
    report({"step": progress.step, **values_of(progress), **progress.metrics}, path)


def _after_evaluation(call: Callable[[TrainProgress], None], progress: TrainProgress) -> None:
    if progress.metrics:
        call(progress)
