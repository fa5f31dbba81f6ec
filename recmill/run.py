"""run: a recipe's whole chain in order. A stage that is done already is not done again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recmill import evaluate as evaluation
from recmill import prepare as preparation
from recmill import train as training
from recmill.checkpoint import CheckpointFolder
from recmill.errors import RecmillError
from recmill.evaluate.write import write_evaluation
from recmill.learner.questions import Questions, id_feature
from recmill.learner.retrieval import Retriever
from recmill.learner.saved import models_of, open_learner
from recmill.logs.generate import generate, read_truth
from recmill.progress import Progress
from recmill.protocols import protocol_for
from recmill.spec.recipe import Recipe
from recmill.table import Table
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
    """Generate a log unless there is one, prepare it, train and evaluate; `report` hears of each stage as it ends."""
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
    return ran


def _evaluate(into: Path, table: Any, options: Options, progress: Progress) -> list[evaluation.Evaluated]:
    folder = CheckpointFolder.open(into / "checkpoint")
    wanted = evaluation.Options(
        models=options.train.models, gate=options.gate, num_threads=options.train.threads or 1
    )
    evaluated = evaluation.evaluate(folder, table, wanted, progress)
    write_evaluation(folder, evaluated, into / "report.html")
    return evaluated


@dataclass(frozen=True)
class Recommendation:
    """What one user of the held-out rows is recommended, best first, and what they went on to click."""

    user: str
    items: list[str]
    clicked: list[str]


def recommend(into: Path, k: int = 10) -> Recommendation | None:
    """An example from what a run left behind; None for a recipe without [retrieval]."""
    folder, table = CheckpointFolder.open(into / "checkpoint"), Table.open(into / "table")
    if "retrieval" not in folder.models:
        return None
    retriever = open_learner(folder, "retrieval").learner
    assert isinstance(retriever, Retriever)
    recipe, split = folder.recipe, "test" if table.num_rows("test") else "eval"
    questions = Questions.of(table, recipe, split, protocol_for(recipe))
    _, ranked = next(retriever.answers(questions, k))
    names = table.plan.values_of(retriever.item_id)
    ids = questions.catalogue.ids

    def name(place: int) -> str:
        known = place < len(ids)
        return (
            (str(names[int(ids[place]) - 1]) if names is not None else str(ids[place]))
            if known
            else "a new item"
        )

    user = questions.users["__user"][0]
    users = table.plan.values_of(id_feature(recipe, folder.columns, "user"))
    kept = recipe.log.user in recipe.table.keep
    return Recommendation(
        str(user) if users is None or kept else str(users[int(user) - 1]),
        [name(int(place)) for place in ranked[0] if place >= 0],
        [name(int(place)) for place in questions.relevant.of(slice(0, 1)).items],
    )


def _generate(recipe: Recipe, into: Path, rows: int) -> Any:
    """A synthetic log in the recipe's shape; None when it is there already."""
    if recipe.generate is None:
        raise RecmillError(f'Recipe "{recipe.name}" has no generator; give its log with --data DIR.')
    truth = read_truth(into)
    if truth is not None and truth["shape"] == recipe.generate and truth["rows"] == rows:
        return None
    return generate(recipe.generate, rows, 0, into)
