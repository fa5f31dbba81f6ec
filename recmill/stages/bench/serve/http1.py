"""A minimal HTTP/1.1 client of encoded requests: keep-alive sockets, one request at a time on each."""

from __future__ import annotations

import asyncio
import re

from recmill.stages.bench.serve.http2 import Done

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_KINDS = {429: "refused", 504: "late"}


class Http1Connection(asyncio.Protocol):
    """One connection; it is free when no request is in flight."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport
        self._done: Done | None = None
        self._read = b""

    @property
    def is_free(self) -> bool:
        return self.is_open and self._done is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def connection_lost(self, error: Exception | None) -> None:
        self._end("connection", b"", reusable=False)

    def close(self) -> None:
        if self.is_open:
            self._transport.close()

    def send(self, request: bytes, done: Done) -> None:
        assert self.is_free, "one request at a time"
        self._done = done
        self._transport.write(request)

    def cancel(self) -> None:
        """Give up. The answer may still arrive, so the connection cannot be used again."""
        self._end("late", b"", reusable=False)

    def data_received(self, data: bytes) -> None:
        self._read = self._read + data if self._read else data
        head = self._read.find(b"\r\n\r\n")
        if head < 0:
            return
        length = _LENGTH.search(self._read, 0, head)
        if length is None:
            self._end("no length", b"", reusable=False)
            return
        end = head + 4 + int(length[1])
        if len(self._read) >= end:
            status, body = int(self._read[9:12]), self._read[head + 4 : end]
            closing = b"connection: close" in self._read[:head].lower()
            problem = "" if status == 200 else _KINDS.get(status, f"HTTP {status}")
            self._end(problem, body, reusable=not closing)

    def _end(self, problem: str, body: bytes, reusable: bool) -> None:
        done, self._done, self._read = self._done, None, b""
        if not reusable:
            was_open, self.is_open = self.is_open, False
            if was_open:
                self._transport.close()
        if done is not None:
            done(problem, body)


def post(path: str, host: str, body: bytes) -> bytes:
    """A POST request with a JSON body."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def get(path: str, host: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode()
