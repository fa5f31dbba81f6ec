"""Writes a sample of requests and answers as Parquet files that can be replayed. Answers never wait for it."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.errors import RecmillError

if TYPE_CHECKING:
    from recmill.stages.serve.messages import Answer, Recommend
    from recmill.stages.serve.telemetry import Telemetry

# Ids are text in every log: a bundle also finds a numeric id by its digits.
SCHEMA = pa.schema(
    [
        ("time", pa.timestamp("us", "UTC")),
        ("user", pa.string()),
        ("request", pa.string()),  # the whole Recommend message as JSON, for replays
        ("context", pa.string()),  # raw context columns by name, as JSON
        ("items", pa.list_(pa.string())),
        ("scores", pa.list_(pa.float32())),
        ("recall_scores", pa.list_(pa.float32())),
        ("channels", pa.list_(pa.string())),
        ("version", pa.string()),
        ("degraded", pa.list_(pa.string())),
        ("milliseconds", pa.float32()),
        ("stages", pa.map_(pa.string(), pa.float32())),  # milliseconds by stage
    ]
)

_SETTLE_SECONDS = (
    0.5  # seconds between conversions of waiting rows: short steps, so that answers get the interpreter
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RequestLogLimits:
    """When a file is full, and how much may wait in memory. Items are counted too, because answers may be long."""

    rows_per_file: int = 20_000
    bytes_per_file: int = 64 << 20  # converted rows in memory
    seconds_per_file: float = 60.0
    max_waiting_items: int = 200_000


@dataclass(frozen=True)
class _Row:
    at: float
    query: Recommend
    answer: Answer
    seconds: float

    @property
    def weight(self) -> int:
        return 1 + len(self.answer.items)


@dataclass
class _PendingRows:
    rows: list[_Row] = field(default_factory=list)
    num_items: int = 0


class RequestLog:
    """Writes a fraction of the requests to `folder`. A file is complete once it has its final name.

    A thread of its own writes. Rows that it cannot keep up with are dropped and counted, in `num_dropped` and the
    metrics.
    """

    def __init__(
        self,
        folder: Path,
        share: float,
        telemetry: Telemetry | None = None,
        limits: RequestLogLimits = RequestLogLimits(),  # noqa: B008, frozen
    ) -> None:
        if not 0 < share <= 1:
            raise RecmillError(f"Request log: the share must be above 0 and at most 1, got {share}")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.share, self.limits = folder, share, limits
        self.num_written = self.num_dropped = 0
        self._telemetry = telemetry
        self._lock = threading.Lock()
        self._waiting = _PendingRows()
        self._batches: list[pa.RecordBatch] = []
        self._file_begun = time.monotonic()
        self._num_files = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def add(self, query: Recommend, answer: Answer, seconds: float) -> None:
        """Log this request, if it is sampled."""
        if self.share < 1 and random.random() >= self.share:
            return
        kept = msgspec.structs.replace(answer, trace=None)  # features of every item would fill the memory
        row = _Row(time.time(), query, kept, seconds)
        with self._lock:
            waiting = self._waiting
            fits = waiting.num_items + row.weight <= self.limits.max_waiting_items
            if fits and not self._closing.is_set():
                waiting.rows.append(row)
                waiting.num_items += row.weight
                return
        self._dropped(1)

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Write the rows that wait. Gives up on a disk that does not respond."""
        self._closing.set()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while not self._closing.wait(_SETTLE_SECONDS):
            self._settle()
            if self._is_full():
                self._write()
        self._settle()
        self._write()

    def _settle(self) -> None:
        """Convert waiting rows to columns, a few at a time."""
        with self._lock:
            waiting, self._waiting = self._waiting, _PendingRows()
        for start in range(0, len(waiting.rows), 64):
            rows = waiting.rows[start : start + 64]
            try:
                self._batches.append(_columns(rows))
            except Exception as error:
                self._lost(len(rows), error)

    def _is_full(self) -> bool:
        limits = self.limits
        return (
            sum(batch.num_rows for batch in self._batches) >= limits.rows_per_file
            or sum(batch.nbytes for batch in self._batches) >= limits.bytes_per_file
            or time.monotonic() - self._file_begun >= limits.seconds_per_file
        )

    def _write(self) -> None:
        batches, self._batches, self._file_begun = self._batches, [], time.monotonic()
        if not batches:
            return
        table = pa.Table.from_batches(batches, SCHEMA)
        try:
            self._write_whole(table)
        except OSError as error:
            self._lost(table.num_rows, error)
            return
        self.num_written += table.num_rows
        if self._telemetry is not None:
            self._telemetry.logged("written", table.num_rows)

    def _write_whole(self, table: pa.Table) -> None:
        self._num_files += 1
        at = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        path = self.folder / f"{at}-{os.getpid()}-{self._num_files:05d}.parquet"
        aside = path.with_name(path.name + ".partial")
        try:
            pq.write_table(table, aside, compression="zstd")
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)

    def _lost(self, num_rows: int, error: Exception) -> None:
        _log.warning("Request log %s: %d rows are lost: %s", self.folder, num_rows, error)
        self._dropped(num_rows)

    def _dropped(self, num_rows: int) -> None:
        with self._lock:
            self.num_dropped += num_rows
        if self._telemetry is not None:
            self._telemetry.logged("dropped", num_rows)


def _columns(rows: Sequence[_Row]) -> pa.RecordBatch:
    encode = msgspec.json.Encoder().encode
    values: dict[str, list[Any]] = {
        "time": [int(row.at * 1e6) for row in rows],
        "user": [None if row.query.user is None else str(row.query.user) for row in rows],
        "request": [encode(row.query).decode() for row in rows],
        "context": [encode(row.query.context).decode() for row in rows],
        "items": [[str(item.id) for item in row.answer.items] for row in rows],
        "scores": [[item.score for item in row.answer.items] for row in rows],
        "recall_scores": [[item.recall_score for item in row.answer.items] for row in rows],
        "channels": [[item.channel for item in row.answer.items] for row in rows],
        "version": [row.answer.version for row in rows],
        "degraded": [list(row.answer.degraded) for row in rows],
        "milliseconds": [row.seconds * 1000 for row in rows],
        "stages": [list(row.answer.stages.items()) for row in rows],
    }
    return pa.RecordBatch.from_pydict(values, SCHEMA)
