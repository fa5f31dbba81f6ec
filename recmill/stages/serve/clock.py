"""The time of one answer: of its stages, and until its deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from recmill.errors import TooLate


class Clock:
    """Milliseconds of each stage, and the time left until the deadline."""

    def __init__(self, deadline_ms: float | None) -> None:
        self.started = time.monotonic()
        self.deadline = None if deadline_ms is None else self.started + deadline_ms / 1000
        self.stages: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + (time.perf_counter() - begin) * 1000

    @property
    def left(self) -> float:
        """Seconds."""
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def check(self) -> None:
        if self.left <= 0:
            raise TooLate("The deadline passed before there was anything to answer.")
