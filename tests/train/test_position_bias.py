"""Logged positions: trained with as a wide feature, the same for all items when they are served."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.dataset.batch import collate
from recmill.learner.saved import open_learner
from recmill.recipe.load import recipe_from_dict
from recmill.stages.prepare.prepare import prepare
from recmill.stages.train.config import TrainConfig
from recmill.stages.train.source import TableData
from recmill.stages.train.train import train

NUM_ITEMS, NUM_ROWS = 8, 12_000

RECIPE = {
    "name": "shelf",
    "log": {
        "files": ["log.csv"],
        "separator": ",",
        "columns": [
            {"name": "item", "type": "int"},
            {"name": "position", "type": "int"},
            {"name": "click", "type": "int"},
        ],
    },
    "features": [
        {"columns": "item", "steps": ["vocabulary"]},
        {"columns": "position", "steps": [{"fill": 1}, "vocabulary"]},
    ],
    "labels": [{"name": "click", "columns": "click"}],
    "table": {"order": "shuffle", "keep": ["item"]},
    "ranking": {
        "model": "lr",
        "label": "click",
        "features": ["item"],
        "embedding_dim": 1,
        "train": {"batch_size": 64, "epochs": 6, "sparse": {"name": "adagrad", "learning_rate": 0.3}},
    },
}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Item 7 is liked best and shown last; further down, items are clicked less."""
    folder = tmp_path_factory.mktemp("shelf")
    random = np.random.default_rng(0)
    item = random.integers(0, NUM_ITEMS, NUM_ROWS)
    position = np.clip(item + random.integers(-4, 5, NUM_ROWS), 1, NUM_ITEMS)
    logit = 0.3 * item - 0.7 * (position - 1)
    click = random.random(NUM_ROWS) < 1 / (1 + np.exp(-logit))
    rows = zip(item, position, click.astype(int), strict=True)
    (folder / "log.csv").write_text("".join(f"{i},{p},{c}\n" for i, p, c in rows))
    return prepare(recipe_from_dict(RECIPE), str(folder), folder / "table").table


def order_of_items(table, ranking, into) -> list[int]:
    """Items by the score of a ranker whose rows are all at the position of a request without one."""
    recipe = recipe_from_dict({**RECIPE, "ranking": {**RECIPE["ranking"], **ranking}})
    train(recipe, TableData(table), into, TrainConfig(threads=1))
    ranker = open_learner(Checkpoint.open(into), "ranking").learner
    rows = table.to_polars("train").unique("raw_item", keep="first").sort("raw_item")
    asked = rows.select(item="raw_item", position=pl.lit(None, pl.Int64), click=pl.lit(0, pl.Int64))
    position = table.plan.apply(asked)["position"]
    scores = ranker.predict(collate(rows.with_columns(position), ranker.layout))
    return np.argsort(scores).tolist()


def test_a_ranker_without_positions_prefers_what_was_shown_first(table, tmp_path):
    found = order_of_items(table, {}, tmp_path)
    assert found[0] == 7
    assert found[-1] <= 2


def test_a_ranker_with_positions_beside_it_finds_what_is_liked(table, tmp_path):
    found = order_of_items(table, {"wide": ["position"]}, tmp_path)
    assert found[0] <= 1
    assert found[-1] >= 6
