"""run: a recipe's whole chain in order. A stage that is done already is not done again.

With `at_once`, training begins when the first shard of the Table is there; the two may run on different engines.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recmill.artifacts.bundle.bundle import Bundle
from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.artifacts.lock import lock_folder
from recmill.artifacts.manifest import is_published
from recmill.dataset.table import Table
from recmill.errors import RecmillError
from recmill.learner.saved import models_of
from recmill.recipe.recipe import Recipe
from recmill.recipe.titles import title_column
from recmill.recipe.trust import modules_of
from recmill.reporting.progress import Progress
from recmill.stages.evaluate import evaluate as evaluation
from recmill.stages.evaluate.config import EvaluateConfig
from recmill.stages.evaluate.gate import SERVED
from recmill.stages.evaluate.write import write_evaluation
from recmill.stages.export import export as exporting
from recmill.stages.prepare import prepare as preparation
from recmill.stages.replay.config import ReplayConfig
from recmill.stages.replay.replay import NothingToMeasure, ServedResult, can_replay
from recmill.stages.replay.write import replay_and_write, served_json
from recmill.stages.run.config import RunConfig
from recmill.stages.run.overlap import preparing
from recmill.stages.serve.messages import Id
from recmill.stages.serve.recommender import Recommender
from recmill.stages.train import train as training
from recmill.stages.train.partial_table import FOLLOWED, open_growing
from recmill.stages.train.source import open_table_data
from recmill.storage.cache import folder_of
from recmill.storage.objects import address_below, is_url
from recmill.storage.workspace import written
from recmill.synthetic.generate import generate, read_truth

if TYPE_CHECKING:
    from recmill.stages.train.launch import MakeSource


@dataclass
class RunResult:
    """What the stages made, and the seconds that each took."""

    data: str
    into: str | Path
    seconds: dict[str, float] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    total_seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the models met the gate; what did not is not exported."""
        served = self.results.get("served")
        return all(model.passed for model in self.results.get("evaluate", [])) and (
            served is None or served.passed
        )

    @property
    def table(self) -> Table:
        return Table.open(address_below(self.into, "table"))

    @property
    def checkpoint(self) -> Checkpoint | None:
        """None for a recipe without models."""
        return Checkpoint.open(address_below(self.into, "checkpoint")) if "train" in self.results else None

    @property
    def report(self) -> Path | None:
        return report_path(self.into) if "evaluate" in self.results else None

    @property
    def bundle(self) -> Bundle | None:
        if "export" not in self.results:
            return None
        # Functions that its features call are the recipe's own.
        exported = self.results["export"].bundle
        return Bundle(exported.path, exported.manifest, tuple(modules_of(exported.recipe)))


def report_path(into: str | Path) -> Path:
    """Of a run. That of a URL is published with the checkpoint; this is the local copy."""
    if is_url(into):
        return folder_of(str(address_below(into, "checkpoint")), "work") / "report.html"
    return Path(into) / "report.html"


def run(
    recipe: Recipe,
    data: str | None,
    into: str | Path,
    options: RunConfig | None = None,
    progress: Progress | None = None,
    report: Callable[[str, Any], None] = lambda stage, result: None,
) -> RunResult:
    """Generate a log unless there is one, prepare it, train, evaluate and export.

    `report` is called after each stage. What did not pass its gate is not exported. Killed at any point and run
    again, it goes on from there. `into` may be a URL: what each stage made is published there when the stage ends.
    """
    options = options or RunConfig()
    _check_can_publish(into, data, options)
    # Behind a URL, each stage holds the lease of what it writes.
    with nullcontext() if is_url(into) else lock_folder(Path(into)):
        return _run(recipe, data, into, options, progress or Progress(quiet=True), report)


def _check_can_publish(into: str | Path, data: str | None, options: RunConfig) -> None:
    """Raise before any work when a run cannot write to a URL."""
    if not is_url(into):
        return
    if data is None:
        raise RecmillError(
            f"{into}: a generated log lands in a directory. Write it with `recmill generate` and give it with --data."
        )
    if options.at_once:
        raise RecmillError(
            f"{into}: training while the Table is prepared needs a disk that both stages see. Give --into a directory, "
            "or prepare and train one after the other."
        )
    training.check_can_publish(
        address_below(into, "checkpoint"), options.train, 1, is_on_cluster=options.ray is not None
    )


