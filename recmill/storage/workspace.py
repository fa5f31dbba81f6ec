"""Writing to object storage: a local folder, in which stages work as usual, and its publication at a URL."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from recmill.artifacts.manifest import WORK, write_whole
from recmill.errors import ArtifactError
from recmill.storage.cache import cache_folder, download_verified, folder_of, locked_or_none
from recmill.storage.index import INDEX, Index, StoredFile, read_index, write_folder_index
from recmill.storage.lease import Lease
from recmill.storage.objects import CHUNK_BYTES, ObjectStore, is_url
from recmill.storage.view import TRANSFERS, note_source

_UNPUBLISHED = (".partial", ".damaged")


class Target:
    """An output directory, which the stage itself publishes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def push(self) -> None:
        """Publish the contents of the folder."""

    def give_to_cache(self) -> None:
        """Move published files to the cache, when nothing will be written any more."""


@dataclass
class _Hashed:
    """A file's size and times when it was hashed."""

    num_bytes: int
    modified_ns: int
    file: StoredFile


@dataclass
class _State:
    """The contents of a workspace when it last equalled what is published."""

    digest: str = ""
    hashed: dict[str, _Hashed] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> _State:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            hashed = found["hashed"].items()
            return cls(
                found["digest"],
                {
                    name: _Hashed(one["num_bytes"], one["modified_ns"], StoredFile(**one["file"]))
                    for name, one in hashed
                },
            )
        except (OSError, ValueError, KeyError, TypeError):
            return cls()


class Workspace(Target):
    """The local folder of a URL. One process owns it, as the URL's only writer."""

    def __init__(self, url: str, path: Path) -> None:
        super().__init__(path)
        self.url = url
        self.store = ObjectStore(url)
        self.lease = Lease(self.store, path.with_name(f"{path.name}.lease"))
        self._record = path.with_name(f"{path.name}.json")
        self._state = _State.read(self._record)

    def pull(self) -> None:
        """Make the folder equal to what is published, unless it is ahead."""
        index = read_index(self.store)
        if index is None or index.digest == self._state.digest:
            return
        shutil.rmtree(self.path / WORK, ignore_errors=True)
        for name in set(published_files(self.path)) - index.files.keys():
            (self.path / name).unlink()
        missing = {name: file for name, file in index.files.items() if self.describe(name) != file}

        def replace(name: str) -> None:
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            download_verified(self.store, missing[name], self.path / name)

        with ThreadPoolExecutor(TRANSFERS) as threads:
            list(threads.map(replace, missing))
        _remove_empty(self.path)
        self.remember(index)

    def push(self) -> None:
        """Upload new files, write the index, then remove objects that are no longer indexed."""
        before = read_index(self.store) or Index()
        there = {file.object for file in before.files.values()}
        self.publish(Index(self.upload(published_files(self.path), there=there), before.folders), before)

    def publish(self, index: Index, before: Index) -> None:
        """Write the index of uploaded files, and remove objects that only the previous index named."""
        self.lease.check()
        if index.to_json() != before.to_json():  # the order of folders counts
            self.store.write(INDEX, index.to_json())
        self.remember(index)
        still = {file.object for file in index.files.values()}
        for file in before.files.values():
            if file.object not in still:
                self.store.delete(file.object)

    def upload(
        self, names: Iterable[str], below: str = "", there: Collection[str] = ()
    ) -> dict[str, StoredFile]:
        """Upload files that are missing; returns their records. With `below`, names are relative to a folder.

        Objects in `there` are known to exist.
        """
        store = self.store.below(below) if below else self.store

        def upload(name: str) -> tuple[str, StoredFile]:
            path = f"{below}/{name}" if below else name
            file = self.describe(path, name)
            assert file is not None
            if file.object not in there and store.num_bytes(file.object) != file.num_bytes:
                store.upload(self.path / path, file.object, file.num_bytes)
            return name, file

        with ThreadPoolExecutor(TRANSFERS) as threads:
            return dict(threads.map(upload, list(names)))

    def upload_folder(self, name: str) -> StoredFile:
        """Upload a folder that has an index of its own; returns its entry for the parent index."""
        index = Index(self.upload(published_files(self.path / name), name))
        return write_folder_index(self.store.below(name), index)

    def describe(self, path: str, name: str = "") -> StoredFile | None:
        """The record of a file, or of the first bytes of a growing one; None when it does not exist."""
        try:
            found = (self.path / path).stat()
        except FileNotFoundError:
            return None
        known = self._state.hashed.get(path)
        if known is None or (known.num_bytes, known.modified_ns) != (found.st_size, found.st_mtime_ns):
            digest = sha256_of(self.path / path, found.st_size)
            file = StoredFile.named(name or path, found.st_size, digest)
            known = self._state.hashed[path] = _Hashed(found.st_size, found.st_mtime_ns, file)
        return known.file

    def remember(self, index: Index) -> None:
        """Record what is published now, so that the next writer here need not fetch or hash it."""
        self._state.digest = index.digest
        self._state.hashed = {
            name: one for name, one in self._state.hashed.items() if (self.path / name).is_file()
        }
        write_whole(self._record, json.dumps(asdict(self._state)))

    def give_to_cache(self) -> None:
        """Move published files to the cache, so that readers on this machine need not fetch them."""
        objects = cache_folder() / "objects"
        objects.mkdir(parents=True, exist_ok=True)
        for name in published_files(self.path):
            if (file := self.describe(name)) is not None:
                with suppress(OSError):  # another disk, or cached already
                    os.link(self.path / name, objects / file.sha256)
        shutil.rmtree(self.path)
        self._record.unlink(missing_ok=True)


