"""A pass over raw rows: valid ones as frames; bad ones are counted and may be stored with their bytes."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import IO, Any

import polars as pl

from recmill.artifacts.manifest import unique_aside
from recmill.artifacts.work import read_record, write_record
from recmill.dataset.positions import position
from recmill.logs.base import LogBatch, LogFile, LogFiles, LogRange
from recmill.logs.tally import Tally, too_many

_UNIT_BYTES = 64 << 20
_MIN_UNIT_BYTES = 4 << 20


def scan(
    source: LogFiles,
    units: Iterable[LogRange],
    tally: Tally,
    chunk_bytes: int = 8 << 20,
    set_aside: Callable[[dict[str, Any]], None] | None = None,
) -> Iterator[pl.DataFrame]:
    """Valid rows of some units, in order. Bad ones are counted in the tally; `set_aside` gets a record of each."""
    for unit in units:
        for batch in source.read(unit, chunk_bytes):
            note_rows(batch, tally, set_aside)
            if batch.frame.height:
                yield batch.frame


def note_rows(
    batch: LogBatch, tally: Tally, set_aside: Callable[[dict[str, Any]], None] | None = None
) -> None:
    """Count the rows of a batch."""
    tally.rows += batch.num_rows
    for row in batch.bad:
        record = tally.note(row)
        if set_aside is not None:
            set_aside(record)


class LogScan:
    """A log as engines read it: unit by unit, in any order, in several processes, more than once.

    Bad rows are written to the folder `rejected`, once for each unit; too many of them are an error.
    """

    def __init__(
        self, source: LogFiles, units: list[LogRange], rejected: Path, max_bad: float, chunk_bytes: int
    ) -> None:
        self.source = source
        self.rejected = rejected
        self.max_bad = max_bad
        self.chunk_bytes = chunk_bytes
        self._units = units
        self._seen = Tally()
        self._lock = threading.Lock()
        rejected.mkdir(parents=True, exist_ok=True)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_seen", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _seen=Tally(), _lock=threading.Lock())

    @classmethod
    def resume(
        cls,
        source: LogFiles,
        work: Path,
        rejected: Path,
        max_bad: float,
        memory: int,
        partitions: int | None,
        tasks_at_once: int,
    ) -> LogScan:
        """A scan of the units of unfinished work, or of new ones, within a memory bound."""
        units = _units_in(work / "units.json", source, partitions, memory, tasks_at_once)
        return cls(source, units, rejected, max_bad, max(1 << 20, min(8 << 20, memory // 128)))

    def units(self) -> list[LogRange]:
        return self._units

    @property
    def files(self) -> tuple[LogFile, ...]:
        return self.source.files

    @property
    def num_bytes(self) -> int:
        return sum(self.unit_bytes(unit) for unit in self._units)

    def unit_bytes(self, unit: LogRange) -> int:
        return self.source.text_bytes(unit)

    def max_offset(self) -> int:
        return self.source.max_offset()

    def first_position(self, unit: LogRange) -> int:
        return position(unit.file_index, unit.start)

    def read(self, unit: LogRange) -> Iterator[pl.DataFrame]:
        name = f"{unit.file_index:05d}-{unit.start:015d}"
        record = self.rejected / f"{name}.json"
        tally = Tally(num_bytes=self.unit_bytes(unit))
        with _RejectedRows(self.rejected / f"{name}.jsonl") as aside:
            yield from scan(self.source, [unit], tally, self.chunk_bytes, aside.write)
        if not record.exists():
            write_record(record, vars(tally), [aside.path] if tally.bad else [])
            self._check_early(tally)

    def _check_early(self, tally: Tally) -> None:
        """Stop a long job when even a log without further bad rows would have too many."""
        with self._lock:
            self._seen.add(tally)
            rows = self._seen.rows * self.num_bytes / max(1, self._seen.num_bytes)
            if self._seen.bad > self.max_bad * 1.5 * max(rows, self._seen.rows):
                raise too_many(self._seen, self.source, self.max_bad, self.rejected)

    def tally(self) -> Tally:
        """The tally of all rows read so far, from the records on disk."""
        total = Tally()
        for record in sorted(self.rejected.glob("*.json")):
            saved = read_record(record)
            total.add(Tally(**{**saved, "reasons": Counter(saved["reasons"])}))
        return total

    def check(self) -> Tally:
        """The tally of a finished pass; raises when the log is empty or has too many bad rows."""
        self.source.check_unchanged()
        total = self.tally()
        total.check(self.source, self.max_bad, self.rejected)
        return total


def forget_records(rejected: Path) -> None:
    """Keep only the bad rows, without temporary files of killed readers; remove the folder when there are none."""
    for file in [*rejected.glob("*.json"), *rejected.glob("*.partial")]:
        file.unlink()
    if rejected.exists() and not any(rejected.iterdir()):
        rejected.rmdir()


def _units_in(
    saved: Path, source: LogFiles, partitions: int | None, memory: int, tasks_at_once: int
) -> list[LogRange]:
    if saved.exists():
        return [LogRange(*unit) for unit in read_record(saved)]
    if partitions is not None:
        units = source.units(parts=partitions)
    else:
        # Several units per task, so that the last one does not take long.
        fair = sum(file.size for file in source.files) // (8 * tasks_at_once)
        units = source.units(target_bytes=max(_MIN_UNIT_BYTES, min(_UNIT_BYTES, memory // 8, fair)))
    write_record(saved, [astuple(unit) for unit in units])
    return units


class _RejectedRows:
    """Writes bad rows as JSON lines; the file is created only if there are any."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = unique_aside(path)  # a lost task may still be writing when its replacement does
        self.file: IO[str] | None = None

    def __enter__(self) -> _RejectedRows:
        return self

    def write(self, record: dict[str, Any]) -> None:
        if self.file is None:
            self.file = open(self.partial, "w", encoding="utf-8")  # noqa: SIM115, closed in __exit__
        self.file.write(json.dumps(record) + "\n")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.file is None:
            return
        self.file.close()
        if kind is None:
            self.partial.replace(self.path)
        else:
            self.partial.unlink(missing_ok=True)
