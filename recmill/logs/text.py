"""Text read in pieces: a sliding window over a file, and the rule that says which unit a row belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recmill import _native
from recmill.dataset.positions import END_OF_FILE
from recmill.errors import LogError
from recmill.logs.base import BadRow, LogFile, LogFiles, LogRange
from recmill.logs.decode import Decode, DecodedStream, decoder_of
from recmill.logs.files import decompressed, explained, open_bytes
from recmill.recipe.recipe import Log, SideTable

MAX_ROW_BYTES = 256 << 20
_READ_AHEAD = 64 << 10
_SAMPLE_BYTES = 4 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Window:
    """The part of a text that is in memory. `offset` is where it starts; `ended` says nothing follows it."""

    def __init__(self, file: LogFile, chunk_bytes: int, decode: Decode | None = None) -> None:
        self.file = file
        self.offset = 0
        self.ended = False
        self._buffer = bytearray(max(chunk_bytes, 1))
        self._begin = 0
        self._end = 0
        self._bytes = open_bytes(file)
        stream = decompressed(self._bytes, file)
        self._stream: Any = stream if decode is None else DecodedStream(stream, decode, file.path)
        self._is_as_on_disk = decode is None and file.compression is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def end_offset(self) -> int:
        return self.offset + len(self)

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        """The bytes in memory. Valid until the next `fill`."""
        return np.frombuffer(self._buffer, dtype=np.uint8)[self._begin : self._end]

    @property
    def bytes_on_disk(self) -> int:
        """How much of the file was read so far."""
        return int(self._bytes.tell())

    def skip(self, num_bytes: int) -> None:
        self._begin += num_bytes
        self.offset += num_bytes

    def seek(self, offset: int) -> None:
        """Go on at another offset of an uncompressed file."""
        self._begin = self._end = 0
        self.offset = offset
        self.ended = False
        with explained(self.file.path):
            self._stream.seek(offset)

    def fill(self, until: int) -> None:
        """Read on to the offset `until` and a little further: a row that begins before it mostly ends there."""
        self._make_room()
        wanted = max(until - self.end_offset, 0) + _READ_AHEAD
        room = memoryview(self._buffer)[self._end : self._end + wanted]
        try:
            num_read = self._stream.readinto(room)
        except (OSError, pa.ArrowException) as error:
            raise LogError(self._damage(error)) from error
        self._end += num_read
        self.ended = num_read == 0
        if self.ended and self._is_as_on_disk and self.end_offset < min(until, self.file.size):
            raise LogError(f"{self.file.path}: ends at byte {self.end_offset:,}, but had {self.file.size:,}.")

    def is_before(self, stop: int) -> bool:
        """Whether there may be rows that begin before an offset."""
        return self.offset < stop and not (self.ended and len(self) == 0)

    def has_more(self) -> bool:
        while len(self) == 0 and not self.ended:
            self.fill(0)
        return len(self) > 0

    def starts_with(self, prefix: bytes) -> bool:
        while len(self) < len(prefix) and not self.ended:
            self.fill(0)
        return self._buffer.startswith(prefix, self._begin, self._end)

    def skip_line(self) -> None:
        """Drop everything up to and including the next newline."""
        while (found := self._buffer.find(b"\n", self._begin, self._end)) < 0 and not self.ended:
            self.skip(len(self))
            self.fill(0)
        self.skip(found + 1 - self._begin if found >= 0 else len(self))

    def bad_row(self, begin: int, end: int, reason: str, column: str | None) -> BadRow:
        """The row between two offsets of the view, as one to set aside."""
        text = self.view[begin:end].tobytes().removesuffix(b"\n")
        return BadRow(self.file.name, self.offset + begin, reason, column, text)

    def bad_line(self, begin: int, reason: str, column: str | None) -> BadRow:
        """The same for the row that begins at an offset of the view, up to the end of its first line."""
        end = self._buffer.find(b"\n", self._begin + begin, self._end)
        return self.bad_row(begin, end - self._begin if end >= 0 else len(self), reason, column)

    def _make_room(self) -> None:
        size = len(self)
        if size == len(self._buffer) >= MAX_ROW_BYTES:
            raise LogError(
                f"{self.file.path}: the row at byte {self.offset:,} is longer than {MAX_ROW_BYTES >> 20} MB. "
                "Check the format, the quote character and the line ends."
            )
        kept = memoryview(self._buffer)[self._begin : self._end]
        if size == len(self._buffer):
            grown = bytearray(min(2 * size, MAX_ROW_BYTES))
            grown[:size] = kept
            self._buffer = grown
        elif self._begin > 0:
            self._buffer[:size] = kept.tobytes()
        self._begin, self._end = 0, size

    def _damage(self, error: Exception) -> str:
        where = (
            f"near byte {self.bytes_on_disk:,} of {self.file.size:,}, after {self.end_offset:,} bytes of text"
        )
        return f"{self.file.path}: damaged or cut off {where} ({error}). Copy or write the file again."


@cache
def expansion(file: LogFile) -> float:
    """Bytes of text for each byte on disk, from the beginning of the file."""
    if file.compression is None or not file.size:
        return 1.0
    with Window(file, _SAMPLE_BYTES) as window:
        while not window.ended and len(window) < _SAMPLE_BYTES:
            window.fill(_SAMPLE_BYTES)
        return max(1.0, len(window) / max(1, window.bytes_on_disk))


class TextSource(LogFiles):
    """Rows that end in newlines.

    A row belongs to the unit that holds its first byte, so any cutting gives the same rows.
    """

    def __init__(self, spec: Log | SideTable, files: tuple[LogFile, ...], may_grow: bool = False) -> None:
        super().__init__(spec, files, may_grow)
        self._is_decoded = decoder_of(spec) is not None

    def open_window(self, unit: LogRange, chunk_bytes: int) -> Window:
        decoder = decoder_of(self.spec)
        return Window(self.files[unit.file_index], chunk_bytes, None if decoder is None else decoder())

    def can_cut(self, file: LogFile) -> bool:
        return file.compression is None and not self._is_decoded

    def _cut(self, index: int, file: LogFile, target_bytes: int) -> list[LogRange]:
        num_units = max(1, -(-file.size // target_bytes)) if self.can_cut(file) else 1
        edges = [file.size * i // num_units for i in range(num_units + 1)]
        return [LogRange(index, start, end) for start, end in pairwise(edges)]

    def text_bytes(self, unit: LogRange) -> int:
        file = self.files[unit.file_index]
        return int(unit.end - unit.start) if file.compression is None else int(file.size * expansion(file))

    def max_offset(self) -> int:
        return max(int(file.size * expansion(file)) for file in self.files)

    def count_rows(self, unit: LogRange) -> int:
        stop = self.stop_of(unit)
        with self.open_window(unit, 1 << 20) as window:
            self.seek_unit(window, unit)
            if not window.has_more() or window.offset >= stop:
                return 0
            newlines = 0
            while window.offset < stop - 1:
                # The last byte stays back: a newline there ends the text, and no row follows it.
                piece = window.view[: min(len(window), stop - window.offset) - 1]
                newlines += _native.count_newlines(piece)
                window.skip(len(piece))
                if window.ended:
                    break
                window.fill(stop)
        return 1 + newlines

    def row_offsets(self, unit: LogRange, numbers: Sequence[int]) -> list[int]:
        """Row n begins after the n-th newline of the unit, so nothing needs to be parsed."""
        found: list[int] = []
        with self.open_window(unit, 1 << 20) as window:
            self.seek_unit(window, unit)
            newlines = 0
            while len(found) < len(numbers) and window.has_more():
                ends = np.flatnonzero(window.view == ord("\n"))
                for number in numbers[len(found) :]:
                    if number > newlines + len(ends):
                        break
                    within = 0 if number == newlines else int(ends[number - newlines - 1]) + 1
                    found.append(window.offset + within)
                newlines += len(ends)
                window.skip(len(window))
        return found

    def seek_unit(self, window: Window, unit: LogRange) -> Any:
        """Move to the first row that starts in the unit. Returns what `read_preamble` found."""
        if window.starts_with(_BYTE_ORDER_MARK):
            window.skip(len(_BYTE_ORDER_MARK))
        preamble = self.read_preamble(window)
        if unit.start > window.offset:
            window.seek(unit.start - 1)
            window.skip_line()
        return preamble

    def read_preamble(self, window: Window) -> Any:
        """Read past what stands before the first row, such as a header."""

    def stop_of(self, unit: LogRange) -> int:
        """Rows that start here or later are not the unit's. The length of a compressed text is not known before."""
        return unit.end if self.can_cut(self.files[unit.file_index]) else END_OF_FILE
