"""What can be asked of a server, whatever the transport: one table of calls, and the dispatcher that answers them."""

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
from recmill.stages.serve.limits import Admission, Limits
from recmill.stages.serve.security import Scope, Tokens

if TYPE_CHECKING:
    from recmill.stages.serve.service import Service
    from recmill.stages.serve.telemetry import Telemetry

_LARGE_BYTES = 64 << 10  # of a request that a thread reads
_LARGE_WAITING = 16  # such requests, each held in memory
Parsed = TypeVar("Parsed")
_logger = logging.getLogger("recmill.serve")


class Recommends(m.Message, frozen=True, kw_only=True):
    """Several users in one call."""

    queries: list[m.Recommend]


class Recalls(m.Message, frozen=True, kw_only=True):
    """Candidates for several users in one call."""

    queries: list[m.Recall]


class Answers(m.Message, frozen=True, kw_only=True):
    """One answer for each query, in their order."""

    answers: list[m.Answer]


class Events(m.Message, frozen=True, kw_only=True):
    """What users just did, oldest first."""

    events: list[m.Event]


class NewItems(m.Message, frozen=True, kw_only=True):
    """Items to add or replace."""

    items: list[m.NewItem]


class ItemIds(m.Message, frozen=True, kw_only=True):
    """Items to remove."""

    items: list[m.Id]


class RollBack(m.Message, frozen=True, kw_only=True):
    """The version to go back to; none: the one before."""

    version: str | None = None


class Nothing(m.Message, frozen=True, kw_only=True):
    """A call that needs nothing to be said."""


class UserPrefix(m.Message, frozen=True, kw_only=True):
    """Ask for ids of users that begin like this."""

    prefix: str = ""
    limit: int = 20


class FeatureRowsRequest(m.Message, frozen=True, kw_only=True):
    """Ask for packed feature rows of a user and items: between roles."""

    query: m.Rank


class RankRows(m.Message, frozen=True, kw_only=True):
    """Packed feature rows to rank: between roles."""

    user: bytes
    items: list[bytes]
    context: m.Values


class ChangeResult(m.Message, frozen=True, kw_only=True, omit_defaults=False):
    """How many were taken, and the version that has them now."""

    number: int
    version: str


class UserIds(m.Message, frozen=True, kw_only=True):
    """Ids of users, as the log writes them."""

    users: list[m.Id]


class PackedRows(m.Message, frozen=True, kw_only=True):
    """Feature rows as stores keep them; empty: not known."""

    user: bytes
    items: list[bytes]
    degraded: list[str]
    version: str


class Refusal(m.Message, frozen=True, kw_only=True):
    """Why there is no answer, in one sentence."""

    error: str


@dataclass(frozen=True)
class ServerCall:
    """One thing to ask for: who may, which roles answer it, and how. `is_change`: it waits beside the queue."""

    name: str
    run: Callable[[Service, Any], Any]
    roles: frozenset[str]
    scope: Scope = "read"
    is_change: bool = False


ROLES = ("all", "recommend", "recall", "features", "rank")
_EVERY = frozenset(ROLES)


def _roles(*names: str) -> frozenset[str]:
    return frozenset({"all", *names})


def _changed(service: Service, number: int) -> ChangeResult:
    return ChangeResult(number=number, version=service.status().version)


def _lookup(service: Service, request: FeatureRowsRequest) -> PackedRows:
    user, items, degraded, version = service.lookup_rows(request.query)
    return PackedRows(user=user, items=items, degraded=degraded, version=version)


CALLS = {
    call.name: call
    for call in (
        ServerCall("recommend", lambda s, r: s.recommend(r), _roles("recommend")),
        ServerCall("rank", lambda s, r: s.rank(r), _roles("recommend", "rank")),
        ServerCall("recall", lambda s, r: s.recall(r), _roles("recommend", "recall")),
        ServerCall("features", lambda s, r: s.features(r), _roles("recommend", "features")),
        ServerCall("lookup", _lookup, _roles("features")),
        ServerCall("rank_rows", lambda s, r: s.rank_rows(r.user, r.items, r.context), _roles("rank")),
        ServerCall("infer", lambda s, r: s.score(r), _roles("rank")),
        ServerCall(
            "users", lambda s, r: UserIds(users=s.user_ids(r.prefix, r.limit)), _EVERY, is_change=True
        ),
        ServerCall("status", lambda s, r: s.status(), _EVERY, is_change=True),
        ServerCall("add_events", lambda s, r: _changed(s, s.add_events(r.events)), _EVERY, is_change=True),
        ServerCall(
            "add_items", lambda s, r: _changed(s, s.add_items(r.items)), _EVERY, "admin", is_change=True
        ),
        ServerCall(
            "remove_items", lambda s, r: _changed(s, s.remove_items(r.items)), _EVERY, "admin", is_change=True
        ),
        ServerCall("rollback", lambda s, r: s.rollback(r.version), _EVERY, "admin", is_change=True),
    )
}


