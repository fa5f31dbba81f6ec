"""Looks at the folder of versions every so often: which one is current, and which deltas the open ones have."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from recmill.artifacts.bundle.bundle import named_by
from recmill.artifacts.bundle.delta import deltas_folder
from recmill.errors import RecmillError, StoreError
from recmill.stages.serve.recommender import Recommender
from recmill.stages.serve.telemetry import Telemetry

if TYPE_CHECKING:
    from recmill.stages.serve.service import Service

LOOK_EVERY = 0.5  # seconds
_logger = logging.getLogger("recmill.serve")


class Watcher:
    """What is refused is refused once, with the reason; the old keeps serving. It is tried again when it changes."""

    def __init__(self, service: Service, seconds: float | None, telemetry: Telemetry | None) -> None:
        """Without `seconds`, only what other processes of this server do is looked for."""
        self.service = service
        self.seconds = seconds
        self.telemetry = telemetry
        self.problem = ""  # why it is not known which version is current
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY if self.seconds is None else self.seconds):
            try:
                self.look()
            except Exception:
                _logger.exception("looking at %s failed", self.service.folder)

    def look(self) -> None:
        """Take changes of other processes, the version that is to be served, then the deltas of each open one."""
        self.service.take_changes()
        self._follow(self._wanted())
        for recommender in self.service.versions.all():
            self.catch_up(recommender)

    def _wanted(self) -> list[str]:
        """Versions to serve, best first: those that the folder names, or else what this server's processes agree on.

        They agree on the version that `recmill serve` was given, if it was given one and not a folder of them.
        """
        agreed = self.service.agreement.version
        if self.seconds is None or self.service.is_pinned:
            return [agreed] if agreed is not None else []
        try:
            found, problem = named_by(self.service.folder), ""
        except RecmillError as error:
            found, problem = [], str(error)
        if problem and problem != self.problem:
            _logger.warning("%s", problem)
        self.problem = problem
        return found

    def _follow(self, wanted: list[str]) -> None:
        """Serve the first of these that is whole; the one that serves already goes on unless it was refused since."""
        service = self.service
        for version in wanted:
            path = service.folder / version
            if path == service.current.bundle.path and not service.agreement.refuses(path):
                return
            taken = self._try(path, service.swap)
            if self.telemetry is not None and taken is not None:
                self.telemetry.swap(taken)
            if taken:
                _logger.info("serving %s", version)
                return

    def catch_up(self, recommender: Recommender) -> None:
        """Apply the deltas of a version, one after the other."""
        if self.seconds is None:
            return
        with recommender.catching_up:
            while (path := self._next_delta(recommender)) is not None:
                taken = self._try(path, lambda path: self.service.apply(path, recommender))
                if self.telemetry is not None and taken is not None:
                    self.telemetry.delta(taken)
                if not taken:
                    return
                _logger.info("version %s has %d deltas", recommender.version, recommender.num_deltas)

    def _next_delta(self, recommender: Recommender) -> Path | None:
        folder = deltas_folder(self.service.folder, recommender.version)
        path = folder / f"{recommender.num_deltas + 1:06d}"
        return path if path.is_dir() else None

    def _try(self, path: Path, take: Callable[[Path], None]) -> bool | None:
        """Whether it was taken; None when it was refused before and has not changed since, or waits for a store."""
        agreement = self.service.agreement
        if agreement.refuses(path):
            return None
        try:
            take(path)
        except StoreError as error:
            _logger.warning("%s waits: %s", path, error)
            return None
        except Exception as error:  # whatever is in a file must not stop the server
            agreement.refuse(path, str(error) if isinstance(error, RecmillError) else f"{path}: {error!r}")
            _logger.warning("%s", error, exc_info=not isinstance(error, (RecmillError, OSError, ValueError)))
            return False
        return True
