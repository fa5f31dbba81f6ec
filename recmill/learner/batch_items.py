"""The distinct items of a step, from which an in-batch softmax chooses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from recmill.dataset.batch import Array


@dataclass(frozen=True)
class BatchItems:
    """The items of a step's rows, sorted by key, with the number of rows of each.

    Each passes the item tower once. `recmill.distributed` has a subclass with the items of all workers.
    """

    keys: Array
    counts: Array
    of_rows: Array  # for each row of this process, the index of its item
    tower_rows: Array  # the rows that pass the item tower in this process, one for each item

    @classmethod
    def of(cls, item_keys: Array) -> BatchItems:
        """The items of rows, given the item key of each."""
        keys, first_rows, of_rows, counts = np.unique(
            item_keys, return_index=True, return_inverse=True, return_counts=True
        )
        return cls(keys, counts, of_rows, first_rows)

    @property
    def num_rows(self) -> int:
        """rows of the whole batch"""
        return int(self.counts.sum())

    def gather(self, vectors: Tensor) -> Tensor:
        """Vectors of all items, given those of `tower_rows`."""
        return vectors

    def reduce(self, grads: Tensor) -> Tensor:
        """The reverse: gradients of `tower_rows`, given this process's gradients of all items."""
        return grads
