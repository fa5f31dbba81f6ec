"""Native recall gives what NumPy gives for the same arrays: nearest vectors, related items, one list of several."""

from __future__ import annotations

import numpy as np
import pytest

from recmill import _native
from recmill.artifacts.vector_index import Index, build_index
from recmill.recall.fusion import Fusion
from recmill.recall.interactions import Array, Sequences
from recmill.recall.neighbours import ItemNeighbours
from recmill.stages.serve.recall import (
    CHANNELS,
    ChannelList,
    ItemFilter,
    Popularity,
    fuse,
    top_items,
)

NUM_ITEMS, DIM = 600, 27  # a dim that no vector register divides


def random_index(kind: str, random: np.random.Generator) -> tuple[Index, Array]:
    """An index with removed, replaced and new items, and the vectors that it should search: NaN where removed."""
    vectors = random.normal(size=(NUM_ITEMS, DIM)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index = build_index(vectors, kind)
    index.remove(np.arange(0, 60, 3))
    replaced = np.array([1, 3, NUM_ITEMS, NUM_ITEMS + 1])
    index.add(replaced, -vectors[10:14])
    shown = np.concatenate([vectors, np.zeros((2, DIM), np.float32)])
    shown[np.arange(0, 60, 3)] = np.nan
    shown[replaced] = -vectors[10:14]
    return index, shown


@pytest.mark.parametrize("kind", ["exact", "clustered"])
@pytest.mark.parametrize("has_mask", [False, True])
def test_nearest_items_are_those_of_a_full_scan_without_what_must_not_be_shown(
    kind: str, has_mask: bool
) -> None:
    random = np.random.default_rng(1)
    index, shown = random_index(kind, random)
    banned = np.unique(random.choice(NUM_ITEMS + 2, 50))
    allowed = random.random(NUM_ITEMS + 2) < 0.5 if has_mask else None
    for query in random.normal(size=(20, DIM)).astype(np.float32):
        scores = shown @ query
        scores[banned] = np.nan
        if allowed is not None:
            scores[~allowed] = np.nan
        best = np.argsort(-np.nan_to_num(scores, nan=-np.inf), kind="stable")
        number = int((~np.isnan(scores)).sum())  # all that there are: every cluster has to be scanned
        indices, found = index.nearest(query, number, banned, allowed)
        assert indices.tolist() == best[:number].tolist()
        np.testing.assert_allclose(found, scores[best[:number]], atol=1e-5)


def test_halves_that_are_tiny_count_as_what_they_are() -> None:
    vectors = np.array([[6e-8, 0.0], [-3e-5, 0.0], [0.5, 0.0], [-1.0, 0.0]], np.float32)
    index = build_index(vectors, "clustered")
    assert index.nearest(np.array([1, 0], np.float32), 4)[0].tolist() == [2, 0, 1, 3]


def test_one_profile_has_the_list_that_it_has_among_many() -> None:
    random = np.random.default_rng(2)
    indices = random.integers(0, 80, (80, 6)).astype(np.int32)
    indices[random.random((80, 6)) < 0.05] = -1
    near = ItemNeighbours.of_rows(indices, random.normal(size=(80, 6)).astype(np.float32))
    banned = np.unique(random.choice(80, 10))
    allowed = random.random(80) < 0.7
    for length in (1, 5, 60):
        profile = random.integers(0, 90, length)  # items from 80 on are new
        for half_life, mask in ((None, None), (3.0, allowed)):
            many = near.lists(
                Sequences(np.array([0, length]), profile.astype(np.int32)),
                half_life,
                Sequences(np.array([0, len(banned)]), banned.astype(np.int32)),
                20,
                mask,
            )
            search = near.search(profile, half_life)
            ((found, scores),) = _native.run_searches(
                [search], 20, banned, None if mask is None else mask.view(np.uint8)
            )
            kept = many[0][0] >= 0
            assert found.tolist() == many[0][0][kept].tolist()
            assert scores.tolist() == many[1][0][kept].tolist()


def fused_by_numpy(
    lists: dict[str, ChannelList], fusion: Fusion, number: int
) -> list[tuple[int, str, float]]:
    by_weight = sorted(lists, key=lambda name: -fusion.weights.get(name, 0.0))
    gains = np.concatenate([fusion.gains(name, len(lists[name][0])) for name in by_weight])
    items = np.concatenate([lists[name][0] for name in by_weight])
    channels = np.concatenate([[name] * len(lists[name][0]) for name in by_weight])
    order = np.argsort(-gains, kind="stable")
    unique, first, inverse = np.unique(items[order], return_index=True, return_inverse=True)
    sums = np.bincount(inverse, gains[order]).astype(np.float32)
    best = np.lexsort((first, -sums))[:number]
    return [(int(unique[i]), str(channels[order[first[i]]]), float(sums[i])) for i in best]


def test_lists_are_fused_as_their_gains_add_up() -> None:
    random = np.random.default_rng(3)
    for weights in ({"two_tower": 0.7, "similar": 0.1, "popular": 0.1}, {"popular": 0.3}, {}):
        lists = {
            name: (random.permutation(60)[:size], random.normal(size=size).astype(np.float32))
            for name, size in (("popular", 40), ("two_tower", 30), ("similar", 0), ("co_clicks", 25))
        }
        fusion = Fusion(weights, 10.0)
        fused = fuse(lists, fusion, 50)
        found = [
            (item, CHANNELS[channel], score)
            for item, channel, score in zip(
                fused.indices.tolist(), fused.channels.tolist(), fused.fused.tolist(), strict=True
            )
        ]
        assert found == fused_by_numpy(lists, fusion, 50)
        for item, channel, score in zip(fused.indices, fused.channels, fused.scores, strict=True):
            items, scores = lists[CHANNELS[channel]]
            assert score == scores[items.tolist().index(item)]


def test_popular_items_are_the_first_that_may_be_shown() -> None:
    popularity = Popularity(np.array([5, 9, 9, 1, 7], np.float32), None)
    allowed = np.array([True, True, True, True, False])
    best, scores = popularity.best(3, ItemFilter(np.array([1]), allowed))
    assert best.tolist() == [2, 0, 3]
    assert scores.tolist() == [9, 5, 1]


@pytest.mark.parametrize("k", [0, 1, 7, 300, 1000])
def test_the_best_of_some_scores_are_those_of_a_sort(k: int) -> None:
    random = np.random.default_rng(k)
    items = random.permutation(5000)[:300]
    scores = random.integers(-20, 20, 300).astype(np.float32) / 8
    scores[:3] = -0.0, np.inf, -np.inf
    best = top_items(items, scores, k)
    np.testing.assert_array_equal(best, np.lexsort((items, -scores))[:k])
    scores[5] = np.nan
    assert top_items(items, scores, 300)[-1] == 5
