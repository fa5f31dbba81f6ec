"""Unfinished work of a killed job for the next run. If it is damaged, the job starts over."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from recmill.artifacts.manifest import clear_work, with_checksum, without_checksum, write_whole
from recmill.errors import ArtifactError, DamagedWork
from recmill.features.kernels import checksum

T = TypeVar("T")

_CHUNK_BYTES = 8 << 20
_logger = logging.getLogger("recmill.artifacts.work")


def resume_or_start_over(into: Path, run: Callable[[], T]) -> T:
    """Run a job that reuses unfinished work; if that is damaged, run it again without."""
    try:
        return run()
    except DamagedWork as error:
        _logger.warning("warning: %s Starting over.", error)
        clear_work(into)
        return run()


def write_record(record: Path, content: Any, files: Sequence[Path] = ()) -> None:
    """Record that some of the work is done, with the checksums of its files."""
    checksums = {os.path.relpath(file, record.parent): file_checksum(file) for file in files}
    record.parent.mkdir(parents=True, exist_ok=True)
    write_whole(record, json.dumps(with_checksum({"content": content, "files": checksums})), contended=True)


def read_record(record: Path) -> Any:
    """The content of a record; DamagedWork when it or one of its files is damaged."""
    try:
        found = without_checksum(json.loads(record.read_text(encoding="utf-8")))
        content, checksums = found["content"], found["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedWork(f"Unfinished work is damaged: {record} cannot be read: {error}.") from None
    for name, expected in checksums.items():
        check_file(record.parent / name, expected)
    return content


def check_file(file: Path, expected: str) -> None:
    """Raise DamagedWork when a file does not match the checksum that it was written with."""
    if not file.is_file() or file_checksum(file) != expected:
        raise DamagedWork(f"Unfinished work is damaged: {file} does not have the checksum of its record.")


def file_checksum(file: Path) -> str:
    """The checksum of a file, which need not fit into memory."""
    with open(file, "rb") as opened:
        chunks = iter(lambda: opened.read(_CHUNK_BYTES), b"")
        return checksum("".join(map(checksum, chunks)).encode())


@contextmanager
def damage_is_of_work() -> Iterator[None]:
    """Convert errors of reading damaged unfinished work to DamagedWork."""
    try:
        yield
    except ArtifactError as error:
        raise DamagedWork(f"Unfinished work is damaged: {error}") from None
