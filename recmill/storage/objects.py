"""Objects under one URL, s3://, gs:// or file://, through pyarrow with retries; reading never lists."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from pyarrow import ArrowException, fs

from recmill.errors import StorageError, first_line

T = TypeVar("T")

SCHEMES = ("s3", "gs", "gcs", "file")
CHUNK_BYTES = 8 << 20  # size of a read, and of a part of an upload
ATTEMPTS = 8
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0  # seconds
# How services report that a retry is useless.
_FINAL = (
    "ACCESS_DENIED",
    "INVALID_ACCESS_KEY",
    "SIGNATURE_DOES_NOT_MATCH",
    "INVALID_CLIENT_TOKEN",
    "NO_SUCH_BUCKET",
)
_logger = logging.getLogger("recmill.storage")


def is_url(address: object) -> TypeGuard[str]:
    """Whether an address is in object storage rather than a directory."""
    return isinstance(address, str) and "://" in address


def address_below(address: str | Path, name: str) -> str | Path:
    """Where a part of a directory or of a URL is."""
    return ObjectStore(str(address)).address(name) if is_url(address) else Path(address) / name


def _tried_once(filesystem: Any) -> Any:
    """The same file system without its own retries, whose pauses of up to 20 s would multiply with ours.

    Small objects then take one request instead of three. A URL has no options for either.
    """
    _, (settings,) = filesystem.__reduce__()
    once = fs.AwsStandardS3RetryStrategy(max_attempts=1)
    return fs.S3FileSystem(**{**settings, "retry_strategy": once, "allow_delayed_open": True})


@dataclass(frozen=True)
class StoredObject:
    """A listed object: its name below the URL, and its modification time by the clock of the storage."""

    name: str
    written_at: float


@dataclass(frozen=True)
class ObjectStore:
    """The objects under one URL. Writes are atomic; a missing object is a FileNotFoundError."""

    url: str
    attempts: int = ATTEMPTS

    @cached_property
    def _located(self) -> tuple[Any, str]:
        if self.url.partition("://")[0] not in SCHEMES:
            raise StorageError(f"{self.url}: expected s3://bucket/..., gs://bucket/... or file:///...")
        try:
            filesystem, root = fs.FileSystem.from_uri(self.url)
            if isinstance(filesystem, fs.S3FileSystem):
                filesystem = _tried_once(filesystem)
        except (OSError, ValueError, ArrowException) as error:
            raise StorageError(
                f"{self.url}: is not an address of object storage: {first_line(error)}"
            ) from None
        return filesystem, root.rstrip("/")

    def address(self, name: str) -> str:
        """The URL of an object or of a prefix."""
        path, mark, options = self.url.partition("?")
        return f"{path.rstrip('/')}/{name}{mark}{options}" if name else self.url

    def below(self, name: str) -> ObjectStore:
        return ObjectStore(self.address(name), self.attempts)

    # reading

    def read(self, name: str) -> bytes:
        """Read a small object."""

        def read() -> bytes:
            with self._filesystem.open_input_file(self._path(name)) as source:
                content = source.read()
                if len(content) != source.size():
                    raise OSError(f"{len(content):,} of {source.size():,} bytes arrived")
                return bytes(content)

        return self._tried("read", name, read)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Read a range of bytes of an object."""
        return b"".join(self.chunks(name, end, start))

    def chunks(self, name: str, end: int, start: int = 0) -> Iterator[bytes]:
        """The bytes of an object in order. A chunk that fails is read again, without those before it."""
        source = self._tried("read", name, lambda: self._filesystem.open_input_file(self._path(name)))

        def read_at(offset: int, length: int) -> bytes:
            content = bytes(source.read_at(length, offset))
            if len(content) != length:
                raise OSError(f"{len(content):,} of {length:,} bytes arrived")
            return content

        with source:
            for offset in range(start, end, CHUNK_BYTES):
                length = min(CHUNK_BYTES, end - offset)
                yield self._tried("read", name, lambda: read_at(offset, length))  # noqa: B023, called at once

    def download(self, name: str, into: Path, num_bytes: int) -> str:
        """Download an object to a new file; returns the SHA-256 of its bytes."""
        digest = hashlib.sha256()
        with open(into, "xb") as target:
            for chunk in self.chunks(name, num_bytes):
                digest.update(chunk)
                target.write(chunk)
        return digest.hexdigest()

    def num_bytes(self, name: str) -> int | None:
        """The size of an object; None when it does not exist."""
        info = self._tried("read", name, lambda: self._filesystem.get_file_info(self._path(name)))
        return int(info.size) if info.is_file else None

    def list(self, prefix: str) -> list[StoredObject]:
        """List all objects with a prefix. Only writers need it."""
        selector = fs.FileSelector(self._path(prefix), allow_not_found=True, recursive=True)
        infos = self._tried("list", prefix, lambda: self._filesystem.get_file_info(selector))
        start = len(self._root) + 1
        return [StoredObject(info.path[start:], info.mtime_ns / 1e9) for info in infos if info.is_file]

    # writing

    def write(self, name: str, content: bytes) -> None:
        """Replace an object atomically."""

        def write(target: Any) -> None:
            target.write(content)

        self._put(name, write)

    def upload(self, file: Path, name: str, num_bytes: int) -> None:
        """Upload the first bytes of a file as an object; large ones in several concurrent parts."""

        def write(target: Any) -> None:
            left = num_bytes
            with open(file, "rb") as source:
                while left:
                    chunk = source.read(min(CHUNK_BYTES, left))
                    if not chunk:
                        raise StorageError(
                            f"{file} became shorter while it was uploaded to {self.address(name)}."
                        )
                    target.write(chunk)
                    left -= len(chunk)

        self._put(name, write)
        if (found := self.num_bytes(name)) != num_bytes:
            raise StorageError(f"{self.address(name)} has {found} bytes after an upload of {num_bytes:,}.")

    def delete(self, name: str) -> None:
        """Remove an object, if it exists."""

        def delete() -> None:
            try:
                self._filesystem.delete_file(self._path(name))
            except FileNotFoundError:
                return

        self._tried("removed", name, delete)

    def _put(self, name: str, write: Callable[[Any], None]) -> None:
        def put() -> None:
            path = self._path(name)
            if not isinstance(self._filesystem, fs.LocalFileSystem):
                with self._filesystem.open_output_stream(path, compression=None) as target:
                    write(target)
                return
            # A file, unlike an object, is visible while it is written.
            aside = f"{path}.{os.getpid()}-{secrets.token_hex(4)}.partial"
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with self._filesystem.open_output_stream(aside, compression=None) as target:
                write(target)
            os.replace(aside, path)

        self._tried("written", name, put)

    # retries

    @property
    def _filesystem(self) -> Any:
        return self._located[0]

    @property
    def _root(self) -> str:
        return self._located[1]

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _tried(self, what: str, name: str, call: Callable[[], T]) -> T:
        """Retry with exponential backoff; raises StorageError when retries are useless."""
        for attempt in range(1, self.attempts + 1):
            try:
                return call()
            except FileNotFoundError:
                raise
            except (OSError, ArrowException) as error:
                is_final = any(word in str(error) for word in _FINAL) or isinstance(error, PermissionError)
                if is_final or attempt == self.attempts:
                    raise self._failed(what, name, attempt, error) from error
                _logger.debug("%s: attempt %d: %s", self.address(name), attempt, first_line(error))
                pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (attempt - 1))
                time.sleep(pause * random.uniform(0.5, 1.0))  # jitter: many readers must not return at once
        raise AssertionError("there is at least one attempt")

    def _failed(self, what: str, name: str, attempts: int, error: Exception) -> StorageError:
        tried = f" ({attempts} attempts)" if attempts > 1 else ""
        return StorageError(
            f"{self.address(name)} cannot be {what}{tried}: {first_line(error).rstrip('.')}. Check the address, "
            "the credentials and that the storage answers; then run the same command again."
        )
