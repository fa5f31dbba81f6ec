"""Item-item models: what goes with what, and the lists that profiles get from it."""

from __future__ import annotations

import numpy as np
import pytest

from recmill.errors import RecmillError
from recmill.recall.interactions import Interactions, Sequences
from recmill.recall.neighbours import (
    ItemNeighbours,
    _inverse,
    balanced_ease,
    co_clicks,
    content,
    ease,
    lifted_transitions,
    profile_length,
    transitions,
)
from recmill.recall.popularity import popularity


def interactions_of(*rows: tuple[int, int], num_items: int = 6) -> Interactions:
    users, items = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    return Interactions(users, items, int(users.max()) + 1, num_items)


def sequences_of(*items: list[int]) -> Sequences:
    offsets = np.cumsum([0, *map(len, items)])
    return Sequences(
        offsets.astype(np.int64), np.concatenate([np.empty(0, np.int32), *items]).astype(np.int32)
    )


def lists_of(model: ItemNeighbours) -> tuple[list[list[int]], list[list[float]]]:
    """Neighbours of each row, and their weights."""
    bounds = list(zip(model.offsets[:-1].tolist(), model.offsets[1:].tolist(), strict=True))
    return (
        [model.indices[start:stop].tolist() for start, stop in bounds],
        [model.weights[start:stop].tolist() for start, stop in bounds],
    )


def test_a_user_has_each_item_once_where_it_was_clicked_last() -> None:
    sequences = interactions_of((0, 3), (1, 5), (0, 2), (0, 3), (1, 1)).sequences
    assert [sequences.of(0).tolist(), sequences.of(1).tolist()] == [[2, 3], [5, 1]]
    assert sequences.from_end.tolist() == [1, 0, 1, 0]
    assert sequences.take(np.array([1, 0])).items.tolist() == [5, 1, 2, 3]
    assert sequences.last(1).items.tolist() == [3, 1]


def test_items_of_the_same_users_are_near_by_their_cosine() -> None:
    # 1 and 2 have the same two users; 3 has one of them; 4 has another user alone.
    rows = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 4)]
    found = co_clicks(interactions_of(*rows), threads=2)
    near, weights = lists_of(found)
    assert near == [[], [2, 3], [1, 3], [1, 2], [], []]
    # Counts are shrunk by 10: 2 / sqrt(12 * 12) and 1 / sqrt(12 * 11).
    assert weights[1] == pytest.approx([2 / 12, 1 / np.sqrt(12 * 11)])


def test_co_clicks_are_what_a_matrix_product_gives() -> None:
    random = np.random.default_rng(0)
    rows = [(int(user), int(item)) for user, item in random.integers(0, (30, 40), (300, 2))]
    found = co_clicks(interactions_of(*rows, num_items=40), threads=2)
    clicked = np.zeros((30, 40))
    clicked[tuple(np.array(rows).T)] = 1
    together, counts = clicked.T @ clicked, clicked.sum(axis=0) + 10
    expected = together / np.sqrt(np.outer(counts, counts))
    np.fill_diagonal(expected, 0)
    dense = np.zeros((40, 40))
    for item, (near, weights) in enumerate(zip(*lists_of(found), strict=True)):
        dense[item, near] = weights
        assert (np.diff(weights) <= 0).all()
    assert np.allclose(dense, expected, atol=1e-6)


def test_transitions_go_forward_and_sooner_counts_more() -> None:
    found = transitions(interactions_of((0, 1), (0, 2), (0, 3), (1, 1), (1, 2)), threads=1)
    near, weights = lists_of(found)
    assert near[1] == [2, 3]
    # After item 1: item 2 at once, twice, and item 3 one later.
    assert weights[1] == pytest.approx([2 / 12.5, 0.5 / 12.5])
    assert near[3] == []


def test_lift_prefers_what_comes_after_few_others() -> None:
    # After 0 come 1 and 2 equally often, but 1 comes after everything.
    rows = [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 2),
        *[(user, item) for user in range(2, 9) for item in (3 + user % 3, 1)],
    ]
    assert transitions(interactions_of(*rows), threads=1).indices[0] == 1
    assert lifted_transitions(interactions_of(*rows), threads=1).indices[0] == 2


