"""Bundles: written by `recmill export` from a checkpoint, served by `recmill serve`. Mapped, never loaded whole.

DIR/current             the current version and the previous one
DIR/checkpoints/        <version>/: the checkpoint that a version was exported from, if kept
DIR/<version>/          a bundle, complete once it has a manifest
  manifest.json         recipe, columns, evaluation numbers, models, and size and checksums of every file
(integrity.py)
  plan/                 the fitted features
  graphs/               dense models as ONNX
  tables/               embedding rows: <collection>/<table>/ (rows.py)
  report.html           the report of `recmill evaluate`, if there is one
  items/  users/        raw columns and finished features by id (entities.py), item vectors, popularity, index
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import polars as pl

from recmill.artifacts.bundle.arrays import map_array
from recmill.artifacts.bundle.entities import Entities, Side, no_features
from recmill.artifacts.bundle.integrity import open_verified, publish_with_checksums, verify_files
from recmill.artifacts.bundle.rows import RowCollection
from recmill.artifacts.manifest import MANIFEST, with_checksum, without_checksum, write_whole
from recmill.dataset.batch import Array, Batch, Layout, collate
from recmill.embeddings.collection import EmbeddingFeature
from recmill.errors import ArtifactError
from recmill.features.chain import ColumnInfo
from recmill.features.plan import Plan
from recmill.features.plan_artifact import PlanArtifact
from recmill.recipe.trust import check_trusted
from recmill.storage.index import as_published
from recmill.storage.objects import ObjectStore, is_url
from recmill.storage.view import opened, published

CURRENT = "current"
# Collection -> its model in the manifest, and the entries that name its features.
_COLLECTIONS = {
    "user": ("retrieval", ("user",)),
    "item": ("retrieval", ("item", "sequences")),
    "deep": ("ranking", ("keys", "sequences")),
    "wide": ("ranking", ("wide",)),
}
_NEEDED = ("version", "recipe", "columns", "rows_dtype", "models")
_FOLDER_OF: Mapping[Side, str] = {"user": "users", "item": "items"}


@dataclass(frozen=True, repr=False)
class Bundle(PlanArtifact):
    """One version of a recommender on disk. Opening verifies every file; parts are mapped on first use."""

    path: Path
    manifest: Mapping[str, Any]
    trust_code: Collection[str] = ()  # modules and packages with functions that its features may call

    @classmethod
    def open(cls, path: str | Path, trust_code: Collection[str] = ()) -> Bundle:
        """Open a version's folder, or the current version in a folder of versions. A damaged one is an error.

        Either may be a URL, such as s3://bucket/bundles: the version is copied to the cache.
        """
        folder = opened(_version_at(path), "bundle")
        if (folder / CURRENT).is_file():
            folder = folder / _read_current(folder)["version"]
        return cls(folder, open_verified(folder, "bundle", _NEEDED), tuple(trust_code))

    @cached_property
    def plan(self) -> Plan:
        """The fitted features. Raises ArtifactError when they call untrusted code."""
        plan = Plan.read(self.path / "plan")
        check_trusted(plan.recipe, self.trust_code, f"Bundle {self.path}")
        return plan

    @property
    def version(self) -> str:
        return str(self.manifest["version"])

    def summary(self) -> dict[str, str]:
        counts = {"users": self.manifest.get("num_users"), "items": self.manifest.get("num_items")}
        return {
            "recipe": str(self.manifest["recipe"]["name"]),
            "models": " and ".join(self.models),
            **{name: f"{count:,}" for name, count in counts.items() if count},
        }

    @property
    def models(self) -> Mapping[str, Mapping[str, Any]]:
        """retrieval, ranking or both: the features of each."""
        return self.manifest["models"]  # type: ignore[no-any-return]

    @property
    def rows_dtype(self) -> str:
        return str(self.manifest["rows_dtype"])

    @property
    def num_bytes(self) -> int:
        """Size on disk."""
        return sum(int(file["num_bytes"]) for file in self.manifest["files"].values())

    @cached_property
    def items(self) -> Entities | None:
        """The items, if the recipe has any."""
        return self._open_entities("item", self.recipe.log.item)

    @cached_property
    def users(self) -> Entities | None:
        """The users, if the recipe has any."""
        return self._open_entities("user", self.recipe.log.user)

    def entities(self, side: Side) -> Entities:
        """The users or the items; an error if the recipe has none."""
        entities = self.users if side == "user" else self.items
        if entities is None:
            raise ArtifactError(
                f"Bundle {self.path} has no {side}s: its recipe's log names no {side} column."
            )
        return entities

    def _open_entities(self, side: Side, id_column: str | None) -> Entities | None:
        folder = self.path / _FOLDER_OF[side]
        if id_column is None or not (folder / "raw.arrow").is_file():
            return None
        layout = side_layout(self.columns, self.models, side)
        entities = Entities(folder, side, layout, id_column)
        entities.make_unknown_row = partial(self._unknown_row, layout, entities.raw_schema)
        return entities

    def _unknown_row(self, layout: Layout, schema: pl.Schema) -> Batch:
        """The features of a row whose columns are all missing."""
        if not layout.features:
            return no_features(1)
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
        """Names of the models' collections."""
        return [
            name
            for collection, (model, _) in _COLLECTIONS.items()
            for name in (collection, *dims_of(self.models.get(model, {}), collection))
            if collection_features(self.columns, self.models, name)
        ]

    def graph(self, name: str) -> Path | None:
        """The ONNX file of a dense model: user, item, rank or rank_split."""
        path = self.path / "graphs" / f"{name}.onnx"
        return path if path.is_file() else None

    def array(self, name: str) -> Array | None:
        """An array of the bundle by its file, such as items/vectors.npy, mapped; None when the file does not exist."""
        path = self.path / name
        return map_array(path) if path.is_file() else None

    def verify(self) -> None:
        """Verify every file again; files that have not changed are not read again."""
        verify_files(self.path, "bundle", self.manifest["files"])


