"""A minimal gRPC client: only what unary calls of encoded messages need of HTTP/2.

grpcio's client uses as much CPU as a small model, which the server on the same machine would lack. Here headers are
encoded once and answers are not parsed. No TLS, and no Huffman-coded header values: gRPC's C core sends none.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

Done = Callable[[str, bytes], None]  # the kind of problem ("" for none), the body of the answer

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 1, 1, 4, 8, 32
_LARGEST_WINDOW = 2**31 - 1
_FRAME_BYTES = 16384
_INITIAL_WINDOW = 4
_REFUSED_STREAM, _CANCEL = 7, 8

CODES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)


class Http2Connection(asyncio.Protocol):
    """One connection with any number of concurrent calls. The callback of `send` is called exactly once."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport
        self._left = b""  # the start of an incomplete frame
        self._calls: dict[int, _Call] = {}
        self._waiting: dict[int, None] = {}  # streams blocked by flow control, in order
        self._next_stream = 1
        self._taken = 0  # bytes received since the last WINDOW_UPDATE
        self._window = 65535
        self._stream_window = 65535

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True
        # No dynamic header table, no pushes, and the largest receive windows.
        settings = struct.pack(">HIHIHI", 1, 0, 2, 0, _INITIAL_WINDOW, _LARGEST_WINDOW)
        window = struct.pack(">I", _LARGEST_WINDOW - 65535)
        transport.write(_PREFACE + frame(_SETTINGS, 0, 0, settings) + frame(_WINDOW, 0, 0, window))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        calls, self._calls = self._calls, {}
        self._waiting.clear()
        for call in calls.values():
            call.done("connection", b"")

    def close(self) -> None:
        if self.is_open:
            self._transport.close()

    def send(self, headers: bytes, message: bytes, done: Done) -> int:
        """Call with encoded headers and a serialized message; returns the stream, for `cancel`."""
        assert self.is_open, "the transport checks first"
        body = b"\0" + len(message).to_bytes(4, "big") + message
        stream = self._next_stream
        self._next_stream += 2
        call = self._calls[stream] = _Call(done, body, self._stream_window)
        self._transport.write(frame(_HEADERS, _END_HEADERS, stream, headers) + self._data(stream, call))
        return stream

    def cancel(self, stream: int) -> None:
        """Reset a call; its callback gets `late`."""
        call = self._calls.pop(stream, None)
        if call is not None:
            if self.is_open:
                self._transport.write(frame(_RESET, 0, stream, _CANCEL.to_bytes(4, "big")))
            call.done("late", b"")

    def data_received(self, data: bytes) -> None:
        data = self._left + data if self._left else data
        start, end = 0, len(data)
        while end - start >= 9:
            size = data[start] << 16 | data[start + 1] << 8 | data[start + 2]
            if end - start < 9 + size:
                break
            stream = int.from_bytes(data[start + 5 : start + 9], "big") & _LARGEST_WINDOW
            self._frame(data[start + 3], data[start + 4], stream, data[start + 9 : start + 9 + size])
            start += 9 + size
        self._left = data[start:]

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA:
            self._count_received(len(payload))
            call = self._calls.get(stream)
            if call is not None:
                call.parts.append(_unpadded(payload) if flags & _PADDED else payload)
            if flags & _END_STREAM:
                self._finish(stream)
        elif kind == _HEADERS:
            self._headers(flags, stream, payload)
        elif kind == _WINDOW:
            self._widen(stream, int.from_bytes(payload, "big"))
        elif kind == _SETTINGS:
            if not flags & _ACK:
                self._settings(payload)
        elif kind == _PING:
            if not flags & _ACK:
                self._transport.write(frame(_PING, _ACK, 0, payload))
        elif kind == _RESET:
            code = int.from_bytes(payload, "big")
            self._finish(stream, "refused" if code == _REFUSED_STREAM else "reset")
        elif kind in (_GOAWAY, _CONTINUATION):
            self._transport.close()

    def _count_received(self, num_bytes: int) -> None:
        """Widen the connection's receive window once half of it is used up."""
        self._taken += num_bytes
        if self._taken > _LARGEST_WINDOW // 2:
            self._transport.write(frame(_WINDOW, 0, 0, struct.pack(">I", self._taken)))
            self._taken = 0

    def _headers(self, flags: int, stream: int, payload: bytes) -> None:
        payload = _unpadded(payload) if flags & _PADDED else payload
        payload = payload[5:] if flags & _PRIORITY else payload
        call = self._calls.get(stream)
        if call is not None:
            call.status = grpc_status(payload) or call.status
        if flags & _END_STREAM:
            self._finish(stream)

    def _settings(self, payload: bytes) -> None:
        for offset in range(0, len(payload), 6):
            name, value = struct.unpack_from(">HI", payload, offset)
            if name == _INITIAL_WINDOW:
                for call in self._calls.values():
                    call.window += value - self._stream_window
                self._stream_window = value
        self._transport.write(frame(_SETTINGS, _ACK, 0, b""))
        self._send_waiting()

    def _widen(self, stream: int, more: int) -> None:
        """Add to the send window of one call, or of the connection (stream 0)."""
        if stream == 0:
            self._window += more
        elif stream in self._calls:
            self._calls[stream].window += more
        self._send_waiting()

    def _data(self, stream: int, call: _Call) -> bytes:
        """DATA frames of what the send windows allow; the rest of the message waits."""
        frames = []
        while call.unsent:
            size = min(len(call.unsent), call.window, self._window, _FRAME_BYTES)
            if size <= 0:
                self._waiting[stream] = None
                break
            part, call.unsent = call.unsent[:size], call.unsent[size:]
            call.window -= size
            self._window -= size
            frames.append(frame(_DATA, 0 if call.unsent else _END_STREAM, stream, part))
        return b"".join(frames)

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for stream in waiting:
            call = self._calls.get(stream)
            if call is not None and (frames := self._data(stream, call)):
                self._transport.write(frames)

    def _finish(self, stream: int, problem: str = "") -> None:
        call = self._calls.pop(stream, None)
        if call is not None:
            code = call.status
            problem = problem or ("" if code == "0" else _kind(code))
            call.done(problem, b"".join(call.parts)[5:])


