"""What every model must do, whatever it is: learn, resume, share its work, be exported, served and score in batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "parallel"))
from contract import MODELS, STEPS, batches, learner_of, losses_of_workers, recipe_of, write_log
from processes import together

import recmill
from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.dataset.batch import Batch, collate
from recmill.dataset.table import Table
from recmill.distributed.workers import SINGLE_WORKER
from recmill.errors import FeatureError
from recmill.learner.ranking import Ranker
from recmill.learner.retrieval import Retriever
from recmill.learner.saved import open_learner
from recmill.stages.export.config import ExportConfig
from recmill.stages.export.export import export
from recmill.stages.prepare.prepare import prepare
from recmill.stages.serve.messages import Features, Rank, Recommend
from recmill.stages.serve.recommender import Recommender
from recmill.stages.train.config import TrainConfig
from recmill.stages.train.source import TableData
from recmill.stages.train.train import TrainContext, train

pytestmark = [pytest.mark.stages, pytest.mark.processes]

RANKERS = [name for name in MODELS if "ranking" in MODELS[name]]
OF_NUMBERS = [name for name in RANKERS if not recipe_of(name).ranking.binary_labels]
WORKER_STEPS = 4
LOSS_OF_CONSTANT = 0.65  # where a third of the rows is clicked


@dataclass(frozen=True)
class Run:
    """A model, trained to the end and exported, and its losses."""

    model: str
    checkpoint: Path
    bundle: Path
    losses: list[float]

    @property
    def learner(self) -> Ranker | Retriever:
        return open_learner(Checkpoint.open(self.checkpoint), self.model, "last").learner

    @property
    def served(self) -> Recommender:
        return recmill.open_bundle(self.bundle)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    folder = tmp_path_factory.mktemp("contract")
    write_log(folder / "log")
    return prepare(recipe_of("lr"), str(folder / "log"), folder / "table").table


def trained(name: str, table: Table, into: Path, resume: bool = False, **training: Any) -> list[float]:
    """Train to the end, or as far as `training` says; the losses."""
    (model,) = MODELS[name]
    recipe = recipe_of(name)
    spec = getattr(recipe, model)
    recipe = replace(recipe, **{model: replace(spec, train=replace(spec.train, **training))})
    losses: list[float] = []
    context = TrainContext(on_step=lambda _, progress: losses.append(progress.loss))
    train(recipe, TableData(table), into, TrainConfig(threads=1, resume=resume), context=context)
    return losses


@pytest.fixture(scope="module")
def run_of(table: Table, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def run(name: str) -> Run:
        into = folder / name
        losses = trained(name, table, into / "checkpoint")
        data = str(table.path.parent / "log")
        export(Checkpoint.open(into / "checkpoint"), data, into / "bundles", ExportConfig(which="last"))
        (model,) = MODELS[name]
        return Run(model, into / "checkpoint", into / "bundles", losses)

    return run


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_falls_on_planted_rows(run_of, name):
    losses = run_of(name).losses
    assert len(losses) == STEPS
    # Trees are fitted before the first step: nothing falls, but all is below the loss of a constant.
    first = np.mean(losses[:5]) if name != "trees" else LOSS_OF_CONSTANT
    assert np.mean(losses[-5:]) < 0.95 * first


@pytest.mark.parametrize("name", MODELS)
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(run_of, table, name, tmp_path):
    whole = run_of(name)
    assert len(trained(name, table, tmp_path, max_steps=STEPS // 2)) == STEPS // 2
    assert len(trained(name, table, tmp_path, resume=True)) == STEPS - STEPS // 2
    found, expected = (
        open_learner(Checkpoint.open(path), whole.model, "last").learner.arrays()
        for path in (tmp_path, whole.checkpoint)
    )
    assert found.keys() == expected.keys()
    assert all(found[key].tobytes() == value.tobytes() for key, value in expected.items())


@pytest.mark.parametrize("name", MODELS)
def test_two_threads_learn_what_one_learns(table, name):
    found = []
    for num_threads in (1, 2):
        learner = learner_of(name, table, num_threads)
        found.append([learner.step(batch).loss for batch in batches(learner, table, WORKER_STEPS)])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.fixture(scope="module")
def of_workers(table: Table, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[list[list[float]]]]:
    """By number of workers, and for each of them: the losses of every model."""
    folder, task = tmp_path_factory.mktemp("workers"), (table.path, list(MODELS), WORKER_STEPS)
    found = {size: together(folder / str(size), size, losses_of_workers, *task) for size in (2, 4)}
    return {1: [losses_of_workers(SINGLE_WORKER, *task)], **found}


@pytest.mark.parametrize("name", MODELS)
def test_two_and_four_workers_learn_what_one_learns(of_workers, name):
    index = list(MODELS).index(name)
    for size in (2, 4):
        for answer in of_workers[size]:
            assert isinstance(answer, list), answer
            assert answer[index] == pytest.approx(of_workers[1][0][index], rel=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_the_bundle_gives_what_training_gives(run_of, name):
    checked = run_of(name).served.bundle.manifest["check"]
    assert set(checked) == ({"rank", "rank_split"} if name in RANKERS else {"user", "item"})
    assert all(numbers["max"] < 1e-5 for numbers in checked.values())


@pytest.mark.parametrize("user", [3, 999, None])
@pytest.mark.parametrize("name", RANKERS)
def test_a_request_gets_the_scores_of_its_raw_rows(run_of, name, user):
    served, items = run_of(name).served, [1, 2, 3, 999]
    known = served.features(Features(user=user, items=items))
    values = known.user.values if known.user is not None else {}
    raw = served.lookup.raw_columns
    rows = raw.frame([{**values, **item.values} for item in known.items], list(raw.kinds))
    scores = served.score(rows.drop("click", "buy", strict=False))
    ranked = served.rank(Rank(user=user, items=items)).scores
    np.testing.assert_allclose(ranked, served.ranker.tasks.scores(scores), atol=1e-6 * max(1, scores.max()))


@pytest.mark.parametrize("name", MODELS)
def test_recommendations_come_without_error(run_of, name):
    for user in (3, 999):
        answer = run_of(name).served.recommend(Recommend(user=user, k=5))
        assert len(answer.items) == 5
        assert not answer.degraded


@pytest.mark.parametrize("name", RANKERS)
def test_batch_scores_of_checkpoint_and_bundle_are_those_of_the_learner(run_of, table, name, tmp_path):
    run = run_of(name)
    rows = collate(table.scan("eval").collect(), run.learner.layout)
    expected = run.learner.predict(rows)
    names = ["score"] if expected.ndim == 1 else [f"score_{label}" for label in run.learner.spec.labels]
    for number, model in enumerate((Checkpoint.open(run.checkpoint), run.served.bundle)):
        into = tmp_path / str(number)
        found = recmill.score(model, table, split="eval", which="last", into=into, quiet=True).to_polars()
        np.testing.assert_allclose(
            found.select(names).to_numpy().squeeze(), expected, atol=1e-5 * max(1, expected.max())
        )


@pytest.mark.parametrize("name", [*OF_NUMBERS, "mmoe, a number"])
def test_a_predicted_number_is_measured_and_judged(run_of, table, name, tmp_path):
    metric = "paid.r2" if name not in OF_NUMBERS else "r2"
    found = recmill.evaluate(
        run_of(name).checkpoint, table, which="last", gate=f"{metric}>=0.2", report=tmp_path / "report.html"
    )
    assert found.passed
    assert "Predicted and observed" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("name", [name for name in MODELS if name != "sasrec"])  # which reads no numbers
def test_a_number_that_is_not_finite_changes_nothing(table, name):
    learner = learner_of(name, table)
    (batch,) = batches(learner, table, 1)
    before = learner.arrays()
    with pytest.raises(FeatureError, match='Feature "price" is nan in row 5'):
        learner.step(with_number(batch, np.nan))
    assert all(np.array_equal(value, before[key]) for key, value in learner.arrays().items())


def with_number(batch: Batch, value: float) -> Batch:
    numbers = batch.numbers.copy()
    numbers[5] = value
    return replace(batch, numbers=numbers)


def with_labels(batch: Batch, value: float) -> Batch:
    return replace(
        batch, labels={label: np.full_like(values, value) for label, values in batch.labels.items()}
    )


@pytest.mark.parametrize("name", [name for name in MODELS if name not in OF_NUMBERS])
def test_a_label_that_is_neither_0_nor_1_is_refused(table, name):
    learner = learner_of(name, table)
    (batch,) = batches(learner, table, 1)
    with pytest.raises(
        FeatureError, match=r'Label "clicked" is neither 0 nor 1 in (\d+) of \1 rows: 4 in \1'
    ):
        learner.step(with_labels(batch, 4.0))


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_a_label_that_is_no_number_is_refused(table, name):
    learner = learner_of(name, table)
    (batch,) = batches(learner, table, 1)
    with pytest.raises(FeatureError, match=r'Label "paid" is nan in 64 of 64 rows; expected numbers'):
        learner.step(with_labels(batch, np.nan))
