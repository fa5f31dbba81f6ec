"""State that the processes of one server share, in files of a common folder.

It holds the served version and what was refused, so that a restarted process decides like the others, and the live
changes that each process accepted.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from recmill.artifacts.manifest import write_whole
from recmill.stages.serve.changes import Change


class RefusedVersion(msgspec.Struct, frozen=True):
    """Why a version or a delta was refused, and the fingerprint of its files at that time."""

    files: str
    reason: str


class _State(msgspec.Struct):
    version: str | None = None
    refused: dict[str, RefusedVersion] = {}


class VersionState:
    """The served version and the refused ones. Without a folder, the state of a single process."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / "versions.json" if folder is not None else None
        self._state = _State()
        self._lock = threading.Lock()

    @property
    def version(self) -> str | None:
        """The served version; None until a process proposes one."""
        return self._read().version

    def propose(self, version: str) -> str:
        """Propose a version and return the served one: this one, if no process proposed another before."""
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
        """Path -> reason, for everything refused that still exists."""
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


class ChangeJournal:
    """A file to which each process of a server appends its changes, and from which it reads the others'."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "changes.jsonl"
        self._num_read = 0  # bytes read so far

    def write(self, change: Change) -> None:
        line = msgspec.json.encode(change) + b"\n"
        with open(self.path, "ab", buffering=0) as file:
            file.write(line)

    def read_others(self) -> list[Change]:
        """Changes that other processes have written since the last call."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self._num_read)
            lines = file.read().rpartition(b"\n")[0]
        if not lines:
            return []
        self._num_read += len(lines) + 1
        changes = [msgspec.json.decode(line, type=Change) for line in lines.split(b"\n")]
        return [change for change in changes if change.process != os.getpid()]


def _fingerprint(path: Path) -> str:
    """Changes whenever a file is written, replaced, added or removed."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(path.rglob("*")):
        try:
            facts = file.stat()
        except OSError:
            continue
        digest.update(
            repr((str(file), facts.st_size, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns)).encode()
        )
    return digest.hexdigest()
