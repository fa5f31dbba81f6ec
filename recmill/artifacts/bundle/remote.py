"""Folders of bundles in object storage: copied by servers while they run, and published by export.

URL/index.json                         `current`, and an index for each version and each kept checkpoint
URL/<version>/                         the objects of a version
URL/checkpoints/<version>/             those of the checkpoint that it was exported from
URL/<version>.deltas/000001/index.json a delta, complete once this exists; the index above does not name it, so that a
                                       delta costs the same however many there are
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recmill.artifacts.bundle.bundle import (
    CURRENT,
    current_of,
    kept_checkpoint,
    parse_current,
    previous_of,
    set_current,
    versions_of,
)
from recmill.artifacts.bundle.delta import deltas_folder, deltas_of
from recmill.artifacts.manifest import is_published, unique_aside, write_whole
from recmill.errors import ArtifactError
from recmill.storage.cache import folder_of, keep, locked
from recmill.storage.index import INDEX, Index, StoredFile, as_published, folder_index, read_index
from recmill.storage.objects import ATTEMPTS, ObjectStore, is_url
from recmill.storage.view import note_source, transfer
from recmill.storage.workspace import Workspace, published_files, written

_CHECKPOINTS = "checkpoints/"


class BundleCopy:
    """A local copy of a folder of bundles in object storage: its current and previous version, and their deltas.

    All processes of a machine share it. It keeps its content when the storage is unreachable.
    """

    def __init__(self, url: str, attempts: int = ATTEMPTS, part: str = "live") -> None:
        """With few attempts, an unreachable storage is detected quickly; `part` is that of the cache."""
        self.store = ObjectStore(url, attempts)
        self.folder = folder_of(url, part)
        keep(self.folder)
        note_source(self.folder, url)

    def refresh(self) -> None:
        """Copy what is new. A version or a delta is renamed to its name when it is complete."""
        with locked(self.folder.with_name(f"{self.folder.name}.lock")):
            as_published(self._refresh, self.store.url)

    def _refresh(self) -> None:
        index = self.index()
        if CURRENT not in index.files:
            raise ArtifactError(f"{self.store.url} has no current version. Run `recmill export` first.")
        current, previous = self._named(index)
        self._fetch_version(index, current)
        self._write_current(index)
        self._fetch_deltas(current)
        if previous is not None and previous in index.folders:
            self._fetch_version(index, previous)
            self._fetch_deltas(previous)
        for version in set(versions_of(self.folder)) - index.folders.keys():
            shutil.rmtree(self.folder / version)
            shutil.rmtree(deltas_folder(self.folder, version), ignore_errors=True)

    def fetch_version(self, version: str) -> bool:
        """Copy another version; returns whether it exists."""
        if version in versions_of(self.folder):
            return True
        with locked(self.folder.with_name(f"{self.folder.name}.lock")):
            index = self.index()
            if version in index.folders:
                self._fetch_version(index, version)
                self._fetch_deltas(version)
            return version in index.folders

    def index(self) -> Index:
        """The index of the folder of versions."""
        index = read_index(self.store)
        if index is None:
            raise ArtifactError(
                f"{self.store.url} holds no bundles: it has no index. Run `recmill export` first."
            )
        return index

    def _named(self, index: Index) -> tuple[str, str | None]:
        """The current version and the previous one in the index; perhaps not copied yet."""
        return _names(self.store, self._read_current(index))

    def _read_current(self, index: Index) -> bytes:
        return self.store.read(index.files[CURRENT].object)

    def _write_current(self, index: Index) -> None:
        text = self._read_current(index).decode()
        path = self.folder / CURRENT
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_whole(path, text, contended=True)

    def _fetch_version(self, index: Index, version: str) -> None:
        if not is_published(self.folder / version):
            files = folder_index(self.store, index, version)
            copy_folder(self.store.below(version), files, self.folder / version)

    def _fetch_deltas(self, version: str) -> None:
        """Fetch the deltas after the local ones, up to the first that is not published yet."""
        number = len(deltas_of(self.folder, version)) + 1
        while (found := read_index(delta_store(self.store, version, number))) is not None:
            folder = deltas_folder(self.folder, version) / f"{number:06d}"
            copy_folder(delta_store(self.store, version, number), found, folder)
            number += 1


def copy_folder(store: ObjectStore, index: Index, folder: Path) -> None:
    """Fetch a folder atomically: it is renamed to its name when it is complete."""
    aside = unique_aside(folder)
    try:
        transfer(store, index.files, aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def delta_store(store: ObjectStore, version: str, number: int) -> ObjectStore:
    return store.below(f"{version}.deltas/{number:06d}")


class BundleWorkspace(Workspace):
    """The local folder of versions for object storage. Versions of other machines are fetched on demand."""

    def pull(self) -> None:
        """Fetch only which version is current: published versions are not needed to write another."""
        index = read_index(self.store)
        if index is not None and CURRENT in index.files:
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.path / CURRENT, self.store.read(index.files[CURRENT].object).decode())

    def fetch_version(self, version: str) -> None:
        """Copy a published version, if it is not local; an error that names the others."""
        index = read_index(self.store) or Index()
        if version not in index.folders:
            known = ", ".join(_versions_in(index)) or "none"
            raise ArtifactError(f'{self.url} has no version "{version}"; it has: {known}.')
        if not is_published(self.path / version):
            copy_folder(
                self.store.below(version), folder_index(self.store, index, version), self.path / version
            )

    def push_version(self, version: str, keep: int | None = None) -> list[str]:
        """Publish a version, its checkpoint if one is kept, and make it current; returns the removed versions."""
        before = read_index(self.store) or Index()
        folders = dict(before.folders)
        names = [version]
        if is_published(kept_checkpoint(self.path, version)):
            names.append(f"{_CHECKPOINTS}{version}")
        for name in names:
            folders.pop(name, None)  # the newest is the last
            folders[name] = self.upload_folder(name)
        gone = self._surplus(folders, keep)
        for name in gone:
            folders.pop(name)
            folders.pop(f"{_CHECKPOINTS}{name}", None)
        self.publish(Index(self._current(), folders), before)
        for name in gone:
            for folder in (name, f"{name}.deltas", f"{_CHECKPOINTS}{name}"):
                for found in self.store.list(folder):
                    self.store.delete(found.name)
        return gone

    def push(self) -> None:
        """Publish which version is current."""
        before = read_index(self.store) or Index()
        self.publish(Index(self._current(), before.folders), before)

    def _current(self) -> dict[str, StoredFile]:
        return self.upload([CURRENT]) if (self.path / CURRENT).is_file() else {}

    def _surplus(self, folders: dict[str, StoredFile], keep: int | None) -> list[str]:
        """Versions that are neither among the newest nor current nor previous."""
        if keep is None:
            return []
        versions = _versions_in(Index(folders=folders))
        stay = {current_of(self.path), previous_of(self.path), *versions[-keep:]}
        return [version for version in versions if version not in stay]


def _versions_in(index: Index) -> list[str]:
    """The versions of an index, in the order in which they were published."""
    return [name for name in index.folders if not name.startswith(_CHECKPOINTS)]


@contextmanager
def bundles_written(address: str) -> Iterator[BundleWorkspace]:
    """The folder in which to write versions for a URL."""
    with written(address, BundleWorkspace) as target:
        assert isinstance(target, BundleWorkspace)
        yield target


def named_at(address: str | Path) -> tuple[str | None, str | None]:
    """The current version of a folder or a URL of versions, and the previous one; None for none yet."""
    if not is_url(address):
        return current_of(address), previous_of(address)
    store = ObjectStore(str(address))

    def read_current() -> bytes | None:
        index = read_index(store)
        return store.read(index.files[CURRENT].object) if index and CURRENT in index.files else None

    text = as_published(read_current, store.url)
    return (None, None) if text is None else _names(store, text)


def _names(store: ObjectStore, text: bytes) -> tuple[str, str | None]:
    try:
        content = parse_current(text)
    except ValueError as error:
        raise ArtifactError(
            f"{store.url}: {CURRENT} is damaged: {error}. Run `recmill export` again."
        ) from None
    return content["version"], content["previous"]


def rollback_at(url: str, version: str | None) -> tuple[str, str | None]:
    """Make a version of a URL current, by default the previous one; returns it, and the formerly current one."""
    with bundles_written(url) as bundles:
        if not (bundles.path / CURRENT).is_file():
            raise ArtifactError(
                f"{url} holds no versions. Give the URL that `recmill export --into` was given."
            )
        before, version = current_of(bundles.path), version or previous_of(bundles.path)
        if version is None:
            raise ArtifactError(f"{url} has no version before {before}. Name one.")
        bundles.fetch_version(version)
        set_current(bundles.path, version)
        bundles.push()
    return version, before


@contextmanager
def deltas_written(copy: BundleCopy, version: str) -> Iterator[DeltaPublisher]:
    """Become the only publisher of a version's deltas; the local copy has exactly the published ones."""
    address = copy.store.address(f"{version}.deltas")
    with written(address) as target:
        assert isinstance(target, Workspace)
        shutil.rmtree(deltas_folder(copy.folder, version), ignore_errors=True)
        copy.refresh()
        yield DeltaPublisher(copy, version, target)


class DeltaPublisher:
    """Uploads deltas from the local folder."""

    def __init__(self, copy: BundleCopy, version: str, workspace: Workspace) -> None:
        self.copy, self.version, self.lease = copy, version, workspace.lease

    def publish(self, number: int) -> None:
        """Upload a delta; its index comes last."""
        store = delta_store(self.copy.store, self.version, number)
        self.lease.check()
        folder = deltas_folder(self.copy.folder, self.version) / f"{number:06d}"
        index = Index(Workspace(store.url, folder).upload(published_files(folder)))
        if (found := read_index(store)) is not None and found != index:
            raise ArtifactError(f"Delta {store.url} exists already; another trainer publishes there.")
        store.write(INDEX, index.to_json())
