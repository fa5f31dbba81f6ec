"""The HTTP transport, without sockets: every path, every refusal; the OpenAPI document says the same."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from asgi import Client

from recmill.stages.serve import console
from recmill.stages.serve.calls import CallDispatcher
from recmill.stages.serve.config import ServeConfig
from recmill.stages.serve.http_routes import HttpApp
from recmill.stages.serve.inference import Scoring
from recmill.stages.serve.limits import Limits
from recmill.stages.serve.security import Tokens
from recmill.stages.serve.service import Service
from recmill.stages.serve.telemetry import Telemetry

READ, ADMIN = "read-token-0123456789", "admin-token-0123456789"
SAMPLES = {
    "/v1/recommend": {"user": "u1", "k": 3},
    "/v1/recall": {"user": "u1", "k": 3},
    "/v1/rank": {"user": "u1", "items": ["i1", "i2"]},
    "/v1/features": {"user": "u1", "items": ["i1"]},
}


class Failing(Service):
    """A service with a mistake in it."""

    def rank(self, query: Any) -> Any:
        raise ZeroDivisionError("the secret of the server")


@pytest.fixture(scope="module")
def service(bundles: Path) -> Iterator[Service]:
    service = Service(ServeConfig(bundle=bundles, watch=False))
    service.warm_up()
    yield service
    service.close()


def client_of(service: Service, **options: Any) -> Client:
    dispatcher = CallDispatcher(service, Telemetry(), threads=1, **options)
    app = HttpApp(dispatcher, Scoring(dispatcher), console.routes()).app
    return Client(app)


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[Client]:
    with client_of(service) as client:
        yield client


async def in_pieces(body: bytes) -> AsyncIterator[bytes]:
    """A body whose length is not said before."""
    for begin in range(0, len(body), 100):
        yield body[begin : begin + 100]


@pytest.mark.parametrize("path", SAMPLES)
def test_every_question_has_an_answer(client: Client, service: Service, path: str) -> None:
    answer = client.post(path, json=SAMPLES[path])
    assert answer.status_code == 200, answer.text
    assert answer.json()["version"] == service.bundle.version


def test_recommend_gives_k_items_best_first(client: Client) -> None:
    items = client.post("/v1/recommend", json={"user": "u1", "k": 7}).json()["items"]
    scores = [item["score"] for item in items]
    assert len(items) == 7
    assert scores == sorted(scores, reverse=True)


def test_several_queries_are_answered_in_their_order(client: Client) -> None:
    queries = [{"user": "u1", "k": 2}, {"user": "u2", "k": 3}]
    answers = client.post("/v1/recommend", json={"queries": queries}).json()["answers"]
    alone = [client.post("/v1/recommend", json=query).json()["items"] for query in queries]
    assert [answer["items"] for answer in answers] == alone


def test_rank_gives_one_score_for_each_item(client: Client) -> None:
    scores = client.post("/v1/rank", json={"user": "u1", "items": ["i1", "i1", "never seen"]}).json()[
        "scores"
    ]
    assert len(scores) == 3
    assert scores[0] == scores[1]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/recommend", b"", "Input data was truncated."),
        ("/v1/recommend", b"{", "truncated"),
        ("/v1/recommend", b"[]", "Expected `object`, got `array`."),
        ("/v1/recommend", b'{"k": "3"}', "Expected `int`, got `str` - at `$.k`."),
        ("/v1/recommend", b'{"kk": 3}', "Object contains unknown field `kk`."),
        ("/v1/recommend", b'{"k": 0}', "k must be a whole number from 1 to 1,000, got 0."),
        ("/v1/recommend", b'{"queries": []}', "queries must hold 1 to 100 values, got 0."),
        ("/v1/recommend", b'{"queries": [{"k": "3"}]}', "Expected `int`, got `str` - at `$.queries[0].k`."),
        ("/v1/recommend", b'{"channels": ["no"]}', 'No channel "no"'),
        ("/v1/recommend", b'{"where": "no_such_column > 3"}', "no_such_column"),
        ("/v1/recommend", b'{"where": "price in (select 1)"}', "at character 11: expected a number"),
        ("/v1/recommend", b'{"where": "least() > 1"}', "at character 1: expected a column, found least()"),
        ("/v1/recommend", b'{"where": "category = 3"}', 'column "category" is text and 3 is int'),
        ("/v1/recommend", b'{"where": "category = \'\\ud800\'"}', ""),
        ("/v1/recommend", b'{"where": "price > ' + b"9" * 400 + b'"}', "beyond 64 bits"),
        (
            "/v1/recommend",
            b'{"where": "LENGTH(LPAD(category, 20000000, \'x\')) > 1"}',
            "conditions have no functions",
        ),
        ("/v1/recommend", b'{"context": {"no_such_column": 3}}', 'has a column "no_such_column"'),
        ("/v1/recommend", b'{"deadline_ms": -1}', "deadline_ms must be above 0"),
        ("/v1/rank", b"{}", "missing required field `items`"),
        ("/v1/rank", b'{"items": [1.5]}', "at `$.items[0]`"),
        ("/v1/recommend", b'{"user": "\xff"}', "invalid"),
        ("/v1/recommend", b"[" * 100_000, "Expected `object`"),
        ("/v1/recommend", b'{"context": {"a": ' + b"[" * 100_000, ""),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(client: Client, path: str, body: bytes, words: str) -> None:
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert words.lower() in answer.json()["error"].lower()


def test_what_is_not_there_is_said_in_json(client: Client) -> None:
    assert client.get("/v1/nothing").status_code == 404
    assert "openapi.json" in client.get("/v1/nothing").json()["error"]
    assert client.get("/v1/status/").status_code == 404
    wrong = client.get("/v1/recommend")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert client.post("/v1/recommend", json={"version": "none"}).status_code == 404
    assert client.post("/v2/models/other/infer", json={"inputs": []}).status_code == 404


def test_the_kind_and_the_size_of_bodies_are_checked(service: Service) -> None:
    with client_of(service, limits=Limits(max_body=200)) as client:
        assert client.post("/v1/recommend", content=b"k=3").status_code == 415
        json_type = {"content-type": "application/json; charset=utf-8"}
        assert client.post("/v1/recommend", content=b'{"k": 3}', headers=json_type).status_code == 200
        large = b'{"user": "' + b"u" * 300 + b'"}'
        assert client.post("/v1/recommend", content=large, headers=json_type).status_code == 413
        streamed = client.post("/v1/recommend", content=in_pieces(large), headers=json_type)
        assert streamed.status_code == 413
        packed = {**json_type, "content-encoding": "gzip"}
        bomb = gzip.compress(b" " * 1_000_000)
        assert client.post("/v1/recommend", content=gzip.compress(b"{}"), headers=packed).status_code == 200
        assert client.post("/v1/recommend", content=bomb[:190], headers=packed).status_code == 413
        assert client.post("/v1/recommend", content=b"no gzip", headers=packed).status_code == 400
        strange = {**json_type, "content-encoding": "br"}
        assert client.post("/v1/recommend", content=b"{}", headers=strange).status_code == 415


def test_users_are_found_by_prefix(client: Client) -> None:
    assert client.get("/v1/users", params={"prefix": "u1", "limit": 3}).json() == {
        "users": ["u1", "u10", "u100"]
    }
    assert client.get("/v1/users", params={"limit": "many"}).status_code == 400
    assert client.get("/v1/users", params={"limit": 0}).status_code == 400


def test_health_metrics_live_and_the_page_are_there(client: Client, service: Service) -> None:
    assert client.get("/health/live").json() == {"live": True}
    assert client.get("/health/ready").json() == {"ready": True}
    client.post("/v1/recommend", json={"user": "u1"})
    metrics = client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert 'recmill_requests_total{method="recommend",status="200",transport="http"}' in metrics.text
    assert "seconds" in client.get("/v1/live").json()
    assert client.get("/").headers["content-type"].startswith("text/html")
    assert client.get("/v1/status").json()["version"] == service.bundle.version


def test_a_server_that_is_not_warm_or_drains_is_not_ready(service: Service) -> None:
    dispatcher = CallDispatcher(service, Telemetry(), threads=1)
    with Client(HttpApp(dispatcher, Scoring(dispatcher)).app) as client:
        dispatcher.is_draining = True
        for path in ("/health/ready", "/v2/health/ready", "/v2/models/ranking/ready"):
            assert client.get(path).status_code == 503


def test_changes_from_other_machines_need_a_token_or_a_certificate(service: Service) -> None:
    calls = {"/v1/items": {"items": [{"id": "x"}]}, "/v1/items/remove": {"items": ["x"]}, "/v1/rollback": {}}
    with client_of(service, admin_is_open=False) as client:
        for path, body in calls.items():
            answer = client.post(path, json=body)
            assert (answer.status_code, "--token-file or --tls-client-ca" in answer.text) == (403, True)
        assert client.post("/v1/recommend", json={}).status_code == 200


def test_tokens_are_asked_for_and_changes_need_admin(service: Service, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"{READ} read\n{ADMIN} admin\n")
    tokens = Tokens.read(tmp_path / "tokens")
    remove = {"items": ["no such item"]}
    with client_of(service, tokens=tokens) as client:
        assert client.post("/v1/recommend", json={}).status_code == 401
        assert client.post("/v1/recommend", json={}).headers["www-authenticate"] == "Bearer"
        read, admin = ({"authorization": f"Bearer {token}"} for token in (READ, ADMIN))
        assert client.post("/v1/recommend", json={}, headers=read).status_code == 200
        assert client.post("/v1/items/remove", json=remove, headers=read).status_code == 403
        assert client.post("/v1/items/remove", json=remove, headers=admin).status_code == 200
        for path in ("/metrics", "/v1/status", "/v1/live", "/v2/models/ranking"):
            assert client.get(path).status_code == 401
        for path in ("/health/live", "/health/ready", "/openapi.json", "/"):
            assert client.get(path).status_code == 200
        assert client.post("/v1/recommend", json={}, headers={"authorization": "Bearer x"}).status_code == 401


def test_a_role_answers_its_own_calls_alone(service: Service) -> None:
    with client_of(service, role="recall") as client:
        assert client.post("/v1/recall", json=SAMPLES["/v1/recall"]).status_code == 200
        refused = client.post("/v1/rank", json=SAMPLES["/v1/rank"])
        assert refused.status_code == 404
        assert 'has the role "recall"' in refused.json()["error"]
        assert "/v1/rank" not in client.get("/openapi.json").json()["paths"]


def test_our_own_mistakes_are_logged_and_never_shown(bundles: Path, caplog: pytest.LogCaptureFixture) -> None:
    with client_of(Failing(ServeConfig(bundle=bundles, watch=False))) as client:
        answer = client.post("/v1/rank", json=SAMPLES["/v1/rank"])
    assert answer.status_code == 500
    assert "secret" not in answer.text
    number = answer.json()["error"].split()[-1].rstrip(".")
    assert f"error {number}" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_the_document_knows_this_bundles_columns_and_limits(service: Service) -> None:
    with client_of(service, limits=Limits(max_k=77)) as client:
        found = client.get("/openapi.json").json()
    schemas = found["components"]["schemas"]
    assert schemas["Recommend"]["properties"]["k"]["maximum"] == 77
    assert "device" in schemas["Recommend"]["properties"]["context"]["properties"]
    assert set(found["paths"]) >= {*SAMPLES, "/v1/items", "/v2/models/{name}/infer", "/metrics"}
