"""The interface of all log readers: files, units of work, and batches of typed rows."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import polars as pl

from recmill.dataset.positions import position
from recmill.errors import LogError
from recmill.features.numeric import dtype_of
from recmill.logs.columns import explain_missing
from recmill.recipe.kinds import kind_of
from recmill.recipe.recipe import POSITION, Column, Log, SideTable

T = TypeVar("T")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
DEFAULT_UNIT_BYTES = 64 << 20


@dataclass(frozen=True)
class LogFile:
    """One file of a log, as of its opening. `name` is relative to the data directory; `size` is the size on disk."""

    path: str
    name: str
    size: int
    modified_ns: int | None = None  # if the file system reports it
    inode: tuple[int, int] | None = None  # inode and device of local files

    @property
    def compression(self) -> str | None:
        return COMPRESSIONS.get(os.path.splitext(self.name)[1])


@dataclass(frozen=True)
class LogRange:
    """A range of one file: bytes of text, rows of Parquet, or the whole of an unsplittable file."""

    file_index: int
    start: int
    end: int


@dataclass(frozen=True)
class BadRow:
    """A rejected row: its location, the reason, and its raw bytes."""

    file: str
    offset: int
    reason: str
    column: str | None
    text: bytes


@dataclass(frozen=True)
class LogBatch:
    """Some rows of a unit: valid ones as declared columns plus POSITION, and bad ones."""

    frame: pl.DataFrame
    bad: tuple[BadRow, ...]
    num_rows: int


class LogFiles(ABC):
    """The files of one log, in natural order of their names. Small and picklable: it holds no open file."""

    def __init__(self, spec: Log | SideTable, files: tuple[LogFile, ...], may_grow: bool = False) -> None:
        """Growing files are read up to their size at opening."""
        self.spec = spec
        self.files = files
        self.may_grow = may_grow
        self.columns: tuple[Column, ...] = spec.columns

    @property
    def schema(self) -> dict[str, pl.DataType]:
        """The declared columns in recipe order, then POSITION."""
        return {**{c.name: dtype_of(kind_of(c)) for c in self.columns}, POSITION: pl.Int64()}

    def check_names(self, names: Sequence[str], file: LogFile) -> None:
        """LogError unless each declared column is one of a file's columns, once."""
        for column in self.columns:
            if names.count(column.name_in_file) != 1:
                raise LogError(f"{file.path}: {explain_missing(column.name_in_file, names)}")

    def units(self, target_bytes: int | None = None, parts: int | None = None) -> list[LogRange]:
        """Cut the log into units of about `target_bytes`, or into about `parts` units, in log order."""
        total = sum(file.size for file in self.files)
        target = max(1, target_bytes or (-(-total // parts) if parts else DEFAULT_UNIT_BYTES))
        return [unit for index, file in enumerate(self.files) for unit in self._cut(index, file, target)]

    def units_of(self, file_index: int) -> list[LogRange]:
        """The units of one file, of the usual size."""
        return self._cut(file_index, self.files[file_index], DEFAULT_UNIT_BYTES)

    @abstractmethod
    def _cut(self, index: int, file: LogFile, target_bytes: int) -> list[LogRange]:
        """The units of one file."""

    def read(self, unit: LogRange, chunk_bytes: int = 8 << 20) -> Iterator[LogBatch]:
        """Stream a unit's rows. Memory stays within a small multiple of `chunk_bytes` or the longest row.

        Raises LogError when the file was replaced since it was opened: its rows could be of two versions.
        """
        return self._unchanged(unit, self._read(unit, chunk_bytes))

    def _unchanged(self, unit: LogRange, items: Iterable[T]) -> Iterator[T]:
        """Check that a unit's file is unchanged after it was read."""
        from recmill.logs.files import check_unchanged

        file = self.files[unit.file_index]
        try:
            yield from items
        except LogError:
            check_unchanged([file], self.may_grow)  # the better reason, if it applies
            raise
        check_unchanged([file], self.may_grow)

    @abstractmethod
    def _read(self, unit: LogRange, chunk_bytes: int) -> Iterator[LogBatch]:
        """Stream a unit's rows, without checking the file for changes."""

    def check_unchanged(self) -> None:
        """After a pass over the log: raise LogError when a file has changed since the log was opened."""
        from recmill.logs.files import check_unchanged

        check_unchanged(self.files, self.may_grow, same_machine=True)

    @abstractmethod
    def count_rows(self, unit: LogRange) -> int:
        """Rows in the unit, good and bad."""

    def row_offsets(self, unit: LogRange, numbers: Sequence[int]) -> list[int]:
        """The offsets of the unit's rows of these numbers (from 0, good and bad, increasing)."""
        found: list[int] = []
        first, start = 0, position(unit.file_index)
        for batch in self.read(unit):
            wanted = [number - first for number in numbers[len(found) :] if number - first < batch.num_rows]
            if wanted:
                offsets = sorted([*(batch.frame[POSITION] - start), *(row.offset for row in batch.bad)])
                found += [int(offsets[number]) for number in wanted]
            first += batch.num_rows
        return found

    @abstractmethod
    def text_bytes(self, unit: LogRange) -> int:
        """Approximate size of the unit's rows when uncompressed."""

    @abstractmethod
    def max_offset(self) -> int:
        """Approximate largest offset of a row in any file."""


def open_source(spec: Log | SideTable, data: str, may_grow: bool = False) -> LogFiles:
    """Open the files of a log under a data directory or URL.

    Files that change while they are read are an error; with `may_grow`, they only must not shrink. Parquet is
    recognised by its content, whatever the recipe's format: the columns are the same. `spec` of the result completes
    what the recipe leaves open about the text format.
    """
    # The readers import this module, so they are imported here; and only the one that is needed.
    from recmill.logs.files import find_files, is_parquet

    files = find_files(spec.files, data)
    if spec.format == "parquet" or is_parquet(files[0]):
        from recmill.logs.parquet import ParquetSource

        return ParquetSource(spec.with_text(spec.text), files, may_grow)
    if spec.format == "jsonl":
        from recmill.logs.jsonl import JsonLinesSource

        return JsonLinesSource(spec.with_text(spec.text), files, may_grow)
    from recmill.logs.delimited import DelimitedSource
    from recmill.logs.sniff import sniff_text

    return DelimitedSource(spec.with_text(sniff_text(spec, files)), files, may_grow)
