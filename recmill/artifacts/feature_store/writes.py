"""A queue of writes to a store that may be down: in order, retried until they succeed."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from recmill.errors import StoreError

MAX_ROWS = 100_000  # limit of waiting rows
_RETRY_SECONDS = 0.25
_logger = logging.getLogger("recmill.artifacts.feature_store")


@dataclass(eq=False)
class _Write:
    write: Callable[[], None]
    num_rows: int
    is_done: threading.Event = field(default_factory=threading.Event)


class WriteQueue:
    """Executes writes one after the other in a thread of its own. They must be idempotent.

    A write that fails with StoreError is retried, and all later ones wait; when there are too many rows, the oldest
    are dropped.
    """

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self.num_dropped = 0  # rows
        self._max_rows = max_rows
        self._waiting: deque[_Write] = deque()
        self._failure = ""  # of the first waiting write
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def num_rows(self) -> int:
        """Number of waiting rows."""
        with self._changed:
            return sum(one.num_rows for one in self._waiting)

    @property
    def problem(self) -> str | None:
        """Which rows wait or were dropped, and why; None when nothing is wrong."""
        waiting, failure, dropped = self.num_rows, self._failure, self.num_dropped
        problems = [f"{waiting:,} rows wait to be written: {failure}"] if failure else []
        problems += [f"{dropped:,} rows were not written; run `recmill load`"] if dropped else []
        return "; ".join(problems) or None

    def add(self, write: Callable[[], None], num_rows: int, wait_seconds: float = 0.0) -> bool:
        """Queue a write; returns whether it was done within this time.

        While the store fails, the call does not wait.
        """
        one = _Write(write, num_rows)
        with self._changed:
            self._make_room(num_rows)
            self._waiting.append(one)
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="store-writes", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            waits = not self._failure
        return waits and one.is_done.wait(wait_seconds)

    def close(self, seconds: float = 1.0) -> None:
        """Write what is queued, if the store is up, within this time."""
        ends_at = time.monotonic() + seconds
        with self._changed:
            while self._waiting and not self._failure and time.monotonic() < ends_at:
                self._changed.wait(0.05)
            self._is_closed = True
            self._changed.notify_all()
        if self.num_rows:
            _logger.warning("%d rows were not written to the store: %s", self.num_rows, self._failure)

    def _make_room(self, num_rows: int) -> None:
        waiting = sum(one.num_rows for one in self._waiting) + num_rows
        while self._waiting and waiting > self._max_rows:
            dropped = self._waiting.popleft()
            waiting -= dropped.num_rows
            self.num_dropped += dropped.num_rows

    def _run(self) -> None:
        while (one := self._next()) is not None:
            try:
                one.write()
            except StoreError as error:
                self._failed(str(error))
            except Exception as error:
                # Its text may hold data of users.
                _logger.error("rows cannot be written to the store: %s", type(error).__name__)
                self._finish(one)
                self.num_dropped += one.num_rows
            else:
                self._finish(one)
                one.is_done.set()

    def _next(self) -> _Write | None:
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            return None if self._is_closed else self._waiting[0]

    def _failed(self, failure: str) -> None:
        with self._changed:
            if not self._failure:
                _logger.warning("rows wait to be written: %s", failure)
            self._failure = failure
            ends_at = time.monotonic() + _RETRY_SECONDS
            while not self._is_closed and (left := ends_at - time.monotonic()) > 0:
                self._changed.wait(left)

    def _finish(self, one: _Write) -> None:
        with self._changed:
            if self._waiting and self._waiting[0] is one:
                self._waiting.popleft()
            self._failure = ""
            self._changed.notify_all()
