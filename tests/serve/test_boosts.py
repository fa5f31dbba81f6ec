"""Boosts of a request: what meets a condition has its score multiplied, through every transport."""

from __future__ import annotations

import grpc
import httpx
import numpy as np
import pytest
from servers import Running
from shop import Shop

import recmill
from recmill.client import Client
from recmill.errors import BadRequest
from recmill.stages.serve import messages as m
from recmill.stages.serve.boosts import boosted
from recmill.stages.serve.proto import recmill_pb2 as pb
from recmill.stages.serve.recommender import Recommender

CHEAP = {"where": "price < 40", "factor": 3.0}
DEAR = {"where": "price >= 20", "factor": 0.5}


@pytest.fixture(scope="module")
def shared(shop: Shop) -> Recommender:
    return recmill.open_bundle(shop.bundles)


def test_the_list_is_the_one_without_boosts_times_the_factors_of_what_each_item_meets(
    shared: Recommender,
) -> None:
    plain = shared.recommend("u1", k=60, candidates=60, fields=["price"]).items
    answer = shared.recommend("u1", k=60, candidates=60, boost=[CHEAP, DEAR], trace=True)
    expected = {
        item.id: item.score * (3.0 if item.fields["price"] < 40 else 1) * (0.5 if item.fields["price"] >= 20 else 1)
        for item in plain
    }  # fmt: skip
    assert {item.id: item.score for item in answer.items} == pytest.approx(expected, rel=1e-5)
    scores = [item.score for item in answer.items]
    assert scores == sorted(scores, reverse=True)
    assert {item.boost for item in answer.items} == {3.0, 1.5, 0.5}
    assert answer.trace is not None
    assert answer.trace.counts["boosted"] == len(answer.items)


def test_a_boost_chooses_among_all_candidates_not_only_the_best(shared: Recommender) -> None:
    best = shared.recommend("u1", k=3, candidates=60, boost=[{"where": "price < 20", "factor": 100}])
    every = shared.recommend("u1", k=60, candidates=60, fields=["price"]).items
    cheap = [item.id for item in every if item.fields["price"] < 20]
    assert len(cheap) >= 3
    assert [item.id for item in best.items] == cheap[:3]


def test_an_item_that_meets_nothing_has_no_boost(shared: Recommender) -> None:
    plain, answer = (
        shared.recommend("u1", k=5, boost=boost) for boost in ([], [{"where": "price < 0", "factor": 9}])
    )
    assert answer.items == plain.items


def test_candidates_alone_keep_their_order_and_have_the_factor(shared: Recommender) -> None:
    plain, found = (shared.recall("u1", k=20, boost=boost).items for boost in ([], [CHEAP]))
    assert [(item.id, item.score) for item in found] == [(item.id, item.score) for item in plain]
    assert {item.boost for item in found} == {1.0, 3.0}


def test_a_factor_above_1_lifts_scores_below_0_too() -> None:
    scores, factors = np.array([-1, -1, 1, 1], np.float32), np.array([2, 0.5, 2, 0.5], np.float32)
    assert boosted(scores, factors).tolist() == [-0.5, -2, 2, 0.5]


@pytest.mark.parametrize(
    ("boost", "message"),
    [
        (
            [{"where": "price < 3", "factor": 0}],
            r"factor of a boost must be from 0\.01 to 100, got 0; .*where",
        ),
        ([{"where": "price < 3", "factor": float("nan")}], r"got nan"),
        ([{"where": "prise < 3", "factor": 2}], r"no column prise.*Columns of items"),
        ([{"where": "price < 3"}], r"missing required field `factor` - at `\$\.boost\[0\]`"),
    ],
)
def test_a_wrong_boost_is_refused(shared: Recommender, boost: list[dict[str, object]], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        shared.recommend("u1", boost=boost)


def test_every_transport_has_boosts(server: Running) -> None:
    question = {"user": "u1", "k": 10, "boost": [CHEAP]}
    by_http = httpx.post(f"{server.http}/v1/recommend", json=question).json()["items"]
    query = pb.Query(user=pb.Id(text="u1"), boost=[pb.Boost(**CHEAP)])
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary("/recmill.v1.Recommender/Recommend")
        request = pb.RecommendRequest(queries=[query], k=10).SerializeToString()
        by_grpc = pb.RecommendReply.FromString(call(request)).answers[0].items
    with Client(server.http) as client:
        by_client = client.recommend("u1", k=10, boost=[m.Boost(**CHEAP)]).items
    expected = [(item["id"], item.get("boost", 1.0)) for item in by_http]
    assert 3.0 in dict(expected).values()
    assert [(item.id.text, item.boost or 1.0) for item in by_grpc] == expected
    assert [(item.id, item.boost) for item in by_client] == expected


def test_too_many_boosts_are_refused(server: Running) -> None:
    answer = httpx.post(f"{server.http}/v1/recommend", json={"user": "u1", "boost": [CHEAP] * 17})
    assert (answer.status_code, "boost must hold at most 16" in answer.json()["error"]) == (400, True)