def test_ease_solves_its_least_squares() -> None:
    random = np.random.default_rng(1)
    rows = [(int(user), int(item)) for user, item in random.integers(0, (50, 12), (200, 2))]
    found = ease(interactions_of(*rows, num_items=12), threads=2, l2=5.0)
    clicked = np.zeros((50, 12))
    clicked[tuple(np.array(rows).T)] = 1
    near, kept = lists_of(found)
    # Each column on its own: ridge regression of an item on all others.
    for item in range(12):
        others = np.delete(np.arange(12), item)
        x = clicked[:, others]
        weights = np.linalg.solve(x.T @ x + 5.0 * np.eye(11), x.T @ clicked[:, item])
        mine = np.array([kept[other][near[other].index(item)] for other in others])
        assert mine == pytest.approx(weights, abs=1e-4)


def test_balanced_ease_weights_users_by_their_histories_and_profile_items_by_their_users() -> None:
    random = np.random.default_rng(2)
    rows = [(int(user), int(item)) for user, item in (random.random((300, 2)) ** 2 * (50, 12)).astype(int)]
    found = balanced_ease(interactions_of(*rows, num_items=12), threads=2, l2=5.0)
    clicked = np.zeros((max(user for user, _ in rows) + 1, 12))
    clicked[tuple(np.array(rows).T)] = 1
    lengths = clicked.sum(axis=1)
    of_users = np.maximum(lengths, 1) ** -0.5
    of_users *= clicked.sum() / (of_users * lengths).sum()
    num_users = np.maximum(clicked.sum(axis=0), 1)
    of_items = (num_users / num_users.mean()) ** -0.2
    near, kept = lists_of(found)
    for item in range(12):
        others = np.delete(np.arange(12), item)
        x = clicked[:, others]
        weighted = x.T * of_users
        weights = np.linalg.solve(weighted @ x + 5.0 * np.eye(11), weighted @ clicked[:, item])
        mine = np.array([kept[other][near[other].index(item)] for other in others])
        assert mine == pytest.approx(weights * of_items[others], abs=1e-4)


def test_later_items_of_a_profile_count_more_and_banned_ones_are_left_out() -> None:
    near = ItemNeighbours.of_rows(
        np.array([[2], [3], [-1], [-1], [-1]], np.int32), np.array([[1.0], [0.8], [0], [0], [0]], np.float32)
    )
    profile, nothing = sequences_of([0, 1]), sequences_of([])
    indices, scores = near.lists(profile, None, nothing, 3)
    assert indices.tolist() == [[2, 3, -1]]
    indices, scores = near.lists(profile, 1.0, nothing, 3)
    assert indices.tolist() == [[3, 2, -1]]
    assert scores.tolist() == [pytest.approx([0.8, 0.5, 0.0])]
    assert near.lists(profile, 1.0, sequences_of([3]), 3)[0].tolist() == [[2, -1, -1]]
    allowed = np.array([True, True, False, True, True])
    assert near.lists(profile, 1.0, nothing, 3, allowed)[0].tolist() == [[3, -1, -1]]


def test_a_model_of_some_items_gives_the_same_lists_as_one_with_empty_rows() -> None:
    some = ItemNeighbours.of_rows(
        np.array([[1], [2], [0]], np.int32),
        np.array([[1.0], [0.8], [0.7]], np.float32),
        np.array([1, 4, 6], np.int32),
    )
    indices, weights = np.full((8, 1), -1, np.int32), np.zeros((8, 1), np.float32)
    indices[[1, 4, 6]], weights[[1, 4, 6]] = [[4], [6], [1]], [[1.0], [0.8], [0.7]]
    whole = ItemNeighbours.of_rows(indices, weights)
    profile, allowed = sequences_of([1, 3, 4]), np.array([True] * 6 + [False, True])
    for banned in ([], [4], [5, 6]):
        for mask in (None, allowed):
            found, expected = (
                one.lists(profile, 2.0, sequences_of(banned), 2, mask) for one in (some, whole)
            )
            assert found[0].tolist() == expected[0].tolist()
            assert found[1].tolist() == expected[1].tolist()


