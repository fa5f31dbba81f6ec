"""The status of a run on other nodes: workers report to an actor, and the driver polls it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from recmill.errors import RecmillError
from recmill.reporting.progress import Progress as Bars
from recmill.reporting.progress import ProgressBar

SECONDS_BETWEEN_NEWS = 0.25


@dataclass(frozen=True)
class StageNews:
    name: str
    total: int
    done: int
    rows: int
    note: str


@dataclass
class News:
    """What happened since the driver's last poll."""

    notes: list[str]
    warnings: list[str]
    stage: StageNews | None = None


class StatusActor:
    """An actor on the driver's node to which workers report news and the error that ends a run."""

    def __init__(self) -> None:
        self._news = News([], [])
        self._failure: RecmillError | None = None
        self.starts = 0

    def began(self, num_workers: int) -> None:
        self.starts += 1
        if self.starts > 1:
            self._news.notes.append(f"started again with {num_workers} workers, from the last checkpoint")

    def note(self, line: str) -> None:
        self._news.notes.append(line)

    def warn(self, line: str) -> None:
        self._news.warnings.append(line)

    def progress(self, stage: StageNews) -> None:
        self._news.stage = stage

    def news(self) -> News:
        news, self._news = self._news, News([], [])
        return news

    def fail(self, error: RecmillError) -> None:
        self._failure = self._failure or error

    def failure(self) -> RecmillError | None:
        return self._failure


# on a worker


class StatusBars(Bars):
    """Progress bars of a worker, displayed on the driver's terminal."""

    def __init__(self, status_actor: Any) -> None:
        super().__init__(quiet=True)
        self.status_actor = status_actor

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[ProgressBar]:
        stage = _StatusBar(name, total, self.status_actor)
        yield stage
        stage.send()


class _StatusBar(ProgressBar):
    def __init__(self, name: str, total: int, status_actor: Any) -> None:
        super().__init__(name, total)
        self.status_actor = status_actor
        self.last = 0.0

    def report(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if at_once or now - self.last >= SECONDS_BETWEEN_NEWS:
            self.last = now
            self.send()

    def send(self) -> None:
        self.status_actor.progress.remote(StageNews(self.name, self.total, self.done, self.rows, self.note))


# on the driver


class StatusDisplay:
    """Displays what the first worker reports on the driver's terminal."""

    def __init__(self, bars: Bars, note: Callable[[str], None], warn: Callable[[str], None]) -> None:
        self.bars, self.note, self.warn = bars, note, warn
        self._stack = ExitStack()
        self._stage: ProgressBar | None = None

    def __enter__(self) -> StatusDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def show(self, news: News) -> None:
        for line in news.notes:
            self.note(line)
        for line in news.warnings:
            self.warn(line)
        if news.stage is None:
            return
        if self._stage is None or self._stage.name != news.stage.name:
            self._stack.close()
            self._stage = self._stack.enter_context(self.bars.stage(news.stage.name, news.stage.total))
        self._stage.note = news.stage.note
        steps, rows = news.stage.done - self._stage.done, max(0, news.stage.rows - self._stage.rows)
        self._stage.advance(steps, rows)
