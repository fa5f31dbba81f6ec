"""Counts bad rows by reason; too many of them are an error."""

from __future__ import annotations

import base64
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recmill.errors import LogError, TooManyBadRows
from recmill.logs.base import BadRow, LogFile, LogFiles
from recmill.logs.hint import format_hint

NUM_SHOWN = 5
_ADVICE = "Correct the recipe or the files, or raise --max-bad."
_MOST = 0.5  # fraction of bad rows above which the recipe is more likely to be wrong than they are


@dataclass
class Tally:
    """Number of rows read, and number of bad ones by reason."""

    rows: int = 0
    num_bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    shown: list[dict[str, Any]] = field(default_factory=list)

    @property
    def bad(self) -> int:
        return sum(self.reasons.values())

    def note(self, row: BadRow) -> dict[str, Any]:
        """Count a bad row; returns its record as JSON."""
        record = record_of(row)
        self.reasons[row.reason] += 1
        if len(self.shown) < NUM_SHOWN:
            self.shown.append(record)
        return record

    def add(self, other: Tally) -> None:
        self.rows += other.rows
        self.num_bytes += other.num_bytes
        self.reasons.update(other.reasons)
        self.shown += other.shown[: NUM_SHOWN - len(self.shown)]

    def check(self, source: LogFiles, max_bad: float, rejected: Path | None = None) -> None:
        """After a whole pass: raise when the log is empty or has too many bad rows."""
        if not self.rows:
            raise LogError(f"The log is empty: {_names(source.files)} hold no rows.")
        if self.bad > max_bad * self.rows or self.bad == self.rows:
            raise too_many(self, source, max_bad, rejected)

    def describe(self) -> list[str]:
        lines = [f"{count:,} rows: {reason}" for reason, count in sorted(self.reasons.items())]
        return lines + [
            f"  {row['file']} at {row['offset']:,}: {_label(row)}  {_preview(row)}" for row in self.shown
        ]


def record_of(row: BadRow) -> dict[str, Any]:
    """A bad row as JSON: `text`, or `base64` where its bytes are not UTF-8."""
    record: dict[str, Any] = {"file": row.file, "offset": row.offset, "reason": row.reason}
    if row.column is not None:
        record["column"] = row.column
    try:
        return {**record, "text": row.text.decode("utf-8")}
    except UnicodeDecodeError:
        return {**record, "base64": base64.b64encode(row.text).decode("ascii")}


def too_many(tally: Tally, source: LogFiles, max_bad: float, rejected: Path | None) -> TooManyBadRows:
    share = tally.bad / max(1, tally.rows)
    hint = format_hint(source.spec, source.files[0]) if share > _MOST else None
    details = "\n  ".join(tally.describe())
    where = f"They are in {rejected}. " if rejected else ""
    return TooManyBadRows(
        f"{tally.bad:,} of {tally.rows:,} rows ({share:.2%}) are bad, more than --max-bad {max_bad:.2%} allows:\n"
        f"  {details}\n"
        f"{where}{hint or _ADVICE}"
    )


def _label(row: dict[str, Any]) -> str:
    return f"{row['reason']} (column {row['column']})" if "column" in row else str(row["reason"])


def _preview(row: dict[str, Any]) -> str:
    text = row["text"] if "text" in row else base64.b64decode(row["base64"]).decode("utf-8", "replace")
    text = repr(text)
    return text if len(text) <= 80 else text[:77] + "..."


def _names(files: tuple[LogFile, ...]) -> str:
    names = [file.name for file in files]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
