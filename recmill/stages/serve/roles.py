"""Stages that run elsewhere, found by address: calls go to all servers of a stage in turn."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
from google.protobuf.message import Message

from recmill.errors import (
    BadRequest,
    Forbidden,
    NotFound,
    Overloaded,
    ServingError,
    StoreError,
    TooLate,
    Unauthenticated,
)
from recmill.stages.serve import messages as m
from recmill.stages.serve.grpc_server import SERVICE
from recmill.stages.serve.proto import convert
from recmill.stages.serve.proto import recmill_pb2 as pb

_REST_SECONDS = 1.0  # that a server which is gone is left alone
_DEFAULT_SECONDS = 1.0
_ERRORS: dict[str, type[ServingError]] = {
    kind.grpc_code: kind for kind in (BadRequest, NotFound, Unauthenticated, Forbidden, Overloaded, TooLate)
}


class StageGone(StoreError):
    """No server of a stage answers."""


@dataclass(frozen=True)
class RoleCredentials:
    """How to talk to other roles: a token, and the certificates to trust and to show."""

    token: str | None = None
    ca: bytes | None = None
    key: bytes | None = None
    certificate: bytes | None = None

    def channel(self, address: str) -> grpc.Channel:
        # A name may stand for several servers, as a headless service does: balance over those too.
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
    """All servers of one stage. A call goes to the next in turn, and once more to another when that one is gone."""

    def __init__(self, addresses: Sequence[str], peers: RoleCredentials | None = None) -> None:
        self.addresses = tuple(addresses)
        self._metadata = (peers or RoleCredentials()).metadata()
        self._channels = [(peers or RoleCredentials()).channel(address) for address in addresses]
        self._methods: dict[tuple[int, str], Callable[..., bytes]] = {}
        self._resting = [0.0] * len(addresses)  # until when
        self._turn = itertools.count()
        self._lock = threading.Lock()

    def call(self, method: str, request: Message, deadline: float | None) -> bytes:
        """The reply's bytes. `deadline` is a time of `time.monotonic`. Raises a refusal, or StageGone."""
        data, reason = request.SerializeToString(), ""
        for server in self._next_two():
            seconds = _DEFAULT_SECONDS if deadline is None else deadline - time.monotonic()
            if seconds <= 0:
                raise TooLate("The deadline passed before a server of the stage was asked.")
            try:
                return self._method(server, method)(data, timeout=seconds, metadata=self._metadata)
            except grpc.RpcError as error:
                code, reason = error.code().name, error.details() or error.code().name
                if code in _ERRORS:
                    raise _ERRORS[code](reason) from None
                self._resting[server] = time.monotonic() + _REST_SECONDS
        raise StageGone(f"No server at {', '.join(self.addresses)} answers {method}: {reason}")

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def _next_two(self) -> list[int]:
        """Those that answer come first, in turn; with one server alone it is asked again."""
        number, first = len(self._channels), next(self._turn)
        order = [(first + place) % number for place in range(number)]
        now = time.monotonic()
        order.sort(key=lambda server: self._resting[server] > now)
        return (order * 2)[:2]

    def _method(self, server: int, name: str) -> Callable[..., bytes]:
        found = self._methods.get((server, name))
        if found is None:
            with self._lock:
                found = self._channels[server].unary_unary(f"/{SERVICE}/{name}")
                self._methods[server, name] = found
        return found


class RemoteStages:
    """Recall, features and ranking by other processes. Deadlines are times of `time.monotonic`."""

    def __init__(
        self,
        recall_at: Sequence[str],
        features_at: Sequence[str],
        rank_at: Sequence[str],
        peers: RoleCredentials | None = None,
    ) -> None:
        self._recall = StageServers(recall_at, peers)
        self._features = StageServers(features_at, peers)
        self._rank = StageServers(rank_at, peers)

    def recall(self, request: m.Recall, deadline: float | None) -> m.Answer:
        message = pb.RecommendRequest(
            queries=[convert.to_query(request)], k=request.k, version=request.version or ""
        )
        reply = pb.RecommendReply.FromString(self._recall.call("Recall", message, deadline))
        return convert.answer_of(reply.answers[0])

    def lookup(self, request: m.Rank, deadline: float | None) -> tuple[bytes, list[bytes], list[str]]:
        """Packed rows of the user and the items, b"" where nothing is known; and what is degraded."""
        message = pb.LookupRequest(query=convert.to_query(request), items=map(convert.to_id, request.items))
        reply = pb.LookupReply.FromString(self._features.call("Lookup", message, deadline))
        return reply.user, list(reply.items), list(reply.degraded)

    def rank_rows(
        self, user: bytes, items: Sequence[bytes], context: m.Values, deadline: float | None
    ) -> m.RankAnswer:
        message = pb.RankRowsRequest(user=user, items=items, context=convert.to_values(context))
        return convert.ranked_of(pb.RankReply.FromString(self._rank.call("RankRows", message, deadline)))

    def close(self) -> None:
        for stage in (self._recall, self._features, self._rank):
            stage.close()
