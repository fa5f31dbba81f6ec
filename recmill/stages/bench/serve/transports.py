"""gRPC and HTTP transports of encoded requests, with a deadline."""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from typing import Protocol, TypeVar

from recmill.errors import RecmillError
from recmill.stages.bench.serve.http1 import Http1Connection
from recmill.stages.bench.serve.http2 import Done, Http2Connection, call_headers

P = TypeVar("P", bound=asyncio.Protocol)
_RETRY_SECONDS = 0.05
_MAX_HTTP_CONNECTIONS = 200


class Transport(Protocol):
    """`send` calls `done` once, with the kind of problem (empty on success) and the body of the answer."""

    async def open(self) -> None: ...
    def send(self, request: bytes, done: Done) -> None: ...
    def close(self) -> None: ...


def precise_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are exact to a few microseconds; epoll rounds up to milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


# The kernel balances connections, not requests, over the processes of a server: with few of them some stay idle.
_CONNECTIONS = 32


class GrpcTransport:
    """Calls of one method over a pool of connections, which reconnect when the server comes back."""

    def __init__(
        self, address: str, method: str, deadline_seconds: float, connections: int = _CONNECTIONS
    ) -> None:
        self.address, self.deadline_seconds = address, deadline_seconds
        self._headers = call_headers(method, address, deadline_seconds)
        self._connections: list[Http2Connection] = []
        self._number = connections
        self._turn = 0
        self._reconnecting: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._connections = [await connect(Http2Connection, self.address) for _ in range(self._number)]

    def send(self, request: bytes, done: Done) -> None:
        self._turn = (self._turn + 1) % self._number
        connection = self._connections[self._turn]
        if not connection.is_open:
            self._start_reconnect()
            done("connection", b"")
            return

        def answered(problem: str, body: bytes) -> None:
            timer.cancel()
            done(problem, body)

        stream = connection.send(self._headers, request, answered)
        timer = self._loop.call_later(self.deadline_seconds, connection.cancel, stream)

    def close(self) -> None:
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        for connection in self._connections:
            connection.close()

    def _start_reconnect(self) -> None:
        if self._reconnecting is None or self._reconnecting.done():
            self._reconnecting = self._loop.create_task(self._reconnect())

    async def _reconnect(self) -> None:
        while closed := [index for index, one in enumerate(self._connections) if not one.is_open]:
            try:
                for index in closed:
                    self._connections[index] = await connect(Http2Connection, self.address)
            except RecmillError:
                await asyncio.sleep(_RETRY_SECONDS)


class HttpTransport:
    """One connection for each request in flight; past a limit, requests wait for a free one."""

    def __init__(self, address: str, deadline_seconds: float) -> None:
        self.address, self.deadline_seconds = address, deadline_seconds
        self._free: list[Http1Connection] = []
        self._waiting: deque[_PendingRequest] = deque()
        self._number = 0
        self._opening: set[asyncio.Task[None]] = set()
        self._open: set[Http1Connection] = set()
        self._loop: asyncio.AbstractEventLoop

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._connect()

    def send(self, request: bytes, done: Done) -> None:
        waiting = _PendingRequest(request, done)
        waiting.timer = self._loop.call_later(self.deadline_seconds, self._time_out, waiting)
        while self._free:
            connection = self._free.pop()
            if connection.is_free:
                self._ask(connection, waiting)
                return
            self._forget(connection)
        self._waiting.append(waiting)
        if self._number < _MAX_HTTP_CONNECTIONS:
            task = self._loop.create_task(self._connect())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def close(self) -> None:
        for task in self._opening:
            task.cancel()
        for connection in self._open:
            connection.close()

    async def _connect(self) -> None:
        self._number += 1
        try:
            connection = await connect(Http1Connection, self.address)
        except RecmillError:
            self._number -= 1
            if self._waiting:
                self._waiting.popleft().end("connection", b"")
                return
            raise
        self._open.add(connection)
        self._release(connection)

    def _ask(self, connection: Http1Connection, waiting: _PendingRequest) -> None:
        def answered(problem: str, body: bytes) -> None:
            waiting.end(problem, body)
            self._release(connection)

        waiting.connection = connection
        connection.send(waiting.request, answered)

    def _time_out(self, waiting: _PendingRequest) -> None:
        if waiting.connection is not None:
            waiting.connection.cancel()
        else:
            waiting.end("late", b"")

    def _release(self, connection: Http1Connection) -> None:
        while self._waiting and self._waiting[0].is_over:
            self._waiting.popleft()
        if not connection.is_open:
            self._forget(connection)
        elif self._waiting:
            self._ask(connection, self._waiting.popleft())
        else:
            self._free.append(connection)

    def _forget(self, connection: Http1Connection) -> None:
        if connection in self._open:
            self._open.remove(connection)
            self._number -= 1


class _PendingRequest:
    """A request in flight, or waiting for a connection."""

    def __init__(self, request: bytes, done: Done) -> None:
        self.request = request
        self.done = done
        self.connection: Http1Connection | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.is_over = False

    def end(self, problem: str, body: bytes) -> None:
        if not self.is_over:
            self.is_over = True
            if self.timer is not None:
                self.timer.cancel()
            self.done(problem, body)


async def ask(transport: Transport, request: bytes) -> tuple[str, bytes]:
    """Send one request and wait for its answer."""
    answer: asyncio.Future[tuple[str, bytes]] = asyncio.get_running_loop().create_future()

    def done(problem: str, body: bytes) -> None:
        if not answer.done():
            answer.set_result((problem, body))

    transport.send(request, done)
    return await answer


async def connect(kind: type[P], address: str) -> P:
    host, port = split_address(address)
    try:
        _, protocol = await asyncio.get_running_loop().create_connection(kind, host, port)
    except OSError as error:
        raise RecmillError(
            f"No server answers at {address}: {error.strerror or error}. Start one with `recmill serve`."
        ) from None
    return protocol


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise RecmillError(f"An address must look like 127.0.0.1:8500, got {address}.")
    return host.strip("[]"), int(port)