def _run(
    recipe: Recipe,
    data: str | None,
    into: str | Path,
    options: RunConfig,
    progress: Progress,
    report: Callable[[str, Any], None],
) -> RunResult:
    ran = RunResult(data or f"{into}/log", into)
    started = time.perf_counter()

    def stage(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = ran.results[name] = work()
        ran.seconds[name] = time.perf_counter() - began
        report(name, result)
        return result

    if data is None:
        stage("generate", lambda: _generate(recipe, Path(ran.data), options.rows))
    if options.at_once and models_of(recipe) and not is_published(Path(into) / "table"):
        table = Path(into).absolute() / "table"
        with preparing(recipe, ran.data, table, options.prepare) as job:
            following = partial(open_growing, str(table), _known_place(ran.data))
            stage(
                "train", lambda: job.followed_by(lambda: _train(recipe, following, into, options, progress))
            )
            stage("prepare", job.result)
            ran.seconds["prepare"] = job.seconds
    else:
        stage(
            "prepare",
            lambda: preparation.prepare_at(
                recipe, ran.data, address_below(into, "table"), options.prepare, progress
            ),
        )
        if models_of(recipe):
            source = _source_of_finished(into, ran.data)
            stage("train", lambda: _train(recipe, source, into, options, progress))
    if models_of(recipe):
        if options.served and options.train.only is None and can_replay(recipe):
            stage("served", lambda: _replay(into, ran.data, options, progress))
        stage(
            "evaluate",
            lambda: _evaluate(
                into, ran.results["prepare"].table, options, progress, ran.results.get("served")
            ),
        )
        if ran.passed and options.train.only is None:
            stage("export", lambda: _export(into, ran.data, progress))
    ran.total_seconds = time.perf_counter() - started
    return ran


def _train(
    recipe: Recipe, make_source: MakeSource, into: str | Path, options: RunConfig, progress: Progress
) -> list[training.TrainResult]:
    checkpoint, context = address_below(into, "checkpoint"), training.TrainContext(warn=options.warn)
    if options.ray is None:
        source = make_source(options.note)
        return training.train_at(recipe, source, checkpoint, options.train, progress, context=context)
    from recmill.stages.train.launch import launch

    return launch(
        recipe, make_source, Path(checkpoint), options.train, options.ray, progress, options.note, context
    )


def _source_of_finished(into: str | Path, data: str) -> MakeSource:
    """The Table; a run that began while it was prepared goes on as it began."""
    if is_url(into):
        return partial(open_table_data, str(address_below(into, "table")))
    into = Path(into)
    table = str((into / "table").absolute())
    if is_published(into / "checkpoint"):
        began_with = Checkpoint.open(into / "checkpoint").manifest["source"]
        if began_with.startswith(FOLLOWED):
            return partial(open_growing, table, _known_place(data))
    return partial(open_table_data, table)


def _known_place(data: str) -> str | None:
    """Where the log is, as a checkpoint may say it: no address with a password in it."""
    if "://" in data:
        return None if "@" in data else data
    return os.path.abspath(data)


def _replay(into: str | Path, data: str, options: RunConfig, progress: Progress) -> ServedResult | None:
    """None when the held-out rows are too few to measure lists by, unless the gate asks for it."""
    config = ReplayConfig(threads=options.train.threads)
    try:
        with written(address_below(into, "checkpoint")) as target:
            folder = Checkpoint.open(target.path).to_serve()
            served = replay_and_write(folder, data, config, options.gate, progress)
            target.push()
        return served
    except NothingToMeasure as error:
        if SERVED in (options.gate or ""):
            raise
        options.warn(f"The served list was not measured. {error}")
        return None


def _evaluate(
    into: str | Path, table: Any, options: RunConfig, progress: Progress, served: ServedResult | None
) -> list[evaluation.EvaluateResult]:
    config = EvaluateConfig(only=options.train.only, gate=options.gate, threads=options.train.threads)
    with written(address_below(into, "checkpoint")) as target:
        folder = Checkpoint.open(target.path).to_serve()
        evaluated = evaluation.evaluate(folder, table, config, progress)
        content = served_json(served) if served is not None else None
        write_evaluation(folder, evaluated, report_path(into), content)
        target.push()
    return evaluated


def _export(into: str | Path, data: str, progress: Progress) -> exporting.ExportResult:
    folder = Checkpoint.open(address_below(into, "checkpoint")).to_serve()
    return exporting.export_at(folder, data, address_below(into, "bundle"), progress=progress)


def recommend(into: str | Path, k: int = 10) -> tuple[Id, list[tuple[str, float]]] | None:
    """An example from the bundle that a run left behind: a user and titles (or ids) of items with their scores.

    None when the bundle has no items.
    """
    own_code = modules_of(Checkpoint.open(address_below(into, "checkpoint")).recipe)
    recommender = Recommender(Bundle.open(address_below(into, "bundle"), own_code))
    users = recommender.bundle.users
    if recommender.recaller is None or users is None or not len(users):
        return None
    user = users.ids(np.zeros(1, np.int64))[0]
    answer = recommender.recommend(user, k=k, trace=True)
    assert answer.trace is not None
    title = title_column(recommender.bundle.recipe) or ""
    names = [
        str(row.get(title) or item.id) for item, row in zip(answer.items, answer.trace.items, strict=True)
    ]
    return user, [(name, item.score) for name, item in zip(names, answer.items, strict=True)]


def _generate(recipe: Recipe, into: Path, rows: int) -> Any:
    """A synthetic log in the recipe's shape; None when it is there already."""
    if recipe.generate is None:
        raise RecmillError(f'Recipe "{recipe.name}" has no generator; give its log with --data DIR.')
    truth = read_truth(into) or {}
    is_same = (truth.get("shape"), truth.get("rows")) == (recipe.generate, rows)
    if is_same and all((into / name).exists() for name in truth.get("files", ())):
        return None
    return generate(recipe.generate, rows, 0, into)
