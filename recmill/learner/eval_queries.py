"""Eval queries: the items that can be recommended, and users with their held-out items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl

from recmill.dataset.batch import Array, Batch, Layout, collate
from recmill.dataset.splits import SplitRows
from recmill.dataset.table import Table
from recmill.errors import ArtifactError, FeatureError
from recmill.features.chain import ColumnInfo
from recmill.features.labels import is_positive
from recmill.recipe.protocols import DataCounts, Protocol
from recmill.recipe.recipe import SPLITS, Recipe, Retrieval

Side = Literal["user", "item"]

_MAX_SCORES = 2_000_000_000  # of all queries and items together: beyond it, every n-th query is evaluated


def id_feature(recipe: Recipe, columns: Sequence[ColumnInfo], side: Side) -> str:
    """The feature that identifies users or items: an id or key made of that column of the log alone.

    If there are several, one of the tower.
    """
    column = getattr(recipe.log, side)
    tower = getattr(recipe.retrieval, side, ())
    kinds = {info.name: info.kind for info in columns if info.role == "feature"}
    made_of_it = [feature.name for feature in recipe.features if feature.columns == (column,)]
    for name in sorted(made_of_it, key=lambda name: name not in tower):
        if kinds.get(name) in ("id", "key"):
            return name
    raise FeatureError(
        f'Retrieval needs a feature made of "{column}" alone, such as a vocabulary of it: it identifies the {side}s.'
    )


@dataclass(frozen=True)
class ItemFeatures:
    """The items of a Table's training rows, by id, each with its latest item features. Id 0 is not an item."""

    item_id: str
    rows: pl.DataFrame

    @classmethod
    def of(cls, table: SplitRows, recipe: Recipe) -> ItemFeatures:
        item_id = id_feature(recipe, table.columns, "item")
        names = dict.fromkeys([item_id, *retrieval_of(recipe).item])
        rows = table.scan().select(*names).filter(pl.col(item_id) != 0)
        rows = rows.unique(item_id, keep="last", maintain_order=True).sort(item_id)
        return cls(item_id, rows.collect())

    def __len__(self) -> int:
        return self.rows.height

    @property
    def ids(self) -> Array:
        """Ids of the item id feature, in order."""
        return self.rows[self.item_id].to_numpy().astype(np.int64)

    def batch(self, layout: Layout) -> Batch:
        return collate(self.rows, layout, with_labels=False)


@dataclass(frozen=True)
class ItemLists:
    """Items of each query, as indices into the catalogue: those of query q are items[offsets[q]:offsets[q + 1]]."""

    offsets: Array
    items: Array

    def of(self, queries: slice) -> ItemLists:
        offsets = self.offsets[queries.start : queries.stop + 1]
        return ItemLists(offsets - offsets[0], self.items[offsets[0] : offsets[-1]])

    @property
    def queries(self) -> Array:
        """The query of each item."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


@dataclass(frozen=True)
class EvalQueries:
    """Held-out clicks as the queries of one protocol: users, masked items, and ground truth."""

    protocol: Protocol
    catalogue: ItemFeatures
    users: pl.DataFrame  # one row of features for each query
    seen: ItemLists
    # the index after the catalogue's last one stands for items outside of it: never hit
    ground_truth: ItemLists
    num_left_out: int  # queries that are skipped, because there are too many

    @classmethod
    def of(cls, table: SplitRows, recipe: Recipe, split: str, protocol: Protocol) -> EvalQueries:
        """Queries of a split's clicks. Users without an id are skipped: keep their raw column in the Table."""
        catalogue = ItemFeatures.of(table, recipe)
        clicks = _clicks(table, recipe, split, catalogue)
        if not clicks.height:
            raise ArtifactError(
                f'{table.path} has no {split} rows with label "{retrieval_of(recipe).label}" of known users; '
                "there is nothing to rank."
            )
        states = clicks.select("__user", *retrieval_of(recipe).user)
        everyone = states.unique(maintain_order=True)
        users = _every_nth(everyone, len(catalogue)).with_row_index("__query")
        _check_states(users, protocol)
        clicks_of_queries = clicks.with_columns(_query_of(states, users)).drop_nulls("__query")
        before = [name for name in SPLITS[: SPLITS.index(split)] if table.num_rows(name)]
        nothing = users.select("__user", pl.lit(0, pl.Int64).alias("__index")).clear()
        seen_by_user = pl.concat(
            [nothing, *(_seen(table, recipe, name, catalogue, users) for name in before)]
        ).unique()
        seen = users.select("__user", "__query").join(seen_by_user, on="__user").select("__query", "__index")
        # A repeated click is masked: recommending the item again would not be a discovery.
        right = clicks_of_queries.join(seen_by_user, on=["__user", "__index"], how="anti").unique(
            ["__query", "__item"]
        )
        num_queries = users.height
        return cls(
            protocol,
            catalogue,
            users,
            _item_lists(seen, num_queries),
            _item_lists(right, num_queries),
            everyone.height - num_queries,
        )

    def __len__(self) -> int:
        return self.users.height

    def batch(self, queries: slice, layout: Layout) -> Batch:
        return collate(self.users[queries], layout, with_labels=False)


