"""Features of rows by name, so that those of user, context and items can be combined for one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from recmill.dataset.batch import Array, Batch, Keys, Layout, keys_of, numbers_of


@dataclass(frozen=True)
class FeatureRows:
    """Features of some rows by name: numbers, and keys of the tables."""

    size: int
    numbers: Mapping[str, Array]  # [size, 1], of vectors [size, width]
    keys: Mapping[str, Keys]

    @classmethod
    def of(cls, batch: Batch, layout: Layout) -> FeatureRows:
        numbers = {name: batch.numbers[:, columns] for name, columns in layout.number_slices.items()}
        return cls(batch.size, numbers, batch.keys)

    @classmethod
    def of_frame(cls, rows: pl.DataFrame, layout: Layout) -> FeatureRows:
        """The output of a Plan, all features of the layout or some. An id out of range is an error."""
        made = {column.name: column for column in rows}
        numbers = {
            name: numbers_of(made[name], layout.widths.get(name)) for name in layout.numbers if name in made
        }
        keys = {name: keys_of(made[name], layout.bounds.get(name)) for name in layout.keys if name in made}
        return cls(rows.height, numbers, keys)

    def batch(self, layout: Layout) -> Batch:
        """The features of a layout, as a model or a store reads them."""
        keys = {name: self.keys[name] for name in layout.keys}
        return Batch(self.size, self.matrix(layout.numbers), keys, {}, {})

    def __or__(self, other: FeatureRows) -> FeatureRows:
        """Both; features of the other override."""
        return FeatureRows(self.size, {**self.numbers, **other.numbers}, {**self.keys, **other.keys})

    def matrix(self, names: Sequence[str]) -> Array:
        """Numbers side by side, float32 [size, columns]."""
        if not names:
            return np.empty((self.size, 0), np.float32)
        return np.concatenate([self.numbers[name] for name in names], axis=1, dtype=np.float32)

    def replaced(self, places: Array, rows: FeatureRows) -> FeatureRows:
        """With some rows replaced."""
        order = np.arange(self.size)
        order[places] = self.size + np.arange(rows.size)
        numbers = {
            name: np.concatenate([values, rows.numbers[name]])[order] for name, values in self.numbers.items()
        }
        keys = {name: _replaced_keys(old, rows.keys[name], order) for name, old in self.keys.items()}
        return FeatureRows(self.size, numbers, keys)

    def row(self, place: int) -> dict[str, Any]:
        """One row as plain values, for display."""
        keys = {
            name: int(keys.values[place])
            if keys.offsets is None
            else keys.values[keys.offsets[place] : keys.offsets[place + 1]].tolist()
            for name, keys in self.keys.items()
        }
        numbers = {
            name: values[place].tolist() if values.shape[1] > 1 else float(values[place, 0])
            for name, values in self.numbers.items()
        }
        return {**numbers, **keys}


def _replaced_keys(old: Keys, new: Keys, order: Array) -> Keys:
    values = np.concatenate([old.values, new.values])
    if old.offsets is None or new.offsets is None:
        return Keys(values[order])
    lengths = np.concatenate([np.diff(old.offsets), np.diff(new.offsets)])
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])[:-1][order]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[order])])
    places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths[order])
    return Keys(values[places], offsets)
