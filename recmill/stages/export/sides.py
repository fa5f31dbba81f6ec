"""Users and items of a bundle: their raw columns, their features, and popularity, neighbours and vectors of items."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
from numpy.lib.format import open_memmap

from recmill.artifacts.bundle.entities import write_entities
from recmill.artifacts.vector_index import build_index
from recmill.dataset.batch import Array, Layout, collate, numbers_of
from recmill.features.plan import Plan
from recmill.learner.retrieval import Retriever
from recmill.recall.neighbours import CONTENT, MAX_ITEMS, fit_neighbours
from recmill.recall.parameters import RecallParameters
from recmill.recall.popularity import popularity, trending
from recmill.stages.export.snapshot import EntitySnapshot

_ROWS_AT_ONCE = 1 << 16
_NUM_QUERIES = 200  # users whose vectors the index is tuned on


def write_users(into: Path, snapshot: EntitySnapshot, plan: Plan, layout: Layout) -> None:
    """Users, and the items that each has clicked."""
    users = snapshot.users
    assert users is not None
    write_entities(into, "user", users, features_of(plan, users, layout.features), layout, users.columns[0])
    if snapshot.clicks is not None:
        snapshot.clicks.write_seen(into)


def write_items(
    into: Path, snapshot: EntitySnapshot, plan: Plan, layout: Layout, recall: RecallParameters, threads: int
) -> None:
    """Items, how popular each is, and the neighbours of each by the item-item models that take part in recall."""
    items = snapshot.items
    assert items is not None
    assert snapshot.counts is not None
    write_entities(into, "item", items, features_of(plan, items, layout.features), layout, items.columns[0])
    if snapshot.clicks is None:
        np.save(into / "popularity.npy", snapshot.counts)
        return
    interactions = snapshot.clicks.interactions()
    np.save(into / "popularity.npy", popularity(interactions, recall.popular_half_life))
    np.save(into / "trending.npy", trending(interactions))
    for name, parameters in recall.neighbours.items() if len(interactions) else ():
        if interactions.num_items <= MAX_ITEMS:
            vectors = content_vectors(plan, items) if name == CONTENT else None
            fit_neighbours(name, parameters.variant, interactions, threads, vectors).save(into, name)


def content_vectors(plan: Plan, items: pl.DataFrame) -> Array | None:
    """The vectors that describe items, as the recipe's `recall.content` names them; None without it."""
    name = plan.recipe.recall.content if plan.recipe.recall is not None else None
    if name is None:
        return None
    (width,) = (column.size for column in plan.columns() if column.name == name)
    return numbers_of(features_of(plan, items, [name])[name], width)


def write_vectors(into: Path, snapshot: EntitySnapshot, plan: Plan, retriever: Retriever, kind: str) -> None:
    """The items' vectors, and the index that finds the nearest of them for users like those of the log."""
    items = snapshot.items
    assert items is not None
    layout = retriever.layouts["item"]
    vectors = None
    for first in range(0, items.height, _ROWS_AT_ONCE):
        rows = plan.apply(items[first : first + _ROWS_AT_ONCE], labels=False, only=layout.features)
        some = retriever.item_vectors(collate(rows, layout, with_labels=False))
        if vectors is None:
            shape = (items.height, some.shape[1])
            vectors = open_memmap(into / "vectors.npy", mode="w+", dtype=np.float32, shape=shape)
        vectors[first : first + len(some)] = some
    assert vectors is not None, "a log that is not empty has items"
    vectors.flush()
    layout = retriever.layouts["user"]
    asking = plan.apply(snapshot.sample[:_NUM_QUERIES], labels=False, only=layout.features)
    queries = retriever.user_vectors(collate(asking, layout, with_labels=False))
    build_index(vectors, kind, queries if len(queries) else None).save(into / "index")


def features_of(plan: Plan, rows: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """Features of raw rows, some rows at a time."""
    pieces = [
        plan.apply(rows[first : first + _ROWS_AT_ONCE], labels=False, only=names)
        for first in range(0, max(1, rows.height), _ROWS_AT_ONCE)
    ]
    return pl.concat(pieces)