class _Call:
    __slots__ = ("done", "parts", "status", "unsent", "window")

    def __init__(self, done: Done, unsent: bytes, window: int) -> None:
        self.done = done
        self.unsent = unsent
        self.window = window
        self.parts: list[bytes] = []
        self.status = ""


def _kind(code: str) -> str:
    name = CODES[int(code)] if code.isdigit() and int(code) < len(CODES) else "no status"
    return {"RESOURCE_EXHAUSTED": "refused", "DEADLINE_EXCEEDED": "late"}.get(name, name)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">HBBBI", len(payload) >> 8, len(payload) & 255, kind, flags, stream) + payload


def _unpadded(payload: bytes) -> bytes:
    return payload[1 : len(payload) - payload[0]]


def call_headers(method: str, authority: str, timeout_seconds: float) -> bytes:
    """Headers of a unary call in HPACK without a dynamic table."""
    return b"".join(
        (
            b"\x83\x86",  # POST, http
            b"\x04" + _text(method),
            b"\x01" + _text(authority),
            b"\x0f\x10" + _text("application/grpc"),
            b"\x00" + _text("te") + _text("trailers"),
            b"\x00" + _text("grpc-timeout") + _text(f"{max(1, round(timeout_seconds * 1000))}m"),
        )
    )


def _text(text: str) -> bytes:
    raw = text.encode()
    return _number(len(raw), 7) + raw


def _number(value: int, bits: int) -> bytes:
    most = (1 << bits) - 1
    if value < most:
        return bytes([value])
    encoded, value = [most], value - most
    while value >= 128:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def grpc_status(block: bytes) -> str:
    """The gRPC status code in a header block; empty when there is none."""
    offset = 0
    while offset < len(block):
        first = block[offset]
        if first & 0x80:  # in the static table, which has no grpc-status
            _, offset = _read_number(block, offset, 7)
        elif first & 0xE0 == 0x20:  # size of the dynamic table
            _, offset = _read_number(block, offset, 5)
        else:
            index, offset = _read_number(block, offset, 6 if first & 0x40 else 4)
            name = b""
            if index == 0:
                name, offset = _read_text(block, offset)
            value, offset = _read_text(block, offset)
            if name == b"grpc-status":
                return value.decode("ascii", "replace")
    return ""


def _read_number(block: bytes, offset: int, bits: int) -> tuple[int, int]:
    most = (1 << bits) - 1
    value = block[offset] & most
    offset += 1
    if value < most:
        return value, offset
    shift = 0
    while True:
        byte = block[offset]
        offset += 1
        value += (byte & 127) << shift
        shift += 7
        if not byte & 128:
            return value, offset


def _read_text(block: bytes, offset: int) -> tuple[bytes, int]:
    size, start = _read_number(block, offset, 7)
    return block[start : start + size], start + size
