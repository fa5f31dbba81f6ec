"""Many features over many tables, looked up and updated in one native call each.

Shapes: B rows of the batch, F features, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from recmill import _native
from recmill.embeddings.table import POOLINGS, Array, EmbeddingTable, Pooling, Segment, as_keys, segment


@dataclass(frozen=True)
class EmbeddingFeature:
    """A column of keys: which table has them, and how a row's keys become one vector. none: one key per row."""

    name: str
    table: str
    pooling: Pooling = "none"


Column = tuple[Array, Array | None] | tuple[Array, Array | None, Array | None]


@dataclass(frozen=True)
class BatchLookup:
    """What a batch read: values_BFD, features in the collection's order; and what its update will need."""

    values: Array
    lookups: Sequence[_native.EmbeddingLookup]
    segments: Sequence[Segment]


class EmbeddingCollection:
    """Tables of one dim and the features that read them. Features may share a table: a key of both trains once."""

    def __init__(
        self, tables: Sequence[EmbeddingTable], features: Sequence[EmbeddingFeature], num_threads: int = 1
    ) -> None:
        self.tables = {table.spec.name: table for table in tables}
        self.features = tuple(features)
        self.num_threads = num_threads
        self._check(tables)
        self.dim = tables[0].spec.dim
        self._indices = {name: index for index, name in enumerate(self.tables)}
        self._natives = [table.native for table in tables]

    def _check(self, tables: Sequence[EmbeddingTable]) -> None:
        if not tables or len(self.tables) != len(tables):
            names = ", ".join(table.spec.name for table in tables)
            raise ValueError(f"a collection needs tables with different names, got: {names or 'none'}")
        if len({table.spec.dim for table in tables}) > 1:
            dims = ", ".join(f"{table.spec.name} {table.spec.dim}" for table in tables)
            raise ValueError(f"the tables of a collection have one dim, got: {dims}")
        if len({feature.name for feature in self.features}) != len(self.features):
            raise ValueError("the features of a collection need different names")
        for feature in self.features:
            if feature.table not in self.tables:
                raise ValueError(
                    f'Feature "{feature.name}" reads table "{feature.table}", but there are: {", ".join(self.tables)}'
                )
            if feature.pooling not in POOLINGS:
                raise ValueError(f'Feature "{feature.name}": pooling must be none, sum or mean')

    def lookup(self, columns: Mapping[str, Column], train: bool, step: int = 0) -> BatchLookup:
        """Read a batch: per feature its keys, offsets (None: one key per row) and, if there are any, weights."""
        values_BFD = np.empty((self._batch_size(columns), len(self.features), self.dim), np.float32)
        segments = [
            self._segment(feature, columns[feature.name], values_BFD[:, index])
            for index, feature in enumerate(self.features)
        ]
        lookups = _native.lookup_tables(self._natives, segments, train, step, self.num_threads)
        return BatchLookup(values_BFD, lookups, segments)

    def update(self, lookup: BatchLookup, grads: Array, learning_rate: float, step: int = 0) -> None:
        """Train by the gradient of lookup.values. One that is not finite raises ValueError and no table changes."""
        segments = self._gradient_segments(lookup, grads)
        _native.update_tables(lookup.lookups, segments, learning_rate, step, self.num_threads)

    def _gradient_segments(self, lookup: BatchLookup, grads: Array) -> list[Segment]:
        """What was looked up, with gradients in place of rows."""
        if grads.shape != lookup.values.shape or grads.dtype != np.float32:
            raise ValueError(
                f"gradients must be float32 {lookup.values.shape}, got {grads.dtype} {grads.shape}"
            )
        if grads.strides[-1] != grads.itemsize:
            grads = np.ascontiguousarray(grads)
        return [(*part[:5], grads[:, index]) for index, part in enumerate(lookup.segments)]

    def _segment(self, feature: EmbeddingFeature, column: Column, rows: Array | None) -> Segment:
        keys, offsets = column[:2]
        weights = column[2] if len(column) > 2 else None
        try:
            return segment(
                self._indices[feature.table], as_keys(keys), offsets, weights, feature.pooling, rows
            )
        except TypeError as error:
            raise TypeError(f'Feature "{feature.name}": {error}') from error

    def _batch_size(self, columns: Mapping[str, Column]) -> int:
        sizes = {}
        for feature in self.features:
            if feature.name not in columns:
                raise ValueError(f'Feature "{feature.name}" is missing; the batch has: {", ".join(columns)}')
            keys, offsets = columns[feature.name][:2]
            sizes[feature.name] = len(keys) if offsets is None else len(offsets) - 1
        if len(set(sizes.values())) > 1:
            raise ValueError(f"the features of a batch must have the same number of rows, got: {sizes}")
        return next(iter(sizes.values()), 0)
