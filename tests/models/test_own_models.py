"""What users' own models may do and what not; that they do all else is in the contract suite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import own_models
import pytest
import torch
from torch import nn

from recmill.dataset.batch import Batch, Keys
from recmill.errors import FeatureError, TrainingError
from recmill.features.chain import ColumnInfo
from recmill.learner.ranking import Ranker
from recmill.recipe import recipe as r

COLUMNS = [
    ColumnInfo("x", "number", "feature"),
    ColumnInfo("user", "id", "feature", size=5),
    ColumnInfo("click", "number", "label"),
    ColumnInfo("worth", "number", "label"),
]


class WithBatchNorm(nn.Module):
    def __init__(self, spec, num_numbers, num_embedded):
        super().__init__()
        self.norm = nn.BatchNorm1d(num_numbers + num_embedded * spec.embedding_dim)
        self.last = nn.Linear(self.norm.num_features, 1)

    def forward(self, numbers, pooled):
        return self.last(self.norm(torch.cat([numbers, pooled.flatten(1)], dim=1))).squeeze(1)


def mean_loss(logits, labels):
    return own_models.focal(logits, labels).mean()


def ranker(num_threads: int = 1, **keys) -> Ranker:
    spec = r.Ranking(**{"model": "wide_deep", "label": "click", "embedding_dim": 2, "hidden": (4,), **keys})
    return Ranker(spec, COLUMNS, num_threads)


def rows(worth: float = 1.0) -> Batch:
    random = np.random.default_rng(0)
    labels = {"click": random.integers(0, 2, 8).astype(np.float32), "worth": np.full(8, worth, np.float32)}
    numbers = random.normal(size=(8, 1)).astype(np.float32)
    return Batch(8, numbers, {"user": Keys(random.integers(1, 5, 8))}, {}, labels)


def test_batch_norm_trains_on_one_thread_and_its_statistics_are_saved():
    learner, other = (ranker(model=f"{__name__}:WithBatchNorm") for _ in range(2))
    learner.step(rows())
    assert learner.model.norm.running_mean.abs().sum() > 0
    other.load_arrays(learner.arrays())
    assert torch.equal(other.model.norm.running_mean, learner.model.norm.running_mean)


def test_batch_norm_on_two_threads_is_an_error():
    message = 'Training changes buffer "norm.running_mean" of the model, as BatchNorm does'
    with pytest.raises(TrainingError, match=message):
        ranker(2, model=f"{__name__}:WithBatchNorm").step(rows())


def test_a_loss_that_is_not_one_for_each_row_is_an_error():
    with pytest.raises(
        TrainingError, match=r"mean_loss\" gave \(\) for logits \(8,\); expected the loss of each"
    ):
        ranker(loss=f"{__name__}:mean_loss").step(rows())


@pytest.mark.parametrize(
    ("path", "reason"), [("nowhere:f", "cannot be imported"), ("own_models:f", "has no f")]
)
def test_a_loss_that_is_not_there_is_an_error(path, reason):
    with pytest.raises(FeatureError, match=f'ranking.loss "{path}".* {reason}'):
        ranker(loss=path)


def test_a_weight_multiplies_the_loss_of_its_row():
    plain, double = ranker().step(rows()).loss, ranker(weight="worth").step(rows(2.0)).loss
    assert double == pytest.approx(2 * plain, rel=1e-5)


@pytest.mark.parametrize("value", [-1.0, np.nan])
def test_a_weight_below_0_or_that_is_no_number_is_refused(value):
    with pytest.raises(
        FeatureError, match=r'ranking.weight "worth" is (-1|nan) in 8 of 8 rows; weights of rows are'
    ):
        ranker(weight="worth").step(rows(value))


def test_a_feature_with_a_dim_of_its_own_reads_a_table_of_that_dim():
    columns = [COLUMNS[0], replace(COLUMNS[1], dim=3), *COLUMNS[2:]]
    learner = Ranker(r.Ranking("wide_deep", "click", (), 2, hidden=(4,)), columns)
    before = learner.predict(rows())
    for _ in range(5):
        learner.step(rows())
    assert learner.tables["deep.3/user"].spec.dim == 3
    assert not torch.equal(learner.model.projection.weights["3"], torch.eye(3, 2).unsqueeze(0))
    assert not np.allclose(before, learner.predict(rows()))


def test_the_page_shows_the_models_that_the_contract_suite_runs():
    page = (Path(__file__).parents[2] / "docs/models.md").read_text()
    code = Path(own_models.__file__).read_text().split("\n\n", 1)[1]
    assert f"```python\n# mine.py\n{code}```" in page
