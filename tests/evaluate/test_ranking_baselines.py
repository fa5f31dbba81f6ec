"""Simple models over the same features, which every evaluation of a ranker is printed beside."""

from __future__ import annotations

import numpy as np
import pytest

from recmill.learner.ranking import Ranker
from recmill.logistic import LinearRegression, LogisticRegression, bucket_edges, hashed
from recmill.metrics import exact_auc
from recmill.recipe.load import recipe_from_dict
from recmill.stages.evaluate.baselines import ranking_baselines
from recmill.stages.evaluate.boosted import boosted_scores
from recmill.stages.prepare.prepare import prepare


def test_a_regression_learns_what_ids_add_up_to():
    random = np.random.default_rng(0)
    first, second = random.integers(0, 4, 20_000), random.integers(0, 4, 20_000)
    truth = np.array([-1.0, 0.0, 0.5, 1.0])
    labels = random.random(20_000) < 1 / (1 + np.exp(-(truth[first] - truth[second])))
    slots = hashed([first, second])
    learned = LogisticRegression().fit(slots, labels)
    same = hashed([np.arange(4), np.zeros(4, np.int64)])
    assert np.diff(learned.sums(same)) == pytest.approx(np.diff(truth), abs=0.25)
    assert learned.predict(slots).mean() == pytest.approx(labels.mean(), abs=0.02)


def test_a_linear_regression_learns_what_ids_add_up_to_in_the_labels_unit():
    random = np.random.default_rng(0)
    first, second = random.integers(0, 4, 20_000), random.integers(0, 4, 20_000)
    labels = 500 + np.array([-100.0, 0.0, 50.0, 100.0])[first] - 30 * second + random.normal(0, 20, 20_000)
    learned = LinearRegression().fit(hashed([first, second]), labels)
    same = hashed([np.arange(4), np.zeros(4, np.int64)])
    assert learned.predict(same) == pytest.approx([400, 500, 550, 600], abs=10)


def test_the_same_value_of_two_columns_has_two_weights():
    assert len(np.unique(hashed([np.arange(100), np.arange(100)]))) == 200


def test_edges_cut_where_the_rows_are():
    edges = bucket_edges(np.concatenate([np.zeros(50), np.arange(50)]))
    assert np.searchsorted(edges, [-1, 0, 49], side="right").tolist() == [0, 1, len(edges)]


def test_numbers_and_ids_of_a_table_are_the_baselines_features(tmp_path):
    random = np.random.default_rng(0)
    x, u = random.normal(size=3000).round(2), random.integers(0, 10, 3000)
    clicks = (random.random(3000) < 1 / (1 + np.exp(-2 * x - (u - 4.5)))).astype(int)
    (tmp_path / "log.csv").write_text("".join(f"{a},{b},{c}\n" for a, b, c in zip(x, u, clicks, strict=True)))
    columns = [{"name": "x", "type": "float"}, {"name": "u", "type": "int"}, {"name": "click", "type": "int"}]
    recipe = recipe_from_dict(
        {
            "name": "small",
            "log": {"files": ["log.csv"], "separator": ",", "columns": columns},
            "split": {"by": "tail", "held_out": 0.3},
            "features": [{"columns": "x"}, {"columns": "u", "steps": ["vocabulary"]}],
            "labels": [{"name": "click", "columns": "click"}],
            "ranking": {"model": "wide_deep", "label": "click"},
        }
    )
    table = prepare(recipe, str(tmp_path), tmp_path / "table").table
    found = ranking_baselines(Ranker(recipe.ranking, table.columns), table, "eval", 1)
    assert found["constant"]["auc"] == 0.5
    assert found["constant"]["log_loss"] == pytest.approx(np.log(2), abs=0.01)
    assert found["logistic regression"]["auc"] > 0.85
    assert found["logistic regression"]["log_loss"] < 0.45
    assert found["boosted trees"]["auc"] > 0.85


def test_trees_learn_what_a_regression_cannot():
    """Clicks where exactly one of two numbers is above 0; the ids say nothing."""
    random = np.random.default_rng(0)
    left, right, ids = random.normal(size=4000), random.normal(size=4000), random.integers(0, 2000, 4000)
    labels = ((left > 0) != (right > 0)).astype(float)
    columns = [left, right, ids]
    scores = boosted_scores(
        [one[:3000] for one in columns], labels[:3000], [one[3000:] for one in columns], 1
    )
    assert exact_auc(labels[3000:], scores) > 0.95


def test_a_rows_own_label_is_not_in_its_features():
    """Every id occurs once: means of the label must not tell what the label is."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 2000).astype(float)
    scores = boosted_scores([np.arange(1500)], labels[:1500], [np.arange(1500, 2000)], 1)
    assert scores == pytest.approx(labels[:1500].mean(), abs=0.15)
