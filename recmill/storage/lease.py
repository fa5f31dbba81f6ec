"""One writer of a URL at a time, without conditional writes.

A writer first writes an object of its own, then lists those of others. S3 and GCS include an object in every listing
that begins after its write has ended, so of two writers at least one sees the other, and never do both continue. The
object is rewritten every few seconds: its modification time, by the clock of the storage, is the writer's heartbeat.
After a minute without one, the next writer removes the object; a writer that finds its object missing stops.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from dataclasses import asdict
from pathlib import Path

from recmill.artifacts.lock import Holder, stop_main_thread
from recmill.errors import ArtifactError, StorageError
from recmill.storage.objects import ObjectStore, StoredObject

WRITERS = "_writers"
HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
_SECONDS_BETWEEN_LOOKS = 1.0
_logger = logging.getLogger("recmill.storage")


class Lease:
    """Holds the write lock of a URL, from `acquire` to `release`."""

    def __init__(self, store: ObjectStore, record: Path) -> None:
        """`record` stores the lease of the last writer on this machine, which has ended: the caller holds its lock."""
        self.store = store
        self.name = f"{WRITERS}/{secrets.token_hex(8)}.json"
        self.record = record
        self.is_lost = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease-heartbeat", daemon=True)

    def acquire(self) -> None:
        """Acquire the lease; raises ArtifactError when another process writes there."""
        if self.record.is_file():
            self.store.delete(self.record.read_text(encoding="utf-8"))
        self.record.write_text(self.name, encoding="utf-8")
        self._write()
        try:
            self._wait_for_silent_ones()
        except BaseException:
            self.store.delete(self.name)
            raise
        self._thread.start()

    def release(self) -> None:
        self._is_over.set()
        self._thread.join()
        self.store.delete(self.name)
        self.record.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise when another writer took over. Called before anything is published."""
        self.is_lost = self.is_lost or self.store.num_bytes(self.name) is None
        self.check_is_ours()

    def check_is_ours(self) -> None:
        """Like `check`, from this process's own knowledge."""
        if self.is_lost:
            raise ArtifactError(
                f"{self.store.url} was taken over by another process, because this one had no heartbeat for "
                f"{STALE_SECONDS:g} s. This one stopped writing; wait for the other one."
            )

    def _write(self) -> None:
        self.store.write(self.name, json.dumps(asdict(Holder.this_process())).encode())

    def _wait_for_silent_ones(self) -> None:
        """Wait until there is no other writer. One with a moving heartbeat is alive; a later one yields to us."""
        first: dict[str, float] = {}
        while others := self._others():
            own = next((one for one in self.store.list(WRITERS) if one.name == self.name), None)
            for other in others:
                if first.setdefault(other.name, other.written_at) != other.written_at:
                    raise self._held(other)
                silent_seconds = own.written_at - other.written_at if own is not None else 0.0
                if silent_seconds > STALE_SECONDS:
                    _logger.warning(
                        "warning: %s: its writer has been silent for %.0f s: taking over",
                        self.store.url,
                        silent_seconds,
                    )
                    self.store.delete(other.name)
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            self._write()  # so that the same clock gives both times

    def _others(self) -> list[StoredObject]:
        return [one for one in self.store.list(WRITERS) if one.name != self.name]

    def _held(self, other: StoredObject) -> ArtifactError:
        try:
            holder: object = Holder(**json.loads(self.store.read(other.name)))
        except (FileNotFoundError, ValueError, TypeError):
            holder = "another process"
        return ArtifactError(
            f"{self.store.url} is being written by {holder}. Wait until it is done or stop it, or choose "
            "another --into."
        )

    def _beat(self) -> None:
        while not self._is_over.wait(HEARTBEAT_SECONDS):
            try:
                if self.store.num_bytes(self.name) is None:
                    self.is_lost = True
                    stop_main_thread()
                    return
                self._write()
            except StorageError as error:
                _logger.warning("warning: no heartbeat to %s: %s", self.store.url, error)
