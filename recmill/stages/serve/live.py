"""The last two minutes, second by second: what the console's charts show.

A ring of seconds in a few doubles each. Where several processes serve one port, each keeps its ring in a file of a
common folder, and the process that answers adds them up.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recmill.reporting.latency import NUM_BINS, bin_of, percentile

SECONDS = 120
MAX_STAGES = 24
COUNTS = ("requests", "errors", "refused", "degraded")

# Rows of the ring: a few more than are shown, so that a second is not overwritten while it is read.
_ROWS = 128
_BIN, _SUM = 1 + len(COUNTS), 1 + len(COUNTS) + NUM_BINS
_WIDTH = _SUM + 2 * MAX_STAGES  # columns: the second itself, counts, bins, then sum and count for each stage
_NAMES_BYTES = 4096  # header: names of the stages as JSON, in the order of their columns

Doubles = npt.NDArray[np.float64]


class Ring:
    """Counts of each of the last seconds. Any thread may call `add`."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        num_bytes = _NAMES_BYTES + _ROWS * _WIDTH * 8
        self._bytes = memoryview(bytearray(num_bytes) if folder is None else _mapped(folder, num_bytes))
        self._values = self._bytes[_NAMES_BYTES:].cast("d")
        self._stages: dict[str, int] = {}
        self._lock = threading.Lock()
        self._write_names()

    def add(self, seconds: float, counted: Sequence[int], stages: Mapping[str, float]) -> None:
        """Record one answered request: its duration, which of `COUNTS` it is, milliseconds of its stages."""
        with self._lock:
            values, start = self._values, self._second()
            values[start + 1] += 1
            for one in counted:
                values[start + 1 + one] += 1
            values[start + _BIN + bin_of(seconds)] += 1
            self._add_stages(start, stages)

    def read(self, now: float | None = None) -> dict[str, Any]:
        """The last whole seconds, oldest first, as lists of the same length; null where there were no requests."""
        last = int(time.time() if now is None else now)
        seconds = np.arange(last - SECONDS, last)
        blocks = [self._bytes] if self.folder is None else _blocks(self.folder)
        total, stages = np.zeros((SECONDS, _SUM)), dict[str, Doubles]()
        for block in blocks:
            names, rows = _rows(block, seconds)
            total += rows[:, :_SUM]
            for column, name in enumerate(names):
                at = _SUM + 2 * column
                stages[name] = stages.get(name, 0.0) + rows[:, at : at + 2]
        counts = {name: total[:, 1 + one].astype(int).tolist() for one, name in enumerate(COUNTS)}
        return {
            "seconds": seconds.tolist(),
            **counts,
            "p50_ms": _milliseconds(percentile(total[:, _BIN:], 0.5)),
            "p99_ms": _milliseconds(percentile(total[:, _BIN:], 0.99)),
            "stages_ms": {name: _means(sums) for name, sums in stages.items()},
        }

    def _second(self) -> int:
        """Offset of this second's row; it replaces one that is two minutes old."""
        now = int(time.time())
        start = now % _ROWS * _WIDTH
        if self._values[start] != now:
            first = _NAMES_BYTES + start * 8
            self._bytes[first : first + _WIDTH * 8] = bytes(_WIDTH * 8)
            self._values[start] = now
        return start

    def _add_stages(self, start: int, stages: Mapping[str, float]) -> None:
        values = self._values
        for name, milliseconds in stages.items():
            column = self._stages.get(name)
            if column is None and (column := self._named(name)) is None:
                continue
            at = start + _SUM + 2 * column
            values[at] += milliseconds
            values[at + 1] += 1

    def _named(self, name: str) -> int | None:
        """The column of a new stage; None when there are too many."""
        if len(self._stages) == MAX_STAGES:
            return None
        self._stages[name[:64]] = column = len(self._stages)
        self._write_names()
        return column

    def _write_names(self) -> None:
        text = json.dumps(list(self._stages)).encode()
        self._bytes[:_NAMES_BYTES] = text.ljust(_NAMES_BYTES)


def _mapped(folder: Path, num_bytes: int) -> mmap.mmap:
    """A zero-filled memory-mapped file of this process."""
    with open(folder / f"live_{os.getpid()}.ring", "w+b") as file:
        file.truncate(num_bytes)
        return mmap.mmap(file.fileno(), num_bytes)


def _blocks(folder: Path) -> Iterable[bytes]:
    return (file.read_bytes() for file in sorted(folder.glob("live_*.ring")))


def _rows(block: memoryview | bytes, seconds: npt.NDArray[np.int64]) -> tuple[list[str], Doubles]:
    """Names of the stages, and the counts of one process in these seconds."""
    names = json.loads(bytes(block[:_NAMES_BYTES]))
    ring = np.frombuffer(block, np.float64, offset=_NAMES_BYTES).reshape(_ROWS, _WIDTH)
    rows = ring[seconds % _ROWS].copy()
    rows[rows[:, 0] != seconds] = 0
    return names, rows


def _milliseconds(seconds: Doubles) -> list[float | None]:
    return [None if math.isnan(one) else round(one * 1000, 3) for one in seconds.tolist()]


def _means(sums: Doubles) -> list[float | None]:
    return [round(float(total / number), 4) if number else None for total, number in sums]
