"""The clock of one answer: time per stage, and time until the deadline."""

from __future__ import annotations

import time

from recmill.errors import TooLate


class _Stage:
    """Measures a block of code. A class, because a generator would cost three times as much."""

    __slots__ = ("_begin", "_name", "_stages")

    def __init__(self, stages: dict[str, float], name: str) -> None:
        self._stages, self._name = stages, name

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        milliseconds = (time.perf_counter() - self._begin) * 1000
        self._stages[self._name] = self._stages.get(self._name, 0.0) + milliseconds


class Clock:
    """Milliseconds per stage, and the time left until the deadline."""

    def __init__(self, deadline_ms: float | None) -> None:
        self.started = time.monotonic()
        self.deadline = None if deadline_ms is None else self.started + deadline_ms / 1000
        self.stages: dict[str, float] = {}

    def stage(self, name: str) -> _Stage:
        """Adds the time of a `with` block to a stage."""
        return _Stage(self.stages, name)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def check(self) -> None:
        if self.left <= 0:
            raise TooLate("The deadline passed before any answer was ready.")
