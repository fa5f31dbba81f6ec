"""Users and items with their vectors: of a Table, by the towers of a model, or as a bundle holds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from recmill.dataset.batch import Array, collate
from recmill.dataset.table import Table
from recmill.engines.engine import Engine, Frame
from recmill.errors import FeatureError
from recmill.learner.eval_queries import id_feature, retrieval_of
from recmill.recipe.recipe import POSITION, SPLIT, SPLITS
from recmill.stages.score.models import BundleModels, ModelRef, Models, Side, TowerScorer, open_models
from recmill.stages.score.raw import RawColumn, raw_column
from recmill.stages.score.sources import EntityRows, TableRows

ID = "__id"
SEEN = "__seen"  # raw ids of the items that a user clicked
_CLICKED = "__clicked"
_ROWS_AT_ONCE = 1 << 12


def id_column(models: Models, side: Side) -> str:
    """The log's column with the user or item of a row."""
    name = models.recipe.log.user if side == "user" else models.recipe.log.item
    if name is None:
        raise FeatureError(
            f'Recipe "{models.recipe.name}" has no log.{side}, so there are no {side}s to tell.'
        )
    return name


def vectors(engine: Engine, model: ModelRef, table: Table | None, side: Side) -> Frame:
    """A frame with a row for each different user or item of the Table, or of the bundle: raw id and vector."""
    models = open_models(model)
    if table is not None:
        frame = entities(engine, model, table, side)
        return engine.map(frame, TableVectors(model, side, id_column(models, side)))
    assert isinstance(models, BundleModels)
    indices = engine.read(EntityRows(len(models.entities(side))))
    return engine.map(indices, BundleVectors(model, side, id_column(models, side)))


# of a Table


def entities(engine: Engine, model: ModelRef, table: Table, side: Side, with_seen: bool = False) -> Frame:
    """A frame with the last row of each different user or item: ID, the features of its tower, and POSITION.

    Rows of later splits come last. An item whose id is 0 is none. `with_seen` adds SEEN.
    """
    models = open_models(model)
    identify = Identify(
        model,
        raw_column(table, id_column(models, side)),
        tuple(models.tower(side).layout.features),
        id_feature(models.recipe, table.columns, "item") if side == "item" else None,
        raw_column(table, id_column(models, "item")) if with_seen else None,
        retrieval_of(models.recipe).label,
    )
    rows = engine.read(TableRows.of(table, SPLITS, identify.columns))
    return engine.group(engine.map(rows, identify), [ID], last_of_each, f"{side}s")


@dataclass(frozen=True)
class Identify:
    """Adds to rows of a Table whom they are about, and what was clicked; rows of nobody are left out."""

    model: ModelRef
    who: RawColumn
    features: tuple[str, ...]
    known: str | None  # an id that must not be 0
    item: RawColumn | None
    label: str

    @property
    def columns(self) -> list[str]:
        """What it reads."""
        others = [self.known] if self.known is not None else []
        others += [self.item.stored, self.label] if self.item is not None else []
        return [self.who.stored, *self.features, *others]

    def __call__(self, rows: pl.DataFrame) -> pl.DataFrame:
        plan = open_models(self.model).plan
        is_somebody = (
            rows[self.known] != 0 if self.known is not None else pl.repeat(True, rows.height, eager=True)
        )
        columns = [rows[name] for name in (*self.features, POSITION)]
        columns.append(self.who.of(rows, plan).alias(ID))
        if self.item is not None:
            items = self.item.of(rows, plan)
            columns.append(items.set(rows[self.label] != 1, None).alias(_CLICKED))
        return pl.DataFrame(columns).filter(is_somebody).drop_nulls(ID)


def last_of_each(rows: pl.DataFrame) -> pl.DataFrame:
    """The last row of each ID, with all that it clicked."""
    found = [pl.exclude(ID, _CLICKED).last()]
    if _CLICKED in rows.columns:
        found.append(pl.col(_CLICKED).drop_nulls().unique(maintain_order=True).alias(SEEN))
    return rows.group_by(ID, maintain_order=True).agg(found)


@dataclass(frozen=True)
class TableVectors:
    """Rows of users or items to their vectors."""

    model: ModelRef
    side: Side
    name: str

    def __call__(self, rows: pl.DataFrame) -> pl.DataFrame:
        tower = open_models(self.model).tower(self.side)
        return _with_vectors(rows[ID].alias(self.name), tower_vectors(tower, rows), rows[POSITION])


def tower_vectors(tower: TowerScorer, rows: pl.DataFrame) -> Array:
    """Unit vectors of rows that have the tower's features, some rows at a time."""
    found = [
        tower.vectors(collate(some, tower.layout, with_labels=False)) for some in slices(rows) if some.height
    ]
    return np.concatenate(found) if found else np.empty((0, 1), np.float32)


# of a bundle


@dataclass(frozen=True)
class BundleVectors:
    """Indices of users or items of a bundle to their vectors."""

    model: ModelRef
    side: Side
    name: str

    def __call__(self, rows: pl.DataFrame) -> pl.DataFrame:
        models = open_models(self.model)
        assert isinstance(models, BundleModels)
        indices = rows[POSITION].to_numpy()
        ids = models.ids(self.side).gather(rows[POSITION]).alias(self.name)
        return _with_vectors(ids, models.vectors(self.side, indices), rows[POSITION])


def _with_vectors(ids: pl.Series, vectors_NV: Array, positions: pl.Series) -> pl.DataFrame:
    columns = [ids, as_lists("vector", vectors_NV), positions.alias(POSITION)]
    return pl.DataFrame(columns).with_columns(pl.lit(0, dtype=pl.Int8).alias(SPLIT))


def as_lists(name: str, vectors_NV: Array) -> pl.Series:
    """Rows of a matrix as lists of float32."""
    if not len(vectors_NV):
        return pl.Series(name, [], dtype=pl.List(pl.Float32))
    return pl.Series(name, np.ascontiguousarray(vectors_NV, np.float32)).arr.to_list()


def vectors_of(lists: pl.Series) -> Array:
    """The inverse of `as_lists`."""
    return lists.explode().to_numpy().reshape(len(lists), -1)


def slices(rows: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Rows that are looked at together; no rows at all are a slice too."""
    yield from rows.iter_slices(_ROWS_AT_ONCE) if rows.height else [rows]
