"""`average` through a run: trained, interrupted, resumed, exported and scored as one ranker."""

from __future__ import annotations

import numpy as np
import polars as pl

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.dataset.batch import collate
from recmill.learner.saved import open_learner
from recmill.recipe.load import recipe_from_dict
from recmill.stages.export.config import ExportConfig
from recmill.stages.export.export import export
from recmill.stages.prepare.prepare import prepare
from recmill.stages.serve.recommender import Recommender
from recmill.stages.train.config import TrainConfig
from recmill.stages.train.source import TableData
from recmill.stages.train.train import train

RECIPE = {
    "name": "averaged",
    "log": {
        "files": ["log.csv"],
        "separator": ",",
        "columns": [
            {"name": "x", "type": "float"},
            {"name": "u", "type": "int"},
            {"name": "click", "type": "int"},
        ],
    },
    "split": {"by": "tail", "held_out": 0.2},
    "features": [{"columns": "x"}, {"columns": "u", "steps": ["vocabulary"]}],
    "labels": [{"name": "click", "columns": "click"}],
    "ranking": {
        "model": "wide_deep",
        "label": "click",
        "embedding_dim": 4,
        "hidden": [8],
        "wide": ["u"],
        "average": 2,
        "train": {"batch_size": 32, "epochs": 2, "schedule": {"decay_from": 1}},
    },
}


def with_steps(max_steps: int):
    ranking = {**RECIPE["ranking"], "train": {**RECIPE["ranking"]["train"], "max_steps": max_steps}}
    return recipe_from_dict({**RECIPE, "ranking": ranking})


def test_a_resumed_average_is_the_same_as_one_without_a_break_and_is_served(tmp_path):
    random = np.random.default_rng(0)
    raw = pl.DataFrame(
        {
            "x": random.normal(size=600).round(3),
            "u": random.integers(0, 9, 600),
            "click": random.integers(0, 2, 600),
        }
    )
    raw.write_csv(tmp_path / "log.csv", include_header=False)
    table = prepare(with_steps(20), str(tmp_path), tmp_path / "table").table
    train(with_steps(20), TableData(table), tmp_path / "whole", TrainConfig(threads=1))
    train(with_steps(7), TableData(table), tmp_path / "broken", TrainConfig(threads=1))
    train(with_steps(20), TableData(table), tmp_path / "broken", TrainConfig(threads=1, resume=True))
    whole, broken = (eval_scores(table, tmp_path / name) for name in ("whole", "broken"))
    assert whole.tolist() == broken.tolist()
    bundle = export(
        Checkpoint.open(tmp_path / "broken"),
        str(tmp_path),
        tmp_path / "bundles",
        ExportConfig(which="last", threads=1),
    ).bundle
    served = Recommender(bundle).score(raw.tail(len(whole)).drop("click"))
    np.testing.assert_allclose(served, whole, atol=1e-5)


def eval_scores(table, checkpoint):
    learner = open_learner(Checkpoint.open(checkpoint), "ranking", "last").learner
    return learner.predict(collate(table.to_polars("eval"), learner.layout))
