"""Bundles in object storage: a thread copies new files to the local folder that the server follows.

A server answers from its local copy, so it keeps serving when the storage is unreachable and catches up later.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from recmill.artifacts.bundle.bundle import CURRENT
from recmill.artifacts.bundle.remote import BundleCopy
from recmill.errors import RecmillError, StorageError
from recmill.storage.cache import locked_or_none

REFRESH_SECONDS = 1.0
_LONGEST_PAUSE = 10.0  # seconds between two attempts to reach the storage
_logger = logging.getLogger("recmill.serve")


def first_copy(url: str) -> Path:
    """The local folder of a URL. An earlier copy is good enough when the storage is unreachable."""
    copy = BundleCopy(url)
    try:
        copy.refresh()
    except StorageError as error:
        if not (copy.folder / CURRENT).is_file():
            raise
        _logger.warning("warning: %s Serving what was copied before.", error)
    return copy.folder


class StorageFollower:
    """Keeps the copy up to date.

    Of the processes that share it, one does the work; another takes over when that one ends.
    """

    def __init__(self, url: str, seconds: float = REFRESH_SECONDS) -> None:
        self.copy = BundleCopy(url, attempts=1)
        self.problem = ""  # why nothing new can be copied
        self._seconds = seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="storage", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop without waiting for a storage that does not respond."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1)

    def _run(self) -> None:
        lock = self.copy.folder.with_name(f"{self.copy.folder.name}.follower")
        while not self._stop.is_set():
            with locked_or_none(lock) as is_ours:
                if is_ours:
                    self._follow()
            self._stop.wait(self._seconds)

    def _follow(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            pause = self._seconds if self.refresh() else min(_LONGEST_PAUSE, max(self._seconds, 2 * pause))

    def refresh(self) -> bool:
        """Copy what is new; returns whether that was possible."""
        try:
            self.copy.refresh()
        except (RecmillError, OSError) as error:
            if not self.problem:
                _logger.warning("%s What was copied before is served.", error)
            self.problem = str(error)
            return False
        if self.problem:
            _logger.info("%s answers again", self.copy.store.url)
            self.problem = ""
        return True
