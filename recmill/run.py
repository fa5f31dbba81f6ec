"""run: a recipe's whole chain in order. A stage that is done already is not done again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recmill import evaluate as evaluation
from recmill import export as exporting
from recmill import open_bundle
from recmill import prepare as preparation
from recmill import train as training
from recmill.checkpoint import CheckpointFolder
from recmill.errors import RecmillError
from recmill.evaluate.write import write_evaluation
from recmill.learner.saved import models_of
from recmill.logs.generate import generate, read_truth
from recmill.machine import available_cores
from recmill.progress import Progress
from recmill.serve.messages import Answer, Id, Recommend
from recmill.spec.recipe import Recipe
from recmill.train.source import TableSource

DEFAULT_ROWS = 100_000


@dataclass(frozen=True)
class Options:
    """How the stages run."""

    rows: int = DEFAULT_ROWS  # to generate when there is no log
    prepare: preparation.Options = field(default_factory=preparation.Options)
    train: training.Options = field(default_factory=lambda: training.Options(resume=True))
    gate: tuple[Any, ...] = ()


@dataclass
class Ran:
    """What the stages made, and the seconds that each took."""

    data: str
    into: Path
    seconds: dict[str, float] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(model.passed for model in self.results.get("evaluate", []))


def run(
    recipe: Recipe,
    data: str | None,
    into: Path,
    options: Options | None = None,
    progress: Progress | None = None,
    report: Callable[[str, Any], None] = lambda stage, result: None,
) -> Ran:
    """Generate a log unless there is one, prepare it, train, evaluate and export.

    `report` hears of each stage as it ends. What did not pass its gate is not exported.
    """
    options, progress = options or Options(), progress or Progress(quiet=True)
    ran = Ran(data or str(into / "log"), into)

    def stage(name: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = ran.results[name] = work()
        ran.seconds[name] = time.perf_counter() - started
        report(name, result)
        return result

    if data is None:
        stage("generate", lambda: _generate(recipe, into / "log", options.rows))
    prepared = stage(
        "prepare", lambda: preparation.prepare(recipe, ran.data, into / "table", options.prepare, progress)
    )
    if models_of(recipe):
        source = TableSource(prepared.table)
        stage("train", lambda: training.train(recipe, source, into / "checkpoint", options.train, progress))
        stage("evaluate", lambda: _evaluate(into, prepared.table, options, progress))
        if ran.passed and not options.train.models:
            stage("export", lambda: _export(into, ran.data, progress))
    return ran


def _evaluate(into: Path, table: Any, options: Options, progress: Progress) -> list[evaluation.Evaluated]:
    folder = CheckpointFolder.open(into / "checkpoint")
    num_threads = options.train.threads or available_cores()
    wanted = evaluation.Options(models=options.train.models, gate=options.gate, num_threads=num_threads)
    evaluated = evaluation.evaluate(folder, table, wanted, progress)
    write_evaluation(folder, evaluated, into / "report.html")
    return evaluated


def _export(into: Path, data: str, progress: Progress) -> exporting.Exported:
    folder = CheckpointFolder.open(into / "checkpoint")
    options = exporting.Options(num_threads=available_cores())
    return exporting.export(folder, data, into / "bundle", options, progress)


def recommend(into: Path, k: int = 10) -> tuple[Id, Answer] | None:
    """An example from the bundle that a run left behind: a user and their items; None when it has no items."""
    recommender = open_bundle(into / "bundle")
    users = recommender.bundle.users
    if recommender.recaller is None or users is None or not len(users):
        return None
    user = users.ids(np.zeros(1, np.int64))[0]
    return user, recommender.recommend(Recommend(user=user, k=k))


def _generate(recipe: Recipe, into: Path, rows: int) -> Any:
    """A synthetic log in the recipe's shape; None when it is there already."""
    if recipe.generate is None:
        raise RecmillError(f'Recipe "{recipe.name}" has no generator; give its log with --data DIR.')
    truth = read_truth(into)
    if truth is not None and truth["shape"] == recipe.generate and truth["rows"] == rows:
        return None
    return generate(recipe.generate, rows, 0, into)
