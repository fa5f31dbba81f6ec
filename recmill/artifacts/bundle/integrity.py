"""Integrity of bundles and deltas: checksums of every file in the manifest, verified whenever one is opened.

A file has one XXH64 for each chunk of 4 MiB. It runs at the speed of memory, so that opening can afford to read
everything; chunks are read in parallel. Checksums are cached until the file changes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from recmill import _native
from recmill.artifacts.manifest import MANIFEST, publish, read_manifest
from recmill.dataset.batch import Array
from recmill.errors import ArtifactError

CHUNK_BYTES = 4 << 20
FORMAT = 1
_SPAN_BYTES = 16 * CHUNK_BYTES  # of a file, that one thread reads at a time
_MAX_THREADS = 8
_MAX_CACHED = 20_000
_SETTLED_NS = 2_000_000_000  # longer than the timestamp resolution of any file system
_REMEDIES = {
    "bundle": "Copy it again, or run `recmill export` again.",
    "delta": "Copy it again; the trainer's next full version makes up for it.",
}
Checksums = tuple[str, ...]


def publish_with_checksums(path: Path, kind: str, fields: Mapping[str, Any]) -> None:
    """Publish a finished folder: the manifest has checksums of all files, and one of its own."""
    found = _read_all(sorted(file for file in path.rglob("*") if file.is_file() and file.name != MANIFEST))
    files = {
        file.relative_to(path).as_posix(): {"num_bytes": file.stat().st_size, "checksums": list(checksums)}
        for file, checksums in found.items()
    }
    publish(path, kind, {**fields, "files": files})


def open_verified(path: Path, kind: str, needed: tuple[str, ...]) -> dict[str, Any]:
    """The manifest of an artifact whose files are all intact; raises ArtifactError otherwise."""
    manifest = read_manifest(path, kind, needs_checksum=True)
    if manifest["format"] != FORMAT:
        raise ArtifactError(
            f"{kind.capitalize()} {path} has format {manifest['format']}; this recmill reads format {FORMAT}. "
            "Upgrade recmill."
        )
    for name in (*needed, "files"):
        if name not in manifest:
            raise damaged(path, kind, f'{MANIFEST} has no "{name}"')
    verify_files(path, kind, manifest["files"])
    return manifest


def damaged(path: Path, kind: str, what: str) -> ArtifactError:
    return ArtifactError(f"{kind.capitalize()} {path} is damaged: {what}. {_REMEDIES[kind]}")


def verify_files(path: Path, kind: str, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise an ArtifactError that names the first damaged file."""
    _check_sizes(path, kind, files)
    try:
        found = _read_all([path / name for name in files])
    except OSError as error:
        raise damaged(path, kind, f"a file cannot be read: {error}") from None
    for name, file in files.items():
        if list(found[path / name]) != file.get("checksums"):
            raise damaged(path, kind, f"{name} does not have the checksums of its record")


def _check_sizes(path: Path, kind: str, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare sizes, which is cheap, so it comes first.

    A file without a record is an error: nothing would verify it.
    """
    if unknown := sorted(_names(path) - files.keys()):
        raise damaged(path, kind, f"{MANIFEST} has no record of {unknown[0]}")
    for name, file in files.items():
        if not (path / name).is_file():
            raise damaged(path, kind, f"{name} is missing")
        size = (path / name).stat().st_size
        if size != file["num_bytes"]:
            raise damaged(path, kind, f"{name} has {size:,} bytes instead of {file['num_bytes']:,}")


def _names(path: Path) -> set[str]:
    """The files of an artifact, without its manifest and hidden files, which are never opened."""
    files = (file.relative_to(path) for file in path.rglob("*") if not file.is_dir())
    return {file.as_posix() for file in files if not file.name.startswith(".")} - {MANIFEST}


# checksums

_Identity = tuple[int, ...]
_cached: dict[_Identity, Checksums] = {}


def _read_all(files: Sequence[Path]) -> dict[Path, Checksums]:
    """Checksums of files, by several threads: neither reading nor hashing holds the GIL."""
    identities = {file: _identity(file) for file in files}
    new = [file for file in files if identities[file] not in _cached]
    spans = [span for file in new for span in _spans(file, identities[file])]
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        parts = list(threads.map(_read_span, spans))
    found: dict[Path, list[str]] = {file: [] for file in new}
    for span, part in zip(spans, parts, strict=True):
        found[span.file] += part
    known = {file: _cached[identities[file]] for file in files if file not in found}
    _cache({identities[file]: tuple(checksums) for file, checksums in found.items()})
    return known | {file: tuple(checksums) for file, checksums in found.items()}


def _cache(found: Mapping[_Identity, Checksums]) -> None:
    """Cache checksums, except of recently written files: another change might leave their times unchanged."""
    if len(_cached) > _MAX_CACHED:
        _cached.clear()
    latest = time.time_ns() - _SETTLED_NS
    _cached.update((identity, sums) for identity, sums in found.items() if max(identity[3:]) < latest)


def _identity(file: Path) -> _Identity:
    """Equal as long as the file is not written: ctime cannot be set back, mtime can."""
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@dataclass(frozen=True)
class _Span:
    """Bytes of a file that one thread reads."""

    file: Path
    start: int
    end: int


def _spans(file: Path, identity: _Identity) -> Iterator[_Span]:
    size = identity[2]
    for start in range(0, size, _SPAN_BYTES):
        yield _Span(file, start, min(size, start + _SPAN_BYTES))


def _read_span(span: _Span) -> list[str]:
    """Read, not mapped: an unreadable sector or a shrinking file is an OSError instead of SIGBUS."""
    buffer = np.empty(min(CHUNK_BYTES, span.end - span.start), np.uint8)
    found: list[str] = []
    with open(span.file, "rb", buffering=0) as file:
        file.seek(span.start)
        for start in range(span.start, span.end, CHUNK_BYTES):
            chunk = buffer[: min(CHUNK_BYTES, span.end - start)]
            _fill(file, chunk)
            found.append(f"{_native.hash_texts(np.array([0, len(chunk)]), chunk, 0)[0]:016x}")
    return found


def _fill(file: FileIO, chunk: Array) -> None:
    num_read = 0
    while num_read < len(chunk):
        more = file.readinto(chunk[num_read:].data)
        if not more:
            raise OSError("it ends too early")
        num_read += more
