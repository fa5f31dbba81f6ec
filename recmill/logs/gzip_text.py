"""gzip text that is read from the beginning, or from a mark that an earlier pass recorded."""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from recmill import _native

_CHUNK_BYTES = 256 << 10


@dataclass(frozen=True)
class Mark:
    """A place to start decompression: an offset of the text, the bit of the file, and the 32 KB of text before it."""

    offset: int
    bit: int
    window: bytes  # compressed

    @classmethod
    def of(cls, offset: int, bit: int, window: bytes) -> Mark:
        return cls(offset, bit, zlib.compress(window))


def mark_before(marks: Sequence[Mark], offset: int) -> Mark | None:
    """The last of some ordered marks at or before an offset of the text."""
    number = bisect.bisect_right(marks, offset, key=lambda mark: mark.offset)
    return marks[number - 1] if number else None


class GzipText:
    """The text of a seekable gzip stream. Checksums of members are verified when they are read whole."""

    def __init__(self, stream: Any, mark: Mark | None = None) -> None:
        self._bytes = stream
        if mark is None:
            self._text = _native.GzipStream()
        else:
            self._bytes.seek(mark.bit >> 3)
            self._text = _native.GzipStream.at(mark.offset, mark.bit, zlib.decompress(mark.window))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def mark_every(self, spacing: int) -> None:
        """Record marks from here on, at block boundaries, about this many bytes of text apart."""
        self._text.mark_every(spacing)

    def take_marks(self) -> list[Mark]:
        """The marks recorded since the last call."""
        return [Mark.of(*mark) for mark in self._text.take_marks()]

    def readinto(self, room: memoryview) -> int:
        """Fill the buffer unless the text ends; 0 only at the end. Raises OSError when the file is damaged."""
        into = np.frombuffer(room, dtype=np.uint8)
        num_read = 0
        while num_read < len(into) and not self._text.is_finished:
            some = self._text.read(into[num_read:])
            num_read += some
            if not some and not self._text.is_finished:
                self._text.feed(self._bytes.read(_CHUNK_BYTES))
        return num_read

    def read(self, num_bytes: int) -> bytes:
        room = bytearray(num_bytes)
        return bytes(room[: self.readinto(memoryview(room))])

    def close(self) -> None:
        self._bytes.close()
