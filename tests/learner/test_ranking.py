"""A ranker's first answers, its wide part beside any model, and optimizers that do not depend on the batch size."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from recmill.dataset.batch import Batch, Keys
from recmill.embeddings.table import EmbeddingTable, KeyRecords, TableSpec
from recmill.features.chain import ColumnInfo
from recmill.learner.base import table_parameters
from recmill.learner.ranking import Ranker
from recmill.recipe import recipe as r

COLUMNS = [
    ColumnInfo("x", "number", "feature"),
    ColumnInfo("c", "id", "feature", size=5),
    ColumnInfo("click", "number", "label"),
]


def ranker(batch_size: int, **keys) -> Ranker:
    train = r.Training(batch_size=batch_size, sparse=r.Optimizer("adagrad", 0.1, eps=2.0))
    spec = r.Ranking("dlrm", "click", embedding_dim=2, bottom=(4, 2), top=(4,), train=train, **keys)
    return Ranker(spec, COLUMNS)


def batch(ids: list[int], labels: list[int]) -> Batch:
    numbers = np.linspace(-1, 1, len(ids), dtype=np.float32)[:, None]
    keys = {"c": Keys(np.array(ids))}
    return Batch(len(ids), numbers, keys, {}, {"click": np.array(labels, np.float32)})


def test_the_first_loss_is_about_that_of_a_constant():
    rows = batch([1, 2, 3, 4] * 25, [1, 0, 0, 0] * 25)
    learner = ranker(100)
    learner.start(rows)
    constant = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert learner.step(rows).loss == pytest.approx(constant, abs=0.02)


def test_a_wide_part_beside_dlrm_learns_what_an_id_adds():
    learner = ranker(8, wide=("c",))
    for _ in range(200):
        learner.step(batch([1, 1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 0, 0, 0, 0, 1]))
    wide = learner.tables["wide/c"]
    first, second, unseen = wide.pool(wide.lookup(np.array([1, 2, 3]), train=False))[:, 0]
    assert first > 0.3 > -0.3 > second
    assert unseen == 0


def test_an_optimizer_of_rows_means_the_same_for_every_batch_size():
    spec = r.Optimizer("ftrl", 0.05, l1=1.0, l2=2.0, initial_accumulator=1.0)
    assert table_parameters(spec, 1) == {"l1": 1.0, "l2": 2.0, "beta": 0.0, "initial_accumulator": 1.0}
    assert table_parameters(spec, 10) == {"l1": 0.1, "l2": 0.2, "beta": 0.0, "initial_accumulator": 0.01}


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad", "ftrl", "adagrad_decay"])
def test_an_id_that_occurs_once_moves_as_far_in_every_batch_size(optimizer):
    moved = []
    for batch_size in (4, 400):
        spec = r.Optimizer(optimizer, 0.1, initial_accumulator=1.0, eps=None if optimizer == "ftrl" else 0.5)
        table = EmbeddingTable(
            TableSpec("t", 1, optimizer, table_parameters(spec, batch_size), num_rows=3, init_scale=0.0)
        )
        lookup = table.lookup(np.array([1]), train=True)
        table.update(lookup, np.array([[0.8 / batch_size]], np.float32), learning_rate=0.1)  # one row of them
        moved.append(float(table.pool(table.lookup(np.array([1]), train=False))[0, 0]))
    assert moved[0] == pytest.approx(moved[1], rel=1e-4)
    assert moved[0] < 0


def test_each_member_of_an_average_learns_as_it_would_alone():
    both, alone = ranker(8, average=2), ranker(8)
    alone.model.load_state_dict(both.model.models[1].state_dict())
    own, other = both.tables["deep/c"], alone.tables["deep/c"]
    own.lookup(np.array([1, 2, 3]), train=True)  # rows that were never read are not saved
    records = rows_of(own)
    other.load(replace(records, rows=records.rows[:, 2:], states=records.states[:, 2:]))
    rows = batch([1, 1, 1, 1, 2, 2, 2, 3], [1, 1, 1, 0, 0, 0, 0, 1])
    for _ in range(5):
        losses = both.step(rows).loss, alone.step(rows).loss
    assert losses[0] != losses[1]
    for name, weights in both.model.models[1].state_dict().items():
        np.testing.assert_allclose(weights, alone.model.state_dict()[name], rtol=1e-5)
    np.testing.assert_allclose(rows_of(own).rows[:, 2:], rows_of(other).rows, rtol=1e-5)


def test_an_average_answers_one_probability_a_row_and_starts_from_a_constant():
    learner = ranker(100, average=3, wide=("c",))
    rows = batch([1, 2, 3, 4] * 25, [1, 0, 0, 0] * 25)
    learner.start(rows)
    constant = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert learner.step(rows).loss == pytest.approx(constant, abs=0.02)
    assert learner.predict(rows).shape == (100,)


def rows_of(table: EmbeddingTable) -> KeyRecords:
    with table.begin_snapshot() as snapshot:
        (records,) = list(snapshot)
    return records
