"""The local cache of objects read from object storage.

RECMILL_CACHE/objects/          files by their SHA-256, once each
RECMILL_CACHE/views/            artifacts as of one index: their files are links to objects. Immutable
RECMILL_CACHE/live/             folders of bundles that servers follow
RECMILL_CACHE/work/             unpublished files of writers; outside the bound

Processes lock the views and live folders that they read. When space is short, unused ones are evicted first, least
recently read first; then shards of Tables in use, which are fetched again when they are read.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from recmill.artifacts.manifest import link_or_copy
from recmill.config import parse_size
from recmill.errors import StorageError
from recmill.storage.index import StoredFile
from recmill.storage.objects import ObjectStore

DEFAULT_SIZE = 50 << 30
IN_USE = ".in-use"  # locked by every process that reads a view
SHARDS = ("train/", "eval/", "test/")  # folders of a Table
STREAMED = ".streamed"  # a view whose shards may be evicted and fetched again
_SECONDS_A_SHARD_STAYS = 60.0  # after its last use
_held: dict[Path, int] = {}  # file descriptors that hold locks until this process ends


def cache_folder() -> Path:
    """The cache folder: RECMILL_CACHE, or recmill in the user's cache folder."""
    given = os.environ.get("RECMILL_CACHE")
    return (
        Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recmill"
    )


def cache_size() -> int:
    """The bound in bytes: RECMILL_CACHE_SIZE, such as 20GB."""
    text = os.environ.get("RECMILL_CACHE_SIZE")
    try:
        return parse_size(text) if text else DEFAULT_SIZE
    except ValueError as error:
        raise StorageError(f"RECMILL_CACHE_SIZE {error}.") from None


def folder_of(url: str, kind: str) -> Path:
    """The folder of a URL in one part of the cache. It is named after the URL's last segment, for readability."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", url.partition("?")[0].rstrip("/").rpartition("/")[2])[:40]
    return cache_folder() / kind / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """A lock held by one thread of one process at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def locked_or_none(path: Path) -> Iterator[bool]:
    """Try to take the lock; yields whether it was taken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


def keep(folder: Path) -> None:
    """Protect a folder from eviction for the lifetime of this process."""
    while folder not in _held:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / IN_USE, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):  # it was evicted while we waited
            if os.path.samestat(os.fstat(descriptor), os.stat(folder / IN_USE)):
                _held[folder] = descriptor
                break
        os.close(descriptor)
    os.utime(folder / IN_USE)


def fetch(store: ObjectStore, file: StoredFile, target: Path) -> None:
    """Put a file into a view, from the cache or else from storage. Its bytes are verified."""
    if target.is_file() and target.stat().st_size == file.num_bytes:
        return
    kept = cache_folder() / "objects" / file.sha256
    with locked(cache_folder() / "locks" / file.sha256[:3]):  # of several readers, one fetches it
        if not (kept.is_file() and kept.stat().st_size == file.num_bytes):
            kept.parent.mkdir(parents=True, exist_ok=True)
            make_room(file.num_bytes)
            download_verified(store, file, kept)
        touch(kept)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
    link_or_copy(kept, aside)
    os.replace(aside, target)


def touch(file: Path) -> None:
    """Record the access to a file. Its modification time stays: readers detect changes by it."""
    with suppress(FileNotFoundError):
        os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))


def download_verified(store: ObjectStore, file: StoredFile, target: Path) -> None:
    """Replace a local file when all bytes have arrived and match the recorded digest."""
    for _ in range(store.attempts):
        aside = target.with_name(f"{target.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
        try:
            if store.download(file.object, aside, file.num_bytes) == file.sha256:
                os.replace(aside, target)
                return
        finally:
            aside.unlink(missing_ok=True)
    raise StorageError(
        f"{store.address(file.object)} is damaged: its bytes do not have the digest of their record. "
        "Write the artifact again."
    )


# eviction


def make_room(num_bytes: int) -> None:
    """Evict until this many bytes fit below the bound, or nothing evictable is left."""
    if (missing := used_bytes() + num_bytes - cache_size()) <= 0:
        return
    with locked(cache_folder() / ".evict"):
        missing = used_bytes() + num_bytes - cache_size()
        for remove in (_unlinked_objects, _unused_views, _streamed_shards):
            if missing > 0:
                for path in remove():
                    _remove(path)
                    if (missing := used_bytes() + num_bytes - cache_size()) <= 0:
                        break


def used_bytes() -> int:
    """Size of the objects in the cache."""
    return sum(found.st_size for _, found in _objects())


def _objects() -> list[tuple[Path, os.stat_result]]:
    found = []
    with suppress(FileNotFoundError):
        for entry in os.scandir(cache_folder() / "objects"):
            with suppress(FileNotFoundError):
                found.append((Path(entry.path), entry.stat()))
    return found


def _unlinked_objects() -> Iterator[Path]:
    """Objects outside all views, least recently read first. A recently fetched one is about to be linked."""
    for path, found in sorted(_objects(), key=lambda one: one[1].st_atime):
        if found.st_nlink == 1 and time.time() - found.st_atime > _SECONDS_A_SHARD_STAYS:
            yield path


def _unused_views() -> Iterator[Path]:
    """Views and live folders that no process reads, least recently read first. Each is locked until it is removed."""
    marks = [
        mark
        for kind in ("views", "live", "followed")
        for mark in (cache_folder() / kind).glob(f"*/**/{IN_USE}")
    ]
    for mark in sorted(marks, key=_asked_for_at):
        with open(mark) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            yield mark.parent


def _streamed_shards() -> Iterator[Path]:
    """Shards of Tables in use that were not read lately, least recently read first."""
    views = [mark.parent for mark in (cache_folder() / "views").glob(f"*/*/{STREAMED}")]
    shards = sorted(
        (shard for view in views for folder in SHARDS for shard in (view / folder).glob("*")),
        key=_asked_for_at,
    )
    for shard in shards:
        if time.time() - _asked_for_at(shard) > _SECONDS_A_SHARD_STAYS:
            yield shard


def _remove(path: Path) -> None:
    """Remove a file, or a folder and the objects that nothing else links to."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    inodes = {file.stat().st_ino for file in files if file.stat().st_nlink <= 2}
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    for entry in os.scandir(cache_folder() / "objects"):
        if entry.inode() in inodes:
            os.unlink(entry.path)


def _asked_for_at(path: Path) -> float:
    try:
        return path.stat().st_atime
    except FileNotFoundError:
        return 0.0
