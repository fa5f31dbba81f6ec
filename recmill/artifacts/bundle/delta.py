"""Deltas: what was trained since a bundle or its last delta, small enough to be sent every few seconds.

<version>.deltas/000001/        of bundle <version>; each builds on the one before
  manifest.json                 version, number, recipe_digest, log_end, log_sizes, of a stream its key and the last
                                entry; size and checksums of files
  rows/<collection>/<table>/    keys.npy, rows.npy (float32), removed.npy, and shared.npy if the table shares rows
  graphs/<name>.onnx            graphs with new dense weights
  graphs/rank.npz               the same weights as layers (layers.py), if the bundle has them
  items.arrow  users.arrow      raw rows of items and users that are new or have changed
  clicks.arrow                  columns user and item: the new clicks, oldest first; of a stream, the entry too
  events.arrow                  rows of a stream as they were read, with their entries
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl

from recmill.artifacts.bundle.arrays import file_name, map_array
from recmill.artifacts.bundle.integrity import open_verified, publish_with_checksums
from recmill.artifacts.bundle.layers import FILE
from recmill.artifacts.manifest import is_published
from recmill.embeddings.table import Array
from recmill.errors import ArtifactError

_NEEDED = ("version", "number", "recipe_digest", "tables")


@dataclass(frozen=True)
class TableChange:
    """Changed rows of one table, evicted keys, and the shared rows."""

    keys: Array
    rows: Array
    removed: Array
    shared: Array | None = None


@dataclass(frozen=True)
class Changes:
    """The content of a delta. Tables by `collection/table`, graphs by name."""

    tables: Mapping[str, TableChange] = field(default_factory=dict)
    graphs: Mapping[str, bytes] = field(default_factory=dict)
    layers: bytes | None = None
    items: pl.DataFrame | None = None
    users: pl.DataFrame | None = None
    clicks: pl.DataFrame | None = None
    events: pl.DataFrame | None = None  # for a resumed trainer; servers only need the others


@dataclass(frozen=True)
class Delta:
    """One published delta."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def version(self) -> str:
        """The version of the bundle that it changes."""
        return str(self.manifest["version"])

    @property
    def number(self) -> int:
        """From 1; each delta builds on the one before."""
        return int(self.manifest["number"])

    @classmethod
    def open(cls, path: Path) -> Delta:
        """Open a delta and verify every file of it."""
        return cls(path, open_verified(path, "delta", _NEEDED))

    def changes(self) -> Changes:
        tables = {name: self._table(name) for name in self.manifest["tables"]}
        graphs = {file.stem: file.read_bytes() for file in sorted((self.path / "graphs").glob("*.onnx"))}
        frames = {name: self._frame(name) for name in ("items", "users", "clicks")}
        layers = self.path / "graphs" / FILE
        return Changes(tables, graphs, layers.read_bytes() if layers.is_file() else None, **frames)

    def events(self) -> pl.DataFrame | None:
        """The rows of the delta, when they came from a stream."""
        return self._frame("events")

    def _table(self, name: str) -> TableChange:
        folder = _folder(self.path, name)
        shared = folder / "shared.npy"
        keys, rows, removed = (map_array(folder / f"{part}.npy") for part in ("keys", "rows", "removed"))
        return TableChange(keys, rows, removed, map_array(shared) if shared.is_file() else None)

    def _frame(self, name: str) -> pl.DataFrame | None:
        file = self.path / f"{name}.arrow"
        return pl.read_ipc(file.read_bytes()) if file.is_file() else None


def deltas_folder(bundles: Path, version: str) -> Path:
    return bundles / f"{version}.deltas"


def deltas_of(bundles: Path, version: str) -> list[Path]:
    """The published deltas of a version, in order."""
    folders = sorted(deltas_folder(bundles, version).glob("[0-9]*"))
    return [folder for folder in folders if folder.suffix != ".partial" and is_published(folder)]


def write_delta(
    bundles: Path, version: str, number: int, recipe_digest: str, changes: Changes, facts: Mapping[str, Any]
) -> Path:
    """Publish a delta: written aside, renamed when it is completely on disk."""
    into = deltas_folder(bundles, version) / f"{number:06d}"
    if into.exists():
        raise ArtifactError(f"Delta {into} exists already; another trainer publishes into {bundles}.")
    aside = into.with_suffix(".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for name, change in changes.tables.items():
        folder = _folder(aside, name)
        folder.mkdir(parents=True)
        np.save(folder / "keys.npy", change.keys)
        np.save(folder / "rows.npy", np.asarray(change.rows, np.float32))
        np.save(folder / "removed.npy", change.removed)
        if change.shared is not None:
            np.save(folder / "shared.npy", change.shared)
    for name, graph in changes.graphs.items():
        (aside / "graphs").mkdir(exist_ok=True)
        (aside / "graphs" / f"{name}.onnx").write_bytes(graph)
    if changes.layers is not None:
        (aside / "graphs" / FILE).write_bytes(changes.layers)
    for name in ("items", "users", "clicks", "events"):
        frame: pl.DataFrame | None = getattr(changes, name)
        if frame is not None and frame.height:
            compression: Literal["zstd", "uncompressed"] = "zstd" if name == "events" else "uncompressed"
            frame.write_ipc(aside / f"{name}.arrow", compression=compression)
    manifest = {
        "version": version,
        "number": number,
        "recipe_digest": recipe_digest,
        "tables": list(changes.tables),
    }
    publish_with_checksums(aside, "delta", {**facts, **manifest})
    aside.rename(into)
    return into


def _folder(path: Path, table: str) -> Path:
    collection, _, name = table.partition("/")
    return path / "rows" / collection / file_name(name)
