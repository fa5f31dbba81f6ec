"""Trees, alone or beside a ranker's model: fitted once, blended, resumed, exported."""

from __future__ import annotations

import numpy as np
import pytest

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.dataset.batch import collate
from recmill.errors import MissingPackage, RecmillError
from recmill.learner.graphs.graphs import write_graphs
from recmill.learner.saved import open_learner
from recmill.recipe.load import recipe_from_dict
from recmill.stages.prepare.prepare import prepare
from recmill.stages.train.config import TrainConfig
from recmill.stages.train.source import LogData, TableData
from recmill.stages.train.train import train

# Clicks depend on whether a and b are of the same sign, which neither a sum of both nor an id of u can tell.
RECIPE = {
    "name": "signs",
    "log": {
        "files": ["log.csv"],
        "separator": ",",
        "columns": [
            {"name": "a", "type": "float"},
            {"name": "b", "type": "float"},
            {"name": "u", "type": "int"},
            {"name": "click", "type": "int"},
        ],
    },
    "split": {"by": "tail", "held_out": 0.2},
    "features": [{"columns": "a"}, {"columns": "b"}, {"columns": "u", "steps": ["vocabulary"]}],
    "labels": [{"name": "click", "columns": "click"}],
    "ranking": {
        "model": "wide_deep",
        "label": "click",
        "features": ["u"],
        "embedding_dim": 4,
        "trees": {
            "features": ["a", "b"],
            "rounds": 40,
            "depth": 3,
            "learning_rate": 0.3,
            "feature_fraction": 1,
        },
    },
}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signs")
    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, 4000)).round(3)
    user = random.integers(0, 20, 4000)
    rows = zip(a, b, user, ((a > 0) == (b > 0)).astype(int), strict=True)
    (folder / "log.csv").write_text("".join(f"{a},{b},{u},{c}\n" for a, b, u, c in rows))
    return prepare(recipe_from_dict(RECIPE), str(folder), folder / "table").table


def test_without_lightgbm_the_error_names_the_extra(table, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"recmill\[trees\]"):
        train(table.recipe, TableData(table), tmp_path)


def test_trees_need_a_table(table, tmp_path):
    source = LogData(table.recipe, table.manifest["data"], table.path)
    with pytest.raises(RecmillError, match="train it from a Table"):
        train(table.recipe, source, tmp_path)


def test_a_blend_knows_what_its_trees_found(table, tmp_path):
    pytest.importorskip("lightgbm", reason="the extra trees is not installed")
    (result,) = train(table.recipe, TableData(table), tmp_path, TrainConfig(threads=1))
    assert result.best.metrics["auc"] > 0.95
    ranker = open_learner(Checkpoint.open(tmp_path), "ranking").learner
    rows = table.to_polars("eval")
    scores = ranker.predict(collate(rows, ranker.layout))
    assert ((scores > 0.5) == (rows["click"].to_numpy() == 1)).mean() > 0.95
    assert set(write_graphs(ranker, tmp_path / "graphs", {})) == {"rank"}


def test_trees_alone_are_fitted_up_to_the_best_round_and_need_no_table_of_embeddings(table, tmp_path):
    pytest.importorskip("lightgbm", reason="the extra trees is not installed")
    trees = {"model": "trees", "label": "click", "trees": RECIPE["ranking"]["trees"]}
    recipe = recipe_from_dict({**RECIPE, "ranking": trees})
    (result,) = train(recipe, TableData(table), tmp_path, TrainConfig(threads=1))
    assert result.best.metrics["auc"] > 0.95
    ranker = open_learner(Checkpoint.open(tmp_path), "ranking").learner
    assert not ranker.tables
    assert not ranker.parameters
    rows = collate(table.to_polars("eval"), ranker.layout)
    assert result.best.metrics["log_loss"] == pytest.approx(ranker.step(rows).loss, abs=1e-5)
