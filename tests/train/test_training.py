"""Rankers learn a planted truth, whatever the number of threads."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from recmill.dataset.loader import Batches
from recmill.dataset.table import Table
from recmill.errors import FeatureError, RecmillError
from recmill.learner.ranking import Ranker
from recmill.metrics import ScoreSums, meets
from recmill.recipe.load import load_recipe
from recmill.recipe.recipe import Dynamic, Schedule
from recmill.stages.prepare.prepare import prepare
from recmill.stages.train.trainer import Trainer
from recmill.synthetic.generate import generate, read_truth

pytestmark = pytest.mark.stages

TRAIN = [
    "ranking.train.batch_size=256",
    "ranking.train.epochs=1",
    'ranking.train.dense={ name = "adam", learning_rate = 0.002 }',
    'ranking.train.sparse={ name = "rowwise_adagrad", learning_rate = 0.05 }',
]
RECIPES = {
    "dlrm": ("criteo-dlrm", ["ranking.embedding_dim=8", "ranking.bottom=[32, 8]", "ranking.top=[32]"]),
    "dynamic": ("criteo-deeprec", ["ranking.bottom=[32, 16]", "ranking.top=[32]"]),
    "wide_deep": ("criteo-widedeep", ["ranking.embedding_dim=8", "ranking.hidden=[32]"]),
}


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("criteo")
    generate("criteo", 30_000, 5, folder)
    return folder


@pytest.fixture(scope="module")
def tables(log, tmp_path_factory) -> dict[str, Table]:
    folder = tmp_path_factory.mktemp("tables")
    return {name: prepare(_recipe(name), str(log), folder / name).table for name in RECIPES}


def _recipe(name: str):
    shipped, changes = RECIPES[name]
    return load_recipe(shipped, ["table.order=shuffle", "ranking.train.target=", *changes, *TRAIN])


def trainer(tables, name: str, num_threads: int = 1, **training) -> Trainer:
    spec = _recipe(name).ranking
    spec = dataclasses.replace(spec, train=dataclasses.replace(spec.train, **{"evaluations": 2, **training}))
    table = tables[name]
    ranker = Ranker(spec, table.columns, num_threads)
    batches = Batches(table, spec.train.batch_size, features=ranker.layout.features)
    held_out = Batches(table, 4096, split="eval")
    return Trainer(ranker, batches, "auc", lambda: ranker.evaluate(held_out.read()).metrics().as_dict())


@pytest.mark.parametrize("name", RECIPES)
def test_a_planted_truth_is_learned(tables, log, name):
    run = trainer(tables, name)
    state = run.train()
    assert state.stopped_by == "end"
    best_reachable = read_truth(log)["best"]["auc"]
    assert [evaluation["step"] for evaluation in state.evaluations] == [
        run.total_steps // 2 + run.total_steps % 2,
        run.total_steps,
    ]
    assert 0.63 < state.evaluations[-1]["auc"] < best_reachable + 0.03
    assert state.evaluations[-1]["normalised_entropy"] < 1.0


@pytest.mark.parametrize("name", RECIPES)
def test_threads_change_nothing_but_rounding(tables, name):
    losses = []
    for num_threads in (1, 3):
        run = trainer(tables, name, num_threads)
        losses.append([run.learner.step(batch).loss for batch, _ in list(run.batches.read())[:12]])
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-4)


def test_one_thread_gives_the_same_bits_twice(tables):
    found = []
    for _ in range(2):
        run = trainer(tables, "dlrm")
        run.train()
        found.append(run.evaluate())
    assert found[0] == found[1]


def test_prediction_learns_nothing(tables):
    run = trainer(tables, "dynamic")
    batch, _ = next(iter(run.batches.read()))
    run.learner.step(batch)
    keys = [table.statistics().keys for table in run.learner.tables.values()]
    later = list(run.batches.read())[5][0]
    first = run.learner.predict(later)
    assert (run.learner.predict(later) == first).all()
    assert [table.statistics().keys for table in run.learner.tables.values()] == keys


def test_a_batch_of_one_row_trains(tables):
    run = trainer(tables, "wide_deep")
    table = tables["wide_deep"]
    batch, _ = next(iter(Batches(table, 1).read()))
    assert np.isfinite(run.learner.step(batch).loss)


def test_training_stops_at_its_target(tables):
    run = trainer(tables, "dlrm", target="auc >= 0.51")
    assert run.train().stopped_by == "target"
    assert run.learner.steps < run.total_steps


def test_training_stops_when_patience_is_over(tables):
    run = trainer(tables, "dlrm", evaluations=10, patience=2)
    falling = iter([0.9, 0.8, 0.7, 0.6])
    run.evaluate = lambda: {"auc": next(falling)}
    assert run.train().stopped_by == "patience"
    assert len(run.state.evaluations) == 3


def test_training_stops_after_so_many_steps_or_minutes(tables):
    run = trainer(tables, "dlrm", max_steps=7)
    assert run.train().stopped_by == "steps"
    assert run.learner.steps == 7
    assert trainer(tables, "dlrm", max_minutes=1e-6).train().stopped_by == "minutes"


def test_the_rate_drops_when_an_evaluation_is_worse_than_the_best(tables):
    run = trainer(tables, "dlrm", evaluations=4, schedule=Schedule(drop_factor=0.1))
    found = iter([0.7, 0.6, 0.8, 0.75])
    run.evaluate = lambda: {"auc": next(found)}
    factors = []
    run.report = lambda progress: factors.append((progress.step, round(progress.rate_factor, 6)))
    run.train()
    changes = [(step, factor) for (_, before), (step, factor) in pairwise(factors) if factor != before]
    assert changes == [(53, 0.1)]
    assert run.state.drops == 2


def test_micro_batches_change_nothing_but_rounding(tables):
    losses = []
    for micro_batches in (1, 4):
        run = trainer(tables, "wide_deep", micro_batches=micro_batches)
        losses.append([run.learner.step(batch).loss for batch, _ in list(run.batches.read())[:12]])
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-4)


def test_targets_are_read_and_wrong_ones_named():
    sums = ScoreSums()
    sums.add(np.array([1, 0]), np.array([0.9, 0.2]))
    metrics = sums.metrics().as_dict()
    assert meets("auc >= 0.99", metrics)
    assert not meets("log_loss <= 0.01", metrics)
    with pytest.raises(RecmillError, match=r'must look like "auc >= 0\.8025"'):
        meets("beauty >= 1", metrics)


def test_dynamic_tables_lose_the_keys_that_the_recipe_no_longer_wants(tables):
    spec = _recipe("dynamic").ranking
    spec = dataclasses.replace(spec, dynamic=Dynamic(capacity=20, evict_every_steps=10))
    ranker = Ranker(spec, tables["dynamic"].columns)
    batches = [batch for batch, _ in list(Batches(tables["dynamic"], 256).read())[:10]]
    for batch in batches[:9]:
        ranker.step(batch)
    assert max(table.statistics().keys for table in ranker.tables.values()) > 100
    ranker.step(batches[9])
    dynamic = [table for table in ranker.tables.values() if table.spec.num_rows is None]
    assert max(table.statistics().keys for table in dynamic) == 20


def test_what_a_ranker_cannot_do_is_an_error(tables):
    table, spec = tables["dlrm"], _recipe("dlrm").ranking
    with pytest.raises(FeatureError, match='"no_such_module:Model" cannot be imported'):
        Ranker(dataclasses.replace(spec, model="no_such_module:Model"), table.columns)