@contextmanager
def written(
    address: str | Path, open_workspace: Callable[[str, Path], Workspace] = Workspace
) -> Iterator[Target]:
    """Open an address for writing. A URL gets a local folder with what is published there.

    Another writer of the URL is an ArtifactError. `push` publishes; without it, nothing is published.
    """
    if not is_url(address):
        yield Target(Path(address))
        return
    path = folder_of(str(address), "work")
    with locked_or_none(path.with_name(f"{path.name}.lock")) as is_ours:
        if not is_ours:
            raise ArtifactError(
                f"{address} is being written by another process of this machine. Wait until it is done or stop it, "
                "or choose another --into."
            )
        workspace = open_workspace(str(address), path)
        workspace.lease.acquire()
        try:
            workspace.pull()
            path.mkdir(parents=True, exist_ok=True)
            note_source(path, str(address), beside=True)
            yield workspace
        except (KeyboardInterrupt, SystemExit):
            workspace.lease.check_is_ours()
            raise
        finally:
            workspace.lease.release()


def published_files(folder: Path) -> list[str]:
    """The publishable files of a folder: no locks, hidden files or unfinished work."""
    found = []
    for path, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != WORK and _is_published(name))
        found += [
            os.path.relpath(os.path.join(path, name), folder) for name in sorted(files) if _is_published(name)
        ]
    return found


def _is_published(name: str) -> bool:
    return not name.startswith(".") and not name.endswith(_UNPUBLISHED)


def _remove_empty(folder: Path) -> None:
    """Remove empty folders, such as those of checkpoints that are no longer published."""
    for path, _, _ in os.walk(folder, topdown=False):
        if path != str(folder):
            with suppress(OSError):
                os.rmdir(path)


def sha256_of(file: Path, num_bytes: int) -> str:
    """SHA-256 of the first bytes of a file."""
    digest = hashlib.sha256()
    with open(file, "rb") as source:
        while num_bytes and (chunk := source.read(min(CHUNK_BYTES, num_bytes))):
            digest.update(chunk)
            num_bytes -= len(chunk)
    return digest.hexdigest()
