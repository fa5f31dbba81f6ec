"""The calls that a server offers, in one table that HTTP, gRPC and the split roles share, and their dispatcher."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from recmill.errors import (
    ArtifactError,
    FeatureError,
    Forbidden,
    NotFound,
    RecmillError,
    ServingError,
    StoreError,
)
from recmill.reporting.machine import available_cores
from recmill.stages.serve import messages as m
from recmill.stages.serve.admission import Admission
from recmill.stages.serve.changes import Change
from recmill.stages.serve.limits import Limits
from recmill.stages.serve.security import Scope, Tokens

if TYPE_CHECKING:
    from recmill.stages.serve.service import Service
    from recmill.stages.serve.telemetry import Telemetry

_LARGE_BYTES = 64 << 10  # requests from this size on are parsed on a thread
_LARGE_WAITING = 16  # how many such requests may wait: each is held in memory
Parsed = TypeVar("Parsed")
_logger = logging.getLogger("recmill.serve")

ROLES = ("all", "recommend", "recall", "features", "rank")
_EVERY = frozenset(ROLES)


@dataclass(frozen=True)
class ServerCall:
    """One call: its request and reply types, the roles that answer it, the required scope, and its HTTP endpoint.

    `is_change`: it has a queue of its own, separate from the answers. `takes_many` and `answers_many` are the types
    for several requests at once; `batch` is the list whose length is limited.
    """

    name: str
    run: Callable[[Service, Any], Any]
    takes: type[m.Message]
    answers: type[m.Message]
    roles: frozenset[str]
    endpoint: tuple[str, str] | None = None  # HTTP method and path; None: gRPC alone, between roles
    summary: str = ""
    scope: Scope = "read"
    is_change: bool = False
    batch: str | None = None
    takes_many: type[m.Message] | None = None
    answers_many: type[m.Message] | None = None


def _roles(*names: str) -> frozenset[str]:
    return frozenset({"all", *names})


CALLS = {
    call.name: call
    for call in (
        ServerCall(
            "recommend",
            lambda service, query: service.recommend(query),
            m.Recommend,
            m.Answer,
            _roles("recommend"),
            ("POST", "/v1/recommend"),
            "The k best items of a user, or of several users at once.",
            batch="queries",
            takes_many=m.Recommends,
            answers_many=m.Answers,
        ),
        ServerCall(
            "rank",
            lambda service, query: service.rank(query),
            m.Rank,
            m.RankAnswer,
            _roles("recommend", "rank"),
            ("POST", "/v1/rank"),
            "The probability of a click on each of these items.",
        ),
        ServerCall(
            "recall",
            lambda service, query: service.recommender_for(query).recall(query),
            m.Recall,
            m.Answer,
            _roles("recommend", "recall"),
            ("POST", "/v1/recall"),
            "Candidates alone, before ranking.",
            batch="queries",
            takes_many=m.Recalls,
            answers_many=m.Answers,
        ),
        ServerCall(
            "similar",
            lambda service, query: service.similar(query),
            m.Similar,
            m.Answer,
            _roles("recommend", "recall"),
            ("POST", "/v1/similar"),
            "The items that are most like an item.",
        ),
        ServerCall(
            "trending",
            lambda service, query: service.trending(query),
            m.Trending,
            m.Answer,
            _roles("recommend", "recall"),
            ("POST", "/v1/trending"),
            "The items that are most popular lately.",
        ),
        ServerCall(
            "features",
            lambda service, query: service.current.features(query),
            m.Features,
            m.FeaturesAnswer,
            _roles("recommend", "features"),
            ("POST", "/v1/features"),
            "The stored columns and features of a user and of items.",
        ),
        ServerCall(
            "lookup",
            lambda service, query: service.current.packed_rows(query),
            m.Rank,
            m.PackedRows,
            _roles("features"),
        ),
        ServerCall(
            "rank_rows",
            lambda service, rows: service.current.rank_rows(rows),
            m.RankRows,
            m.RankAnswer,
            _roles("rank"),
        ),
        ServerCall(
            "describe",
            lambda service, query: service.recommender_for(query).describe(query),
            m.Describe,
            m.Answer,
            _roles("recall"),
        ),
        ServerCall(
            "users",
            lambda service, request: service.user_ids(request),
            m.UserPrefix,
            m.UserIds,
            _EVERY,
            ("GET", "/v1/users"),
            "Ids of users that begin with a text.",
            is_change=True,
        ),
        ServerCall(
            "status",
            lambda service, request: service.status(),
            m.Empty,
            m.Status,
            _EVERY,
            ("GET", "/v1/status"),
            "The version that serves, its bundle, and how fresh it is.",
            is_change=True,
        ),
        ServerCall(
            "add_events",
            lambda service, request: service.change(Change(events=request.events)),
            m.Events,
            m.ChangeResult,
            _EVERY,
            ("POST", "/v1/events"),
            "Add events of users: the next answer takes them into account.",
            is_change=True,
            batch="events",
        ),
        ServerCall(
            "add_items",
            lambda service, request: service.change(Change(items=request.items)),
            m.NewItems,
            m.ChangeResult,
            _EVERY,
            ("POST", "/v1/items"),
            "Add or replace items (admin).",
            scope="admin",
            is_change=True,
            batch="items",
        ),
        ServerCall(
            "remove_items",
            lambda service, request: service.change(Change(removed=request.items)),
            m.ItemIds,
            m.ChangeResult,
            _EVERY,
            ("POST", "/v1/items/remove"),
            "Remove items (admin).",
            scope="admin",
            is_change=True,
        ),
        ServerCall(
            "rollback",
            lambda service, request: service.rollback(request.version),
            m.RollBack,
            m.Status,
            _EVERY,
            ("POST", "/v1/rollback"),
            "Serve an earlier version again (admin).",
            scope="admin",
            is_change=True,
        ),
    )
}
INFER_ROLES = _roles("rank")  # that answer the Open Inference Protocol


@dataclass(frozen=True)
class CallError:
    """Why a call failed, as each transport reports it."""

    http_status: int
    grpc_code: str
    message: str
    retry_after_seconds: int | None = None


class CallDispatcher:
    """Takes the calls of all transports: checks token, role and load, then calls the service."""

    def __init__(
        self,
        service: Service,
        telemetry: Telemetry,
        limits: Limits | None = None,
        tokens: Tokens | None = None,
        role: str = "all",
        threads: int | None = None,
        admin_is_open: bool = True,
    ) -> None:
        self.service = service
        self.telemetry = telemetry
        self.limits = limits or Limits()
        self.tokens = tokens
        self.role = role
        self.admin_is_open = admin_is_open  # without tokens: whether any client may make admin calls
        self.is_draining = False
        waiting = self.limits.max_waiting
        self.queue = Admission(threads or available_cores(), waiting, self.limits.max_wait_seconds)
        # Changes may take long; they must neither delay answers nor be delayed by them.
        self.changes = Admission(2, waiting, float("inf"), "change")
        self.reading = Admission(1, _LARGE_WAITING, float("inf"), "read")

    @property
    def is_ready(self) -> bool:
        return not self.is_draining and bool(self.service.ready)

    def permit(self, authorization: str | None, scope: Scope = "read") -> None:
        if self.tokens is not None:
            self.tokens.check(authorization, scope)
        elif scope == "admin" and not self.admin_is_open:
            raise Forbidden(
                "This call needs the admin scope, and this server has no tokens and requires no client certificates. "
                "Start it with --token-file or --tls-client-ca."
            )

    def check_offered(self, name: str, roles: frozenset[str], is_change: bool = False) -> None:
        """Raise NotFound if this process has none of the call's roles, and Overloaded if its queue is full.

        Called before the request body is read: a refusal must cost little.
        """
        if not is_change:
            self.queue.check_room(name, 1, None)
        if self.role not in roles:
            raise NotFound(
                f'This server has the role "{self.role}", which does not answer {name}; '
                f"ask one of: {', '.join(sorted(roles))}."
            )

    async def read(self, num_bytes: int, parse: Callable[[], Parsed]) -> Parsed:
        """Parse a body of this many bytes: large ones on a thread, so that the event loop stays free."""
        return parse() if num_bytes < _LARGE_BYTES else await self.reading.run("read", parse)

    async def answer(
        self,
        call: ServerCall,
        requests: Sequence[msgspec.Struct],
        remaining_seconds: float | None = None,
        pack: Callable[[Any], Any] = lambda answer: None,
    ) -> list[tuple[Any, Any]]:
        """Answer all requests, each packed by `pack` for the transport; one error fails all of them.

        The requests have passed the limits. The earliest deadline applies to all. The thread that answers also packs,
        so that the event loop stays free.
        """
        deadline = time.monotonic() + self.seconds_for(requests, remaining_seconds)
        works = [self._work(call, request, deadline, pack) for request in requests]
        if call.is_change:
            return await self.changes.run_all(call.name, works)
        return await self.queue.run_all(call.name, works, deadline)

    def seconds_for(self, requests: Sequence[Any], remaining_seconds: float | None) -> float:
        """Time budget of the answer: the shortest deadline of the requests and the connection, else the default."""
        deadlines = [ms / 1000 for request in requests if (ms := getattr(request, "deadline_ms", None))]
        if remaining_seconds is not None:
            deadlines.append(remaining_seconds)
        return min(deadlines, default=self.limits.deadline_seconds)

    def observe(
        self,
        transport: str,
        method: str,
        status: int | str,
        seconds: float,
        answer: Any = None,
        traceparent: str | None = None,
    ) -> None:
        """Count a request that was answered or refused."""
        stages = getattr(answer, "stages", None)
        self.telemetry.observe(transport, method, status, seconds, answer, stages, traceparent)
        self.telemetry.queue_length(self.queue.length)

    def _work(
        self, call: ServerCall, request: msgspec.Struct, deadline: float, pack: Callable[[Any], Any]
    ) -> Callable[[], tuple[Any, Any]]:
        def work() -> tuple[Any, Any]:
            answer = call.run(self.service, _with_time_left(request, deadline))
            return answer, pack(answer)

        return work

    def close(self) -> None:
        self.reading.close()
        self.queue.close()
        self.changes.close()


@dataclass(frozen=True)
class BatchAnswer:
    """What metrics need from several answers to one call."""

    degraded: list[str]
    version: str


def for_metrics(answers: Sequence[Any]) -> Any:
    """The answers of a call combined into one for metrics; None for calls that cannot be degraded."""
    if not hasattr(answers[0], "degraded"):
        return None
    if len(answers) == 1:
        return answers[0]
    return BatchAnswer([reason for answer in answers for reason in answer.degraded], answers[0].version)


def _with_time_left(request: Any, deadline: float) -> Any:
    """The request with the deadline that remains after queueing."""
    if not hasattr(request, "deadline_ms"):
        return request
    return msgspec.structs.replace(request, deadline_ms=max(0.1, (deadline - time.monotonic()) * 1000))


def call_error(error: Exception) -> CallError:
    """The error for the client. A bug is logged under an id, and the client gets only the id."""
    if isinstance(error, ServingError):
        retry = getattr(error, "retry_after_seconds", None)
        return CallError(error.http_status, error.grpc_code, str(error), retry)
    if isinstance(error, RecmillError):
        for kind, status, code in _OTHER_ERRORS:
            if isinstance(error, kind):
                return CallError(status, code, str(error))
    error_id = secrets.token_hex(4)
    _logger.error("error %s", error_id, exc_info=error)
    return CallError(500, "INTERNAL", f"Internal error. The server's log has the details under {error_id}.")


_OTHER_ERRORS: tuple[tuple[type[RecmillError], int, str], ...] = (
    (FeatureError, 400, "INVALID_ARGUMENT"),
    (ArtifactError, 409, "FAILED_PRECONDITION"),
    (StoreError, 503, "UNAVAILABLE"),
)
