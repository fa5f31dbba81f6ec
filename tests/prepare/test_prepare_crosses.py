"""`[ranking] cross = "auto"`: pairs that are planted are found, and the resolved recipe has them from then on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.dataset.table import Table
from recmill.errors import RecmillError
from recmill.recipe import steps as s
from recmill.recipe.defaults import is_resolution
from recmill.recipe.load import recipe_from_dict
from recmill.recipe.recipe import Recipe
from recmill.stages.prepare.config import PrepareConfig
from recmill.stages.prepare.crosses import best_pairs
from recmill.stages.prepare.prepare import prepare
from recmill.stages.train.config import TrainConfig
from recmill.stages.train.source import LogData, TableData
from recmill.stages.train.train import train

EDGES = (0.0, 1.0)
RECIPE: dict[str, Any] = {
    "name": "pairs",
    "log": {
        "files": ["log.csv"],
        "separator": ",",
        "columns": [
            *({"name": name, "type": "int"} for name in "abcd"),
            {"name": "x", "type": "float"},
            {"name": "click", "type": "int"},
        ],
    },
    "split": {"by": "tail", "held_out": 0.2},
    "features": [
        *({"columns": name, "steps": ["vocabulary"]} for name in "abcd"),
        {"columns": "x", "steps": [{"buckets": EDGES}]},
    ],
    "labels": [{"name": "click", "columns": "click"}],
    "ranking": {
        "model": "wide_deep",
        "label": "click",
        "embedding_dim": 2,
        "wide": ["a", "b", "c", "d", "x"],
        "cross": "auto",
        "train": {"epochs": 4},
    },
}
ROWS = 20_000


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whether a and b are equal modulo 2 decides most clicks, and a little what d is where x is above 1."""
    folder = tmp_path_factory.mktemp("pairs")
    random = np.random.default_rng(0)
    a, b, c, d = random.integers(0, 8, (4, ROWS))
    x = random.normal(size=ROWS).round(3)
    logits = np.where((a + b) % 2, 1.2, -1.2) + np.where(x > 1, 1.0, -0.2) * (d - 3.5) / 2
    clicks = random.random(ROWS) < 1 / (1 + np.exp(-logits))
    columns = zip(a, b, c, d, x, clicks.astype(int), strict=True)
    (folder / "log.csv").write_text("".join(",".join(map(str, row)) + "\n" for row in columns))
    return folder


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return recipe_from_dict(RECIPE)


@pytest.fixture(scope="module")
def table(recipe: Recipe, log: Path) -> Table:
    result = prepare(recipe, str(log), log / "table")
    assert result.crosses == ("a_b", "d_x")
    return result.table


def test_planted_pairs_join_the_wide_part_of_the_resolved_recipe(table):
    found = table.recipe
    assert found.ranking.cross is None
    assert found.ranking.wide == ("a", "b", "c", "d", "x", "a_b", "d_x")
    assert found.ranking.features == ("a", "b", "c", "d", "x")
    first, second = found.features[-2:]
    assert (first.columns, first.steps) == (("a", "b"), (s.Cross(), s.Vocabulary(min_count=5)))
    assert second.columns == ("d", "x")
    assert second.steps[0] == s.Cross(edges=((), EDGES))


def test_how_the_log_is_cut_does_not_change_what_is_found(recipe, table, log, tmp_path):
    again = prepare(recipe, str(log), tmp_path / "table", PrepareConfig(partitions=5)).table
    assert (again.digest, again.recipe) == (table.digest, table.recipe)


def test_a_recipe_with_open_crosses_trains_and_resumes_on_its_table(recipe, table, tmp_path):
    (result,) = train(recipe, TableData(table), tmp_path, TrainConfig(threads=1))
    assert result.best.metrics["auc"] > 0.75  # single columns reach 0.58
    stored = Checkpoint.open(tmp_path).recipe
    assert stored.ranking.wide == table.recipe.ranking.wide
    assert is_resolution(stored, recipe)
    (again,) = train(recipe, TableData(table), tmp_path, TrainConfig(threads=1, resume=True))
    assert again.was_complete


def test_another_log_gets_the_crosses_of_a_plan(recipe, table, log, tmp_path):
    other = prepare(recipe, str(log), tmp_path / "table", plan=table.plan)
    assert other.table.recipe.features == table.recipe.features
    assert LogData(recipe, str(log), table.path).recipe.features == table.recipe.features


def test_a_log_without_a_plan_cannot_have_crosses(recipe, log):
    with pytest.raises(RecmillError, match="Fit them once with `recmill prepare`"):
        LogData(recipe, str(log))


def test_columns_that_act_alone_have_no_pair():
    random = np.random.default_rng(0)
    columns = random.integers(0, 10, (6, ROWS))
    clicks = random.random(ROWS) < 1 / (1 + np.exp(-0.3 * (columns.sum(axis=0) - 27)))
    hashes = {str(number): column.astype(np.uint64) for number, column in enumerate(columns)}
    assert best_pairs(hashes, clicks.astype(float)) == []
