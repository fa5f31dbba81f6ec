"""What a recipe leaves open follows from the number of its training rows, and is written down."""

from __future__ import annotations

import pytest

from recmill.recipe.defaults import is_resolution, is_resolved, ranking_batch_size, resolve
from recmill.recipe.load import load_recipe


@pytest.mark.parametrize(
    ("num_rows", "batch_size"),
    [(0, 64), (20_000, 64), (98_740, 256), (123_425, 256), (300_000, 512), (40_000_000, 2048)],
)
def test_an_epoch_has_about_450_steps_within_bounds(num_rows, batch_size):
    assert ranking_batch_size(num_rows) == batch_size


def test_what_the_recipe_says_stays():
    recipe = load_recipe(
        "criteo-dlrm", ["ranking.train.batch_size=100", "ranking.train.schedule.decay_from=0"]
    )
    train = resolve(recipe, 1_000_000).ranking.train
    assert (train.batch_size, train.schedule.decay_from) == (100, 0)


def test_what_is_open_is_resolved_once():
    open_keys = ["ranking.train.batch_size=", "ranking.train.schedule="]
    resolved = resolve(load_recipe("criteo-dlrm", open_keys), 123_425)
    assert (resolved.ranking.train.batch_size, resolved.ranking.train.schedule.decay_from) == (256, 0.5)
    assert is_resolved(resolved)
    assert resolve(resolved, 7) == resolved
    assert not is_resolved(load_recipe("criteo-dlrm", open_keys))


def test_a_stored_recipe_is_known_again_by_one_that_leaves_things_open():
    recipe = load_recipe("quickstart", ["ranking.train.batch_size=", "ranking.train.schedule="])
    stored = resolve(recipe, 300_000)
    assert is_resolution(stored, recipe)
    assert is_resolution(stored, stored)
    assert not is_resolution(stored, load_recipe("quickstart", ["ranking.train.batch_size=17"]))


def test_two_towers_keep_their_rate_and_their_negatives():
    open_keys = ["retrieval.train.batch_size=", "retrieval.train.schedule="]
    train = resolve(load_recipe("quickstart", open_keys), 20_000).retrieval.train
    assert (train.batch_size, train.schedule.decay_from) == (2048, 1.0)
