"""Bad rows: counted by reason, set aside with their place and bytes, and too many of them is an error."""

from __future__ import annotations

import base64
import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import polars as pl

from recmill.artifact import write_whole
from recmill.errors import LogError, TooManyBadRows
from recmill.logs.base import BadRow, LogFile, Source, Unit, first_position

NUM_SHOWN = 5


@dataclass
class Tally:
    """How many rows were read, and how many were bad and why."""

    rows: int = 0
    num_bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    shown: list[dict[str, Any]] = field(default_factory=list)

    @property
    def bad(self) -> int:
        return sum(self.reasons.values())

    def add(self, other: Tally) -> None:
        self.rows += other.rows
        self.num_bytes += other.num_bytes
        self.reasons.update(other.reasons)
        self.shown += other.shown[: NUM_SHOWN - len(self.shown)]

    def describe(self) -> list[str]:
        lines = [f"{count:,} rows: {reason}" for reason, count in sorted(self.reasons.items())]
        return lines + [
            f"  {row['file']} at {row['offset']:,}: {_label(row)}  {_preview(row)}" for row in self.shown
        ]


class WatchedSource:
    """A log as engines read it: frames only. What cannot be read is set aside in `rejected`, once for each unit."""

    def __init__(
        self, source: Source, units: list[Unit], rejected: Path, max_bad: float, chunk_bytes: int
    ) -> None:
        self.source = source
        self.rejected = rejected
        self.max_bad = max_bad
        self.chunk_bytes = chunk_bytes
        self._units = units
        self._seen = Tally()
        self._lock = threading.Lock()
        rejected.mkdir(parents=True, exist_ok=True)

    def units(self) -> list[Unit]:
        return self._units

    @property
    def files(self) -> tuple[LogFile, ...]:
        return self.source.files

    @property
    def num_bytes(self) -> int:
        return sum(self.unit_bytes(unit) for unit in self._units)

    def unit_bytes(self, unit: Unit) -> int:
        return self.source.text_bytes(unit)

    def max_offset(self) -> int:
        return self.source.max_offset()

    def first_position(self, unit: Unit) -> int:
        return first_position(unit.file_index) + unit.start

    def read(self, unit: Unit) -> Iterator[pl.DataFrame]:
        name = f"{unit.file_index:05d}-{unit.start:015d}"
        record = self.rejected / f"{name}.json"
        tally = Tally(num_bytes=self.unit_bytes(unit))
        with _Aside(self.rejected / f"{name}.jsonl") as aside:
            for batch in self.source.read(unit, self.chunk_bytes):
                tally.rows += batch.num_rows
                aside.write(batch.bad, tally)
                if batch.frame.height:
                    yield batch.frame
        if not record.exists():
            write_whole(record, json.dumps(vars(tally)))
            self._check_early(tally)

    def _check_early(self, tally: Tally) -> None:
        """Stop a long job when even a log that is good from here on would have too many bad rows."""
        with self._lock:
            self._seen.add(tally)
            rows = self._seen.rows * self.num_bytes / max(1, self._seen.num_bytes)
            if self._seen.bad > self.max_bad * 1.5 * max(rows, self._seen.rows):
                raise too_many(self._seen, self.max_bad, self.rejected)

    def tally(self) -> Tally:
        """All that was read so far, from the records on disk."""
        total = Tally()
        for record in sorted(self.rejected.glob("*.json")):
            saved = json.loads(record.read_text(encoding="utf-8"))
            total.add(Tally(**{**saved, "reasons": Counter(saved["reasons"])}))
        return total

    def check(self) -> Tally:
        """The tally of a finished pass; raises when the log is empty or has too many bad rows."""
        total = self.tally()
        if not total.rows:
            raise LogError(f"The log is empty: {_names(self.source.files)} hold no rows.")
        if total.bad > self.max_bad * total.rows or total.bad == total.rows:
            raise too_many(total, self.max_bad, self.rejected)
        return total


class _Aside:
    """Writes bad rows as JSON lines; the file appears only if there were any."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        self.file: IO[str] | None = None

    def __enter__(self) -> _Aside:
        return self

    def write(self, bad: Iterable[BadRow], tally: Tally) -> None:
        for row in bad:
            if self.file is None:
                self.file = open(self.partial, "w", encoding="utf-8")  # noqa: SIM115, closed in __exit__
            record = _record(row)
            tally.reasons[row.reason] += 1
            if len(tally.shown) < NUM_SHOWN:
                tally.shown.append(record)
            self.file.write(json.dumps(record) + "\n")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.file is None:
            return
        self.file.close()
        if kind is None:
            self.partial.replace(self.path)
        else:
            self.partial.unlink(missing_ok=True)


def _record(row: BadRow) -> dict[str, Any]:
    """A bad row as JSON: `text`, or `base64` where its bytes are no UTF-8."""
    record: dict[str, Any] = {"file": row.file, "offset": row.offset, "reason": row.reason}
    if row.column is not None:
        record["column"] = row.column
    try:
        return {**record, "text": row.text.decode("utf-8")}
    except UnicodeDecodeError:
        return {**record, "base64": base64.b64encode(row.text).decode("ascii")}


def too_many(tally: Tally, max_bad: float, rejected: Path) -> TooManyBadRows:
    share = tally.bad / max(1, tally.rows)
    details = "\n  ".join(tally.describe())
    return TooManyBadRows(
        f"{tally.bad:,} of {tally.rows:,} rows ({share:.2%}) are bad, more than --max-bad {max_bad:.2%} allows:\n"
        f"  {details}\n"
        f"They are in {rejected}. Correct the recipe's [log] or the files, or raise --max-bad."
    )


def _label(row: dict[str, Any]) -> str:
    return f"{row['reason']} (column {row['column']})" if "column" in row else str(row["reason"])


def _preview(row: dict[str, Any]) -> str:
    text = repr(row.get("text", row.get("base64", "")))
    return text if len(text) <= 80 else text[:77] + "..."


def _names(files: tuple[LogFile, ...]) -> str:
    names = [file.name for file in files]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
