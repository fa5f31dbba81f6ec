"""What the processes of one server agree on: the version that they serve, and what one of them refused.

In a file that they share, so that a process which is started again decides as the others do.
"""

from __future__ import annotations

import fcntl
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from recmill.artifacts.manifest import write_whole


class RefusedVersion(msgspec.Struct, frozen=True):
    """Why a version or a delta is not taken, and what its files were like then."""

    files: str
    reason: str


class _State(msgspec.Struct):
    version: str | None = None
    refused: dict[str, RefusedVersion] = {}


class Agreement:
    """Without a folder, of one process with itself."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / "versions.json" if folder is not None else None
        self._state = _State()
        self._lock = threading.Lock()

    @property
    def version(self) -> str | None:
        """The version that is served; None as long as nobody named one."""
        return self._read().version

    def propose(self, version: str) -> str:
        """The version that is agreed on: this one, when there is none yet."""
        with self._changing() as state:
            state.version = state.version or version
            return state.version

    def serve(self, version: str) -> None:
        with self._changing() as state:
            state.version = version

    def refuse(self, path: Path, reason: str) -> None:
        with self._changing() as state:
            state.refused[str(path)] = RefusedVersion(_fingerprint(path), reason)

    def refused(self) -> dict[str, str]:
        """Path -> reason of all that was refused and is still there."""
        return {path: one.reason for path, one in self._read().refused.items() if Path(path).exists()}

    def refuses(self, path: Path) -> bool:
        """Whether it was refused and none of its files has changed since."""
        known = self._read().refused.get(str(path))
        return known is not None and known.files == _fingerprint(path)

    def _read(self) -> _State:
        if self._path is None or not self._path.exists():
            return self._state
        return msgspec.json.decode(self._path.read_bytes(), type=_State)

    @contextmanager
    def _changing(self) -> Iterator[_State]:
        if self._path is None:
            with self._lock:
                yield self._state
            return
        with open(self._path.with_suffix(".lock"), "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = self._read()
            yield state
            write_whole(self._path, msgspec.json.encode(state).decode())


def _fingerprint(path: Path) -> str:
    """Another one whenever a file is written, replaced, added or removed."""
    found = hashlib.blake2b(digest_size=16)
    for file in sorted(path.rglob("*")):
        try:
            facts = file.stat()
        except OSError:
            continue
        found.update(
            repr((str(file), facts.st_size, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns)).encode()
        )
    return found.hexdigest()
