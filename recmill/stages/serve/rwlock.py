"""Answers are computed side by side; a change waits for those under way and lets no new one begin before it is done."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class RWLock:
    """Many readers or one writer. A writer that waits goes before readers that come later."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._readers = 0
        self._writers = 0  # waiting or at work
        self._is_writing = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._condition:
            while self._writers:
                self._condition.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                if not self._readers:
                    self._condition.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self._condition:
            self._writers += 1
            while self._readers or self._is_writing:
                self._condition.wait()
            self._is_writing = True
        try:
            yield
        finally:
            with self._condition:
                self._writers -= 1
                self._is_writing = False
                self._condition.notify_all()
