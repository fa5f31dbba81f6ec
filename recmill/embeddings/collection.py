"""Many features over many tables, looked up and updated in one native call each.

Shapes: B rows of the batch, F features with one vector a row, N keys of a sequence in all rows, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from recmill import _native
from recmill.embeddings.table import POOLINGS, Array, EmbeddingTable, Pooling, Segment, as_keys, segment
from recmill.features.chain import ColumnInfo


@dataclass(frozen=True)
class EmbeddingFeature:
    """A column of keys, the table that holds them, and the pooling of a row's keys. none: one key per row.

    sequence: a row has any number of keys, and each keeps its vector.
    """

    name: str
    table: str
    pooling: Pooling | Literal["sequence"] = "none"

    @classmethod
    def of(cls, column: ColumnInfo, sequences: Collection[str] = ()) -> EmbeddingFeature:
        """The feature for a column of a Table.

        Features of one vocabulary share a table; lists are pooled unless named here.
        """
        is_list = column.kind in ("ids", "keys")
        pooling: Pooling | Literal["sequence"] = "mean" if is_list else "none"
        return cls(
            column.name,
            column.vocabulary or column.name,
            "sequence" if column.name in sequences else pooling,
        )

    @property
    def is_sequence(self) -> bool:
        return self.pooling == "sequence"


Column = tuple[Array, Array | None] | tuple[Array, Array | None, Array | None]


@dataclass(frozen=True)
class BatchLookup:
    """The result of reading a batch, with everything that its update needs.

    values_BFD are the features with one vector per row, in the collection's order; `sequences` has [N, D] for each of
    the others, the keys of its rows concatenated.
    """

    values: Array
    sequences: Mapping[str, Array]
    lookups: Sequence[_native.EmbeddingLookup]
    segments: Sequence[Segment]


class EmbeddingCollection:
    """Tables of one dim and the features that read them. Features may share a table: a key in both trains once."""

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
            if feature.pooling not in POOLINGS and not feature.is_sequence:
                raise ValueError(f'Feature "{feature.name}": pooling must be none, sum, mean or sequence')

    def lookup(self, columns: Mapping[str, Column], train: bool, step: int = 0) -> BatchLookup:
        """Read a batch. Each feature passes its keys, offsets (None: one key per row) and optional weights."""
        values_BFD, sequences = self._room(columns)
        segments = self._segments(columns, values_BFD, sequences)
        lookups = _native.lookup_tables(self._natives, segments, train, step, self.num_threads)
        return BatchLookup(values_BFD, sequences, lookups, segments)

    def update(
        self,
        lookup: BatchLookup,
        grads: Array,
        learning_rate: float,
        step: int = 0,
        sequence_grads: Mapping[str, Array] | None = None,
    ) -> None:
        """Train with the gradients of lookup.values and lookup.sequences.

        A gradient that is not finite raises ValueError, and no table changes.
        """
        segments = self._gradient_segments(lookup, grads, sequence_grads or {})
        _native.update_tables(lookup.lookups, segments, learning_rate, step, self.num_threads)

    def _room(self, columns: Mapping[str, Column]) -> tuple[Array, dict[str, Array]]:
        """Output buffers for a batch's vectors."""
        num_pooled = sum(not feature.is_sequence for feature in self.features)
        values_BFD = np.empty((self._batch_size(columns), num_pooled, self.dim), np.float32)
        sequences = {
            feature.name: np.empty((len(columns[feature.name][0]), self.dim), np.float32)
            for feature in self.features
            if feature.is_sequence
        }
        return values_BFD, sequences

    def _segments(
        self, columns: Mapping[str, Column], values_BFD: Array, sequences: Mapping[str, Array]
    ) -> list[Segment]:
        rows = self._rows_of_features(values_BFD, sequences)
        return [
            self._segment(feature, columns[feature.name], rows[index])
            for index, feature in enumerate(self.features)
        ]

    def _rows_of_features(self, values_BFD: Array, sequences: Mapping[str, Array]) -> list[Array]:
        """Views of each feature's vectors, or gradients, in a batch."""
        pooled = iter(range(values_BFD.shape[1]))
        return [
            sequences[feature.name] if feature.is_sequence else values_BFD[:, next(pooled)]
            for feature in self.features
        ]

    def _gradient_segments(
        self, lookup: BatchLookup, grads: Array, sequence_grads: Mapping[str, Array]
    ) -> list[Segment]:
        """The looked-up keys, with gradients in place of rows."""
        if set(sequence_grads) != set(lookup.sequences):
            raise ValueError(
                f"gradients of sequences must be those of {sorted(lookup.sequences)}, got {sorted(sequence_grads)}"
            )
        grads = _checked_gradients(grads, lookup.values)
        of_sequences = {
            name: _checked_gradients(sequence_grads[name], values)
            for name, values in lookup.sequences.items()
        }
        rows = self._rows_of_features(grads, of_sequences)
        return [(*part[:5], rows[index]) for index, part in enumerate(lookup.segments)]

    def _segment(self, feature: EmbeddingFeature, column: Column, rows: Array | None) -> Segment:
        keys, offsets = column[:2]
        weights = column[2] if len(column) > 2 else None
        pooling: Pooling = "none" if feature.pooling == "sequence" else feature.pooling
        offsets = None if feature.is_sequence else offsets
        try:
            return segment(self._indices[feature.table], as_keys(keys), offsets, weights, pooling, rows)
        except TypeError as error:
            raise TypeError(f'Feature "{feature.name}": {error}') from error

    def _batch_size(self, columns: Mapping[str, Column]) -> int:
        sizes = {}
        for feature in self.features:
            if feature.name not in columns:
                raise ValueError(f'Feature "{feature.name}" is missing; the batch has: {", ".join(columns)}')
            keys, offsets = columns[feature.name][:2]
            if offsets is not None or not feature.is_sequence:  # a sequence may come without its rows
                sizes[feature.name] = len(keys) if offsets is None else len(offsets) - 1
        if len(set(sizes.values())) > 1:
            raise ValueError(f"the features of a batch must have the same number of rows, got: {sizes}")
        return next(iter(sizes.values()), 0)


def _checked_gradients(grads: Array, values: Array) -> Array:
    """Contiguous gradients of the values, in the native layout."""
    if grads.shape != values.shape or grads.dtype != np.float32:
        raise ValueError(f"gradients must be float32 {values.shape}, got {grads.dtype} {grads.shape}")
    return grads if grads.strides[-1] == grads.itemsize else np.ascontiguousarray(grads)
