"""Artifacts in object storage, read as folders: a URL becomes a cache folder with the files of its index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from recmill.artifacts.manifest import write_whole
from recmill.errors import ArtifactError
from recmill.storage.cache import STREAMED, cache_folder, fetch, folder_of, keep, locked, touch
from recmill.storage.index import Index, StoredFile, as_published, find_index
from recmill.storage.objects import ObjectStore, is_url

SOURCE = ".storage.json"  # in a folder of the cache: its URL, and files that are not fetched yet
TRANSFERS = 8  # concurrent transfers


def opened(address: str | Path, kind: str = "artifact", streamed: tuple[str, ...] = ()) -> Path:
    """The folder to read an artifact from: the directory itself, or a view of a URL.

    Files whose names begin with `streamed` are fetched on demand, by `available`.
    """
    if not is_url(address):
        return Path(address)
    store = ObjectStore(str(address))

    def open_view() -> Path:
        found, index = published(store, kind)
        view = folder_of(store.url, "views") / index.digest[:16]
        return _filled(view, found, index, streamed)

    return as_published(open_view, store.url)


def published(store: ObjectStore, kind: str) -> tuple[ObjectStore, Index]:
    """The index of what is published under a URL; an error when there is nothing."""
    found = find_index(store)
    if found is None:
        raise ArtifactError(
            f"{kind.capitalize()} {store.url} does not exist, or is not complete: it has no index. "
            "Write it first: its manifest comes last."
        )
    return found


def _filled(view: Path, store: ObjectStore, index: Index, streamed: tuple[str, ...]) -> Path:
    with locked(cache_folder() / "locks" / view.parent.name):
        keep(view)
        later = {name: file for name, file in index.files.items() if name.startswith(streamed)}
        transfer(store, {name: file for name, file in index.files.items() if name not in later}, view)
        note_source(view, store.url, later)
        if later:
            (view / STREAMED).touch()
    return view


def transfer(store: ObjectStore, files: Mapping[str, StoredFile], folder: Path) -> None:
    """Fetch files into a folder, several at once."""
    with ThreadPoolExecutor(TRANSFERS) as threads:
        for _ in threads.map(lambda name: fetch(store, files[name], folder / name), files):
            pass


def note_source(
    folder: Path, url: str, later: Mapping[str, StoredFile] | None = None, beside: bool = False
) -> None:
    """Record the URL of a folder's files; next to a folder that a stage fills, so that it starts empty."""
    files = {name: vars(file) for name, file in (later or {}).items()}
    record = folder.with_name(folder.name + SOURCE) if beside else folder / SOURCE
    write_whole(record, json.dumps({"url": url, "files": files}), contended=True)


def address_of(path: Path) -> str:
    """The address to show for an artifact or a part of it: its URL, or the path itself."""
    if not path.is_relative_to(cache_folder()):
        return str(path)
    for folder in (path, *path.parents):
        for record in (folder / SOURCE, folder.with_name(folder.name + SOURCE)):
            if record.is_file():
                store = ObjectStore(json.loads(record.read_text(encoding="utf-8"))["url"])
                return store.address("" if folder == path else path.relative_to(folder).as_posix())
    return str(path)


def available(folder: Path, name: str) -> Path:
    """The path of a file of an artifact, fetched if it is streamed and not in the cache."""
    file = folder / name
    if (folder / STREAMED).is_file():
        if not file.is_file():
            url, files = _source(folder)
            if name in files:
                fetch(ObjectStore(url), files[name], file)
        touch(file)
    return file


def tail(folder: Path, name: str, num_bytes: int) -> bytes | None:
    """The last bytes of a streamed file that is not in the cache; None for other files."""
    if (folder / name).is_file() or not (folder / STREAMED).is_file():
        return None
    url, files = _source(folder)
    if (file := files.get(name)) is None:
        return None
    return ObjectStore(url).read_range(file.object, max(0, file.num_bytes - num_bytes), file.num_bytes)


def streamed_size(folder: Path, name: str) -> int | None:
    """The size of a file that is fetched on demand; None for other files."""
    if not (folder / STREAMED).is_file():
        return None
    file = _source(folder)[1].get(name)
    return file.num_bytes if file is not None else None


@lru_cache(maxsize=64)
def _source(folder: Path) -> tuple[str, dict[str, StoredFile]]:
    """The URL of a view, and the files that are fetched on demand. Views never change."""
    source = json.loads((folder / SOURCE).read_text(encoding="utf-8"))
    return source["url"], {name: StoredFile(**file) for name, file in source["files"].items()}
