"""The recommend role: combines recall, features and ranking, which run in other processes.

Calls go over gRPC, round robin over the servers of a stage. This process needs no bundle of its own.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import msgspec
import numpy as np
from google.protobuf.message import Message

from recmill.dataset.batch import Array
from recmill.errors import (
    BadRequest,
    Forbidden,
    NotFound,
    Overloaded,
    RecmillError,
    ServingError,
    StoreError,
    TooLate,
    Unauthenticated,
)
from recmill.stages.serve import messages as m
from recmill.stages.serve.boosts import boosted
from recmill.stages.serve.clock import Clock
from recmill.stages.serve.grpc_server import SERVICE, method_name
from recmill.stages.serve.limits import check_sizes
from recmill.stages.serve.proto import convert
from recmill.stages.serve.proto import recmill_pb2 as pb
from recmill.stages.serve.recommender import scores_with_ranking

_RETRY_SECONDS = 1.0  # seconds before a server that did not answer is tried again
_DEFAULT_SECONDS = 1.0
_ERRORS: dict[str, type[ServingError]] = {
    kind.grpc_code: kind for kind in (BadRequest, NotFound, Unauthenticated, Forbidden, Overloaded, TooLate)
}


class StageUnavailable(StoreError):
    """No server of a stage answers."""


@dataclass(frozen=True)
class RoleCredentials:
    """How to connect to other roles: a token, the CA to trust, and the certificate to present."""

    token: str | None = None
    ca: bytes | None = None
    key: bytes | None = None
    certificate: bytes | None = None

    def channel(self, address: str) -> grpc.Channel:
        # A name may resolve to several servers, as with a headless service: balance over those too.
        options = [
            ("grpc.lb_policy_name", "round_robin"),
            ("grpc.max_receive_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
        ]
        if self.ca is None:
            return grpc.insecure_channel(f"dns:///{address}", options)
        credentials = grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)
        return grpc.secure_channel(f"dns:///{address}", credentials, options)

    def metadata(self) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {self.token}")] if self.token else []


class StageServers:
    """All servers of one stage. Calls go to the servers in turn; a failed call is retried once on another."""

    def __init__(self, addresses: Sequence[str], credentials: RoleCredentials) -> None:
        self.addresses = tuple(addresses)
        self._metadata = credentials.metadata()
        self._channels = [credentials.channel(address) for address in addresses]
        self._methods: dict[tuple[int, str], Callable[..., bytes]] = {}
        self._down_until = [0.0] * len(addresses)
        self._turn = itertools.count()
        self._lock = threading.Lock()

    def call(self, call: str, request: Message, deadline: float | None) -> bytes:
        """Call a server and return its reply.

        `deadline` is a `time.monotonic` time. Raises the server's error, or StageUnavailable.
        """
        data, reason = request.SerializeToString(), ""
        for server in self._next_two():
            seconds = _DEFAULT_SECONDS if deadline is None else deadline - time.monotonic()
            if seconds <= 0:
                raise TooLate("The deadline passed before a server of the stage was called.")
            try:
                return self._method(server, call)(data, timeout=seconds, metadata=self._metadata)
            except grpc.RpcError as error:
                code, reason = error.code().name, error.details() or error.code().name
                if code in _ERRORS:
                    raise _ERRORS[code](reason) from None
                self._down_until[server] = time.monotonic() + _RETRY_SECONDS
        raise StageUnavailable(
            f"No server at {', '.join(self.addresses)} answers {method_name(call)}: {reason}"
        )

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def _next_two(self) -> list[int]:
        """The next two servers in turn, those that are up first; a single server is tried twice."""
        count, first, now = len(self._channels), next(self._turn), time.monotonic()
        order = [(first + offset) % count for offset in range(count)]
        order.sort(key=lambda server: self._down_until[server] > now)
        return (order * 2)[:2]

    def _method(self, server: int, call: str) -> Callable[..., bytes]:
        method = self._methods.get((server, call))
        if method is None:
            with self._lock:
                method = self._channels[server].unary_unary(f"/{SERVICE}/{method_name(call)}")
                self._methods[server, call] = method
        return method


class RemoteRecommender:
    """A Recommender whose stages are servers of other roles. A stage that fails degrades the answer."""

    def __init__(
        self,
        recall_at: Sequence[str],
        features_at: Sequence[str],
        rank_at: Sequence[str],
        credentials: RoleCredentials = RoleCredentials(),  # noqa: B008, frozen
    ) -> None:
        self._recall = StageServers(recall_at, credentials)
        self._features = StageServers(features_at, credentials)
        self._rank = StageServers(rank_at, credentials)

    def recommend(self, query: m.Recommend) -> m.Answer:
        """The k best of the recalled items. Without recall there is no answer."""
        clock = Clock(query.deadline_ms)
        check_sizes(query.k, query.candidates)
        with clock.stage("recall"):
            recalled = self.recall_by(_recall_query(query), clock.deadline)
        degraded = list(recalled.degraded)
        ranking = recalled.ranking or m.RankingPart()
        items = recalled.items
        if items and ranking.share:
            items = self._ranked(query, items, ranking, clock, degraded)
        if query.boost:
            items = _boosted(items)
        trace = m.Trace(stages=clock.stages, counts={"candidates": len(items)}) if query.trace else None
        items = items[: query.k]
        if query.fields or query.explain:
            items = self._described(query, items, clock.deadline, degraded)
        return m.Answer(
            items=items,
            known=recalled.known,
            degraded=degraded,
            version=recalled.version,
            stages=clock.stages,
            trace=trace,
        )

    def rank(self, query: m.Rank) -> m.RankAnswer:
        clock = Clock(query.deadline_ms)
        check_sizes(1, len(query.items))
        degraded: list[str] = []
        if not query.items:
            return m.RankAnswer(scores=[])
        return self._scores(query, query.items, clock, degraded)

    def recall(self, query: m.Recall) -> m.Answer:
        return self.recall_by(query, Clock(query.deadline_ms).deadline)

    def similar(self, query: m.Similar) -> m.Answer:
        message = pb.SimilarRequest(item=convert.to_id(query.item), query=convert.to_item_query(query))
        return self._answer("similar", message, Clock(query.deadline_ms).deadline)

    def trending(self, query: m.Trending) -> m.Answer:
        message = pb.TrendingRequest(query=convert.to_item_query(query))
        return self._answer("trending", message, Clock(query.deadline_ms).deadline)

    def describe(self, query: m.Describe) -> m.Answer:
        return self.describe_by(query, Clock(query.deadline_ms).deadline)

    def _answer(self, call: str, message: Message, deadline: float | None) -> m.Answer:
        """The answer of the recall role."""
        return convert.answer_of(pb.Answer.FromString(self._recall.call(call, message, deadline)))

    # stages; deadlines are `time.monotonic` times

    def recall_by(self, query: m.Recall, deadline: float | None) -> m.Answer:
        message = pb.RecommendRequest(
            queries=[convert.to_query(query)], k=query.k, fields=query.fields, version=query.version or ""
        )
        reply = pb.RecommendReply.FromString(self._recall.call("recall", message, deadline))
        return convert.answer_of(reply.answers[0])

    def describe_by(self, query: m.Describe, deadline: float | None) -> m.Answer:
        message = pb.DescribeRequest(
            query=convert.to_query(query),
            items=convert.to_answer(m.Answer(items=query.items)).items,
            fields=query.fields,
            explain=query.explain,
            version=query.version or "",
        )
        return self._answer("describe", message, deadline)

    def packed_rows(self, query: m.Rank, deadline: float | None) -> m.PackedRows:
        message = pb.LookupRequest(query=convert.to_query(query), items=map(convert.to_id, query.items))
        reply = pb.LookupReply.FromString(self._features.call("lookup", message, deadline))
        return m.PackedRows(
            user=reply.user,
            items=list(reply.items),
            known=reply.known,
            unknown_items=convert.ids_of(reply.unknown_items, "unknown_items"),
            degraded=list(reply.degraded),
        )

    def rank_rows(self, rows: m.RankRows, deadline: float | None) -> m.RankAnswer:
        message = pb.RankRowsRequest(
            user=rows.user,
            items=rows.items,
            context=convert.to_values(rows.context),
            serve_score=rows.serve_score or "",
        )
        return convert.ranked_of(pb.RankReply.FromString(self._rank.call("rank_rows", message, deadline)))

    def _ranked(
        self,
        query: m.Recommend,
        items: list[m.Item],
        ranking: m.RankingPart,
        clock: Clock,
        degraded: list[str],
    ) -> list[m.Item]:
        """Items by recall and ranking together, or in the order of recall when the rank role fails."""
        probabilities: Array | None = None
        try:
            reply = self._scores(query, [item.id for item in items], clock, degraded)
            probabilities = np.array(reply.scores, np.float32)
        except RecmillError as error:
            if isinstance(error, ServingError) and not isinstance(error, TooLate) and error.http_status < 429:
                raise  # the request itself is invalid
            degraded.append(f"rank: {error} Items are in the order of recall")
        fused = np.array([item.score for item in items], np.float32)
        scores = scores_with_ranking(fused, probabilities, ranking)
        return [
            msgspec.structs.replace(items[number], score=float(scores[number]))
            for number in np.argsort(-scores, kind="stable")
        ]

    def _described(
        self, query: m.Recommend, items: list[m.Item], deadline: float | None, degraded: list[str]
    ) -> list[m.Item]:
        """Items with fields and reasons, or without them when the recall role fails."""
        wanted = m.Describe(
            user=query.user,
            features=query.features,
            recent=query.recent,
            version=query.version,
            items=items,
            fields=query.fields,
            explain=query.explain,
        )
        try:
            return self.describe_by(wanted, deadline).items
        except BadRequest:
            raise
        except RecmillError as error:
            degraded.append(f"fields and reasons: {error}")
            return items

    def _scores(
        self, query: m.Recommend | m.Rank, items: list[m.Id], clock: Clock, degraded: list[str]
    ) -> m.RankAnswer:
        """Scores of the rank role, from rows of the features role, or from default rows without it."""
        wanted = m.Rank(user=query.user, items=items, features=query.features, recent=query.recent)
        with clock.stage("features"):
            try:
                rows = self.packed_rows(wanted, clock.deadline)
                degraded += rows.degraded
            except RecmillError as error:
                rows = m.PackedRows(user=b"", items=[b""] * len(items))
                degraded.append(f"features: {error} Default features were used")
        with clock.stage("rank"):
            packed = m.RankRows(
                user=rows.user, items=rows.items, context=query.context, serve_score=query.serve_score
            )
            ranked = self.rank_rows(packed, clock.deadline)
        degraded += ranked.degraded
        return m.RankAnswer(
            scores=ranked.scores,
            tasks=ranked.tasks,
            known=rows.known,
            unknown_items=rows.unknown_items,
            degraded=degraded,
        )

    def close(self) -> None:
        for stage in (self._recall, self._features, self._rank):
            stage.close()


def _boosted(items: Sequence[m.Item]) -> list[m.Item]:
    """Items by their scores times the boosts from the recall role."""
    scores = np.array([item.score for item in items], np.float32)
    scores = boosted(scores, np.array([item.boost for item in items], np.float32))
    return [
        msgspec.structs.replace(items[number], score=float(scores[number]))
        for number in np.argsort(-scores, kind="stable")
    ]


def _recall_query(query: m.Recommend) -> m.Recall:
    """The Recall of a query, within the deadline of the whole call."""
    fields = {name: getattr(query, name) for name in m.Recall.__struct_fields__}
    own = {"k": max(query.candidates, query.k), "fields": [], "deadline_ms": None}
    return m.Recall(**{**fields, **own})
