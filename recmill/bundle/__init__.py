"""Bundles: what `recmill export` makes of a checkpoint and `recmill serve` answers from. Mapped, never loaded whole.

DIR/current             which version is served, and which one was before
DIR/checkpoints/        <version>/: the checkpoint that a version is of, if it was kept
DIR/<version>/          a bundle, whole once its manifest is there
  manifest.json         recipe, columns, evaluation numbers, models, and size and SHA-256 of every file
  plan/                 the fitted features
  graphs/               dense models as ONNX
  tables/               embedding rows: <collection>/<table>/ (rows.py)
  report.html           what `recmill evaluate` said of it, if it did
  items/  users/        raw columns and finished features by id (entities.py), item vectors, popularity, index
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import polars as pl

from recmill.artifact import MANIFEST, publish, read_manifest, write_whole
from recmill.batches import Array, Batch, Layout, collate
from recmill.bundle.arrays import map_array
from recmill.bundle.entities import Entities, Side, write_entities
from recmill.bundle.rows import RowCollection, Rows, table_folder, write_rows
from recmill.embeddings.collection import EmbeddingFeature
from recmill.errors import ArtifactError
from recmill.features.chain import ColumnInfo
from recmill.features.plan import Plan
from recmill.features.planned import Planned
from recmill.spec.trust import check_trusted

__all__ = [
    "Bundle",
    "Entities",
    "RowCollection",
    "Rows",
    "current_of",
    "kept_checkpoint",
    "previous_of",
    "publish_bundle",
    "set_current",
    "side_layout",
    "table_folder",
    "versions_of",
    "write_entities",
    "write_rows",
]

CURRENT = "current"
# Collection -> its model in the manifest, and the entry there that names its features.
_COLLECTIONS = {
    "user": ("retrieval", "user"),
    "item": ("retrieval", "item"),
    "deep": ("ranking", "keys"),
    "wide": ("ranking", "wide"),
}
_NEEDED = ("version", "recipe", "columns", "rows_dtype", "models", "files")
_FOLDER_OF: Mapping[Side, str] = {"user": "users", "item": "items"}


@dataclass(frozen=True)
class Bundle(Planned):
    """One version of a recommender on disk. Opening maps it; parts are read when they are first asked for."""

    path: Path
    manifest: Mapping[str, Any]
    trust_code: Collection[str] = ()  # modules and packages of which its features may call functions

    @classmethod
    def open(cls, path: str | Path, trust_code: Collection[str] = ()) -> Bundle:
        """A version's folder, or a folder of versions, whose current one is opened."""
        folder = Path(path)
        if (folder / CURRENT).is_file():
            folder = folder / _read_current(folder)["version"]
        manifest = read_manifest(folder, "bundle")
        if manifest.pop("digest", None) != _digest_of_manifest(manifest):
            raise _damaged(folder, f"{MANIFEST} does not have its own digest")
        if manifest["format"] != 1:
            raise ArtifactError(
                f"Bundle {folder} has format {manifest['format']}; this recmill reads format 1. Upgrade recmill."
            )
        for name in _NEEDED:
            if name not in manifest:
                raise _damaged(folder, f'{MANIFEST} has no "{name}"')
        _check_sizes(folder, manifest["files"])
        return cls(folder, manifest, tuple(trust_code))

    @cached_property
    def plan(self) -> Plan:
        """The fitted features. Raises ArtifactError when they call code that is not trusted."""
        plan = Plan.read(self.path / "plan")
        check_trusted(plan.recipe, self.trust_code, f"Bundle {self.path}")
        return plan

    @property
    def version(self) -> str:
        return str(self.manifest["version"])

    @property
    def models(self) -> Mapping[str, Mapping[str, Any]]:
        """retrieval, ranking or both: which features each reads."""
        return self.manifest["models"]  # type: ignore[no-any-return]

    @property
    def rows_dtype(self) -> str:
        return str(self.manifest["rows_dtype"])

    @property
    def num_bytes(self) -> int:
        """On disk."""
        return sum(int(file["num_bytes"]) for file in self.manifest["files"].values())

    @cached_property
    def items(self) -> Entities | None:
        """The items, if the recipe has any."""
        return self._entities("item", self.recipe.log.item)

    @cached_property
    def users(self) -> Entities | None:
        """The users, if the recipe has any."""
        return self._entities("user", self.recipe.log.user)

    def _entities(self, side: Side, id_column: str | None) -> Entities | None:
        folder = self.path / _FOLDER_OF[side]
        if id_column is None or not (folder / "raw.arrow").is_file():
            return None
        layout = side_layout(self.columns, self.models, side)
        entities = Entities.open(folder, side, layout, id_column)
        entities.make_stranger = partial(self._stranger, layout, entities.raw_schema)
        return entities

    def _stranger(self, layout: Layout, schema: pl.Schema) -> Batch:
        """What the Plan makes of a row in which everything is missing."""
        row = pl.DataFrame({name: [None] for name in schema}, schema=schema)
        return collate(self.plan.apply(row, labels=False, only=layout.features), layout, with_labels=False)

    @cached_property
    def _collections(self) -> dict[str, RowCollection]:
        return {}

    def collection(self, name: str) -> RowCollection:
        """The embedding rows of a tower (user, item) or of the ranker (deep, wide)."""
        if name not in self._collections:
            features = collection_features(self.columns, self.models, name)
            if not features:
                raise ArtifactError(f'Bundle {self.path} has no tables "{name}".')
            self._collections[name] = RowCollection.open(self.path / "tables" / name, features)
        return self._collections[name]

    @property
    def collections(self) -> list[str]:
        """Names of the collections that the models have."""
        return [name for name in _COLLECTIONS if collection_features(self.columns, self.models, name)]

    def graph(self, name: str) -> Path | None:
        """The ONNX file of a dense model: user, item, rank or rank_split."""
        path = self.path / "graphs" / f"{name}.onnx"
        return path if path.is_file() else None

    def array(self, name: str) -> Array | None:
        """An array of the bundle by its file, such as items/vectors.npy, mapped; None when there is no such file."""
        path = self.path / name
        return map_array(path) if path.is_file() else None

    def verify(self) -> None:
        """Read every file and compare it with its digest."""
        for name, file in self.manifest["files"].items():
            if _digest_of(self.path / name) != file["sha256"]:
                raise _damaged(self.path, f"{name} does not have the digest of its record")


