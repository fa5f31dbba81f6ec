"""Batch recall: the best items for every user, users in units, items found by vector in a map that tasks share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
from numpy.lib.format import open_memmap

from recmill.artifacts.vector_index import Index, build_index, open_index
from recmill.artifacts.work import read_record, write_record
from recmill.dataset.batch import Array
from recmill.dataset.table import Table
from recmill.engines.engine import Engine, Frame
from recmill.errors import ArtifactError
from recmill.features.base import to_lists
from recmill.features.kernels import ValueIndex
from recmill.recipe.recipe import POSITION, SPLIT
from recmill.stages.score.models import BundleModels, ItemSearch, ModelRef, once_in_process, open_models
from recmill.stages.score.sides import ID, SEEN, entities, id_column, slices, tower_vectors, vectors_of
from recmill.stages.score.sources import EntityRows

_VECTORS, _IDS, _INDEX = "vectors.npy", "ids.arrow", "index"


def recall(
    engine: Engine, model: ModelRef, users: Table | None, items: Path | None, k: int, new_only: bool
) -> Frame:
    """A frame with a row for each user of the Table, or of the bundle: raw id, ids of its k best items, scores.

    `items` is what `write_catalogue` made; a bundle has its own. `new_only` leaves out what a user clicked.
    """
    models = open_models(model)
    name = id_column(models, "user")
    if users is not None:
        assert items is not None
        frame = entities(engine, model, users, "user", with_seen=new_only)
        return engine.map(frame, RecallRows(model, name, items, k))
    assert isinstance(models, BundleModels)
    indices = engine.read(EntityRows(len(models.entities("user")), per_unit=1 << 12))
    return engine.map(indices, RecallEntities(model, name, k, new_only))


@dataclass(frozen=True)
class RecallRows:
    """Rows of users, with their features and what they clicked, to their best items."""

    model: ModelRef
    name: str
    items: Path
    k: int

    def __call__(self, rows: pl.DataFrame) -> pl.DataFrame:
        tower = open_models(self.model).tower("user")
        catalogue, lookup = open_catalogue(self.items)
        found = [
            _best(
                catalogue,
                some[ID].alias(self.name),
                tower_vectors(tower, some),
                _indices_of(some[SEEN], lookup) if SEEN in some.columns else None,
                self.k,
                some[POSITION],
            )
            for some in slices(rows)
        ]
        return pl.concat(found)


@dataclass(frozen=True)
class RecallEntities:
    """Users of a bundle to their best items."""

    model: ModelRef
    name: str
    k: int
    new_only: bool

    def __call__(self, rows: pl.DataFrame) -> pl.DataFrame:
        models = open_models(self.model)
        assert isinstance(models, BundleModels)
        indices = rows[POSITION].to_numpy()
        seen = models.seen(indices) if self.new_only else None
        users = models.ids("user").gather(rows[POSITION]).alias(self.name)
        vectors_UV = models.vectors("user", indices)
        return _best(models.catalogue(), users, vectors_UV, seen, self.k, rows[POSITION])


def _best(
    catalogue: ItemSearch,
    users: pl.Series,
    vectors_UV: Array,
    seen: Sequence[Array] | None,
    k: int,
    positions: pl.Series,
) -> pl.DataFrame:
    items_UK, scores_UK = nearest_items(catalogue.index, vectors_UV, k, seen)
    is_there = items_UK >= 0
    lengths = pl.Series(is_there.sum(axis=1))
    items = catalogue.ids.gather(items_UK[is_there])
    scores = pl.Series(scores_UK[is_there], dtype=pl.Float32)
    columns = [users, to_lists("items", items, lengths), to_lists("scores", scores, lengths)]
    split = pl.repeat(0, len(users), dtype=pl.Int8, eager=True).alias(SPLIT)
    return pl.DataFrame([*columns, positions.alias(POSITION), split])


def nearest_items(
    index: Index, vectors_UV: Array, k: int, seen: Sequence[Array] | None = None
) -> tuple[Array, Array]:
    """Indices of the k nearest items and their scores, each [U, k], best first, without those seen; -1 pads."""
    if seen is None:
        return index.search(vectors_UV, k)
    indices = np.full((len(vectors_UV), k), -1, np.int64)
    scores = np.full((len(vectors_UV), k), -np.inf, np.float32)
    # As many more as each user has seen, rounded up, so that many users are searched for in one call.
    wanted = np.array([k + len(items) for items in seen], np.int64)
    wanted = 1 << np.ceil(np.log2(np.maximum(wanted, 1))).astype(np.int64)
    for number in np.unique(wanted):
        some = np.flatnonzero(wanted == number)
        found, found_scores = index.search(vectors_UV[some], int(number))
        for row, user in enumerate(some.tolist()):
            is_new = ~np.isin(found[row], seen[user]) & (found[row] >= 0)
            new = np.flatnonzero(is_new)[:k]
            indices[user, : len(new)], scores[user, : len(new)] = found[row, new], found_scores[row, new]
    return indices, scores


def _indices_of(seen: pl.Series, lookup: ValueIndex) -> list[Array]:
    """Lists of raw ids as indices in the catalogue."""
    lengths = seen.list.len().to_numpy()
    elements = seen.filter(seen.list.len() > 0).explode()
    indices = lookup.find(elements).to_numpy().astype(np.int64) - 1
    return [some[some >= 0] for some in np.split(indices, np.cumsum(lengths)[:-1])]


# the items of a Table


def write_catalogue(shards: Sequence[Path], into: Path) -> None:
    """Make vectors that can be mapped, raw ids and an index of shards with items, unless an earlier run did."""
    record = into.with_name(into.name + ".json")
    if record.exists():
        read_record(record)
        return
    shutil.rmtree(into, ignore_errors=True)
    aside = into.with_name(into.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    num_items = sum(pq.ParquetFile(shard).metadata.num_rows for shard in shards)
    if not num_items:
        raise ArtifactError("There are no items to recommend: no row of the Table is about a known item.")
    mapped, ids, first = None, [], 0
    for shard in shards:
        rows = pl.read_parquet(shard)
        if not rows.height:
            continue
        some = vectors_of(rows["vector"])
        if mapped is None:
            shape = (num_items, some.shape[1])
            mapped = open_memmap(aside / _VECTORS, mode="w+", dtype=np.float32, shape=shape)
        mapped[first : first + len(some)] = some
        first += len(some)
        ids.append(rows.to_series(0).alias("id"))
    assert mapped is not None
    mapped.flush()
    pl.DataFrame([pl.concat(ids, rechunk=True)]).write_ipc(aside / _IDS, compression="uncompressed")
    build_index(mapped).save(aside / _INDEX)
    os.replace(aside, into)
    write_record(record, {}, sorted(path for path in into.rglob("*") if path.is_file()))


def open_catalogue(folder: Path) -> tuple[ItemSearch, ValueIndex]:
    """Items that were written, mapped, and what finds the index of a raw id; the same for all of this process."""

    def opened() -> tuple[ItemSearch, ValueIndex]:
        mapped = np.load(folder / _VECTORS, mmap_mode="r").view(np.ndarray)
        ids = pl.read_ipc(folder / _IDS).to_series()
        return ItemSearch(open_index(folder / _INDEX, mapped), ids), ValueIndex(ids)

    stat = (folder / _VECTORS).stat()
    return once_in_process((folder, stat.st_ino, stat.st_mtime_ns), opened)
