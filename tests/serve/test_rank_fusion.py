"""Without a ranker, answers are in the order of fused ranks: scores of channels say nothing about each other."""

from __future__ import annotations

import numpy as np
import pytest
from shop import Shop

from recmill.artifacts.bundle.bundle import Bundle
from recmill.errors import StoreError
from recmill.stages.serve import messages as m
from recmill.stages.serve.recall import NAMES, merge_channels
from recmill.stages.serve.recommender import Recommender
from recmill.stages.serve.roles import RemoteRecommender


def found(*indices: int, scores: list[float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(indices), np.array(scores, np.float32)


# Cosines, sums of co-clicks and counts of clicks: item 7 is in all of them, and best in none.
CHANNELS = {
    "two_tower": found(1, 7, 2, scores=[0.9, 0.8, 0.7]),
    "co_clicks": found(3, 7, scores=[2.5, 2.0]),
    "popular": found(4, 5, 7, scores=[1_400.0, 1_300.0, 1_200.0]),
}


def test_an_item_that_several_channels_found_is_first_whatever_their_scores() -> None:
    candidates = merge_channels(CHANNELS, 10)
    order = candidates.indices[np.lexsort((candidates.indices, -candidates.fused))]
    assert order.tolist() == [7, 1, 3, 4, 5, 2]
    assert candidates.fused[candidates.indices == 7] == pytest.approx(1 / 62 + 1 / 62 + 1 / 63)


def test_candidates_keep_their_own_channel_and_its_score() -> None:
    candidates = merge_channels(CHANNELS, 10)
    indices = candidates.indices.tolist()
    assert sorted(indices) == [1, 2, 3, 4, 5, 7]
    assert NAMES[candidates.channels[indices.index(7)]] == "two_tower"
    assert candidates.scores[indices.index(7)] == pytest.approx(0.8)


@pytest.mark.parametrize("is_late", [False, True])
def test_an_answer_without_ranking_is_not_sorted_by_clicks(shop: Shop, is_late: bool) -> None:
    recommender = Recommender(Bundle.open(shop.bundles))
    if is_late:
        recommender._seconds_each = 1_000.0  # as if ranking were very slow
    else:
        recommender.ranker = None
    user = recommender.bundle.users.ids(np.array([3]))[0]  # type: ignore[union-attr]
    answer = recommender.recommend(m.Recommend(user=user, k=8, deadline_ms=60_000))
    scores = [item.score for item in answer.items]
    assert scores == sorted(scores, reverse=True)
    assert 0 < scores[0] <= 4 / 61


class _RecallAlone(RemoteRecommender):
    """Servers of which none but recall answers."""

    def __init__(self, items: list[m.Item]) -> None:
        super().__init__((), (), ())
        self.items = items

    def recall_by(self, query: m.Recall, deadline: float | None) -> m.Answer:
        return m.Answer(items=self.items, version="1")

    def packed_rows(self, query: m.Rank, deadline: float | None) -> m.PackedRows:
        raise StoreError("No server answers.")

    def rank_rows(self, rows: m.RankRows, deadline: float | None) -> m.RankAnswer:
        raise StoreError("No server answers.")


def test_split_roles_without_ranks_interleave_channels() -> None:
    of_tower = [m.Item(id=f"t{number}", score=0.9 - number / 10, channel="two_tower") for number in range(3)]
    popular = [m.Item(id=f"p{number}", score=1_400.0 - number, channel="popular") for number in range(2)]
    answer = _RecallAlone([*of_tower, *popular]).recommend(m.Recommend(k=4))
    assert [item.id for item in answer.items] == ["t0", "p0", "t1", "p1"]
    assert [item.recall_score for item in answer.items] == pytest.approx([0.9, 1_400.0, 0.8, 1_399.0])
    assert any("order of recall" in reason for reason in answer.degraded)