def side_layout(columns: Sequence[ColumnInfo], models: Mapping[str, Mapping[str, Any]], side: Side) -> Layout:
    """Every feature of users or of items that any model reads, in the recipe's order."""
    entries = {"retrieval": ("user", "item"), "ranking": ("numbers", "keys", "wide")}
    used = {
        name
        for model, parts in entries.items()
        for part in parts
        for name in models.get(model, {}).get(part, ())
    }
    return Layout.of(
        columns, [column.name for column in columns if column.of == side and column.name in used]
    )


def collection_features(
    columns: Sequence[ColumnInfo], models: Mapping[str, Mapping[str, Any]], name: str
) -> list[EmbeddingFeature]:
    """The features of a collection, as the trainer has them."""
    if name not in _COLLECTIONS:
        raise ValueError(f'no collection is called "{name}"; there are: {", ".join(_COLLECTIONS)}')
    model, part = _COLLECTIONS[name]
    known = {column.name: column for column in columns}
    chosen = [known[feature] for feature in models.get(model, {}).get(part, ())]
    return [
        EmbeddingFeature(
            column.name,
            column.vocabulary or column.name,
            "mean" if column.kind in ("ids", "keys") else "none",
        )
        for column in chosen
        if column.kind in ("id", "key", "ids", "keys")
    ]


# publishing


def publish_bundle(path: Path, fields: Mapping[str, Any]) -> Bundle:
    """Make a finished folder a bundle: digests of all files, then the manifest. Its version is the folder's name."""
    files = {
        file.relative_to(path).as_posix(): {"num_bytes": file.stat().st_size, "sha256": _digest_of(file)}
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != MANIFEST
    }
    manifest = {"version": path.name, **fields, "files": files}
    # As it will be read: JSON makes lists of tuples and text of numeric keys.
    content = json.loads(json.dumps({"kind": "bundle", "format": 1, **manifest}))
    publish(path, "bundle", {**manifest, "digest": _digest_of_manifest(content)})
    return Bundle.open(path)


def current_of(folder: str | Path) -> str | None:
    """The version that is served from a folder of versions; None when none is yet."""
    return _read_current(Path(folder))["version"] if (Path(folder) / CURRENT).is_file() else None


def previous_of(folder: str | Path) -> str | None:
    """The version that was current before."""
    return _read_current(Path(folder))["previous"] if (Path(folder) / CURRENT).is_file() else None


def kept_checkpoint(folder: str | Path, version: str) -> Path:
    """Where the checkpoint that a version is of is kept beside it; it need not be there."""
    return Path(folder) / "checkpoints" / version


def set_current(folder: str | Path, version: str) -> None:
    """Serve another version, which must be whole; the one before it is kept in mind for a rollback."""
    folder = Path(folder)
    if version not in versions_of(folder):
        known = ", ".join(versions_of(folder)) or "none"
        raise ArtifactError(f'{folder} has no version "{version}"; it has: {known}.')
    current = current_of(folder)
    previous = current if current != version else previous_of(folder)
    text = json.dumps({"version": version, "previous": previous}, indent=1) + "\n"
    write_whole(folder / CURRENT, text, durable=True)


def versions_of(folder: str | Path) -> list[str]:
    """Every whole version in a folder, oldest first; what another program is still writing is not among them."""
    manifests = Path(folder).glob(f"*/{MANIFEST}")
    return sorted(path.parent.name for path in manifests if not path.parent.name.endswith(".partial"))


def _read_current(folder: Path) -> dict[str, Any]:
    path = folder / CURRENT
    try:
        current = json.loads(path.read_text(encoding="utf-8"))
        version, previous = current["version"], current.get("previous")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ArtifactError(f"{path} is damaged: {error}. {_EXPORT_OR_ROLL_BACK}") from None
    if not _is_name(version) or not (previous is None or _is_name(previous)):
        raise ArtifactError(f"{path} is damaged: it names no version of this folder. {_EXPORT_OR_ROLL_BACK}")
    return {"version": version, "previous": previous}


_EXPORT_OR_ROLL_BACK = "Run `recmill export` again, or `recmill rollback` to name a version."


def _is_name(version: object) -> bool:
    return isinstance(version, str) and version == Path(version).name and version not in ("", "..")


def _check_sizes(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    for name, file in files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            raise _damaged(folder, f"{name} is missing") from None
        if found != file["num_bytes"]:
            raise _damaged(folder, f"{name} has {found:,} bytes instead of {file['num_bytes']:,}")


def _digest_of(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise _damaged(path.parent, f"{path.name} is missing") from None


def _digest_of_manifest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _damaged(folder: Path, what: str) -> ArtifactError:
    return ArtifactError(f"Bundle {folder} is damaged: {what}. Copy it again, or run `recmill export` again.")