def test_a_matrix_inverted_by_halves_is_the_inverse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recmill.recall.neighbours._SMALL_MATRIX", 4)
    rows = [(int(user), int(item)) for user, item in np.random.default_rng(2).integers(0, (40, 31), (300, 2))]
    clicked = np.zeros((40, 31), np.float32)
    clicked[tuple(np.array(rows).T)] = 1
    gram = clicked.T @ clicked + 2 * np.eye(31, dtype=np.float32)
    np.testing.assert_allclose(_inverse(gram) @ gram, np.eye(31), atol=1e-5)


def test_ease_of_many_items_keeps_rows_of_the_frequent_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recmill.recall.neighbours.MAX_EASE_ITEMS", 2)
    found = ease(interactions_of((0, 1), (0, 4), (1, 1), (1, 4), (2, 5)), threads=1, l2=1.0)
    assert found.items is not None
    assert found.items.tolist() == [1, 4]
    assert found.lists(sequences_of([4, 5]), None, sequences_of([4]), 2)[0].tolist() == [[1, -1]]


def test_items_that_are_newer_than_the_neighbours_are_skipped_in_a_profile() -> None:
    near = ItemNeighbours.of_rows(np.array([[1], [0]], np.int32), np.ones((2, 1), np.float32))
    assert near.lists(sequences_of([0, 7]), 1.0, sequences_of([]), 2)[0].tolist() == [[1, -1]]


def test_a_profile_is_as_long_as_its_weights_matter() -> None:
    assert profile_length(1.0) == 7
    assert profile_length(None) == 500


def test_popularity_halves_with_each_half_life() -> None:
    interactions = interactions_of((0, 1), (0, 1), (0, 1), (0, 2))
    assert popularity(interactions, None).tolist() == [0, 3, 1, 0, 0, 0]
    decayed = popularity(interactions, 1.0)
    assert decayed[:3] == pytest.approx([0, 0.5 + 0.25 + 0.125, 1.0], abs=1e-5)


def test_items_are_near_by_the_vectors_that_are_given_for_them() -> None:
    vectors = np.array([[1, 0], [0, 0], [0.1, 2], [3, 0.3], [0, 1], [-1, 0]], np.float32)
    found = content(vectors)
    near, weights = lists_of(found)
    assert near[0] == [3, 2]  # whatever their lengths; never those that point away
    assert near[1] == []  # a missing vector is near to none
    assert not any(1 in some or item in some for item, some in enumerate(near))
    assert weights[0][0] == pytest.approx(3 / np.hypot(3, 0.3))


def test_content_in_blocks_is_what_one_matrix_product_gives() -> None:
    vectors = np.random.default_rng(3).normal(size=(600, 8)).astype(np.float32)
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = units @ units.T
    np.fill_diagonal(cosines, -1)
    found = content(vectors)
    order = np.where(np.sort(-cosines, axis=1) < 0, np.argsort(-cosines, axis=1), -1)[:, :100]
    near, _ = lists_of(found)
    for item in (0, 300, 599):
        assert near[item] == order[item][order[item] >= 0].tolist()


def test_content_of_too_many_items_is_an_error_that_names_the_other_way() -> None:
    with pytest.raises(RecmillError, match="of which there are 200,001; it is for up to 200,000"):
        content(np.zeros((200_001, 1), np.float32))


def test_neighbours_of_some_rows_are_padded_to_the_longest() -> None:
    near = ItemNeighbours.of_rows(
        np.array([[1, 2], [-1, -1], [0, -1]], np.int32), np.full((3, 2), 0.5, np.float32)
    )
    indices, weights = near.padded(np.array([2, 0, 1]))
    assert indices.tolist() == [[0, -1], [1, 2], [-1, -1]]
    assert weights.tolist() == [[0.5, 0.0], [0.5, 0.5], [0.0, 0.0]]
    assert near.padded(np.array([1]))[0].shape == (1, 0)