@dataclass(frozen=True)
class CallError:
    """A call without an answer, in the words of both transports."""

    http_status: int
    grpc_code: str
    message: str
    retry_after_seconds: int | None = None


class CallDispatcher:
    """Where every transport brings its calls: may they ask, is it right, is there room; then the service answers."""

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
        self.admin_is_open = admin_is_open  # to those without a token, when there are no tokens
        self.is_draining = False
        waiting = self.limits.max_waiting
        self.queue = Admission(threads or available_cores(), waiting, self.limits.max_wait_seconds)
        # Changes may take long, and must neither hold up answers nor be held up by them.
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
                "This call needs the admin scope, and this server has no tokens and wants no client certificates. "
                "Start it with --token-file or --tls-client-ca."
            )

    def offers(self, call: ServerCall) -> None:
        """Raises NotFound when this process has a role that does not answer such calls; Overloaded when it cannot now.

        It is asked before a request is even read: what is refused must cost little.
        """
        if not call.is_change:
            self.queue.check_room(call.name, 1, None)
        if self.role not in call.roles:
            raise NotFound(
                f'This server has the role "{self.role}", which does not answer {call.name}; '
                f"ask one of: {', '.join(sorted(call.roles))}."
            )

    async def read(self, num_bytes: int, parse: Callable[[], Parsed]) -> Parsed:
        """What `parse` makes of so many bytes. A thread does it when they are many, so that the event loop is free."""
        return parse() if num_bytes < _LARGE_BYTES else await self.reading.run("read", parse)

    async def answer(
        self,
        call: ServerCall,
        requests: Sequence[msgspec.Struct],
        remaining_seconds: float | None = None,
        pack: Callable[[Any], Any] = lambda answer: None,
    ) -> list[tuple[Any, Any]]:
        """One answer for each request, and the same as `pack` makes it for the transport; or an error for all.

        The requests are within limits already. The earliest deadline of any of them holds for all. Packing is done by
        the thread that answers, so that the event loop is free.
        """
        deadline = time.monotonic() + self.seconds_for(requests, remaining_seconds)
        works = [self._work(call, request, deadline, pack) for request in requests]
        if call.is_change:
            return await self.changes.run_all(call.name, works)
        return await self.queue.run_all(call.name, works, deadline)

    def seconds_for(self, requests: Sequence[Any], remaining_seconds: float | None) -> float:
        """How long the answer may take: what the connection and the requests say, else the default."""
        asked = [ms / 1000 for request in requests if (ms := getattr(request, "deadline_ms", None))]
        known = [*asked, remaining_seconds] if remaining_seconds is not None else asked
        return min(known) if known else self.limits.deadline_seconds

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
            answer = call.run(self.service, with_time_left(request, deadline))
            return answer, pack(answer)

        return work

    def close(self) -> None:
        self.reading.close()
        self.queue.close()
        self.changes.close()


@dataclass(frozen=True)
class BatchAnswer:
    """What several answers have in common, for counting."""

    degraded: list[str]
    version: str


def together(answers: Sequence[Any]) -> Any:
    """What to count for a call; none for calls that cannot be degraded."""
    if not hasattr(answers[0], "degraded"):
        return None
    if len(answers) == 1:
        return answers[0]
    return BatchAnswer([reason for answer in answers for reason in answer.degraded], answers[0].version)


def with_time_left(request: Any, deadline: float) -> Any:
    """The request as the service should see it: its deadline counts from now."""
    if not hasattr(request, "deadline_ms"):
        return request
    return msgspec.structs.replace(request, deadline_ms=max(0.1, (deadline - time.monotonic()) * 1000))


def refused(error: Exception) -> CallError:
    """How to say an error. One that is our own mistake goes to the log with a number, and only the number is shown."""
    if isinstance(error, ServingError):
        retry = getattr(error, "retry_after_seconds", None)
        return CallError(error.http_status, error.grpc_code, str(error), retry)
    if isinstance(error, RecmillError):
        for kind, status, code in _OTHER_ERRORS:
            if isinstance(error, kind):
                return CallError(status, code, str(error))
    number = secrets.token_hex(4)
    _logger.error("error %s", number, exc_info=error)
    return CallError(
        500, "INTERNAL", f"The server made a mistake. Its log has more under the number {number}."
    )


_OTHER_ERRORS: tuple[tuple[type[RecmillError], int, str], ...] = (
    (FeatureError, 400, "INVALID_ARGUMENT"),
    (ArtifactError, 409, "FAILED_PRECONDITION"),
    (StoreError, 503, "UNAVAILABLE"),
)
