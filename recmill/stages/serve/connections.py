"""Limits the open connections of a process, and closes the most silent ones first when there are too many."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recmill.errors import RecmillError

RESERVED_FILES = 256  # descriptors for everything except connections: bundles, stores, logs, pipes
MAX_CONNECTIONS = 10_000  # per transport, unless --max-connections is higher
MIN_CONNECTIONS = 16
_WANTED_FILES = 1 << 20  # where the system has no limit
_RESERVE = 0.2  # fraction of the connections that is kept free; silent ones are closed for it
_PERIOD_SECONDS = 0.25
_QUIET_MS = 1_000  # a connection that sent data within this time is in use
_FILES = "/proc/self/fd"
# Offsets in Linux' struct tcp_info: milliseconds since data arrived, and how many bytes did.
_LAST_DATA_RECV, _BYTES_RECEIVED, _TCP_INFO_BYTES = 52, 128, 136
_logger = logging.getLogger("recmill.serve")


class TooFewFiles(RecmillError):
    """The process may not open enough files for its connections."""


def raise_file_limit() -> int:
    """Raise this process's limit of open files to the hard limit; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, _WANTED_FILES) if hard == resource.RLIM_INFINITY else hard
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def connections_for(requested: int | None, file_limit: int) -> int:
    """Connections for each of the two transports. Raises TooFewFiles when the limit of open files is too low."""
    # Half as many again may be accepted before the first of them is handled.
    room = (file_limit - RESERVED_FILES) * 2 // 5
    if requested is None:
        return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, room))
    if requested > max(MIN_CONNECTIONS, room):
        raise TooFewFiles(
            f"--max-connections {requested} for HTTP and as many for gRPC need "
            f"{requested * 5 // 2 + RESERVED_FILES:,} open files, but this process may have {file_limit:,}. "
            "Raise its limit (ulimit -Hn), or ask for fewer."
        )
    return requested


@dataclass(frozen=True)
class _Connection:
    """An accepted connection. `socket` is a duplicate descriptor, so that its number cannot be reused."""

    socket: socket.socket
    port: int
    has_sent: bool
    quiet_ms: int

    @property
    def is_in_use(self) -> bool:
        return self.has_sent and self.quiet_ms < _QUIET_MS

    def __lt__(self, other: _Connection) -> bool:
        """Connections that never sent anything come first, then those that have been silent for longest."""
        return (self.has_sent, -self.quiet_ms) < (other.has_sent, -other.quiet_ms)


class ConnectionReaper:
    """Keeps spare connections on each port by closing those that have been silent for longest.

    It reads the kernel's TCP info, which covers connections of every transport, also before their TLS handshake.
    """

    def __init__(self, ports: Sequence[int], max_connections: int) -> None:
        self.ports = tuple(ports)
        self.target = max(1, int(max_connections * (1 - _RESERVE)))

    async def run(self) -> None:
        """Check several times a second, until cancelled."""
        while os.path.isdir(_FILES):
            await asyncio.sleep(_PERIOD_SECONDS)
            if len(os.listdir(_FILES)) > self.target:
                await asyncio.to_thread(self.reap)

    def reap(self) -> int:
        """Close the excess connections and return how many."""
        number = 0
        with contextlib.ExitStack() as held:
            connections = list(self._open())
            for one in connections:
                held.callback(one.socket.close)
            for port in self.ports:
                by_silence = sorted(one for one in connections if one.port == port)
                for one in by_silence[: max(0, len(by_silence) - self.target)]:
                    if not one.is_in_use:
                        number += _shut(one.socket)
        if number:
            _logger.warning("closed %d silent connections: there were too many", number)
        return number

    def _open(self) -> Iterator[_Connection]:
        for name in os.listdir(_FILES):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode) and (
                    found := _connection(int(name), self.ports)
                ):
                    yield found


def _connection(descriptor: int, ports: Sequence[int]) -> _Connection | None:
    """The TCP connection behind a descriptor, if it was accepted on one of these ports."""
    copy = socket.socket(fileno=os.dup(descriptor))
    try:
        is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
        if is_tcp and (port := copy.getsockname()[1]) in ports and copy.getpeername():
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            (quiet_ms,) = struct.unpack_from("=I", info, _LAST_DATA_RECV)
            (num_bytes,) = struct.unpack_from("=Q", info, _BYTES_RECEIVED)
            kept, copy = copy, None  # type: ignore[assignment]
            return _Connection(kept, port, num_bytes > 0, quiet_ms)
    finally:
        if copy is not None:
            copy.close()
    return None


def _shut(connection: socket.socket) -> bool:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True
