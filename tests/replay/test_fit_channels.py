"""Recall fitted on eval: which variants of a channel are used, and which one is a baseline."""

from __future__ import annotations

import numpy as np

from recmill.recall.interactions import Interactions
from recmill.recall.neighbours import ItemNeighbours
from recmill.stages.replay.fit import fit_channels
from recmill.stages.replay.queries import HeldOutQueries


def leading_to(item: int) -> ItemNeighbours:
    """A model that recommends this item, whatever was clicked."""
    return ItemNeighbours.of_rows(np.full((4, 1), item, np.int32), np.ones((4, 1), np.float32))


def test_the_channel_may_be_balanced_but_the_baseline_is_plain_ease() -> None:
    # All 40 users clicked item 0, and item 2 later.
    users = np.arange(40, dtype=np.int32)
    interactions = Interactions(users, np.zeros(40, np.int32), 40, 4)
    queries = HeldOutQueries(users.tolist(), users.astype(np.int64), [np.array([2])] * 40, 0)
    neighbours = {
        ("ease", "l2=300"): leading_to(1),
        ("ease", "balanced l2=1000"): leading_to(2),
    }
    found = fit_channels(interactions, queries, neighbours)
    assert found.parameters.neighbours["ease"].variant == "balanced l2=1000"
    assert found.ease_variant == "l2=300"
