"""Decoding between file and parser: UTF-16 to UTF-8, escaped quotes to doubled ones.

Like decompressed text, decoded text is unsplittable: offsets of rows refer to the decoded text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Any

from recmill.errors import LogError
from recmill.recipe.recipe import Files, TextFormat

Decode = Callable[[bytes, bool], bytes]  # takes a chunk, and whether it is the last
_CHUNK_BYTES = 1 << 20


def decoder_of(spec: Files) -> Callable[[], Decode] | None:
    """The decoder factory of a text format; None for text that is parsed as it is."""
    text = spec.text
    if text.encoding != "utf-16" and not text.escape:
        return None
    return lambda: _chained(text)


def _chained(text: TextFormat) -> Decode:
    stages: list[Decode] = []
    if text.encoding == "utf-16":
        stages.append(_utf16())
    if text.escape:
        stages.append(_unescape(text.escape.encode(), text.quote.encode()))

    def decode(chunk: bytes, is_last: bool) -> bytes:
        for stage in stages:
            chunk = stage(chunk, is_last)
        return chunk

    return decode


def _utf16() -> Decode:
    decoder = codecs.getincrementaldecoder("utf-16")()
    return lambda chunk, is_last: decoder.decode(chunk, is_last).encode()


def _unescape(escape: bytes, quote: bytes) -> Decode:
    """Double escaped quotes and undouble escaped escapes; before other characters an escape is a plain character."""
    pair = re.compile(re.escape(escape) + b"([" + re.escape(escape + quote) + b"])")
    held_back = b""

    def decode(chunk: bytes, is_last: bool) -> bytes:
        nonlocal held_back
        text = held_back + chunk
        num_last = len(text) - len(text.rstrip(escape))
        keep = 0 if is_last else num_last % 2  # the second of the pair is in the next chunk
        held_back = text[len(text) - keep :]
        return pair.sub(lambda found: quote * 2 if found[1] == quote else escape, text[: len(text) - keep])

    return decode


class DecodedStream:
    """A stream of bytes, read through a decoder."""

    def __init__(self, stream: Any, decode: Decode, path: str) -> None:
        self._stream = stream
        self._decode = decode
        self._path = path
        self._ready = memoryview(b"")
        self._ended = False

    def readinto(self, room: memoryview) -> int:
        while not self._ready and not self._ended:
            chunk = self._stream.read(_CHUNK_BYTES)
            self._ended = not chunk
            try:
                self._ready = memoryview(self._decode(chunk, self._ended))
            except UnicodeDecodeError as error:
                raise LogError(
                    f"{self._path}: is not UTF-16 ({error.reason}). Correct `encoding`, or copy the file again."
                ) from None
        number = min(len(room), len(self._ready))
        room[:number] = self._ready[:number]
        self._ready = self._ready[number:]
        return number

    def close(self) -> None:
        self._stream.close()
