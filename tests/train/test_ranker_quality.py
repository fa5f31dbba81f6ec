"""Rankers with default settings on a small log of Criteo's shape must not fall behind a logistic regression."""

from __future__ import annotations

import numpy as np
import pytest

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.recipe.load import load_recipe
from recmill.stages.evaluate.config import EvaluateConfig
from recmill.stages.evaluate.evaluate import evaluate
from recmill.stages.prepare.prepare import prepare
from recmill.stages.train.config import TrainConfig
from recmill.stages.train.source import TableData
from recmill.stages.train.train import train

ROWS = 6_000


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """As in real rows, columns say much the same, ids are skewed, numbers are missing and missing ones click less."""
    random = np.random.default_rng(0)
    hidden = random.zipf(1.3, (5, ROWS)) % 500  # what the columns are made of
    numbers = random.lognormal(1.5, 1.5, (13, ROWS)).astype(int)
    is_missing = random.random((13, ROWS)) < 0.3
    effects = random.normal(0, 0.6, (5, 500))
    logits = sum(effects[part, hidden[part]] for part in range(5)) - 1.2
    logits += 0.3 * (np.log1p(numbers[0]) - 1.5) * ~is_missing[0] - 0.7 * is_missing[1]
    logits += 0.8 * np.sign(effects[0, hidden[0]] * effects[1, hidden[1]])
    labels = (random.random(ROWS) < 1 / (1 + np.exp(-logits))).astype(int)
    ids = [(hidden[column % 5] * (column + 1)) % (40 * (column + 1)) for column in range(26)]
    folder = tmp_path_factory.mktemp("clicks")
    with open(folder / "train.txt", "w") as file:
        for row in range(ROWS):
            values = ["" if is_missing[n, row] else str(numbers[n, row]) for n in range(13)]
            keys = [f"{ids[c][row]:08x}" for c in range(26)]
            file.write("\t".join([str(labels[row]), *values, *keys]) + "\n")
    return folder


def test_wide_and_deep_is_about_as_good_as_a_logistic_regression(log, tmp_path):
    recipe = load_recipe("criteo-widedeep-vocabulary", ["ranking.train.evaluations=2"])
    table = prepare(recipe, str(log), tmp_path / "table").table
    train(recipe, TableData(table), tmp_path / "checkpoint", TrainConfig(threads=1))
    (found,) = evaluate(Checkpoint.open(tmp_path / "checkpoint"), table, EvaluateConfig(threads=1))
    assert found.metrics["auc"] > found.baselines["logistic regression"]["auc"] - 0.02
    assert found.metrics["log_loss"] < found.baselines["logistic regression"]["log_loss"] + 0.02
