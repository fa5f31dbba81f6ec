"""Stages in other processes: balanced, retried once, within the deadline; answers are those of one process."""

from __future__ import annotations

import time

import httpx
import pytest
from ports import free_port
from servers import Running, Start

from recmill.errors import BadRequest, NotFound, TooLate
from recmill.stages.serve import messages as m
from recmill.stages.serve.proto import recmill_pb2 as pb
from recmill.stages.serve.roles import RemoteRecommender, RoleCredentials, StageServers, StageUnavailable


def address_of_nobody() -> str:
    return f"127.0.0.1:{free_port()}"


def stages_at(*addresses: str) -> RemoteRecommender:
    return RemoteRecommender(addresses, addresses, addresses)


def soon(seconds: float = 30) -> float:
    return time.monotonic() + seconds


def counted(server: Running, method: str) -> float:
    """Calls of a method that a server answered over gRPC."""
    wanted = f'recmill_requests_total{{method="{method}",status="OK",transport="grpc"}} '
    lines = httpx.get(f"{server.http}/metrics").text.splitlines()
    return sum(float(line.removeprefix(wanted)) for line in lines if line.startswith(wanted))


def test_the_stages_together_are_what_one_process_answers(server: Running) -> None:
    stages = stages_at(server.grpc)
    recalled = stages.recall_by(m.Recall(user="u1", k=30), soon())
    ids = [item.id for item in recalled.items]
    rows = stages.packed_rows(m.Rank(user="u1", items=ids), soon())
    ranked = stages.rank_rows(m.RankRows(user=rows.user, items=rows.items), soon())
    stages.close()
    whole = httpx.post(f"{server.http}/v1/rank", json={"user": "u1", "items": ids}).json()
    assert ranked.scores == pytest.approx(whole["scores"], abs=1e-6)
    assert (len(rows.items), rows.degraded, recalled.version) == (len(ids), [], server.version)


def test_calls_go_to_all_addresses_in_turn(start: Start) -> None:
    servers = [start(role="recall"), start(role="recall")]
    stages = stages_at(*(server.grpc for server in servers))
    for _ in range(10):
        stages.recall_by(m.Recall(user="u1", k=3), soon())
    stages.close()
    assert [counted(server, "recall") for server in servers] == [5, 5]


def test_one_that_is_gone_is_made_up_for_by_another(server: Running) -> None:
    stages = stages_at(address_of_nobody(), server.grpc)
    for _ in range(6):
        assert len(stages.recall_by(m.Recall(user="u1", k=3), soon()).items) == 3
    stages.close()


def test_a_server_that_comes_back_is_asked_again(start: Start) -> None:
    first = start(role="recall")
    port = int(first.grpc.rpartition(":")[2])
    stage = StageServers([first.grpc], RoleCredentials())
    request = pb.RecommendRequest(queries=[pb.Query()], k=2)
    assert stage.call("recall", request, soon())
    first.stop()
    with pytest.raises(StageUnavailable, match="No server at"):
        stage.call("recall", request, soon(0.5))
    start(role="recall", grpc_port=port)
    end = soon(60)
    while time.monotonic() < end:
        try:
            assert stage.call("recall", request, soon())
            break
        except StageUnavailable:
            time.sleep(0.1)
    else:
        pytest.fail("it is never asked again")
    stage.close()


def test_when_nobody_is_there_it_is_said_in_time() -> None:
    stages, began = stages_at(address_of_nobody(), address_of_nobody()), time.monotonic()
    with pytest.raises(StageUnavailable, match="answers Recall"):
        stages.recall_by(m.Recall(), soon(30))
    assert time.monotonic() - began < 30
    stages.close()


def test_a_deadline_that_has_passed_asks_nobody(server: Running) -> None:
    stages = stages_at(server.grpc)
    with pytest.raises(TooLate):
        stages.recall_by(m.Recall(), time.monotonic() - 1)
    stages.close()


def test_refusals_of_a_stage_are_refusals_here(start: Start, server: Running) -> None:
    stages = stages_at(server.grpc)
    with pytest.raises(BadRequest, match="No channel"):
        stages.recall_by(m.Recall(channels=["no"]), soon())
    stages.close()
    other = stages_at(start(role="rank").grpc)
    with pytest.raises(NotFound, match='role "rank"'):
        other.recall_by(m.Recall(), soon())
    other.close()


def test_split_roles_recommend_like_one_process(start: Start, server: Running) -> None:
    at = {f"{role}_at": (start(role=role).grpc,) for role in ("recall", "features", "rank")}
    split = start(role="recommend", **at)
    for user in ("u1", "u2", "an unknown user"):
        question = {"user": user, "k": 5, "candidates": 50, "context": {"device": "phone"}}
        question["boost"] = [{"where": "price < 60", "factor": 1.5}] if user == "u2" else []
        answers = [httpx.post(f"{one.http}/v1/recommend", json=question).json() for one in (split, server)]
        ids = [[item["id"] for item in answer["items"]] for answer in answers]
        scores = [[item["score"] for item in answer["items"]] for answer in answers]
        assert ids[0] == ids[1]
        assert scores[0] == pytest.approx(scores[1], abs=1e-5)
        boosts = [[item.get("boost") for item in answer["items"]] for answer in answers]
        assert boosts[0] == boosts[1]
        assert (1.5 in boosts[0]) == (user == "u2")
        assert "degraded" not in answers[0]
