"""Text read in chunks: a sliding window over a file, and the rule that assigns rows to units."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recmill import _native
from recmill.dataset.positions import END_OF_FILE
from recmill.errors import LogError
from recmill.logs.base import BadRow, LogBatch, LogFile, LogFiles, LogRange
from recmill.logs.decode import Decode, DecodedStream, decoder_of
from recmill.logs.files import decompressed, explained, open_bytes
from recmill.logs.gzip_text import GzipText, Mark, mark_before
from recmill.recipe.recipe import Log, SideTable

MAX_ROW_BYTES = 256 << 20
_READ_AHEAD = 64 << 10
_SAMPLE_BYTES = 4 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Window:
    """The part of a text that is in memory. `offset` is its start; `ended` means that nothing follows it."""

    def __init__(
        self, file: LogFile, chunk_bytes: int, decode: Decode | None = None, marks: Sequence[Mark] = ()
    ) -> None:
        """`marks` are those of a gzip file, for seeking."""
        self.file = file
        self.offset = 0
        self.ended = False
        self.is_begun = False  # whether the preamble before the first row has been read
        self.preamble: Any = None
        self._marks = marks
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
        self.close()

    def close(self) -> None:
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
        """Bytes of the file that have been read so far."""
        return int(self._bytes.tell())

    def skip(self, num_bytes: int) -> None:
        self._begin += num_bytes
        self.offset += num_bytes

    def seek(self, offset: int) -> None:
        """Move to a later offset. Compressed or decoded text is read up to there, gzip from the last mark before it."""
        if self._is_as_on_disk:
            self._go_to(offset)
            with explained(self.file.path):
                self._stream.seek(offset)
            return
        mark = mark_before(self._marks, offset)
        if mark is not None and mark.offset > self.end_offset:
            self._go_to(mark.offset)
            self._stream = GzipText(self._bytes, mark)
        while self.end_offset < offset and not self.ended:
            self.skip(len(self))
            self.fill(offset)
        self.skip(min(offset - self.offset, len(self)))

    def _go_to(self, offset: int) -> None:
        self._begin = self._end = 0
        self.offset = offset
        self.ended = False

    def mark_every(self, spacing: int) -> None:
        """Record marks in gzip from here on, for seeking by a later window."""
        if isinstance(self._stream, GzipText):
            self._stream.mark_every(spacing)

    def take_marks(self) -> list[Mark]:
        """The marks recorded since the last call."""
        return self._stream.take_marks() if isinstance(self._stream, GzipText) else []

    def fill(self, until: int) -> None:
        """Read up to the offset `until` and a little further, where a row that begins before it usually ends."""
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
        """The row between two offsets of the view, as a bad row."""
        text = self.view[begin:end].tobytes().removesuffix(b"\n")
        return BadRow(self.file.name, self.offset + begin, reason, column, text)

    def bad_line(self, begin: int, reason: str, column: str | None) -> BadRow:
        """The row at an offset of the view, up to the end of its first line, as a bad row."""
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
    """Bytes of text per byte on disk, from the beginning of the file."""
    if file.compression is None or not file.size:
        return 1.0
    with Window(file, _SAMPLE_BYTES) as window:
        while not window.ended and len(window) < _SAMPLE_BYTES:
            window.fill(_SAMPLE_BYTES)
        return max(1.0, len(window) / max(1, window.bytes_on_disk))


class TextSource(LogFiles):
    """Rows that end in newlines.

    A row belongs to the unit that holds its first byte, so any cutting gives the same rows. A compressed, decoded or
    quoted file is cut at row offsets that a survey has recorded.
    """

    def __init__(self, spec: Log | SideTable, files: tuple[LogFile, ...], may_grow: bool = False) -> None:
        super().__init__(spec, files, may_grow)
        self._is_decoded = decoder_of(spec) is not None
        self._marks: dict[int, Sequence[Mark]] = {}  # of surveyed files

    @contextmanager
    def open_window(self, unit: LogRange, chunk_bytes: int) -> Iterator[Window]:
        """A window over a unit's file, at or before its first row.

        A surveyed file stays open: its next unit is likely to be read next, and needs nothing before it.
        """
        file = self.files[unit.file_index]
        may_stay = unit.file_index in self._marks
        window = _left_open.take(file, unit.start) if may_stay else None
        window = window or self._new_window(unit, chunk_bytes)
        try:
            yield window
        except BaseException:
            window.close()
            raise
        if may_stay and not window.ended:
            _left_open.leave(file, window)
        else:
            window.close()

    def _new_window(self, unit: LogRange, chunk_bytes: int) -> Window:
        decoder, marks = decoder_of(self.spec), self._marks.get(unit.file_index, ())
        return Window(self.files[unit.file_index], chunk_bytes, decoder() if decoder else None, marks)

    def _read(self, unit: LogRange, chunk_bytes: int) -> Iterator[LogBatch]:
        with self.open_window(unit, chunk_bytes) as window:
            yield from self._batches(window, unit)

    @abstractmethod
    def _batches(self, window: Window, unit: LogRange) -> Iterator[LogBatch]:
        """Rows of a unit. When a batch is yielded, the window is after its rows."""

    def survey(
        self, unit: LogRange, chunk_bytes: int, spacing: int
    ) -> Iterator[tuple[LogBatch, int, list[Mark]]]:
        """All rows of an unsplittable file, each batch with the offset after it and marks for seeking."""
        return self._unchanged(unit, self._surveyed(unit, chunk_bytes, spacing))

    def _surveyed(
        self, unit: LogRange, chunk_bytes: int, spacing: int
    ) -> Iterator[tuple[LogBatch, int, list[Mark]]]:
        with self._new_window(unit, chunk_bytes) as window:
            window.mark_every(spacing)
            for batch in self._batches(window, unit):
                yield batch, window.offset, window.take_marks()

    def cut_at_rows(self, file_index: int, marks: Sequence[Mark]) -> None:
        """From now on, units of this file begin at row offsets of a survey."""
        self._marks[file_index] = marks

    def can_cut(self, file: LogFile) -> bool:
        return file.compression is None and not self._is_decoded

    def _cut(self, index: int, file: LogFile, target_bytes: int) -> list[LogRange]:
        num_units = max(1, -(-file.size // target_bytes)) if self.can_cut(file) else 1
        edges = [file.size * i // num_units for i in range(num_units + 1)]
        return [LogRange(index, start, end) for start, end in pairwise(edges)]

    def text_bytes(self, unit: LogRange) -> int:
        file = self.files[unit.file_index]
        if file.compression is None or unit.file_index in self._marks:
            return unit.end - unit.start
        return int(file.size * expansion(file))

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
                # The last byte is excluded: a newline there ends the text, and no row follows it.
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
        """Move to the first row that starts in the unit. Returns the result of `read_preamble`."""
        if not window.is_begun:
            if window.starts_with(_BYTE_ORDER_MARK):
                window.skip(len(_BYTE_ORDER_MARK))
            window.preamble = self.read_preamble(window)
            window.is_begun = True
        if unit.start > window.offset and unit.file_index in self._marks:
            window.seek(unit.start)
        elif unit.start > window.offset:
            window.seek(unit.start - 1)
            window.skip_line()
        return window.preamble

    def read_preamble(self, window: Window) -> Any:
        """Read past whatever precedes the first row, such as a header."""

    def stop_of(self, unit: LogRange) -> int:
        """The end of a unit: rows that start here or later belong to the next.

        A compressed text's length is unknown.
        """
        is_cut = unit.file_index in self._marks or self.can_cut(self.files[unit.file_index])
        return unit.end if is_cut else END_OF_FILE


class _LeftOpen:
    """Open windows over unsplittable files, for the next unit that is read in this process."""

    MOST = 4  # each holds a buffer and the state of its decompression

    def __init__(self) -> None:
        self._windows: list[tuple[LogFile, Window]] = []
        self._lock = threading.Lock()

    def take(self, file: LogFile, offset: int) -> Window | None:
        """The nearest window before an offset, for exclusive use."""
        with self._lock:
            fitting = [held for held in self._windows if held[0] == file and held[1].offset <= offset]
            if not fitting:
                return None
            nearest = max(fitting, key=lambda held: held[1].offset)
            self._windows.remove(nearest)
            return nearest[1]

    def leave(self, file: LogFile, window: Window) -> None:
        with self._lock:
            self._windows.append((file, window))
            if len(self._windows) > self.MOST:
                self._windows.pop(0)[1].close()


_left_open = _LeftOpen()
