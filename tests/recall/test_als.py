"""ALS: vectors whose products tell who clicked what."""

from __future__ import annotations

import numpy as np
import pytest

from recmill.recall import als as module
from recmill.recall.als import als
from recmill.recall.interactions import Interactions


def even_users_click_even_items(num_users: int = 60, num_items: int = 20) -> Interactions:
    random = np.random.default_rng(0)
    users = np.repeat(np.arange(num_users), 6)
    items = 2 * random.integers(0, num_items // 2, len(users)) + users % 2
    return Interactions(users.astype(np.int32), items.astype(np.int32), num_users, num_items)


def test_even_users_are_shown_even_items_that_they_have_not_seen() -> None:
    interactions = even_users_click_even_items()
    users = np.arange(10)
    seen = interactions.sequences.take(users)
    lists = als(interactions, dim=4).lists(users, seen, 4)
    assert (lists % 2 == users[:, None] % 2).all()
    assert not any(np.isin(lists[user], seen.of(user)).any() for user in users)


def test_lists_end_with_minus_one_when_everything_was_seen() -> None:
    interactions = Interactions(np.array([0, 0, 1], np.int32), np.array([0, 1, 2], np.int32), 2, 3)
    users = np.array([0, 1])
    lists = als(interactions, dim=2).lists(users, interactions.sequences, 5)
    assert lists[0].tolist() == [2, -1, -1, -1, -1]
    assert sorted(lists[1][:2].tolist()) == [0, 1]


def test_vectors_of_users_are_the_ridge_regression_of_their_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STEPS", 12)
    monkeypatch.setattr(module, "_CHUNK", 7)  # rows that go on in the next chunk are added up
    interactions = even_users_click_even_items(8, 12)
    clicked = interactions.sequences
    items = np.random.default_rng(1).standard_normal((12, 3)).astype(np.float32)
    found = module._fitted(np.zeros((8, 3), np.float32), items, clicked, l2=0.05)
    for user in range(8):
        own = items[clicked.of(user)]
        matrix = module._UNOBSERVED * items.T @ items + own.T @ own + 0.05 * np.eye(3)
        assert found[user] == pytest.approx(np.linalg.solve(matrix, own.sum(axis=0)), rel=1e-3)
