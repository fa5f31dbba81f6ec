"""A typed client of a recmill server over HTTP: `Client`, and `AsyncClient` for event loops.

    with Client("http://127.0.0.1:8080") as client:
        for item in client.recommend("u1", k=3, fields=["title"]).items:
            print(item.id, item.fields["title"])

It imports neither NumPy nor torch. The server receives the deadline of each call. Refused connections, 429 and 503
are retried within it, with exponential backoff.
"""

from __future__ import annotations

import asyncio
import http.client
import random
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar, Unpack
from urllib.parse import urlsplit

import msgspec

from recmill.errors import (
    BadRequest,
    Forbidden,
    NotFound,
    Overloaded,
    ServingError,
    TooLate,
    Unauthenticated,
)
from recmill.stages.serve.messages import (
    Answer,
    ChangeResult,
    Event,
    Events,
    Id,
    Item,
    ItemQueryFields,
    Message,
    QueryFields,
    Rank,
    RankAnswer,
    Reason,
    Recommend,
    RecommendFields,
    Refusal,
    Similar,
    Status,
    Trending,
    query_of,
)

__all__ = [
    "Answer",
    "AsyncClient",
    "ChangeResult",
    "Client",
    "Event",
    "Item",
    "RankAnswer",
    "Reason",
    "ServerUnavailable",
    "Status",
]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds before the second attempt, and at most
_ERRORS = {
    kind.http_status: kind for kind in (BadRequest, NotFound, Unauthenticated, Forbidden, Overloaded, TooLate)
}
A = TypeVar("A", bound=Message)
P = ParamSpec("P")
R = TypeVar("R")


class ServerUnavailable(ServingError):
    """The server cannot be reached, or cannot answer now."""

    http_status, grpc_code = 503, "UNAVAILABLE"


class _Refused(Exception):
    """A failed attempt that may be retried after a pause."""

    def __init__(self, error: ServingError, after_seconds: float = 0.0) -> None:
        super().__init__(str(error))
        self.error, self.after_seconds = error, after_seconds


