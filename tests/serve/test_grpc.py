"""The gRPC transport over a real socket: calls, deadlines, sizes, health, reflection; what is no message is refused."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from servers import Running, Start

from recmill.errors import BadRequest
from recmill.stages.serve import messages as m
from recmill.stages.serve.calls import CallDispatcher
from recmill.stages.serve.config import ServeConfig
from recmill.stages.serve.grpc_server import INFERENCE, METHODS, SERVICE, GrpcServer, method_name
from recmill.stages.serve.inference import Scoring
from recmill.stages.serve.proto import convert
from recmill.stages.serve.proto import recmill_pb2 as pb
from recmill.stages.serve.proto.generate import HERE, PROTOS, generated
from recmill.stages.serve.service import Service
from recmill.stages.serve.telemetry import Telemetry

REPLIES = {
    "Recommend": pb.RecommendReply,
    "Recall": pb.RecommendReply,
    "Rank": pb.RankReply,
    "Features": pb.FeaturesReply,
    "Lookup": pb.LookupReply,
    "RankRows": pb.RankReply,
    "AddEvents": pb.Changed,
    "AddItems": pb.Changed,
    "RemoveItems": pb.Changed,
    "Status": pb.StatusReply,
    "Rollback": pb.StatusReply,
}


def call(server: Running, method: str, request: Any, timeout: float = 10, **more: Any) -> Any:
    """One call of a method; a request may also be plain bytes."""
    with grpc.insecure_channel(server.grpc) as channel:
        ask = channel.unary_unary(f"/recmill.v1.Recommender/{method}")
        data = request if isinstance(request, bytes) else request.SerializeToString()
        return REPLIES[method].FromString(ask(data, timeout=timeout, **more))


def refusal(server: Running, method: str, request: Any, timeout: float = 10, **more: Any) -> tuple[str, str]:
    """Code and sentence of a call that must fail."""
    with pytest.raises(grpc.RpcError) as error:
        call(server, method, request, timeout, **more)
    return error.value.code().name, error.value.details()


def user(text: str) -> pb.Query:
    return pb.Query(user=pb.Id(text=text))


@pytest.mark.parametrize("proto", PROTOS)
def test_generated_files_are_as_generated(proto: str) -> None:
    for name, text in generated(proto).items():
        assert (HERE / name).read_text() == text, "run python -m recmill.stages.serve.proto.generate"


def test_several_users_are_answered_in_their_order(server: Running) -> None:
    both = call(server, "Recommend", pb.RecommendRequest(queries=[user("u1"), user("u2")], k=4))
    alone = [call(server, "Recommend", pb.RecommendRequest(queries=[user(u)], k=4)) for u in ("u1", "u2")]
    ids = [[item.id.text for item in answer.items] for answer in both.answers]
    assert ids == [[item.id.text for item in one.answers[0].items] for one in alone]
    assert [len(found) for found in ids] == [4, 4]
    assert {answer.version for answer in both.answers} == {server.version}


def test_rank_gives_the_scores_of_recommend(server: Running) -> None:
    recommended = call(server, "Recommend", pb.RecommendRequest(queries=[user("u3")], k=5)).answers[0]
    items = [item.id for item in recommended.items]
    ranked = call(server, "Rank", pb.RankRequest(query=user("u3"), items=items))
    assert list(ranked.scores) == pytest.approx([item.score for item in recommended.items], abs=1e-6)


def test_packed_rows_rank_as_the_ids_they_stand_for(server: Running) -> None:
    items = [pb.Id(text=f"i{number}") for number in range(1, 6)]
    rows = call(server, "Lookup", pb.LookupRequest(query=user("u3"), items=items))
    packed = call(server, "RankRows", pb.RankRowsRequest(user=rows.user, items=rows.items))
    ranked = call(server, "Rank", pb.RankRequest(query=user("u3"), items=items))
    assert list(packed.scores) == pytest.approx(list(ranked.scores), abs=1e-6)


def test_recall_gives_candidates_and_features_what_is_known(server: Running) -> None:
    recalled = call(server, "Recall", pb.RecommendRequest(queries=[user("u1")], k=20)).answers[0]
    assert len(recalled.items) == 20
    known = MessageToDict(
        call(server, "Features", pb.FeaturesRequest(user=pb.Id(text="u1"), items=[pb.Id(text="i1")]))
    )
    assert known["user"]["known"] is True
    assert known["items"][0]["id"] == "i1"


def test_a_trace_says_how_the_answer_came_about(server: Running) -> None:
    request = pb.RecommendRequest(queries=[user("u1")], k=2, trace=True)
    trace = call(server, "Recommend", request).answers[0].trace
    assert "rank" in trace.stage_ms
    assert len(trace.detail["items"]) == 2


def test_changes_are_seen_by_the_next_call(start: Start) -> None:
    server = start()
    event = pb.Event(user=pb.Id(text="u1"), item=pb.Id(text="i1"))
    assert call(server, "AddEvents", pb.AddEventsRequest(events=[event])).number == 1
    new = pb.NewItem(id=pb.Id(text="brand-new"), values={"category": pb.Value(text="c1")})
    assert call(server, "AddItems", pb.AddItemsRequest(items=[new])).number == 1
    only = pb.Query(user=pb.Id(text="u1"), only=[pb.Id(text="brand-new")])
    found = call(server, "Recommend", pb.RecommendRequest(queries=[only], k=5)).answers[0]
    assert [item.id.text for item in found.items] == ["brand-new"]
    removed = call(server, "RemoveItems", pb.RemoveItemsRequest(items=[pb.Id(text="brand-new")]))
    assert removed.number == 1
    assert not call(server, "Recommend", pb.RecommendRequest(queries=[only], k=5)).answers[0].items


def test_status_says_what_serves(server: Running) -> None:
    status = MessageToDict(call(server, "Status", pb.StatusRequest()))["status"]
    assert (status["version"], status["ready"]) == (server.version, True)


def test_errors_have_a_code_and_a_sentence(server: Running) -> None:
    code, sentence = refusal(server, "Recommend", pb.RecommendRequest(queries=[user("u1")], k=5_000))
    assert (code, sentence) == ("INVALID_ARGUMENT", "k must be a whole number from 1 to 1,000, got 5000.")
    assert refusal(server, "Recommend", pb.RecommendRequest()) == (
        "INVALID_ARGUMENT",
        "queries must hold 1 to 100 values, got 0.",
    )
    none = pb.RecommendRequest(queries=[user("u1")], version="none")
    assert refusal(server, "Recommend", none)[0] == "NOT_FOUND"
    nobody = pb.AddEventsRequest(events=[pb.Event()])
    assert refusal(server, "AddEvents", nobody)[1] == "user[0] is an id with neither text nor number."
    assert refusal(server, "Rollback", pb.RollbackRequest())[0] == "NOT_FOUND"


def test_bytes_that_are_no_message_are_the_callers_mistake(server: Running) -> None:
    for method in REPLIES:
        code, sentence = refusal(server, method, b"\xff\xff\xff\xff")
        assert code == "INVALID_ARGUMENT"
        assert sentence.startswith("The request is no recmill.v1.")


def test_a_large_message_to_any_method_is_read_by_a_thread_and_not_by_the_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[str] = []
    parse = convert.parse

    def noted(kind: Any, data: bytes) -> Any:
        readers.append(threading.current_thread().name)
        return parse(kind, data)

    monkeypatch.setattr(convert, "parse", noted)
    methods = [f"/{SERVICE}/{name}" for name in map(method_name, METHODS)]
    methods += [f"/{INFERENCE}/{name}" for name in ("ModelReady", "ModelMetadata", "ModelInfer")]
    with grpc.insecure_channel(server.grpc) as channel:
        for method in methods:
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(method)(b"\xff" * 1_000_000, timeout=20)
    assert readers == ["recmill-read"] * len(methods)


def test_a_message_that_is_too_large_is_refused(start: Start) -> None:
    server = start(max_body=1_000)
    large = pb.RecommendRequest(queries=[user("u" * 2_000)])
    assert refusal(server, "Recommend", large)[0] == "RESOURCE_EXHAUSTED"


def test_a_deadline_that_has_passed_ends_the_call(server: Running) -> None:
    request = pb.RecommendRequest(queries=[user("u1")])
    assert refusal(server, "Recommend", request, timeout=1e-6)[0] == "DEADLINE_EXCEEDED"


def test_health_is_serving_and_reflection_knows_all_services(server: Running) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        for name in ("", "recmill.v1.Recommender", "inference.GRPCInferenceService"):
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        described = ProtoReflectionDescriptorDatabase(channel)
        assert "recmill.v1.Recommender" in described.get_services()
        pool = DescriptorPool(described)
        assert "Recommend" in pool.FindServiceByName("recmill.v1.Recommender").methods_by_name
        assert "ModelInfer" in pool.FindServiceByName("inference.GRPCInferenceService").methods_by_name


def test_values_come_back_as_they_went() -> None:
    values = {"a": "x", "b": -4, "c": 2.5, "d": True, "e": None, "f": ["x", 3, None]}
    request = pb.RankRowsRequest(context=convert.to_values(values))
    again = pb.RankRowsRequest.FromString(request.SerializeToString())
    assert convert.values_of(again.context) == values


def test_queries_come_back_as_they_went() -> None:
    recall = m.Recall(
        user=7,
        k=9,
        context={"device": "phone"},
        features={"age": 4},
        recent=["a", 2],
        exclude=[1],
        only=[],
        where="price > 3",
        channels=["popular"],
        show_seen=True,
    )
    request = pb.RecommendRequest(queries=[convert.to_query(recall)], k=9)
    assert convert.recalls_of(request) == [recall]


def test_whole_numbers_that_a_double_cannot_hold_become_text() -> None:
    assert dict(convert.to_struct({"key": 2**60, "small": 3})) == {"key": str(2**60), "small": 3.0}


def test_values_are_not_nested_without_end() -> None:
    value = pb.Value(text="x")
    for _ in range(4):
        value = pb.Value(list=pb.ValueList(values=[value]))
    with pytest.raises(BadRequest, match="lists of values"):
        convert.value_of(value)


def test_changes_from_other_machines_need_a_token_or_a_certificate(bundles: Path) -> None:
    service = Service(ServeConfig(bundle=bundles, watch=False))

    async def main() -> list[str]:
        dispatcher = CallDispatcher(service, Telemetry(), threads=1, admin_is_open=False)
        transport = GrpcServer(dispatcher, Scoring(dispatcher))
        port = transport.bind("127.0.0.1:0", None)
        await transport.server.start()
        codes = []
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for method in ("AddItems", "RemoveItems", "Rollback"):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await channel.unary_unary(f"/recmill.v1.Recommender/{method}")(b"", timeout=10)
                codes.append(error.value.code().name)
        await transport.server.stop(0)
        dispatcher.close()
        return codes

    assert asyncio.run(main()) == ["PERMISSION_DENIED"] * 3
    service.close()


@pytest.mark.load
def test_each_of_thousands_of_calls_at_once_is_answered_or_refused_with_a_reason(server: Running) -> None:
    request = pb.RecommendRequest(queries=[user("u1")], k=3).SerializeToString()

    async def main() -> Counter[str]:
        codes: Counter[str] = Counter()

        async def ask() -> None:
            try:
                await recommend(request, timeout=300)  # a deadline that passes in the library is a CANCELLED
                codes["OK"] += 1
            except grpc.aio.AioRpcError as error:
                codes[error.code().name if error.details() else "without a reason"] += 1

        async with grpc.aio.insecure_channel(server.grpc) as channel:
            recommend = channel.unary_unary("/recmill.v1.Recommender/Recommend")
            await channel.channel_ready()
            await asyncio.gather(*(ask() for _ in range(2_500)))
        return codes

    codes = asyncio.run(main())
    assert set(codes) <= {"OK", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
    assert codes["OK"]
