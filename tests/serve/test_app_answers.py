"""Answers for apps: columns beside items, unknown ids, similar and trending items, reasons in words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import polars as pl
import pytest
from servers import Running, Start
from shop import Shop

import recmill
from recmill.stages.serve.proto import recmill_pb2 as pb
from recmill.stages.serve.recommender import Recommender

KINDS = {"recommend": pb.RecommendReply, "rank": pb.RankReply, "similar": pb.Answer, "trending": pb.Answer}


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http) as client:
        yield client


@pytest.fixture(scope="module")
def items(shop: Shop) -> dict[str, dict[str, Any]]:
    rows = pl.read_csv(shop.log / "items.csv").to_dicts()
    return {row["item_id"]: row for row in rows}


@pytest.fixture(scope="module")
def clicks(shop: Shop) -> dict[str, list[str]]:
    """The items that each user clicked."""
    log = pl.read_csv(shop.log / "events.csv").filter(pl.col("clicked") == 1)
    return {user: group["item_id"].to_list() for (user,), group in log.group_by("user_id")}


def ask(http: httpx.Client, path: str, **request: Any) -> dict[str, Any]:
    answer = http.post(f"/v1/{path}", json=request)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def ask_grpc(server: Running, method: str, request: Any) -> Any:
    with grpc.insecure_channel(server.grpc) as channel:
        reply = channel.unary_unary(f"/recmill.v1.Recommender/{method}")(request.SerializeToString())
    return KINDS[method.lower()].FromString(reply)


# columns


def test_columns_that_a_request_names_are_beside_each_item(http: httpx.Client, items: Any) -> None:
    for path, request in (
        ("recommend", {"user": "u1"}),
        ("recall", {"user": "u1"}),
        ("similar", {"item": "i1"}),
        ("trending", {}),
    ):
        answer = ask(http, path, **request, k=4, fields=["title", "price", "title"])
        assert len(answer["items"]) == 4
        for item in answer["items"]:
            row = items[item["id"]]
            assert item["fields"] == {"title": row["title"], "price": pytest.approx(row["price"])}


@pytest.mark.parametrize("request_", [("recommend", {}), ("similar", {"item": "no such"}), ("trending", {})])
def test_an_unknown_column_is_refused_and_the_error_names_those_there_are(
    http: httpx.Client, request_: tuple[str, dict[str, Any]]
) -> None:
    path, request = request_
    refused = http.post(f"/v1/{path}", json={**request, "fields": ["titel"]})
    assert refused.status_code == 400
    assert refused.json()["error"] == (
        'Items have no column "titel"; fields can be: item_id, title, category, brand, price.'
    )


# unknown ids


def test_an_unknown_user_is_not_known_and_a_known_one_is(http: httpx.Client, server: Running) -> None:
    for user, is_known in (("u1", True), ("nobody", False)):
        for path, more in (("recommend", {}), ("recall", {}), ("rank", {"items": ["i1", "not there"]})):
            assert ask(http, path, user=user, **more).get("known", True) is is_known
        query = pb.Query(user=pb.Id(text=user))
        reply = ask_grpc(server, "Recommend", pb.RecommendRequest(queries=[query], k=2))
        assert reply.answers[0].known is is_known
        asked = pb.RankRequest(query=query, items=[pb.Id(text="i1"), pb.Id(text="not there")])
        ranked = ask_grpc(server, "Rank", asked)
        assert (ranked.known, [id.text for id in ranked.unknown_items]) == (is_known, ["not there"])
    assert ask(http, "recommend", k=2)["known"] is False, "nobody in particular"


def test_nothing_is_similar_to_an_unknown_item(http: httpx.Client, server: Running) -> None:
    answer = ask(http, "similar", item="not there")
    assert (answer["items"], answer["known"]) == ([], False)
    reply = ask_grpc(server, "Similar", pb.SimilarRequest(item=pb.Id(text="not there")))
    assert (len(reply.items), reply.known) == (0, False)
    assert ask_grpc(server, "Similar", pb.SimilarRequest(item=pb.Id(text="i1"))).known


# similar and trending


def test_similar_items_are_mostly_of_the_same_category(http: httpx.Client, items: Any, clicks: Any) -> None:
    counts = pl.Series([item for user in clicks.values() for item in user]).value_counts(sort=True)
    same = total = 0
    for item in counts[counts.columns[0]][:20].to_list():
        found = [one["id"] for one in ask(http, "similar", item=item, k=5)["items"]]
        assert item not in found
        same += sum(items[one]["category"] == items[item]["category"] for one in found)
        total += len(found)
    by_chance = 1 / len({row["category"] for row in items.values()})
    assert same / total > 1.5 * by_chance


def test_items_without_a_user_can_be_filtered(http: httpx.Client, items: Any) -> None:
    for path, more in (("similar", {"item": "i1"}), ("trending", {})):
        first = ask(http, path, **more, k=1)["items"][0]["id"]
        found = ask(http, path, **more, k=5, where="price < 20", exclude=[first])["items"]
        assert len(found) == 5
        assert first not in [item["id"] for item in found]
        assert all(items[item["id"]]["price"] < 20 for item in found)


def test_both_transports_answer_alike(http: httpx.Client, server: Running) -> None:
    query = pb.ItemQuery(k=3, where="price < 50", fields=["title"])
    for path, request, more in (
        ("similar", pb.SimilarRequest(item=pb.Id(text="i1"), query=query), {"item": "i1"}),
        ("trending", pb.TrendingRequest(query=query), {}),
    ):
        reply = ask_grpc(server, path.title(), request)
        answer = ask(http, path, **more, k=3, where="price < 50", fields=["title"])
        by_grpc = [(item.id.text, item.fields["title"].text) for item in reply.items]
        assert by_grpc == [(item["id"], item["fields"]["title"]) for item in answer["items"]]
        assert reply.version == server.version


def test_what_is_clicked_now_is_trending_before_what_was_popular(shop: Shop, tmp_path: Path) -> None:
    own = recmill.open_bundle(shop.bundles)
    popular = [item.id for item in own.recall(None, k=1_000, channels=["popular"]).items]
    least = popular[-1]
    from recmill.stages.serve.messages import Event

    own.add_events([Event(user=f"visitor {number}", item=least) for number in range(60)])
    assert own.trending(k=1).items[0].id == least
    assert own.trending(k=1).items[0].channel == "trending"


def test_limits_and_deadlines_hold_for_items_too(http: httpx.Client) -> None:
    for path, more in (("similar", {"item": "i1"}), ("trending", {})):
        assert http.post(f"/v1/{path}", json={**more, "k": 1_001}).status_code == 400
        assert http.post(f"/v1/{path}", json={**more, "fields": ["title"] * 101}).status_code == 400
        assert http.post(f"/v1/{path}", json={**more, "deadline_ms": 1e-4}).status_code == 504
        assert http.post(f"/v1/{path}", json={**more, "version": "none"}).status_code == 404
        assert http.post(f"/v1/{path}", json={**more, "user": "u1"}).status_code == 400
    assert "empty" in http.post("/v1/similar", json={"item": ""}).json()["error"]


# reasons


def test_reasons_name_items_that_the_user_clicked(http: httpx.Client, items: Any, clicks: Any) -> None:
    user = max(clicks, key=lambda one: len(clicks[one]))
    answer = ask(http, "recommend", user=user, k=20, explain=True)
    explained = [item for item in answer["items"] if item.get("because")]
    assert len(explained) >= 10
    for item in explained:
        for reason in item["because"]:
            assert reason["id"] in clicks[user]
            assert reason["title"] == items[reason["id"]]["title"]
            assert 0 < reason["weight"] <= 1
        start = "similar to" if item["because"][0]["channel"] == "similar" else "because you clicked"
        assert item["why"].startswith(f"{start} {item['because'][0]['title']}")
    assert all(item["why"] for item in answer["items"])
    plain = ask(http, "recommend", user=user, k=20)
    assert [item["id"] for item in plain["items"]] == [item["id"] for item in answer["items"]]
    assert not any("why" in item for item in plain["items"])


def test_unknown_users_get_a_reason_without_items(http: httpx.Client) -> None:
    for item in ask(http, "recommend", user="nobody", k=5, explain=True)["items"]:
        assert item["why"] in ("popular with other users", "chosen by users like you")
        assert "because" not in item


def test_an_item_just_clicked_is_a_reason(http: httpx.Client, items: Any, clicks: Any) -> None:
    counts = pl.Series([item for user in clicks.values() for item in user]).value_counts(sort=True)
    item = counts[counts.columns[0]][0]
    answer = ask(http, "recommend", recent=[item], k=20, explain=True)
    named = {reason["id"] for one in answer["items"] for reason in one.get("because", [])}
    assert named == {item}


def test_split_roles_describe_items_like_one_process(start: Start, http: httpx.Client) -> None:
    at = {f"{role}_at": (start(role=role).grpc,) for role in ("recall", "features", "rank")}
    split = start(role="recommend", **at)
    with httpx.Client(base_url=split.http) as remote:
        for path, request in (
            ("recommend", {"user": "u1", "candidates": 50, "explain": True}),
            ("recommend", {"user": "nobody", "candidates": 50, "explain": True}),
            ("similar", {"item": "i1"}),
            ("similar", {"item": "not there"}),
            ("trending", {"where": "price < 20"}),
        ):
            one, other = (ask(client, path, **request, k=5, fields=["title"]) for client in (http, remote))
            assert one.get("known") == other.get("known")
            assert _described(one) == _described(other)
        assert remote.post("/v1/recommend", json={"fields": ["titel"]}).status_code == 400
        ranked = ask(remote, "rank", user="nobody", items=["i1", "not there"])
        assert (ranked["known"], ranked["unknown_items"]) == (False, ["not there"])


def _described(answer: dict[str, Any]) -> list[Any]:
    return [
        (item["id"], item["fields"], item.get("why"), [one["id"] for one in item.get("because", [])])
        for item in answer["items"]
    ]


def test_python_and_http_give_the_same(shop: Shop, http: httpx.Client) -> None:
    own: Recommender = recmill.open_bundle(shop.bundles)
    by_http = [item["id"] for item in ask(http, "similar", item="i1", k=5)["items"]]
    assert [item.id for item in own.similar("i1", k=5).items] == by_http
