"""Connections to Redis. A thread opens new ones, so that callers can give up at their deadline."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from recmill.artifacts.feature_store.address import Servers

if TYPE_CHECKING:
    from collections.abc import Callable

    from redis import ConnectionPool

_MAX_CONNECTING = 4
T = TypeVar("T")


class Connections:
    """Idle connections of each server. Discovering a cluster's nodes has a deadline too."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._idle: dict[ConnectionPool, list[Any]] = {}
        self._lock = threading.Lock()
        self._makers = ThreadPoolExecutor(_MAX_CONNECTING, thread_name_prefix="redis-connect")

    def find_servers(self, ends_at: float) -> None:
        """Connect in advance, so that `pool_of` does not block."""
        if not self._servers.is_found:
            self._makers.submit(lambda: self._servers.client).result(seconds_left(ends_at))

    def take(self, pool: ConnectionPool, ends_at: float) -> Any:
        while (connection := self._pop(pool)) is not None:
            if _is_open(connection):
                return connection
            self.drop(pool, connection)
        making = self._makers.submit(pool.get_connection)
        try:
            return making.result(seconds_left(ends_at))
        except TimeoutError:
            making.add_done_callback(lambda made: self._keep(pool, made))
            raise

    def _pop(self, pool: ConnectionPool) -> Any:
        with self._lock:
            idle = self._idle.get(pool)
            return idle.pop() if idle else None

    def _keep(self, pool: ConnectionPool, made: Future[Any]) -> None:
        """Keep a connection that was too late for its caller."""
        if not made.cancelled() and made.exception() is None:
            self.give(pool, made.result())

    def give(self, pool: ConnectionPool, connection: Any) -> None:
        with self._lock:
            self._idle.setdefault(pool, []).append(connection)

    def drop(self, pool: ConnectionPool, connection: Any) -> None:
        """Close a connection: it is dead, or a late answer may still arrive on it."""
        connection.disconnect()
        pool.release(connection)

    def close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, {}
        for pool, connections in idle.items():
            for connection in connections:
                self.drop(pool, connection)

    def close(self) -> None:
        self._makers.shutdown(wait=False, cancel_futures=True)
        self.close_idle()


class Exchange:
    """Commands to some servers and their answers, until a deadline. Connections are reused after success."""

    def __init__(self, connections: Connections, ends_at: float) -> None:
        self._from = connections
        self._ends_at = ends_at
        self._connections: dict[ConnectionPool, Any] = {}

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        leave: Callable[[ConnectionPool, Any], None] = self._from.give if kind is None else self._from.drop
        for pool, connection in self._connections.items():
            leave(pool, connection)

    def send(self, pool: ConnectionPool, command: bytes) -> None:
        """Send an encoded command."""
        if pool not in self._connections:
            self._connections[pool] = self._from.take(pool, self._ends_at)
        self._connections[pool].send_packed_command([command], check_health=False)

    def read(self, pool: ConnectionPool) -> list[bytes | None]:
        """The next answer from a server."""
        left = seconds_left(self._ends_at)
        answer: list[bytes | None] = self._connections[pool].read_response(timeout=left)
        return answer


def seconds_left(ends_at: float) -> float:
    seconds = ends_at - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _is_open(connection: Any) -> bool:
    """Whether the connection is open and has no unexpected data."""
    from redis.exceptions import RedisError

    try:
        return not connection.can_read(0)
    except (RedisError, OSError):
        return False
