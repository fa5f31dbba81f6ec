"""Without a ranker, answers are in the order of fused ranks: scores of channels say nothing about each other."""

from __future__ import annotations

import numpy as np
import pytest
from shop import Shop

from recmill.artifacts.bundle.bundle import Bundle
from recmill.errors import StoreError
from recmill.recall.fusion import Fusion
from recmill.stages.serve import messages as m
from recmill.stages.serve.recall import CHANNELS as NAMES
from recmill.stages.serve.recall import fuse
from recmill.stages.serve.recommender import Recommender, scores_with_ranking
from recmill.stages.serve.roles import RemoteRecommender


def found(*indices: int, scores: list[float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(indices), np.array(scores, np.float32)


# Cosines, sums of co-clicks and counts of clicks: item 7 is in all of them, and best in none.
CHANNELS = {
    "two_tower": found(1, 7, 2, scores=[0.9, 0.8, 0.7]),
    "co_clicks": found(3, 7, scores=[2.5, 2.0]),
    "popular": found(4, 5, 7, scores=[1_400.0, 1_300.0, 1_200.0]),
}


EQUAL = Fusion({"two_tower": 1.0, "co_clicks": 1.0, "popular": 1.0}, offset=60.0)


def test_an_item_that_several_channels_found_is_first_whatever_their_scores() -> None:
    candidates = fuse(CHANNELS, EQUAL, 10)
    assert candidates.indices.tolist() == [7, 1, 3, 4, 5, 2]
    assert candidates.fused[0] == pytest.approx((60 / 61 + 60 / 61 + 60 / 62) / 3)


def test_candidates_keep_the_channel_that_counted_most_and_its_score() -> None:
    candidates = fuse(CHANNELS, Fusion({"two_tower": 1.0, "co_clicks": 2.0, "popular": 1.0}), 10)
    indices = candidates.indices.tolist()
    assert sorted(indices) == [1, 2, 3, 4, 5, 7]
    assert NAMES[candidates.channels[indices.index(7)]] == "co_clicks"
    assert candidates.scores[indices.index(7)] == pytest.approx(2.0)


def test_a_channel_without_a_weight_only_fills_up() -> None:
    candidates = fuse(CHANNELS, Fusion({"co_clicks": 1.0}), 4)
    assert candidates.indices.tolist() == [3, 7, 1, 2]
    assert candidates.fused.tolist() == pytest.approx([1.0, 60 / 61, 0.0, 0.0])


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
    assert 0 < scores[0] <= 1


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


def test_split_roles_without_ranks_keep_the_order_of_recall() -> None:
    items = [
        m.Item(id="t0", score=0.9, channel="two_tower", recall_score=0.4),
        m.Item(id="p0", score=0.8, channel="popular", recall_score=1_400.0),
        m.Item(id="t1", score=0.7, channel="two_tower", recall_score=0.3),
    ]
    answer = _RecallAlone(items).recommend(m.Recommend(k=2))
    assert [(item.id, item.recall_score) for item in answer.items] == [("t0", 0.4), ("p0", 1_400.0)]
    assert any("order of recall" in reason for reason in answer.degraded)


def test_the_ranker_takes_part_as_much_as_it_helped() -> None:
    fused = np.array([0.5, 0.4, 0.3], np.float32)
    probabilities = np.array([0.1, 0.2, 0.9], np.float32)
    alone = scores_with_ranking(fused, probabilities, m.RankingPart())
    assert alone.tolist() == probabilities.tolist()
    together = scores_with_ranking(fused, probabilities, m.RankingPart(share=0.5, offset=1.0))
    assert together.tolist() == pytest.approx([0.5 + 0.5 / 3, 0.4 + 0.5 / 2, 0.3 + 0.5])