class Client:
    """A client of one server. Thread-safe; it keeps one connection for each concurrent call."""

    def __init__(
        self,
        address: str = "http://127.0.0.1:8080",
        *,
        token: str | None = None,
        timeout_seconds: float = 2.0,
        max_attempts: int = 4,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`timeout_seconds` covers a whole call with its retries; `tls` is for servers with a private CA."""
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadRequest(f"The address must begin with http:// or https://, got {address!r}.")
        self.address = address.rstrip("/")
        self.timeout_seconds, self.max_attempts = timeout_seconds, max_attempts
        self._headers = {"content-type": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._connect = _connector(parts.scheme, parts.hostname, parts.port, tls)
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def recommend(self, user: Id | None = None, **fields: Unpack[RecommendFields]) -> Answer:
        """The k best items of a user: `recommend("u1", k=10, where="price < 30", fields=["title"], explain=True)`."""
        return self._ask("recommend", query_of(Recommend, user, fields), Answer)

    def similar(self, item: Id, **fields: Unpack[ItemQueryFields]) -> Answer:
        """The items most similar to an item; none, with `known` false, if it is unknown."""
        return self._ask("similar", query_of(Similar, item, fields, "item"), Answer)

    def trending(self, **fields: Unpack[ItemQueryFields]) -> Answer:
        """The items that are most popular lately."""
        return self._ask("trending", query_of(Trending, None, fields, None), Answer)

    def rank(self, user: Id | None, items: Sequence[Id], **fields: Unpack[QueryFields]) -> RankAnswer:
        """The click probability of each of these items."""
        return self._ask("rank", query_of(Rank, user, {"items": list(items), **fields}), RankAnswer)

    def add_events(self, events: Sequence[Event]) -> ChangeResult:
        """Send events of users. Retried only when the server certainly did not read the request."""
        # Servers with a stream count events with the same id once, so that a 503 may be retried.
        named = [msgspec.structs.replace(event, id=event.id or secrets.token_hex(12)) for event in events]
        return self._ask("events", Events(events=named), ChangeResult, is_change=True)

    def status(self) -> Status:
        """The served version, its sizes and its freshness."""
        return self._ask("status", None, Status)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # a single call

    def _ask(self, path: str, request: Message | None, kind: type[A], is_change: bool = False) -> A:
        seconds = (getattr(request, "deadline_ms", None) or self.timeout_seconds * 1_000) / 1_000
        deadline, attempt = time.monotonic() + seconds, 0
        while True:
            attempt += 1
            try:
                return self._attempt(f"/v1/{path}", request, kind, deadline, is_change)
            except _Refused as refused:
                pause = max(refused.after_seconds, _pause_after(attempt))
                if attempt >= self.max_attempts or time.monotonic() + pause >= deadline:
                    raise refused.error from None
                time.sleep(pause)

    def _attempt(
        self, path: str, request: Message | None, kind: type[A], deadline: float, is_change: bool
    ) -> A:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TooLate(f"{self.address} did not answer in time.")
        if request is not None and "deadline_ms" in request.__struct_fields__:
            request = msgspec.structs.replace(request, deadline_ms=left * 1_000)
        status, retry_after, body = self._exchange(path, request, left, is_change)
        if status == 200:
            return msgspec.json.decode(body, type=kind)
        error = _error_of(status, body)
        if status in (429, 503):
            raise _Refused(error, float(retry_after or 0))
        raise error

    def _exchange(
        self, path: str, request: Message | None, seconds: float, is_change: bool
    ) -> tuple[int, str | None, bytes]:
        """Status, Retry-After and body. A change opens a new connection: an idle one could close while it is sent."""
        connection = self._connection(seconds, is_new=is_change)
        try:
            method = "GET" if request is None else "POST"
            body = None if request is None else msgspec.json.encode(request)
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            found = response.status, response.headers.get("retry-after"), response.read()
        except TimeoutError:
            connection.close()
            raise TooLate(f"{self.address} did not answer in time.") from None
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            lost = ServerUnavailable(f"{self.address} closed the connection: {error}.")
            raise lost if is_change else _Refused(lost) from None
        with self._lock:
            self._idle.append(connection)
        return found

    def _connection(self, seconds: float, is_new: bool) -> http.client.HTTPConnection:
        with self._lock:
            connection = self._idle.pop() if self._idle and not is_new else None
        if connection is not None and connection.sock is not None:
            connection.sock.settimeout(seconds)
            return connection
        connection = self._connect(timeout=seconds)
        try:
            connection.connect()
        except TimeoutError:
            raise TooLate(f"{self.address} did not answer in time.") from None
        except OSError as error:
            unreachable = ServerUnavailable(f"{self.address} cannot be reached: {error.strerror or error}.")
            raise _Refused(unreachable) from None
        return connection


class AsyncClient:
    """Awaitable versions of the same calls. They run in a thread pool of its own, at most `max_calls` at once."""

    def __init__(
        self, address: str = "http://127.0.0.1:8080", *, max_calls: int = 16, **settings: Any
    ) -> None:
        """The arguments are those of a Client."""
        self._client = Client(address, **settings)
        self._pool = ThreadPoolExecutor(max_calls, "recmill-client")

    async def recommend(self, user: Id | None = None, **fields: Unpack[RecommendFields]) -> Answer:
        return await self._run(self._client.recommend, user, **fields)

    async def similar(self, item: Id, **fields: Unpack[ItemQueryFields]) -> Answer:
        return await self._run(self._client.similar, item, **fields)

    async def trending(self, **fields: Unpack[ItemQueryFields]) -> Answer:
        return await self._run(self._client.trending, **fields)

    async def rank(self, user: Id | None, items: Sequence[Id], **fields: Unpack[QueryFields]) -> RankAnswer:
        return await self._run(self._client.rank, user, items, **fields)

    async def add_events(self, events: Sequence[Event]) -> ChangeResult:
        return await self._run(self._client.add_events, events)

    async def status(self) -> Status:
        return await self._run(self._client.status)

    async def close(self) -> None:
        """Close all connections after the calls in progress."""
        await asyncio.to_thread(self._pool.shutdown)
        self._client.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, call: Callable[P, R], *arguments: P.args, **fields: P.kwargs) -> R:
        work = partial(call, *arguments, **fields)
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _connector(
    scheme: str, host: str, port: int | None, tls: ssl.SSLContext | None
) -> Callable[..., http.client.HTTPConnection]:
    if scheme == "http":
        return partial(http.client.HTTPConnection, host, port)
    return partial(http.client.HTTPSConnection, host, port, context=tls or ssl.create_default_context())


def _pause_after(attempt: int) -> float:
    """Seconds of backoff: doubled each time, with jitter, so that many clients do not return at once."""
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0)


def _error_of(status: int, body: bytes) -> ServingError:
    try:
        message = msgspec.json.decode(body, type=Refusal).error
    except msgspec.MsgspecError:
        message = f"The server answered with status {status}."
    if status in (408, 413, 415, 431):
        return BadRequest(message)
    return _ERRORS.get(status, ServerUnavailable)(message)