def retrieval_of(recipe: Recipe) -> Retrieval:
    if recipe.retrieval is None:
        raise FeatureError(f'Recipe "{recipe.name}" has no [retrieval].')
    return recipe.retrieval


def counts_of(table: Table, recipe: Recipe) -> DataCounts:
    """Interactions, users and items of all splits; users and items only if the Table keeps their raw columns."""
    label = retrieval_of(recipe).label
    rows = pl.concat([table.scan(split) for split in SPLITS if table.num_rows(split)]).filter(
        is_positive(label)
    )
    raw = {"users": f"raw_{table.recipe.log.user}", "items": f"raw_{table.recipe.log.item}"}
    kept = {name: column for name, column in raw.items() if column in rows.collect_schema()}
    counts = rows.select(
        pl.len().alias("interactions"), **{name: pl.col(column).n_unique() for name, column in kept.items()}
    )
    return DataCounts(**counts.collect().row(0, named=True))


def _identity(table: SplitRows, recipe: Recipe, side: Side) -> pl.Expr:
    """The user or item of a row: the raw column if the Table keeps it, else the id, which is null when it is 0."""
    raw = getattr(table.recipe.log, side)
    if raw in table.recipe.table.keep:
        return pl.col(f"raw_{raw}").alias(f"__{side}")
    name = id_feature(recipe, table.columns, side)
    return pl.when(pl.col(name) != 0).then(pl.col(name)).alias(f"__{side}")


def _clicks(table: SplitRows, recipe: Recipe, split: str, catalogue: ItemFeatures) -> pl.DataFrame:
    """Held-out clicks of known users, with their features and the item's index in the catalogue."""
    retrieval = retrieval_of(recipe)
    indices = catalogue.rows.lazy().select(catalogue.item_id).with_row_index("__index")
    # Without the raw column, each unknown item counts as a distinct one.
    item = pl.coalesce(
        _identity(table, recipe, "item").cast(pl.String), pl.format("row {}", pl.int_range(pl.len()))
    )
    clicks = table.scan(split).filter(is_positive(retrieval.label))
    clicks = clicks.select(
        _identity(table, recipe, "user"), item.alias("__item"), catalogue.item_id, *retrieval.user
    )
    clicks = clicks.drop_nulls("__user").join(
        indices, on=catalogue.item_id, how="left", maintain_order="left"
    )
    return clicks.with_columns(pl.col("__index").fill_null(len(catalogue)).cast(pl.Int64)).collect()


def _seen(
    table: SplitRows, recipe: Recipe, split: str, catalogue: ItemFeatures, users: pl.DataFrame
) -> pl.DataFrame:
    """User and item index of what these users clicked in an earlier split."""
    indices = catalogue.rows.lazy().select(catalogue.item_id).with_row_index("__index")
    wanted = users.lazy().select("__user").unique()
    clicks = table.scan(split).filter(is_positive(retrieval_of(recipe).label))
    clicks = clicks.select(_identity(table, recipe, "user"), catalogue.item_id)
    pairs = clicks.join(wanted, on="__user", how="semi").join(indices, on=catalogue.item_id)
    return pairs.select("__user", pl.col("__index").cast(pl.Int64)).unique().collect()


def _check_states(users: pl.DataFrame, protocol: Protocol) -> None:
    if protocol.ask == "user" and users["__user"].n_unique() < users.height:
        name = users["__user"].value_counts(sort=True)["__user"][0]
        raise FeatureError(
            f"Protocol {protocol.name} asks once for each user, but user {name} has held-out rows with different "
            "features. Leave what changes from row to row, such as histories, out of retrieval.user."
        )


def _every_nth(queries: pl.DataFrame, num_items: int) -> pl.DataFrame:
    every = -(-queries.height * num_items // _MAX_SCORES)
    return queries.gather_every(every) if every > 1 else queries


def _query_of(states: pl.DataFrame, users: pl.DataFrame) -> pl.Series:
    """The query of each row: the user with the same features; null if that query is skipped."""
    names = states.columns
    joined = states.join(users, on=names, how="left", maintain_order="left", nulls_equal=True)
    return joined["__query"]


def _item_lists(pairs: pl.DataFrame, num_queries: int) -> ItemLists:
    ordered = pairs.sort("__query", "__index")
    lengths = np.bincount(ordered["__query"].to_numpy(), minlength=num_queries)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    return ItemLists(offsets, ordered["__index"].to_numpy().astype(np.int64))
