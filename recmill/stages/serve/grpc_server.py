"""The gRPC transport: our own calls, the Open Inference Protocol, health and reflection, in one table."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import DESCRIPTOR as STRUCT
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from recmill.stages.serve import calls as c
from recmill.stages.serve import inference
from recmill.stages.serve import messages as m
from recmill.stages.serve import tensorflow_serving as tfs
from recmill.stages.serve.limits import Limits
from recmill.stages.serve.proto import convert, predict_v2_pb2, recmill_pb2, tensorflow_serving_pb2
from recmill.stages.serve.proto import recmill_pb2 as pb
from recmill.stages.serve.security import Scope, Tls

# A client that disconnects before the answer is not a server error.
logging.getLogger("grpc._cython.cygrpc").addFilter(
    lambda record: "ExecuteBatchError" not in str(record.exc_info)
)

_HANDSHAKE_MS = 10_000
_MAX_STREAMS = 10_000  # calls at once on one connection
_NO_LIMIT = 2**31 - 1
SERVICE = "recmill.v1.Recommender"
INFERENCE = "inference.GRPCInferenceService"


Reply: TypeAlias = Message | bytes  # bytes: an encoded message


@dataclass(frozen=True)
class Method:
    """The protobuf messages of one call, and the conversion from and to ours.

    `pack` converts one answer to a message or its bytes; `reply` combines them into the reply.
    """

    takes: type[Message]
    requests_of: Callable[[Any], Sequence[Any]]
    pack: Callable[[Any], Reply]
    reply: Callable[[Sequence[Any]], Reply] = lambda packed: packed[0]


def _changed(answer: m.ChangeResult) -> pb.Changed:
    return pb.Changed(number=answer.number, version=answer.version)


def _status(answer: m.Status) -> pb.StatusReply:
    return pb.StatusReply(status=convert.to_struct(answer))


def _packed(rows: m.PackedRows) -> pb.LookupReply:
    return pb.LookupReply(
        user=rows.user,
        items=rows.items,
        known=rows.known,
        unknown_items=map(convert.to_id, rows.unknown_items),
        degraded=rows.degraded,
        version=rows.version,
    )


def _features(request: pb.FeaturesRequest) -> list[m.Features]:
    return [m.Features(user=convert.id_of(request.user), items=convert.ids_of(request.items, "items"))]


def _rows(request: pb.RankRowsRequest) -> list[m.RankRows]:
    context = convert.values_of(request.context)
    serve_score = request.serve_score or None
    return [
        m.RankRows(user=request.user, items=list(request.items), context=context, serve_score=serve_score)
    ]


def _events(request: pb.AddEventsRequest) -> list[m.Events]:
    events = [
        m.Event(
            user=convert.known_id(event.user, "user"),
            item=convert.known_id(event.item, "item"),
            values=convert.values_of(event.values),
            id=event.id or None,
        )
        for event in request.events
    ]
    return [m.Events(events=events)]


def _new_items(request: pb.AddItemsRequest) -> list[m.NewItems]:
    items = [
        m.NewItem(id=convert.known_id(item.id, "id"), values=convert.values_of(item.values))
        for item in request.items
    ]
    return [m.NewItems(items=items)]


def _item_ids(request: pb.RemoveItemsRequest) -> list[m.ItemIds]:
    return [m.ItemIds(items=convert.ids_of(request.items, "items"))]


METHODS = {
    "recommend": Method(
        pb.RecommendRequest, convert.recommends_of, convert.answer_bytes, convert.replies_bytes
    ),
    "recall": Method(pb.RecommendRequest, convert.recalls_of, convert.answer_bytes, convert.replies_bytes),
    "rank": Method(pb.RankRequest, lambda r: [convert.rank_of(r)], convert.to_ranked),
    "similar": Method(pb.SimilarRequest, lambda r: [convert.similar_of(r)], convert.answer_bytes),
    "trending": Method(pb.TrendingRequest, lambda r: [convert.trending_of(r)], convert.answer_bytes),
    "describe": Method(pb.DescribeRequest, lambda r: [convert.describe_of(r)], convert.answer_bytes),
    "features": Method(pb.FeaturesRequest, _features, convert.to_features),
    "lookup": Method(pb.LookupRequest, lambda r: [convert.rank_of(r)], _packed),
    "rank_rows": Method(pb.RankRowsRequest, _rows, convert.to_ranked),
    "add_events": Method(pb.AddEventsRequest, _events, _changed),
    "add_items": Method(pb.AddItemsRequest, _new_items, _changed),
    "remove_items": Method(pb.RemoveItemsRequest, _item_ids, _changed),
    "status": Method(pb.StatusRequest, lambda r: [m.Empty()], _status),
    "rollback": Method(pb.RollbackRequest, lambda r: [m.RollBack(version=r.version or None)], _status),
}


def method_name(call: str) -> str:
    """The name of a call in recmill.proto, such as AddEvents for add_events."""
    return call.title().replace("_", "")


class GrpcServer:
    """A gRPC server over a dispatcher. Create it inside the event loop that it runs in."""

    def __init__(
        self,
        dispatcher: c.CallDispatcher,
        scoring: inference.Scoring,
        several_processes: bool = False,
        max_connections: int | None = None,
    ) -> None:
        self.dispatcher = dispatcher
        self.scoring = scoring
        self.server = grpc.aio.server(options=_options(dispatcher.limits, several_processes, max_connections))
        own = {method_name(call): self._handler(self._own(c.CALLS[call]), call) for call in METHODS}
        self._register(SERVICE, own)
        self._register(INFERENCE, self._inference())
        self._register(tfs.SERVICE, self._tensorflow_serving())
        self.health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        names = (SERVICE, INFERENCE, tfs.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server, _all_descriptors())

    def bind(self, address: str, tls: Tls | None) -> int:
        """Bind the port and return it; raises OSError when that fails."""
        try:
            if tls is None:
                return int(self.server.add_insecure_port(address))
            return int(self.server.add_secure_port(address, tls.for_grpc()))
        except RuntimeError:
            raise OSError(98, "The gRPC port cannot be bound; is another server using it?", address) from None

    async def set_ready(self, is_ready: bool) -> None:
        state = health_pb2.HealthCheckResponse
        for name in ("", SERVICE, INFERENCE, tfs.SERVICE):
            await self.health.set(name, state.SERVING if is_ready else state.NOT_SERVING)

    def _register(self, service: str, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

    def _handler(
        self, answer: Callable[[bytes, float | None], Awaitable[tuple[Reply, Any]]], name: str
    ) -> grpc.RpcMethodHandler:
        scope: Scope = c.CALLS[name].scope if name in c.CALLS else "read"

        async def handle(data: bytes, context: grpc.aio.ServicerContext) -> Reply:
            began, answered, failure = time.perf_counter(), None, None
            headers = {
                key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)
            }
            try:
                self.dispatcher.permit(headers.get("authorization"), scope)
                reply, answered = await answer(data, context.time_remaining())
            except Exception as error:
                failure = c.call_error(error)
            status = failure.grpc_code if failure else "OK"
            seconds = time.perf_counter() - began
            self.dispatcher.observe("grpc", name, status, seconds, answered, headers.get("traceparent"))
            if failure:
                await context.abort(getattr(grpc.StatusCode, failure.grpc_code), failure.message)
            return reply

        # Bytes are parsed in the handler, so that an invalid message is INVALID_ARGUMENT and not INTERNAL.
        return grpc.unary_unary_rpc_method_handler(handle, None, _encoded)

    def _own(self, call: c.ServerCall) -> Callable[[bytes, float | None], Awaitable[tuple[Reply, Any]]]:
        method = METHODS[call.name]

        async def answer(data: bytes, remaining: float | None) -> tuple[Reply, Any]:
            self.dispatcher.check_offered(call.name, call.roles, call.is_change)
            began = time.monotonic()
            requests = await self.dispatcher.read(len(data), lambda: self._parsed(call, data))
            if remaining is not None:
                remaining -= time.monotonic() - began
            answers = await self.dispatcher.answer(call, requests, remaining, method.pack)
            reply = method.reply([packed for _, packed in answers])
            return reply, c.for_metrics([answer for answer, _ in answers])

        return answer

    def _parsed(self, call: c.ServerCall, data: bytes) -> Sequence[Any]:
        method, limits = METHODS[call.name], self.dispatcher.limits
        request = convert.parse(method.takes, data)
        if call.batch:
            limits.check_number(len(getattr(request, call.batch)), call.batch)
        requests = method.requests_of(request)
        for one in requests:
            limits.check(one)
        return requests

    # the Open Inference Protocol

    def _inference(self) -> dict[str, grpc.RpcMethodHandler]:
        return {
            "ServerLive": self._handler(self._server_live, "status"),
            "ServerReady": self._handler(self._server_ready, "status"),
            "ModelReady": self._handler(self._model_ready, "status"),
            "ServerMetadata": self._handler(self._server, "status"),
            "ModelMetadata": self._handler(self._model, "status"),
            "ModelInfer": self._handler(self._infer, "infer"),
        }

    async def _server_live(self, data: bytes, remaining: float | None) -> tuple[Message, None]:
        return predict_v2_pb2.ServerLiveResponse(live=True), None

    async def _server_ready(self, data: bytes, remaining: float | None) -> tuple[Message, None]:
        return predict_v2_pb2.ServerReadyResponse(ready=self.dispatcher.is_ready), None

    async def _model_ready(self, data: bytes, remaining: float | None) -> tuple[Message, None]:
        request = await self._read(predict_v2_pb2.ModelReadyRequest, data)
        ready = self.scoring.is_ready(request.name, request.version)
        return predict_v2_pb2.ModelReadyResponse(ready=ready), None

    async def _server(self, data: bytes, remaining: float | None) -> tuple[Message, None]:
        facts = self.scoring.server()
        reply = predict_v2_pb2.ServerMetadataResponse(name=facts.name, version=facts.version)
        reply.extensions.extend(facts.extensions)
        return reply, None

    async def _model(self, data: bytes, remaining: float | None) -> tuple[Message, None]:
        request = await self._read(predict_v2_pb2.ModelMetadataRequest, data)
        return inference.grpc_model(self.scoring.model(request.name, request.version)), None

    async def _read(self, kind: type[Message], data: bytes) -> Any:
        return await self.dispatcher.read(len(data), lambda: convert.parse(kind, data))

    async def _infer(self, data: bytes, remaining: float | None) -> tuple[Message, None]:
        began = time.monotonic()
        name, version, rows = await self.dispatcher.read(len(data), lambda: inference.rows_from_grpc(data))
        if remaining is not None:
            remaining -= time.monotonic() - began
        version, scores = await self.scoring.score(name, version, rows, remaining)
        return inference.grpc_answer(version, rows, scores), None

    # TensorFlow Serving

    def _tensorflow_serving(self) -> dict[str, grpc.RpcMethodHandler]:
        limits = self.dispatcher.limits
        classify, regress = (
            tensorflow_serving_pb2.ClassificationRequest,
            tensorflow_serving_pb2.RegressionRequest,
        )
        methods: dict[str, tuple[Callable[[bytes], Any], Callable[[tfs.ModelAnswer], Message]]] = {
            "Predict": (lambda data: tfs.predict_query(data, limits), tfs.predict_reply),
            "Classify": (
                lambda data: tfs.examples_query(data, classify, "classification"),
                tfs.classify_reply,
            ),
            "Regress": (lambda data: tfs.examples_query(data, regress, "regression"), tfs.regress_reply),
        }
        return {name: self._handler(self._predicting(*both), "infer") for name, both in methods.items()}

    def _predicting(
        self, read: Callable[[bytes], Any], pack: Callable[[tfs.ModelAnswer], Message]
    ) -> Callable[[bytes, float | None], Awaitable[tuple[Message, None]]]:
        async def answer(data: bytes, remaining: float | None) -> tuple[Message, None]:
            began = time.monotonic()
            query, frame = await self.dispatcher.read(len(data), lambda: read(data))
            if remaining is not None:
                remaining -= time.monotonic() - began
            answered = await tfs.predict(self.scoring, query, frame, remaining)
            return await self.dispatcher.read(len(data), lambda: pack(answered)), None

        return answer


def _encoded(reply: Reply) -> bytes:
    return reply if isinstance(reply, bytes) else reply.SerializeToString()


def _options(limits: Limits, several_processes: bool, max_connections: int | None) -> list[tuple[str, int]]:
    options = [
        ("grpc.max_receive_message_length", limits.max_body),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", limits.max_header),
        ("grpc.absolute_max_metadata_size", limits.max_header),
        ("grpc.so_reuseport", int(several_processes)),
        # A connection must start HTTP/2 within this time, and is closed after it was idle for long.
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", int(limits.idle_seconds * 1_000)),
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        # Beyond these limits the library cancels calls silently, so the dispatcher refuses them earlier with a
        # reason.
        ("grpc.server.max_pending_requests", _NO_LIMIT),
        ("grpc.server.max_pending_requests_hard_limit", _NO_LIMIT),
    ]
    if max_connections is not None:
        options.append(("grpc.max_allowed_incoming_connections", max_connections))
    return options


def _all_descriptors() -> DescriptorPool:
    """Every message type of this server in one pool, for reflection."""
    pool = DescriptorPool()
    for file in (
        STRUCT,
        recmill_pb2.DESCRIPTOR,
        predict_v2_pb2.DESCRIPTOR,
        tensorflow_serving_pb2.DESCRIPTOR,
        health_pb2.DESCRIPTOR,
        reflection_pb2.DESCRIPTOR,
    ):
        copy = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(copy)
        pool.Add(copy)
    return pool
