"""Arrays of a bundle: memory-mapped, changed and extended in memory."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import numpy as np

from recmill.embeddings.table import Array
from recmill.errors import ArtifactError


def map_array(path: Path) -> Array:
    """A memory-mapped array: pages are loaded when they are read, and writes change memory only."""
    try:
        # A plain view: the memmap class would cost a Python call at every slice.
        mapped: Array = np.load(path, mmap_mode="c", allow_pickle=False).view(np.ndarray)
    except (OSError, ValueError, EOFError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}. Run `recmill export` again.") from None
    return mapped


def file_name(name: str) -> str:
    """The file or folder of a feature or table, whatever characters its name has."""
    return quote(name, safe="").replace(".", "%2E")


class GrowingArray:
    """A mapped array with rows appended in memory. The mapped part is never copied as a whole."""

    def __init__(self, mapped: Array) -> None:
        self.mapped = mapped  # changes reach it, appended rows do not
        self._num_mapped = len(mapped)
        self._added = np.empty((0, *mapped.shape[1:]), mapped.dtype)
        self._size = len(mapped)

    def __len__(self) -> int:
        return self._size

    def take(self, indices: Array) -> Array:
        """Copies of rows, in the order of the indices. An index out of range is an IndexError."""
        indices = np.asarray(indices, np.int64)
        # As unsigned numbers, indices below 0 are out of range too. Once checked, clipping is the fastest take.
        most = int(indices.view(np.uint64).max(initial=0))
        if most < self._num_mapped:
            return self.mapped.take(indices, axis=0, mode="clip")
        if most >= self._size and len(indices):
            raise IndexError(f"{np.int64(np.uint64(most))} is outside 0..{self._size - 1}")
        return self._take_both(indices)

    def _take_both(self, indices: Array) -> Array:
        if not self._num_mapped:
            return self._added[: self._size].take(indices, axis=0)
        found = self.mapped.take(indices, axis=0, mode="clip")
        late = np.flatnonzero(indices >= self._num_mapped)
        found[late] = self._added.take(indices[late] - self._num_mapped, axis=0)
        return found

    def put(self, indices: Array, values: Array) -> None:
        """Change rows, in memory only."""
        is_mapped = indices < self._num_mapped
        self.mapped[indices[is_mapped]] = values[is_mapped]
        self._added[indices[~is_mapped] - self._num_mapped] = values[~is_mapped]

    def append(self, values: Array) -> Array:
        """Append rows; returns their indices."""
        start, stop = self._size - self._num_mapped, self._size - self._num_mapped + len(values)
        if stop > len(self._added):
            grown = np.empty((max(stop, 2 * len(self._added), 16), *self._added.shape[1:]), self._added.dtype)
            grown[:start] = self._added[:start]
            self._added = grown
        self._added[start:stop] = values
        self._size += len(values)
        return np.arange(self._num_mapped + start, self._num_mapped + stop)

    @property
    def added(self) -> Array:
        """The appended rows."""
        return self._added[: self._size - self._num_mapped]

    def whole(self) -> Array:
        """All rows; a copy only when rows were appended."""
        if self._size == self._num_mapped:
            return self.mapped
        return np.concatenate([self.mapped, self.added])


def search(ordered: Array, wanted: Array) -> Array:
    """The index of each value in a sorted array without duplicates, of the same type; -1 for other values."""
    if not len(ordered):
        return np.full(len(wanted), -1)
    at = ordered.searchsorted(wanted)
    at[at == len(ordered)] = 0
    at[ordered.take(at) != wanted] = -1
    return at
