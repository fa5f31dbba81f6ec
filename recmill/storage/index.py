"""The index of an artifact in object storage: the objects of its files. Writing it, last, publishes them.

Names of objects contain a part of their digest (train/00000.5b1c7d0e9f2a4c68.parquet), so an object is never
rewritten with other content: concurrent writers cannot damage what another one published, and an interrupted upload
resumes.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from recmill.artifacts.manifest import with_checksum, without_checksum
from recmill.errors import ArtifactError
from recmill.storage.objects import ObjectStore

INDEX = "index.json"
_FORMAT = 1
_TRIES = 5
_LEVELS = 2  # a kept checkpoint is called checkpoints/<version>
T = TypeVar("T")


@dataclass(frozen=True)
class StoredFile:
    """The object of a file, and the digest and size that reads must match."""

    object: str
    num_bytes: int
    sha256: str

    @classmethod
    def named(cls, name: str, num_bytes: int, sha256: str) -> StoredFile:
        """The object name: the digest precedes the suffix, which tells other programs the kind of file."""
        folder, file = posixpath.split(name)
        stem, dot, suffix = file.partition(".")
        return cls(posixpath.join(folder, f"{stem}.{sha256[:16]}{dot}{suffix}"), num_bytes, sha256)


@dataclass(frozen=True)
class Index:
    """Files by name, and folders that are artifacts themselves: each with the object of its own index."""

    files: Mapping[str, StoredFile] = field(default_factory=dict)
    folders: Mapping[str, StoredFile] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Equal for equal content, whoever wrote it and when."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())

    def to_json(self) -> bytes:
        """Files by name; folders in the order in which they were published."""
        files = {name: asdict(self.files[name]) for name in sorted(self.files)}
        folders = {name: asdict(entry) for name, entry in self.folders.items()}
        content = {"format": _FORMAT, "files": files, "folders": folders}
        return (json.dumps(with_checksum(content), indent=1) + "\n").encode()

    @classmethod
    def from_json(cls, text: bytes, address: str) -> Index:
        try:
            content: dict[str, Any] = without_checksum(json.loads(text), required=True)
            if content["format"] != _FORMAT:
                raise ArtifactError(
                    f"{address} has format {content['format']}; this recmill reads format {_FORMAT}. Upgrade recmill."
                )
            parts = [
                {name: StoredFile(**one) for name, one in content[part].items()}
                for part in ("files", "folders")
            ]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArtifactError(f"{address} is damaged: {error!r}. Write the artifact again.") from None
        for name in (*parts[0], *parts[1]):
            _check_inside(name, address)
        return cls(*parts)


def _check_inside(name: str, address: str) -> None:
    """Check that an indexed name stays inside the folder that it is copied to."""
    if name.startswith("/") or ".." in name.split("/") or posixpath.normpath(name) != name:
        raise ArtifactError(f'{address} is damaged: it names a file "{name}" outside of its folder.')


def read_index(store: ObjectStore, name: str = INDEX) -> Index | None:
    """The index of what is published under a URL; None when nothing is."""
    try:
        return Index.from_json(store.read(name), store.address(name))
    except FileNotFoundError:
        return None


def as_published(read: Callable[[], T], address: str) -> T:
    """Read from a URL, and retry when it was replaced between reading an index and its objects."""
    for _ in range(_TRIES):
        try:
            return read()
        except FileNotFoundError:
            continue
    raise ArtifactError(f"{address} lacks objects that its index names. Write the artifact again.")


def find_index(store: ObjectStore) -> tuple[ObjectStore, Index] | None:
    """Like `read_index`, for a folder in another index too: its objects are under the same URL."""
    index = read_index(store)
    if index is not None:
        return store, index
    above, name = _split(store)
    for _ in range(_LEVELS):
        index = read_index(above) if name else None
        if index is not None:
            return (store, folder_index(above, index, name)) if name in index.folders else None
        above, first = _split(above)
        name = f"{first}/{name}" if first and name else ""
    return None


def folder_index(store: ObjectStore, index: Index, name: str) -> Index:
    """The index of a folder that another index names."""
    entry = index.folders[name]
    address = store.address(f"{name}/{entry.object}")
    text = store.read(f"{name}/{entry.object}")
    if hashlib.sha256(text).hexdigest() != entry.sha256:
        raise ArtifactError(f"{address} is damaged: it does not have the digest of its record.")
    return Index.from_json(text, address)


def write_folder_index(store: ObjectStore, index: Index) -> StoredFile:
    """Write the index of a folder under its digest; returns the entry for the parent index."""
    text = index.to_json()
    entry = StoredFile.named(INDEX, len(text), hashlib.sha256(text).hexdigest())
    store.write(entry.object, text)
    return entry


def _split(store: ObjectStore) -> tuple[ObjectStore, str]:
    path, mark, options = store.url.partition("?")
    above, _, name = path.rstrip("/").rpartition("/")
    is_bucket = above.endswith(("/", ":"))
    return ObjectStore(f"{above}{mark}{options}", store.attempts), "" if is_bucket else name
