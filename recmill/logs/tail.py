"""Tailing a growing log: the rows that were written since the last poll."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import polars as pl

from recmill.errors import LogError
from recmill.logs.base import LogFile, LogFiles, LogRange, open_source
from recmill.logs.scan import scan
from recmill.logs.tally import Tally
from recmill.logs.text import TextSource
from recmill.recipe.recipe import Log

_LOOK_BACK = 1 << 16
_REMEMBERED_BYTES = 1 << 12  # bytes before the current offset that are remembered, to detect a rewritten file


@dataclass
class Tail:
    """Reads new data: whole lines of plain text, and other files once they have stopped growing.

    `done` is the number of bytes read from each file, by name. Files may be added to the log at any time.
    """

    spec: Log
    data: str
    done: dict[str, int] = field(default_factory=dict)
    _sizes: Mapping[str, int] = field(default_factory=dict)  # at the last poll
    _last: dict[str, bytes] = field(default_factory=dict)  # the last bytes that were read

    def read(self, tally: Tally, until: Mapping[str, int] | None = None) -> Iterator[pl.DataFrame]:
        """New rows; read to the end, then call again later. `until` is the `done` of an earlier tail."""
        source = open_source(self.spec, self.data, may_grow=True)
        before, self._sizes = self._sizes, {file.name: file.size for file in source.files}
        before = before if until is None else until
        for index, file in enumerate(source.files):
            start = self.done.get(file.name, 0)
            end = file.size if until is None else until.get(file.name, 0)
            can_cut = isinstance(source, TextSource) and source.can_cut(file)
            self._check_only_grew(file, start, start if until is None else max(start, end), can_cut)
            if end <= start:
                continue
            for unit in self._new_units(source, index, file, start, end, before):
                yield from scan(source, [unit], tally)
                self.done[file.name] = unit.end
                if can_cut:
                    self._last[file.name] = _bytes_before(file, unit.end)

    def _check_only_grew(self, file: LogFile, start: int, num_read: int, can_cut: bool) -> None:
        """Raise LogError when rows would be lost: earlier data is gone, or new data cannot be identified."""
        if file.size < num_read or (not can_cut and 0 < num_read != file.size):
            raise _changed(file, f"has {file.size:,} bytes, but {num_read:,} were read before")
        last = _bytes_before(file, start) if can_cut and start else b"\n"
        if not last.endswith(self._last.get(file.name, b"\n")):
            raise _changed(file, f"no longer begins with the {start:,} bytes that were read before")

    def _new_units(
        self, source: LogFiles, index: int, file: LogFile, start: int, end: int, before: Mapping[str, int]
    ) -> Iterator[LogRange]:
        if isinstance(source, TextSource) and source.can_cut(file):
            end = min(end, _end_of_last_line(file))
            if end > start:
                yield LogRange(index, start, end)
        elif start == 0 and before.get(file.name) == file.size:
            yield from (unit for unit in source.units() if unit.file_index == index)
            self.done[file.name] = file.size


def _changed(file: LogFile, found: str) -> LogError:
    return LogError(
        f"{file.path}: {found}. A log that is followed only grows, by lines or by whole files; "
        "start again from a new export."
    )


def _bytes_before(file: LogFile, end: int) -> bytes:
    start = max(0, end - _REMEMBERED_BYTES)
    with open(file.path, "rb") as opened:
        opened.seek(start)
        return opened.read(end - start)


def _end_of_last_line(file: LogFile) -> int:
    """The offset after the last newline: what follows may be incomplete."""
    with open(file.path, "rb") as opened:
        end = file.size
        while end > 0:
            start = max(0, end - _LOOK_BACK)
            opened.seek(start)
            found = opened.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


def sizes_of(source: LogFiles) -> dict[str, int]:
    """The current end of a log: bytes of each file by name, as a starting point for tailing."""
    return {
        file.name: _end_of_last_line(file)
        if isinstance(source, TextSource) and source.can_cut(file) and os.path.exists(file.path)
        else file.size
        for file in source.files
    }
