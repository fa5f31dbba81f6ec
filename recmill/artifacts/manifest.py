"""Artifacts that stages pass on: a directory is complete once it has a manifest, and not before."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recmill.artifacts.lock import LOCK
from recmill.errors import ArtifactError, ResourceError

MANIFEST = "manifest.json"
WORK = "_work"
_MAKERS = {
    "table": "recmill prepare",
    "checkpoint": "recmill train",
    "step": "recmill train",
    "bundle": "recmill export",
    "delta": "recmill train --publish",
    "scores": "recmill score",
}


def write_whole(path: Path, text: str, durable: bool = False, contended: bool = False) -> None:
    """Write a file atomically.

    `durable` survives a power cut too; `contended` lets several processes write the same file at once.
    """
    aside = unique_aside(path) if contended else path.with_name(path.name + ".partial")
    aside.write_text(text, encoding="utf-8")
    if durable:
        sync(aside)
    os.replace(aside, path)
    if durable:
        sync(path.parent)


def unique_aside(path: Path) -> Path:
    """A temporary name beside `path` that no other writer of the same file uses."""
    return path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")


def sync(path: Path) -> None:
    """Wait until a file is on disk; for a directory, until its names are, where the file system supports it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """Wait until every file below a folder, and its name, is on disk. Unfinished work and locks may be lost."""
    for path, folders, files in os.walk(folder):
        if WORK in folders:
            folders.remove(WORK)
        for name in files:
            if not name.startswith(LOCK):
                sync(Path(path, name))
        sync(Path(path))


def publish(path: Path, kind: str, manifest: Mapping[str, Any]) -> None:
    """Publish a finished directory: everything is on disk before the manifest is written.

    Unfinished work may still exist: until there is a manifest, a killed job needs it to resume.
    """
    sync_all(path)
    write_manifest(path, kind, manifest)
    sync(path.parent)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Give a file another name: by a link where possible. Published files are never changed."""
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)


def write_manifest(path: Path, kind: str, manifest: Mapping[str, Any]) -> None:
    """Write the manifest, which records the kind of a directory and that it is complete."""
    text = json.dumps(with_checksum({"kind": kind, "format": 1, **manifest}), indent=1) + "\n"
    write_whole(path / MANIFEST, text, durable=True)


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with its own checksum."""
    as_read = json.loads(json.dumps(content))  # lists for tuples, text for numeric keys
    return {**content, "checksum": _checksum(as_read)}


def without_checksum(content: Any, required: bool = False) -> Any:
    """The object without its checksum; ValueError when it is damaged. Unless `required`, it may have no checksum."""
    is_checked = required or (isinstance(content, dict) and "checksum" in content)
    if is_checked and content.pop("checksum", None) != _checksum(content):
        raise ValueError("it does not have its own checksum")
    return content


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def is_published(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def is_of_kind(path: Path, kind: str) -> bool:
    """Whether a directory is an artifact of this kind, by its manifest."""
    try:
        return bool(json.loads((path / MANIFEST).read_text(encoding="utf-8"))["kind"] == kind)
    except (OSError, ValueError, TypeError, KeyError):
        return False


def read_manifest(path: Path, kind: str, needs_checksum: bool = False) -> dict[str, Any]:
    """The manifest of a complete artifact of this kind; otherwise an error that says what to do."""
    name = kind.capitalize()
    if not path.exists():
        raise ArtifactError(f"{name} {path} does not exist. Run `{_MAKERS[kind]}` first.")
    if not path.is_dir():
        raise ArtifactError(f"{name} {path} is a file; expected the directory that `{_MAKERS[kind]}` wrote.")
    if not is_published(path):
        raise ArtifactError(
            f"{name} {path} is incomplete (no manifest). Run `{_MAKERS[kind]}` again; it resumes."
        )
    try:
        manifest = without_checksum(json.loads((path / MANIFEST).read_text(encoding="utf-8")), needs_checksum)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ArtifactError(
            f"{name} {path} has a damaged manifest: {error}. Delete it and run `{_MAKERS[kind]}` again."
        ) from None
    if not isinstance(manifest, dict) or manifest.get("kind") != kind:
        found = manifest.get("kind") if isinstance(manifest, dict) else None
        raise ArtifactError(f"{path} is {f'a {found}' if found else 'of no known kind'}; expected a {kind}.")
    return manifest


def open_work(into: Path, job: str, kind: str) -> Path:
    """The folder of unfinished work inside its result: kept if it is of the same job, cleared if not.

    The caller holds the folder's lock.
    """
    work = into / WORK
    if not work.exists() and _content(into):
        raise ArtifactError(
            f"{into} is not empty and holds no {kind}. Choose another --into, or empty it first."
        )
    if work.exists() and (not (work / "job").exists() or (work / "job").read_bytes() != job.encode()):
        clear_work(into)
    work.mkdir(parents=True, exist_ok=True)
    write_whole(work / "job", job)
    return work


def clear_work(into: Path) -> None:
    """Remove unfinished work. If killed in between, no job can resume from the rest: it has no name any more."""
    work = into / WORK
    (work / "job").unlink(missing_ok=True)
    for path in (*(path for path in _content(into) if path != work), work):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _content(folder: Path) -> list[Path]:
    """The content of a folder except its lock."""
    return [path for path in folder.iterdir() if not path.name.startswith(LOCK)]


@contextmanager
def full_disk_is_an_error(into: Path, kind: str) -> Iterator[None]:
    """Convert errors of a full disk to a ResourceError; the job can resume."""
    try:
        yield
    except Exception as error:
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            raise ResourceError(
                f"The disk of {into} is full. Free some space and run `{_MAKERS[kind]}` again; it resumes."
            ) from None
        raise
