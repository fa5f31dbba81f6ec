"""HTTP connections with limits, and a drain that resets none of them.

Limits apply to header bytes, to the time of each part of a request, and to pipelining.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from recmill.stages.serve.limits import Limits

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from recmill.stages.serve.security import Tls

HEALTH_PATHS = ("/health/", "/v2/health/")
_HANDSHAKE_SECONDS = 10.0
_ANSWER_SECONDS = 2.0  # seconds to send the refusal of a body that is too slow
_CLOSE_SECONDS = 5.0  # seconds for a client to read what was written before its connection is aborted
_MAX_AHEAD = 100  # pipelined requests per connection
_QUIET_SECONDS, _GRACE_SECONDS = 0.2, 2.0  # drain: seconds without a request, and in total
_BACKLOG = 2_048


class IdleConnections:
    """Connections without a request in progress. One of them is closed when there are too many connections."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._silent: dict[BoundedProtocol, None] = {}  # those that never sent a request, oldest first
        self._answered: dict[BoundedProtocol, None] = {}

    def add(self, connection: BoundedProtocol, is_silent: bool) -> None:
        (self._silent if is_silent else self._answered)[connection] = None

    def remove(self, connection: BoundedProtocol) -> None:
        self._silent.pop(connection, None)
        self._answered.pop(connection, None)

    def make_room(self, num_connections: int) -> None:
        """Close the connection that has been idle for longest, those that never sent a request first."""
        if num_connections > self.max_connections and (found := self._silent or self._answered):
            oldest = next(iter(found))
            self.remove(oldest)
            oldest.connections.discard(oldest)
            # Otherwise a client that does not read its answer would stay for ever.
            stays = oldest.transport.get_write_buffer_size() > 0
            oldest.transport.abort() if stays else oldest.transport.close()


