"""A gRPC caller of its own: HTTP/2 with nothing but what unary calls of ready bytes need.

The usual client costs as much of a core as a small model, which on one machine would be taken from the server. Here
headers are encoded once and answers are not parsed. No TLS; header values in Huffman code are not read, which servers
on gRPC's C core do not send.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

Done = Callable[[str, bytes], None]  # what went wrong ("" for nothing), the answer

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
    """One connection, any number of calls at once. `send` answers through a callback, always and once."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport
        self._left = b""  # of a frame that is not whole yet
        self._calls: dict[int, _Call] = {}
        self._waiting: dict[int, None] = {}  # streams that have more to send than the peer takes, in order
        self._next_stream = 1
        self._taken = 0  # bytes of answers since the peer was last told to go on
        self._window = 65535
        self._stream_window = 65535

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True
        # No dynamic table of headers, no pushes, and no waiting for our windows.
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
        """Call with encoded headers and a serialized message; the number can cancel it."""
        assert self.is_open, "a transport asks first"
        body = b"\0" + len(message).to_bytes(4, "big") + message
        stream = self._next_stream
        self._next_stream += 2
        call = self._calls[stream] = _Call(done, body, self._stream_window)
        self._transport.write(frame(_HEADERS, _END_HEADERS, stream, headers) + self._data(stream, call))
        return stream

    def cancel(self, stream: int) -> None:
        """Give a call up: its callback hears `late`."""
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
            self._took(len(payload))
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

    def _took(self, num_bytes: int) -> None:
        """The peer may send as much again, once it has used up half of what we take in all."""
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
        for place in range(0, len(payload), 6):
            name, value = struct.unpack_from(">HI", payload, place)
            if name == _INITIAL_WINDOW:
                for call in self._calls.values():
                    call.window += value - self._stream_window
                self._stream_window = value
        self._transport.write(frame(_SETTINGS, _ACK, 0, b""))
        self._send_waiting()

    def _widen(self, stream: int, more: int) -> None:
        """The peer takes more bytes: of one call, or (stream 0) of all together."""
        if stream == 0:
            self._window += more
        elif stream in self._calls:
            self._calls[stream].window += more
        self._send_waiting()

    def _data(self, stream: int, call: _Call) -> bytes:
        """Frames of as much of a call's message as the peer takes now; what is left waits for a wider window."""
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
    """Headers of a unary call as HPACK writes them without any table."""
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
    found, value = [most], value - most
    while value >= 128:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def grpc_status(block: bytes) -> str:
    """The code in a block of headers; empty when there is none."""
    place = 0
    while place < len(block):
        first = block[place]
        if first & 0x80:  # in the static table, which has no grpc-status
            _, place = _read_number(block, place, 7)
        elif first & 0xE0 == 0x20:  # size of the dynamic table
            _, place = _read_number(block, place, 5)
        else:
            index, place = _read_number(block, place, 6 if first & 0x40 else 4)
            name = b""
            if index == 0:
                name, place = _read_text(block, place)
            value, place = _read_text(block, place)
            if name == b"grpc-status":
                return value.decode("ascii", "replace")
    return ""


def _read_number(block: bytes, place: int, bits: int) -> tuple[int, int]:
    most = (1 << bits) - 1
    value = block[place] & most
    place += 1
    if value < most:
        return value, place
    shift = 0
    while True:
        byte = block[place]
        place += 1
        value += (byte & 127) << shift
        shift += 7
        if not byte & 128:
            return value, place


def _read_text(block: bytes, place: int) -> tuple[bytes, int]:
    size, start = _read_number(block, place, 7)
    return block[start : start + size], start + size
