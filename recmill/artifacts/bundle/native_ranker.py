"""A ranker in one native call per request (native/rank.hpp), over the mapped rows of a bundle.

Shapes: H outputs of the first layer, U and I vectors of the user and the items, D embedding dim, d a feature's own
dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from recmill import _native
from recmill.artifacts.bundle.entities import Entities, EntityRows
from recmill.artifacts.bundle.features import FeatureRows
from recmill.artifacts.bundle.layers import ByteRanges, RankerLayers
from recmill.artifacts.bundle.rows import RowCollection
from recmill.dataset.batch import Array, Keys, Layout
from recmill.embeddings.table import as_keys

_NO_VECTORS = np.empty(0, np.float32)


@dataclass(frozen=True)
class SideFeatures:
    """The ranker's features of the user and the context, or of an item, in the order of the layers' columns."""

    numbers: Sequence[str]
    keys: Sequence[str]
    wide: Sequence[str]


class NativeRanker:
    """Layers, packed for this CPU, and the tables whose rows they read."""

    def __init__(
        self,
        layers: RankerLayers,
        layout: Layout,
        keys: Sequence[str],  # in the model's order
        user: SideFeatures,
        item: SideFeatures,
        collections: Mapping[str, RowCollection],
        target: str = "",
        serving_target: str = "",
    ) -> None:
        self._layers, self._layout, self._keys = layers, layout, keys
        self._item = item
        self._tables = {
            feature.name: tables
            for name, tables in collections.items()
            if name != "wide"
            for feature in tables.features
        }
        self._wide = collections.get("wide")
        # The user's vectors are in this order: all of a dim are looked up together.
        self._user_tables = [
            (tables, names)
            for tables in dict.fromkeys(self._tables[name] for name in user.keys)
            if (names := [name for name in user.keys if self._tables[name] is tables])
        ]
        self._user = replace(user, keys=[name for _, names in self._user_tables for name in names])
        self._item_tables: _native.ItemTables | None = None
        self._targets = {"target": target, "serving_target": serving_target}
        self._native = self._build()

    def in_bytes(self, ranges: ByteRanges) -> NativeRanker:
        """The ranker with int8 products. Layers without a hidden one stay as they are."""
        rounded = copy(self)
        rounded._native = self._build()
        if len(self._layers.top) > 1:
            rounded._native.use_bytes(ranges.inputs, list(ranges.hidden))
        return rounded

    def rank(self, user: FeatureRows, items: FeatureRows | EntityRows) -> tuple[Array, Array]:
        """Logits and probabilities, float32 [items.size]."""
        if isinstance(items, EntityRows):
            return self._rank_stored(user, items)
        features = [self._argument(self._tables[name], name, items.keys[name]) for name in self._item.keys]
        wide = [self._argument(self._wide, name, items.keys[name]) for name in self._item.wide]
        once = self._once(user)
        item_numbers = items.matrix(self._item.numbers)
        logits, probabilities, missing = self._native.rank(
            *once, item_numbers, features, self._user_wide(user), wide
        )
        if missing:  # a key has no row of its own, or one that was added in memory
            for index, rows in self._own_rows(missing, items):
                is_wide = index >= len(features)
                (wide if is_wide else features)[index - is_wide * len(features)] = rows
            logits, probabilities, _ = self._native.rank(
                *once, item_numbers, features, self._user_wide(user), wide
            )
        return logits, probabilities

    def _rank_stored(self, user: FeatureRows, items: EntityRows) -> tuple[Array, Array]:
        """Rank items by index: their features are read from the mapped files."""
        entities, tables = items.entities, self._item_tables_of(items.entities)
        once, wide = self._once(user), self._user_wide(user)
        added = entities.added_keys, entities.added_numbers
        found = self._native.rank_items(*once, wide, tables, items.indices, *added, [])
        if found[2]:  # lists, and keys without a row of their own or with one that was added in memory
            rows = self._own_rows(found[2], items.rows)
            found = self._native.rank_items(*once, wide, tables, items.indices, *added, rows)
        return found[0], found[1]

    def _item_tables_of(self, entities: Entities) -> _native.ItemTables:
        """Opened for native code once: the arrays of a bundle's files are never replaced."""
        if self._item_tables is None:
            tables = [self._tables[name].table_of(name).mapped() for name in self._item.keys]
            tables += [self._wide.table_of(name).mapped() for name in self._item.wide] if self._wide else []
            names = [*self._item.keys, *self._item.wide]
            self._item_tables = entities.item_tables(names, self._item.numbers, tables)
        return self._item_tables

    def ranges(self, user: FeatureRows, items: FeatureRows) -> ByteRanges:
        """The ranges of one request, for calibration."""
        features: list[Any] = [self._rows(self._tables[n], n, items.keys[n]) for n in self._item.keys]
        inputs, hidden = self._native.ranges(*self._once(user), items.matrix(self._item.numbers), features)
        return ByteRanges(inputs, hidden)

    # one request

    def _once(self, user: FeatureRows) -> tuple[Array, Array]:
        vectors = [
            vector
            for tables, names in self._user_tables
            for vector in self._user_vectors(tables.pooled(user.keys, names)[0], names)
        ]
        flat = np.concatenate(vectors) if len(vectors) > 1 else vectors[0] if vectors else _NO_VECTORS
        return user.matrix(self._user.numbers)[0], flat

    def _user_vectors(self, rows: Array, names: Sequence[str]) -> Sequence[Array]:
        """Vectors of these features as the first layer reads them: together, or of `dot` each, projected."""
        if not self._is_dot:
            return [rows.reshape(-1)]
        projections = self._layers.projections
        return [
            row @ projections[name] if name in projections else row
            for name, row in zip(names, rows, strict=True)
        ]

    def _user_wide(self, user: FeatureRows) -> float:
        if not self._user.wide:
            return 0.0
        assert self._wide is not None
        return float(self._wide.pooled(user.keys, self._user.wide).sum())

    def _argument(self, tables: RowCollection | None, name: str, keys: Keys) -> Any:
        """A feature of the items for the native ranker: its table, or a row for each item."""
        assert tables is not None
        if keys.offsets is not None:
            return self._rows(tables, name, keys)
        return *tables.table_of(name).mapped(), as_keys(keys.values)

    def _own_rows(self, numbers: Sequence[int], items: FeatureRows) -> list[tuple[int, Array]]:
        """A row for each item of some features, by number: those of the wide part follow the others."""
        found = []
        for number in numbers:
            is_wide = number >= len(self._item.keys)
            name = [*self._item.keys, *self._item.wide][number]
            tables = self._wide if is_wide else self._tables[name]
            assert tables is not None
            found.append((number, self._rows(tables, name, items.keys[name])))
        return found

    def _rows(self, tables: RowCollection, name: str, keys: Keys) -> Array:
        return np.ascontiguousarray(tables.pooled({name: keys}, [name])[:, 0])

    # columns of the first layer

    @property
    def _is_dot(self) -> bool:
        return self._layers.interaction == "dot"

    def _columns_of_numbers(self, names: Sequence[str]) -> list[int]:
        slices = self._layout.number_slices
        return [column for name in names for column in range(slices[name].start, slices[name].stop)]

    def _build(self) -> _native.Ranker:
        layers = self._layers
        user_numbers, item_numbers = (
            self._columns_of_numbers(side.numbers) for side in (self._user, self._item)
        )
        (first, bias), *rest = layers.top
        once, each = self._dot_columns(first) if self._is_dot else self._cat_columns(first)
        bottom = list(layers.bottom)
        if bottom:
            bottom[0] = np.ascontiguousarray(bottom[0][0][:, [*user_numbers, *item_numbers]]), bottom[0][1]
        dim = self._dim(first)
        projections = [layers.projections.get(name) if self._is_dot else None for name in self._item.keys]
        return _native.Ranker(
            is_dot=self._is_dot,
            user_numbers=len(user_numbers),
            item_numbers=len(item_numbers),
            user_vectors=sum(dim if self._is_dot else self._tables[name].dim for name in self._user.keys),
            dim=dim,
            dims=[self._tables[name].dim for name in self._item.keys],
            projections=projections,
            bottom=bottom,
            once=(np.ascontiguousarray(once), bias),
            each=np.ascontiguousarray(each),
            rest=rest,
            **self._targets,
        )

    def _width_below(self) -> int:
        if self._layers.bottom:
            return len(self._layers.bottom[-1][1])
        return len(self._columns_of_numbers([*self._user.numbers, *self._item.numbers]))

    def _dim(self, first: Array) -> int:
        """The dim of the model's vectors."""
        if self._is_dot and self._layers.bottom:
            return self._width_below()
        own = {self._tables[name].dim for name in self._keys if name not in self._layers.projections}
        projected = {values.shape[1] for values in self._layers.projections.values()}
        return next(iter(own | projected), 1)

    def _heads(self) -> tuple[list[int], list[int]]:
        """Columns of the user's and of the items' numbers, or of the bottom's outputs."""
        if self._layers.bottom:
            below = list(range(self._width_below()))
            return ([], below) if self._item.numbers else (below, [])
        return self._columns_of_numbers(self._user.numbers), self._columns_of_numbers(self._item.numbers)

    def _cat_columns(self, first: Array) -> tuple[Array, Array]:
        """The first layer's weights for the user and for an item, multiplied by the projections."""
        start, dim = self._width_below(), self._dim(first)
        places = {name: start + index * dim for index, name in enumerate(self._keys)}
        parts = []
        for head, side in zip(self._heads(), (self._user, self._item), strict=True):
            blocks = [first[:, head]]
            for name in side.keys:
                block = first[:, places[name] : places[name] + dim]
                projection = self._layers.projections.get(name)
                blocks.append(block if projection is None else block @ projection.T)
            parts.append(np.concatenate(blocks, axis=1, dtype=np.float32))
        return parts[0], parts[1]

    def _dot_columns(self, first: Array) -> tuple[Array, Array]:
        """Products follow the bottom's outputs, in the order of all pairs of the model's vectors."""
        below = [0] if self._layers.bottom else []
        order = {name: index + len(below) for index, name in enumerate(self._keys)}
        user, item = ([order[name] for name in side.keys] for side in (self._user, self._item))
        user, item = (user, [*below, *item]) if self._item.numbers else ([*below, *user], item)
        head_once, head_each = self._heads()
        among_user, among_item = _pairs_among(user), _pairs_among(item)
        crossed = [(one, other) for one in item for other in user]
        start = self._width_below()
        once = [*head_once, *_pair_columns(start, among_user)]
        each = [*head_each, *_pair_columns(start, crossed), *_pair_columns(start, among_item)]
        return first[:, once], first[:, each]


def _pairs_among(vectors: Sequence[int]) -> list[tuple[int, int]]:
    """All pairs, in the order of the model's products."""
    return [(vectors[second], vectors[first]) for first in range(len(vectors)) for second in range(first)]


def _pair_columns(start: int, pairs: Sequence[tuple[int, int]]) -> list[int]:
    return [start + max(pair) * (max(pair) - 1) // 2 + min(pair) for pair in pairs]
