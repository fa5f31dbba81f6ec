"""Labels that are numbers, on planted rows whose mean is known."""

from __future__ import annotations

import numpy as np
import pytest

from recmill.dataset.batch import Batch, Keys
from recmill.errors import FeatureError
from recmill.features.chain import ColumnInfo
from recmill.learner.ranking import Ranker
from recmill.metrics import TaskSums
from recmill.recipe import recipe as r

COLUMNS = [
    ColumnInfo("user", "id", "feature", size=33),
    ColumnInfo("item", "id", "feature", size=33),
    ColumnInfo("seconds", "number", "label"),
    ColumnInfo("click", "number", "label"),
]


def planted(num_rows: int, seed: int, unit: float = 1.0) -> Batch:
    """Even users watch even items for 90 seconds on average and others for 10, with a long tail; clicks are others."""
    draw = np.random.default_rng(seed)
    user, item = draw.integers(1, 33, (2, num_rows))
    is_even = (user + item) % 2 == 0
    seconds = draw.exponential(np.where(is_even, 90.0, 10.0)) * unit
    click = draw.random(num_rows) < np.where(is_even, 0.1, 0.5)
    labels = {"seconds": seconds.astype(np.float32), "click": click.astype(np.float32)}
    keys = {"user": Keys(user), "item": Keys(item)}
    return Batch(num_rows, np.zeros((num_rows, 0), np.float32), keys, {}, labels)


def is_long(batch: Batch) -> np.ndarray:
    return (batch.keys["user"].values + batch.keys["item"].values) % 2 == 0


TRAIN = r.Training(batch_size=512, dense=r.Optimizer("adam", 0.01), sparse=r.Optimizer("adagrad", 0.1))


def trained(spec: r.Ranking, unit: float = 1.0, steps: int = 250) -> Ranker:
    learner = Ranker(spec, COLUMNS)
    learner.start(planted(512, 0, unit))
    for step in range(steps):
        learner.step(planted(512, step, unit))
    return learner


def of_seconds(loss: str) -> r.Ranking:
    return r.Ranking("wide_deep", "seconds", embedding_dim=8, hidden=(16,), loss=loss, train=TRAIN)


@pytest.mark.parametrize("loss", ["squared", "weighted_logistic"])
def test_a_mean_is_predicted(loss):
    learner, rows = trained(of_seconds(loss)), planted(8192, seed=10_000)
    found = learner.predict(rows)
    assert found[is_long(rows)].mean() == pytest.approx(90, rel=0.1)
    assert found[~is_long(rows)].mean() == pytest.approx(10, rel=0.25)
    metrics = learner.evaluate([(rows, None)]).metrics()
    assert metrics.calibration == pytest.approx(1, abs=0.08)
    assert metrics.rmse < 0.92 * metrics.constant_rmse
    assert metrics.rank_correlation > 0.45


def test_a_squared_log_predicts_the_mean_of_logarithms_which_a_long_tail_does_not_move():
    learner, rows = trained(of_seconds("squared_log")), planted(8192, seed=10_000)
    for some in (is_long(rows), ~is_long(rows)):
        expected = np.log1p(rows.labels["seconds"][some]).mean()
        assert np.log1p(learner.predict(rows)[some]).mean() == pytest.approx(expected, abs=0.1)


def test_huber_lies_below_the_mean_of_a_long_tail_and_above_its_median():
    learner, rows = trained(of_seconds("huber")), planted(8192, seed=10_000)
    found = learner.predict(rows)[is_long(rows)].mean()
    assert 90 * np.log(2) < found < 90


@pytest.mark.parametrize("loss", ["squared", "huber"])
def test_the_unit_of_a_label_changes_nothing_but_the_unit_of_predictions(loss):
    rows = planted(512, seed=10_000)
    seconds, hours = (trained(of_seconds(loss), unit, steps=40).predict(rows) for unit in (1.0, 1 / 3600))
    np.testing.assert_allclose(hours * 3600, seconds, atol=0.01)


def test_a_number_and_a_click_that_ask_for_opposite_items_are_both_learned():
    tasks = r.Tasks(("click", "seconds"), losses={"seconds": "squared"}, tower=(8,))
    learner = trained(
        r.Ranking("mmoe", embedding_dim=8, top=(16,), interaction="cat", tasks=tasks, train=TRAIN)
    )
    rows = planted(8192, seed=10_000)
    sums = learner.evaluate([(rows, None)])
    assert isinstance(sums, TaskSums)
    metrics = sums.metrics().as_dict()
    assert metrics["click.auc"] > 0.7
    assert metrics["seconds.r2"] > 0.2
    assert (metrics["auc"], metrics["r2"]) == (metrics["click.auc"], metrics["seconds.r2"])
    click, seconds = learner.predict(rows).T
    assert click[is_long(rows)].mean() == pytest.approx(0.1, abs=0.04)
    assert seconds[is_long(rows)].mean() == pytest.approx(90, rel=0.15)


def test_a_negative_number_is_refused_where_logarithms_are_taken():
    rows = planted(512, 0)
    rows.labels["seconds"][7] = -1.0
    with pytest.raises(
        FeatureError, match=r'Label "seconds" is -1 in 1 of 512 rows; expected numbers from 0'
    ):
        Ranker(of_seconds("squared_log"), COLUMNS).step(rows)
    Ranker(of_seconds("squared"), COLUMNS).step(rows)
