"""Writing one checkpoint, by one process or by several workers together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from safetensors.numpy import save_file

from recmill.artifacts.checkpoint.files import digest_of, remove_folder, sync_folder
from recmill.artifacts.checkpoint.records import write_records
from recmill.artifacts.checkpoint.step import ADMISSION_FIELDS, describe_table, manifest_digest
from recmill.artifacts.manifest import publish
from recmill.embeddings.table import Array, EmbeddingTable, Snapshot

T = TypeVar("T")


class Gathering(Protocol):
    def all_gather(self, value: T) -> list[T]:
        """The values of all workers, in order of rank."""


class Writers(Protocol):
    """The workers that write one checkpoint together, from the point of view of one."""

    rank: int
    size: int

    @property
    def steps(self) -> Gathering:
        """The group of the training thread."""

    @property
    def saving(self) -> Gathering:
        """The group of the writing thread."""


@dataclass(frozen=True)
class WrittenFiles:
    """The files of one process: file and number of keys of each table, and size and digest of every file."""

    tables: Mapping[str, str]
    keys: Mapping[str, int]
    files: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class PendingCheckpoint:
    """This process's part of a checkpoint, fixed at one step and ready to be written on another thread."""

    path: Path  # the final path
    manifest: Mapping[str, Any]
    tables: Mapping[str, EmbeddingTable]
    snapshots: Mapping[str, Snapshot]
    arrays: Mapping[str, Array]
    writers: Writers | None

    @property
    def is_first(self) -> bool:
        return self.writers is None or self.writers.rank == 0

    @property
    def partial(self) -> Path:
        """The path until all files are on disk."""
        return self.path.with_name(f"{self.path.name}.partial")

    def write(self) -> None:
        """Write and publish. All workers call this; the first one publishes when all have written."""
        if self.writers is None:
            self._make_folder()
            self._publish([self._write_files()])
            return
        # A disk error is sent as a value, so that all workers raise it.
        group = self.writers.saving
        _value(group.all_gather(_caught(self._make_folder) if self.is_first else None)[0])
        parts = group.all_gather(_caught(self._write_files))
        try:
            if self.is_first:
                self._publish([_value(part) for part in parts])
        finally:
            group.all_gather(None)  # it is published, or never will be
        for part in parts:
            _value(part)

    def _make_folder(self) -> None:
        remove_folder(self.partial)
        self.partial.mkdir(parents=True)

    def _write_files(self) -> WrittenFiles:
        suffix = "" if self.writers is None else f".{self.writers.rank}-{self.writers.size}"
        admission: dict[str, Array] = {}
        tables, keys = {}, {}
        for name, snapshot in self.snapshots.items():
            table = self.tables[name]
            tables[name] = f"tables/{name}{suffix if table.shard is not None else ''}.arrow"
            keys[name] = write_records(self.partial / tables[name], snapshot, describe_table(name, table))
            admission[f"{name}.removed"] = snapshot.removed
            admission |= {f"{name}.{part}": getattr(snapshot.waiting, part) for part in ADMISSION_FIELDS}
        names = [*tables.values(), f"admission{suffix}.safetensors"]
        save_file(admission, self.partial / names[-1])
        if self.is_first:
            names.append("dense.safetensors")
            save_file(dict(self.arrays), self.partial / names[-1])
        return WrittenFiles(tables, keys, {name: _size_and_digest(self.partial / name) for name in names})

    def _publish(self, parts: Sequence[WrittenFiles]) -> None:
        manifest = dict(self.manifest)
        manifest["tables"] = {
            name: {
                **table,
                "files": [part.tables[name] for part in parts if name in part.tables],
                "keys": sum(part.keys.get(name, 0) for part in parts),
            }
            for name, table in self.manifest["tables"].items()
        }
        manifest["files"] = dict(
            sorted((name, facts) for part in parts for name, facts in part.files.items())
        )
        content = {"kind": "step", "format": 1, **manifest}
        publish(self.partial, "step", {**manifest, "digest": manifest_digest(content)})
        remove_folder(self.path)
        os.rename(self.partial, self.path)
        sync_folder(self.path.parent)


def _size_and_digest(path: Path) -> dict[str, Any]:
    return {"num_bytes": path.stat().st_size, "sha256": digest_of(path)}


def _caught(function: Callable[[], T]) -> T | OSError:
    try:
        return function()
    except OSError as error:
        return error


def _value(result: T | OSError) -> T:
    if isinstance(result, OSError):
        raise result
    return result
