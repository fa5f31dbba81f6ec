"""A file lock for a folder: one process writes there at a time. Readers need no lock.

The lock file records its holder. On one machine, flock shows whether the holder is alive. Some network file systems
do not share flock between machines, so the holder also touches the file every few seconds, as a heartbeat.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import platform
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from recmill.errors import ArtifactError

LOCK = ".lock"
HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0  # without a heartbeat
_NOT_SUPPORTED = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)
_SECONDS_BETWEEN_LOOKS = 0.2
_URL = re.compile(r"[a-z0-9]+:/")  # a URL after it was converted to a Path
_logger = logging.getLogger("recmill.artifacts.lock")


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock. `boot` identifies the machine, also where containers share a host name."""

    pid: int
    host: str
    boot: str
    command: str
    since: float

    @classmethod
    def this_process(cls) -> Holder:
        return cls(os.getpid(), platform.node(), _boot_id(), _command(), time.time())

    @classmethod
    def read(cls, descriptor: int) -> Holder | None:
        """The record in a file; None when there is none."""
        try:
            return cls(**json.loads(os.pread(descriptor, 1 << 16, 0)))
        except (ValueError, TypeError):
            return None

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"`{self.command}` (process {self.pid} on {self.host}, since {since})"


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Become the only writer of a folder, which is created if necessary; ArtifactError when another process is.

    The lock ends with its process, however that ends.
    """
    if _URL.match(str(folder)):
        url = str(folder).replace(":/", "://", 1)
        raise ArtifactError(
            f"{url} is a URL; this command writes to a directory. docs/storage.md names others."
        )
    if folder.exists() and not folder.is_dir():
        raise ArtifactError(f"{folder} is a file; --into needs a directory.")
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    descriptor = _acquire(path)
    heartbeat = _Heartbeat(path, descriptor)
    heartbeat.start()
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if heartbeat.is_lost:
            raise ArtifactError(
                f"{folder} was taken over by another process, because this one had no heartbeat for "
                f"{STALE_SECONDS:g} s. This one stopped writing; wait for the other one."
            ) from None
        raise
    finally:
        heartbeat.stop()
        if _is_at(path, descriptor):
            path.unlink(missing_ok=True)
        os.close(descriptor)
        if is_new:
            with suppress(OSError):  # another process wrote there
                folder.rmdir()


def _acquire(path: Path) -> int:
    """The locked descriptor of the lock file. It is renamed when it is complete, so nobody reads half of one."""
    aside = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    ours = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _try_flock(ours)
        os.pwrite(ours, json.dumps(asdict(Holder.this_process())).encode(), 0)
        while not (_link(aside, path) or _take_over(aside, path, ours)):
            pass
        _remove_old_asides(path, ours)
        return ours
    except BaseException:
        os.close(ours)
        raise
    finally:
        aside.unlink(missing_ok=True)


def _link(aside: Path, path: Path) -> bool:
    """Give the file its name unless another one has it: an atomic step on network file systems too."""
    try:
        os.link(aside, path)
    except FileExistsError:
        return False
    except OSError:  # no links here
        if path.exists():
            return False
        os.rename(aside, path)
    return True


def _take_over(aside: Path, path: Path, ours: int) -> bool:
    """Replace the lock of a dead process; ArtifactError when it is alive. False when the lock changed meanwhile."""
    try:
        theirs = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        is_free, is_reliable = _try_flock(theirs)
        holder = Holder.read(theirs)
        if not _is_at(path, theirs):
            return False
        if not is_free:
            raise _held(path, holder)
        if holder is not None and not (is_reliable and holder.boot == _boot_id()):
            _check_silent(path, holder, ours)
        os.rename(aside, path)
        return True
    finally:
        os.close(theirs)


def _remove_old_asides(path: Path, ours: int) -> None:
    """Remove temporary files of processes that were killed before they had the lock."""
    for aside in path.parent.glob(f"{path.name}.*"):
        with suppress(FileNotFoundError):
            if os.fstat(ours).st_mtime - aside.stat().st_mtime > STALE_SECONDS:
                aside.unlink()


def _check_silent(path: Path, holder: Holder, ours: int) -> None:
    """Watch the heartbeat of a holder that flock cannot check, until it beats or is stale."""
    first = _touched_at(path)
    while (last := _touched_at(path)) == first:
        os.utime(ours)  # so that the same clock gives both times
        silent_seconds = os.fstat(ours).st_mtime - last
        if silent_seconds > STALE_SECONDS:
            _logger.warning(
                "warning: %s was locked by %s, which has had no heartbeat for %.0f s: taking over",
                path.parent,
                holder,
                silent_seconds,
            )
            return
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    raise _held(path, holder)


def _touched_at(path: Path) -> float:
    """The last heartbeat. The file is reopened each time: network file systems then update their caches."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return 0.0


def _held(path: Path, holder: Holder | None) -> ArtifactError:
    return ArtifactError(
        f"{path.parent} is being written by {holder or 'another process'}. "
        "Wait until it is done or stop it, or choose another --into."
    )


def _try_flock(descriptor: int) -> tuple[bool, bool]:
    """Whether we hold the lock now, and whether the file system supports such locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return (True, False) if error.errno in _NOT_SUPPORTED else (False, True)
    return True, True


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the open file still has this name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


class _Heartbeat:
    """Touches a lock file as long as its process lives; stops the process when another one took over the lock."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.is_lost = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._is_over.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):
                os.utime(self.descriptor)
            if self.path.exists() and not _is_at(self.path, self.descriptor):
                self.is_lost = True
                stop_main_thread()
                return


def stop_main_thread() -> None:
    """Interrupt the main thread like Ctrl-C, so that open resources are closed."""
    number = signal.SIGTERM if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else signal.SIGINT
    signal.pthread_kill(int(threading.main_thread().ident or 0), number)


def _boot_id() -> str:
    """Equal for processes that share a kernel, where flock works."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def _command() -> str:
    """The program and its command, without arguments: they may hold a password."""
    command = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1].isalpha() else ""
    return f"{os.path.basename(sys.argv[0]) or 'python'} {command}".strip()
