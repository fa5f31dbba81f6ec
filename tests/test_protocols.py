"""Protocols: what they expect of the data, and their metrics by hand on a log of a few rows."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from recmill.errors import RecmillError
from recmill.learner.eval_queries import counts_of
from recmill.learner.saved import new_learner
from recmill.learner.sequences import SequenceRetriever
from recmill.recipe.load import load_recipe
from recmill.recipe.protocols import (
    HELD_OUT_CLICKS,
    ML1M_LEAVE_LAST_OUT,
    ML1M_RANDOM_811,
    PROTOCOLS,
    DataCounts,
    protocol_for,
    protocol_named,
)
from recmill.stages.prepare.prepare import prepare
from recmill.synthetic.generate import generate

NAMED = ["ml1m-random-811", "ml1m-leave-last-out"]


def test_a_recipe_called_like_a_protocol_is_measured_by_it():
    assert [protocol_for(load_recipe(name)).name for name in NAMED] == NAMED
    assert protocol_for(load_recipe("quickstart")) == HELD_OUT_CLICKS
    with pytest.raises(RecmillError, match='no protocol "ml1m"; known: held-out-clicks, ml1m-random-811'):
        protocol_named("ml1m")


def test_the_cutoff_of_a_target_is_measured_too():
    recipe = load_recipe("quickstart", ["retrieval.train.target=recall@20 >= 0.5"])
    assert protocol_for(recipe).cutoffs == (10, 20, 50)


@pytest.mark.parametrize("name", NAMED)
def test_the_real_data_gets_no_note_and_other_data_a_clear_one(name):
    protocol, recipe = PROTOCOLS[name], load_recipe(name)
    assert protocol.notes(recipe, protocol.counts) == []
    assert protocol.notes(recipe, DataCounts(20_000)) == [
        f"not MovieLens-1M: 20,000 interactions, expected {protocol.counts.interactions:,}"
    ]


def test_another_split_than_the_protocols_is_said():
    recipe = load_recipe("ml1m-leave-last-out")
    assert ML1M_RANDOM_811.notes(recipe, ML1M_RANDOM_811.counts) == [
        'not the split of ml1m-random-811: by = "last", expected by = "random"'
    ]
    whole = dataclasses.replace(recipe, split=None)
    assert "nothing held out" in ML1M_LEAVE_LAST_OUT.notes(whole, ML1M_LEAVE_LAST_OUT.counts)[0]


@pytest.mark.parametrize("name", NAMED)
def test_the_shipped_recipe_runs_from_log_to_numbers(name, tmp_path):
    generate("movielens", 4000, 1, tmp_path / "log")
    table = prepare(load_recipe(name), str(tmp_path / "log"), tmp_path / "table").table
    assert len(PROTOCOLS[name].notes(table.recipe, counts_of(table, table.recipe))) == 3
    sums = new_learner(table.recipe, "retrieval", table.columns, 1).evaluate(table, "test")
    assert 0 < sums.users <= counts_of(table, table.recipe).users
    assert set(PROTOCOLS[name].metrics) <= set(sums.means())


def test_metrics_of_a_protocol_by_hand(tmp_path):
    rated = {1: (5, 4, 1, 3), 2: (1, 2, 3, 5), 3: (2, 5, 4, 6), 4: (3, 1, 2, 4)}
    lines = [
        f"{user}::{movie}::3::{time}\n" for user, movies in rated.items() for time, movie in enumerate(movies)
    ]
    (tmp_path / "ratings.dat").write_text("".join(lines))
    recipe = load_recipe("ml1m-leave-last-out")
    table = prepare(recipe, str(tmp_path), tmp_path / "table").table
    means = _FixedOrder(recipe, table.columns).evaluate(table, "test").means()
    # Everyone is shown 1, 2, 5, 3, 4 without what they rated before. User 1 finds 3 behind 2, user 2 finds 5 at
    # once, user 4 finds 4 behind 5. User 3 asks for 6, which no training row has: it counts, but cannot be found.
    assert means["hit@10"] == means["recall@10"] == 3 / 4
    assert means["mrr@10"] == pytest.approx((1 / 2 + 1 + 0 + 1 / 2) / 4)
    assert means["ndcg@10"] == pytest.approx((1 / math.log2(3) + 1 + 0 + 1 / math.log2(3)) / 4)
    # For eval, only training ratings are masked: user 1 finds 1 at once, user 2 finds 3 behind 5, user 3 finds 4
    # behind 1 and 3, user 4 finds 2 at once.
    means = _FixedOrder(recipe, table.columns).evaluate(table, "eval").means()
    assert means["mrr@10"] == pytest.approx((1 + 1 / 2 + 1 / 3 + 1) / 4)


class _FixedOrder(SequenceRetriever):
    """Items in the order of their ids, which is that of their counts, whoever asks."""

    def user_vectors(self, batch):
        return np.ones((batch.size, 1), np.float32)

    def item_vectors(self, batch):
        return np.linspace(1, 0, batch.size, dtype=np.float32)[:, None]