class BoundedProtocol(HttpToolsProtocol):
    """A connection that is closed when a part of a request, or the next request, takes too long to arrive."""

    def __init__(self, limits: Limits, idle: IdleConnections, **more: Any) -> None:
        super().__init__(**more)
        self.limits = limits
        self.idle = idle
        self.is_draining = False
        self._due = math.inf
        self._head_bytes = 0
        self._bytes_without_progress = 0
        self._is_in_head = False
        self._expects_body = False
        self._refusal = 400, "The request is not valid HTTP/1.1."

    # callbacks of the parser

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._due = time.monotonic() + self.limits.idle_seconds
        self.idle.make_room(len(self.connections))
        self.idle.add(self, is_silent=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self.idle.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._bytes_without_progress += len(data)
        super().data_received(data)
        if self._bytes_without_progress > self.limits.max_header and not self.transport.is_closing():
            self._too_much_head()
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0
        self._due = time.monotonic() + self.limits.send_seconds

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header or, after the body, a trailer."""
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= _MAX_AHEAD:
            self._refusal = 400, f"More than {_MAX_AHEAD} requests were sent before the first was answered."
            raise ValueError
        self.idle.remove(self)
        is_free = self.cycle is None or self.cycle.response_complete
        self._is_in_head, self._expects_body, self._bytes_without_progress = False, True, 0
        self._due = time.monotonic() + self.limits.send_seconds + _ANSWER_SECONDS if is_free else math.inf
        super().on_headers_complete()
        if self.is_draining or len(self.connections) > self.idle.max_connections:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._bytes_without_progress = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._expects_body, self._bytes_without_progress = False, 0
        self._due = math.inf
        super().on_message_complete()

    def on_response_complete(self) -> None:
        wait = self.limits.send_seconds if self._expects_body else self.limits.idle_seconds
        self._due = time.monotonic() + wait
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self.idle.add(self, is_silent=False)

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client may half-close the connection after its request; it still gets the answer."""
        is_answering = self.cycle is not None and not self.cycle.response_complete and not self._expects_body
        if not is_answering or self.pipeline or self.scheme == "https":
            return False
        self.cycle.keep_alive = False
        return True

    # limits

    def expire(self, now: float) -> None:
        """Close the connection if it is due. Abort it if it was closed and its client does not read the rest."""
        if now < self._due:
            return
        if self.transport.is_closing():
            self.transport.abort()
        elif self._is_in_head:
            self._refusal = (
                408,
                f"The head of the request did not arrive within {self.limits.send_seconds:g} s.",
            )
            self.send_400_response("")
        else:
            self.transport.close()
        self._due = now + _CLOSE_SECONDS

    def drain(self) -> None:
        """Make the next answer the last one."""
        self.is_draining = True
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """Write a refusal in the format of all others, and close."""
        status, sentence = self._refusal
        body = msgspec.json.encode({"error": sentence})
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(
            body
        )
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
        self._due = time.monotonic() + _CLOSE_SECONDS

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > self.limits.max_header:
            self._too_much_head()
            raise ValueError

    def _too_much_head(self) -> None:
        self._refusal = 431, f"The head of the request has more than {self.limits.max_header:,} bytes."


class HttpServer(uvicorn.Server):
    """An ASGI application behind limited connections on one listening socket."""

    def __init__(
        self, app: ASGIApp, limits: Limits, max_connections: int, drain_seconds: float, tls: Tls | None
    ) -> None:
        self.limits = limits
        self.idle = IdleConnections(max_connections)
        self.is_draining = False
        super().__init__(
            uvicorn.Config(
                self._unless_full(app),
                http="httptools",
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                timeout_keep_alive=math.ceil(limits.idle_seconds),
                timeout_graceful_shutdown=max(1, round(drain_seconds)),
                **(tls.for_uvicorn() if tls else {}),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller, who handles them for both transports."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        loop = asyncio.get_running_loop()
        # The loop closes its copy of the socket; connections in the queue of the original are still accepted after
        # that.
        self.servers = [
            await loop.create_server(
                self._protocol, sock=listener.dup(), backlog=self._backlog, **self._tls_options()
            )
            for listener in sockets
        ]
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                connection.expire(now)  # type: ignore[union-attr]
        return await super().on_tick(counter)

    def drain(self) -> None:
        """Make every answer from now on the last of its connection, and stop the server soon."""
        self.is_draining = self.should_exit = True
        for connection in list(self.server_state.connections):
            connection.drain()  # type: ignore[union-attr]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer requests a little longer, each as the last one of its connection, then stop.

        Nothing is reset: an idle client sees its connection end, and a later one finds no listener.
        """
        self.drain()
        await self._wait_until_quiet()
        await self._accept_the_last(sockets or [])
        await self._wait_until_quiet()
        await super().shutdown(sockets)

    async def _wait_until_quiet(self) -> None:
        """Wait until there are no connections, no request for a while, or the grace period ends."""
        end = time.monotonic() + _GRACE_SECONDS
        num_requests = -1
        while self.server_state.connections and time.monotonic() < end:
            if num_requests == self.server_state.total_requests and not self.server_state.tasks:
                return
            num_requests = self.server_state.total_requests
            await asyncio.sleep(_QUIET_SECONDS)

    async def _accept_the_last(self, listeners: list[socket.socket]) -> None:
        loop, opened = asyncio.get_running_loop(), []
        for server, listener in zip(self.servers, listeners, strict=True):
            server.close()
            listener.setblocking(False)
            with contextlib.suppress(OSError):  # until none is left
                while True:
                    opened.append(listener.accept()[0])
            listener.close()
        for connection in opened:
            with contextlib.suppress(OSError, ssl.SSLError):
                await loop.connect_accepted_socket(self._protocol, connection, **self._tls_options())

    @property
    def _backlog(self) -> int:
        """Accept everything in the listen queue now, before any connection of it is closed."""
        return max(1, min(_BACKLOG, self.idle.max_connections // 2))

    def _protocol(self) -> BoundedProtocol:
        made = BoundedProtocol(
            self.limits,
            self.idle,
            config=self.config,
            server_state=self.server_state,
            app_state={},
        )
        made.is_draining = self.is_draining
        return made

    def _tls_options(self) -> dict[str, Any]:
        if not self.config.is_ssl:
            return {}
        return {"ssl": self.config.ssl, "ssl_handshake_timeout": _HANDSHAKE_SECONDS}

    def _unless_full(self, app: ASGIApp) -> ASGIApp:
        """The application, or health checks alone while there are too many connections."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            num_connections = len(self.server_state.connections)
            if num_connections > self.idle.max_connections and not scope["path"].startswith(HEALTH_PATHS):
                await _refuse(send, f"There are {num_connections:,} connections, which is the limit.")
            else:
                await app(scope, receive, send)

        return answer


async def _refuse(send: Send, sentence: str) -> None:
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1"), (b"connection", b"close")]
    body = msgspec.json.encode({"error": sentence})
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