def used_features(columns: Sequence[ColumnInfo], models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Features that any model reads, in the recipe's order."""
    parts = {
        "retrieval": ("user", "item", "sequences"),
        "ranking": ("numbers", "keys", "wide", "sequences"),
    }
    used = {name for model, facts in models.items() for part in parts[model] for name in facts.get(part, ())}
    return [column.name for column in columns if column.name in used]


def side_layout(columns: Sequence[ColumnInfo], models: Mapping[str, Mapping[str, Any]], side: Side) -> Layout:
    """Every feature of users or of items that any model reads, in the recipe's order."""
    used = set(used_features(columns, models))
    return Layout.of(
        columns, [column.name for column in columns if column.of == side and column.name in used]
    )


def collection_features(
    columns: Sequence[ColumnInfo], models: Mapping[str, Mapping[str, Any]], name: str
) -> list[EmbeddingFeature]:
    """The features of a collection, as the trainer has them."""
    collection, _, dim = name.partition(".")
    if collection not in _COLLECTIONS:
        raise ValueError(f'no collection is called "{name}"; there are: {", ".join(_COLLECTIONS)}')
    model, parts = _COLLECTIONS[collection]
    facts = models.get(model, {})
    dims = facts.get("dims", {}) if collection != "wide" else {}
    sequences = facts.get("sequences", ())
    known = {column.name: column for column in columns}
    chosen = [known[feature] for part in parts for feature in facts.get(part, ())]
    return [
        EmbeddingFeature.of(column, sequences)
        for column in chosen
        if column.kind in ("id", "key", "ids", "keys") and str(dims.get(column.name, "")) == dim
    ]


def dims_of(model: Mapping[str, Any], collection: str) -> dict[str, int]:
    """Collections of features with a dim of their own, `deep.8`, with their dims."""
    dims = sorted(set(model.get("dims", {}).values())) if collection != "wide" else []
    return {f"{collection}.{dim}": dim for dim in dims}


# publishing


def publish_bundle(path: Path, fields: Mapping[str, Any]) -> Bundle:
    """Publish a finished folder as a bundle. Its version is the folder's name."""
    publish_with_checksums(path, "bundle", {"version": path.name, **fields})
    return Bundle.open(path)


def current_of(folder: str | Path) -> str | None:
    """The version that is served from a folder of versions; None when there is none yet."""
    return _read_current(Path(folder))["version"] if (Path(folder) / CURRENT).is_file() else None


def previous_of(folder: str | Path) -> str | None:
    """The version that was current before."""
    return _read_current(Path(folder))["previous"] if (Path(folder) / CURRENT).is_file() else None


def named_by(folder: Path) -> list[str]:
    """The versions that may be served from a folder, best first: the current one and the one before it."""
    return [version for version in (current_of(folder), previous_of(folder)) if version is not None]


def kept_checkpoint(folder: str | Path, version: str) -> Path:
    """The folder of the checkpoint that a version was exported from; it may not exist."""
    return Path(folder) / "checkpoints" / version


def set_current(folder: str | Path, version: str) -> None:
    """Make another version current. It must be valid; the previous one is recorded for a rollback."""
    folder = Path(folder)
    if version not in versions_of(folder):
        known = ", ".join(versions_of(folder)) or "none"
        raise ArtifactError(f'{folder} has no version "{version}"; it has: {known}.')
    Bundle.open(folder / version)
    try:
        current, previous = current_of(folder), previous_of(folder)
    except ArtifactError:  # it is damaged, and is rewritten
        current = previous = None
    content = {"version": version, "previous": current if current != version else previous}
    text = json.dumps(with_checksum(content), indent=1) + "\n"
    write_whole(folder / CURRENT, text, durable=True)


def versions_of(folder: str | Path) -> list[str]:
    """Every published version in a folder, oldest first."""
    manifests = Path(folder).glob(f"*/{MANIFEST}")
    return sorted(path.parent.name for path in manifests if not path.parent.name.endswith(".partial"))


def _version_at(address: str | Path) -> str | Path:
    """The URL of the current version, if a URL points to a folder of versions."""
    if not is_url(address):
        return address
    store = ObjectStore(str(address))

    def read_current() -> bytes | None:
        index = published(store, "bundle")[1]
        return store.read(index.files[CURRENT].object) if CURRENT in index.files else None

    text = as_published(read_current, store.url)
    if text is None:
        return address
    try:
        return store.address(parse_current(text)["version"])
    except ValueError as error:
        raise ArtifactError(
            f"{address}: {CURRENT} is damaged: {error}. Run `recmill export` again."
        ) from None


def _read_current(folder: Path) -> dict[str, Any]:
    try:
        return parse_current((folder / CURRENT).read_bytes())
    except OSError as error:
        raise _damaged_current(folder / CURRENT, repr(error)) from None
    except ValueError as error:
        raise _damaged_current(folder / CURRENT, str(error)) from None


def parse_current(text: bytes) -> dict[str, Any]:
    """The current version and the previous one; raises ValueError when the file is damaged."""
    try:
        current = without_checksum(json.loads(text), required=True)
        content = {"version": current["version"], "previous": current["previous"]}
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(repr(error)) from None
    if not _is_name(content["version"]) or not (content["previous"] is None or _is_name(content["previous"])):
        raise ValueError("it names no version of this folder")
    return content


def _is_name(version: object) -> bool:
    return isinstance(version, str) and version == Path(version).name and version not in ("", "..")


def _damaged_current(path: Path, what: str) -> ArtifactError:
    known = ", ".join(versions_of(path.parent)) or "none"
    return ArtifactError(
        f"{path} is damaged: {what}. Run `recmill export` again, or name one of its versions with "
        f"`recmill rollback`: {known}."
    )
