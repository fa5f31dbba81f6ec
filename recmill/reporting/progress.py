"""Progress of long jobs: a bar on a terminal or in a notebook, plain lines when piped, silence on request."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any, TextIO

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_UPDATES = 0.2


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
        elif _is_notebook():
            bar = _NotebookBar(name, total)
            try:
                yield bar
            finally:
                bar.clear()
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
            bar.show = lambda at_once: bars.update(task, refresh=at_once, completed=bar.done, rate=bar.rate())
            yield bar


class ProgressBar:
    """One pass: its progress and its rate."""

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self.rows = 0
        self.note = ""  # text after the rate
        self.started = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, amount: int, rows: int) -> None:
        with self._lock:
            self.done += amount
            self.rows += rows
            self.report()

    def set_note(self, note: str) -> None:
        """Show what happens while nothing advances."""
        with self._lock:
            self.note = note
            self.report(at_once=True)

    def rate(self) -> str:
        seconds = max(1e-9, time.monotonic() - self.started)
        rows = f"{self.rows / seconds:,.0f} rows/s" if self.rows else ""  # not every stage counts rows
        return "  ".join(filter(None, [rows, self.note]))

    def report(self, at_once: bool = False) -> None:
        """Print the state, now or when it is due; called with the lock held."""


class _Bar(ProgressBar):
    def __init__(self, name: str, total: int) -> None:
        super().__init__(name, total)
        self.show: Callable[[bool], None] = lambda at_once: None

    def report(self, at_once: bool = False) -> None:
        self.show(at_once)


def _is_notebook() -> bool:
    """Whether this process is a Jupyter kernel: its streams are not terminals, but it can show HTML."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


class _NotebookBar(ProgressBar):
    """An HTML element that is updated in place. Rich needs ipywidgets for that, which many notebooks lack."""

    def __init__(self, name: str, total: int) -> None:
        super().__init__(name, total)
        from IPython.display import display

        self.last_shown = self.started
        self.handle = display(self._html(), display_id=True)

    def report(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if at_once or now - self.last_shown >= _SECONDS_BETWEEN_UPDATES:
            self.last_shown = now
            self.handle.update(self._html())

    def clear(self) -> None:
        from IPython.display import HTML

        self.handle.update(HTML(""))

    def _html(self) -> Any:
        from IPython.display import HTML

        bar = f'<progress max="{max(1, self.total)}" value="{self.done}"></progress>'
        return HTML(f"<code>{escape(self.name)}</code> {bar} <code>{escape(self.rate())}</code>")


class _PlainLines(ProgressBar):
    def __init__(self, name: str, total: int, stream: TextIO) -> None:
        super().__init__(name, total)
        self.stream = stream
        self.last = self.started

    def report(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if now - self.last < _SECONDS_BETWEEN_LINES and not (at_once and self.last > self.started):
            return
        self.last = now
        share = self.done / max(1, self.total)
        left = f"  about {(now - self.started) * (1 - share) / share:,.0f} s left" if share else ""
        print(f"{self.name:<10} {share:4.0%}  {self.rate()}{left}", file=self.stream, flush=True)
