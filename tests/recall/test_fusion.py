"""One list from several channels, and the weights that make it."""

from __future__ import annotations

import numpy as np
import pytest

from recmill.metrics import RankingSums
from recmill.recall.fusion import Fusion, RankedLists, fit_fusion, quality
from recmill.recall.parameters import UNFITTED, NeighbourParameters, RecallParameters


def test_lists_are_fused_by_weighted_reciprocal_ranks() -> None:
    lists = RankedLists.of(
        [{"a": np.array([5, 6]), "b": np.array([6, 7])}, {"a": np.array([1]), "b": np.array([], int)}]
    )
    assert lists.top(Fusion({"a": 1.0, "b": 1.0}, offset=1.0), 3).tolist() == [[6, 5, 7], [1, -1, -1]]
    assert lists.top(Fusion({"a": 1.0, "b": 3.0}, offset=1.0), 3).tolist() == [[6, 7, 5], [1, -1, -1]]
    assert lists.top(Fusion({"a": 1.0}), 3).tolist() == [[5, 6, -1], [1, -1, -1]]


def test_a_channel_that_only_misleads_gets_no_weight() -> None:
    """Channel "good" has the relevant item first; "noise" never has it."""
    random = np.random.default_rng(0)
    lists, relevant = [], []
    for query in range(60):
        right = 1_000 + query
        lists.append(
            {"good": np.array([right, *random.integers(0, 900, 9)]), "noise": random.permutation(900)[:10]}
        )
        lists[-1]["good"] = np.array(list(dict.fromkeys(lists[-1]["good"].tolist())))
        relevant.append(np.array([right]))
    fitted = fit_fusion(RankedLists.of(lists), relevant)
    assert set(fitted.fusion.weights) == {"good"}
    assert fitted.quality == pytest.approx(1.0)
    assert fitted.alone["noise"] == 0.0


def test_channels_that_know_different_things_are_both_used() -> None:
    """Each query has two relevant items; either channel finds one of them, in its second place."""
    lists = [
        {"left": np.array([3 * q + 900, 3 * q]), "right": np.array([3 * q + 901, 3 * q + 1])}
        for q in range(40)
    ]
    relevant = [np.array([3 * q, 3 * q + 1]) for q in range(40)]
    fitted = fit_fusion(RankedLists.of(lists), relevant)
    assert set(fitted.fusion.weights) == {"left", "right"}
    assert fitted.quality > max(fitted.alone.values())


def test_weights_are_chosen_by_the_metrics_of_the_list_that_they_give() -> None:
    """Also where scores tie: with one weight for all, half of the items have the score of another one."""
    random = np.random.default_rng(0)
    lists = [{name: random.permutation(40)[: 5 + q % 20] for name in "abc"} for q in range(200)]
    relevant = [np.sort(random.permutation(60)[: 1 + q % 15]) for q in range(200)]
    ranked = RankedLists.of(lists)
    fitted = fit_fusion(ranked, relevant)
    sums = RankingSums((10,))
    offsets = np.concatenate([[0], np.cumsum([len(items) for items in relevant])])
    sums.add(ranked.top(fitted.fusion, 10), offsets, np.concatenate(relevant))
    means = sums.means()
    assert fitted.quality == pytest.approx(quality(means["ndcg@10"], means["recall@10"]))


def test_parameters_are_read_as_they_were_written() -> None:
    parameters = RecallParameters(
        12.5,
        {"ease": NeighbourParameters("l2=300", None)},
        Fusion({"ease": 1.0, "ranking": 0.5}, 10.0),
        is_fitted=True,
    )
    for one in (parameters, UNFITTED):
        assert RecallParameters.from_dict(one.as_dict()) == one


def test_luck_on_a_few_queries_moves_no_weights() -> None:
    """Two channels of the same kind: by chance one of them is ahead in 21 of 40 queries."""
    draw = np.random.default_rng(3)
    lists, relevant = [], []
    for _ in range(40):
        right = draw.choice(1_000, 3, replace=False)
        noise = draw.choice(np.arange(1_000, 9_000), 34, replace=False)
        lists.append({"left": _hidden(draw, right, noise[:17]), "right": _hidden(draw, right, noise[17:])})
        relevant.append(np.sort(right))
    fitted = fit_fusion(RankedLists.of(lists), relevant)
    assert fitted.alone["left"] != fitted.alone["right"]
    assert fitted.fusion.weights == {"left": 1.0, "right": 1.0}


def _hidden(draw: np.random.Generator, right: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """The right items somewhere among others."""
    return draw.permutation(np.concatenate([right, noise]))
