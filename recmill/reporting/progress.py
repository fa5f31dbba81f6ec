"""How far a long job is: a bar with rows/s and ETA on a terminal, plain lines when piped, silence on request."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Reports stages of work; every method may be called from any thread."""

    def __init__(self, quiet: bool = False, stream: TextIO | None = None) -> None:
        self.quiet = quiet
        self.stream = stream or sys.stderr

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[ProgressBar]:
        """One pass over the data; `total` is in the unit that `advance` counts (bytes of input, steps)."""
        if self.quiet:
            yield ProgressBar(name, total)
        elif self.stream.isatty():
            yield from self._bar(name, total)
        else:
            yield _PlainLines(name, total, self.stream)

    def _bar(self, name: str, total: int) -> Iterator[ProgressBar]:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description:<10}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        with RichProgress(*columns, console=Console(file=self.stream), transient=True) as bars:
            task = bars.add_task(name, total=max(1, total), rate="")
            bar = _Bar(name, total)
            bar.show = lambda: bars.update(task, completed=bar.done, rate=bar.rate())
            yield bar


class ProgressBar:
    """One pass: how much of it is done, and how fast."""

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self.rows = 0
        self.note = ""  # what else to say beside the rate
        self.started = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, amount: int, rows: int) -> None:
        with self._lock:
            self.done += amount
            self.rows += rows
            self.report()

    def rate(self) -> str:
        seconds = max(1e-9, time.monotonic() - self.started)
        rows = f"{self.rows / seconds:,.0f} rows/s" if self.rows else ""  # not every stage knows its rows
        return "  ".join(filter(None, [rows, self.note]))

    def report(self) -> None:
        """Show the state; called with the lock held."""


class _Bar(ProgressBar):
    def __init__(self, name: str, total: int) -> None:
        super().__init__(name, total)
        self.show: Callable[[], None] = lambda: None

    def report(self) -> None:
        self.show()


class _PlainLines(ProgressBar):
    def __init__(self, name: str, total: int, stream: TextIO) -> None:
        super().__init__(name, total)
        self.stream = stream
        self.last = self.started

    def report(self) -> None:
        now = time.monotonic()
        if now - self.last < _SECONDS_BETWEEN_LINES:
            return
        self.last = now
        share = self.done / max(1, self.total)
        remaining = (now - self.started) * (1 - share) / max(share, 1e-9)
        print(
            f"{self.name:<10} {share:4.0%}  {self.rate()}  about {remaining:,.0f} s left",
            file=self.stream,
            flush=True,
        )
