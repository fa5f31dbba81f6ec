"""The position of a row as one int64: its file (of a log, or shard of a Table) and its offset in that file.

A position depends on the files alone, so decisions based on it (order, splits, samples, random draws) are the same
for any engine and partitioning. 44 bits hold offsets up to 16 TiB, more than a file has; 19 bits are left for files.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

OFFSET_BITS = 44
END_OF_FILE = 1 << OFFSET_BITS  # past every offset

Array = np.ndarray[Any, np.dtype[Any]]
P = TypeVar("P", int, Array)


def position(file_index: int, offset: int = 0) -> int:
    return (file_index << OFFSET_BITS) + offset


def file_of(positions: P) -> P:
    """The index of the file."""
    return positions >> OFFSET_BITS


def offset_of(positions: P) -> P:
    """Bytes of text or rows of Parquet before it in its file."""
    return positions & (END_OF_FILE - 1)


def is_among(positions: Array, chosen: Array) -> Array:
    """Which positions are among the sorted `chosen` ones."""
    if not len(chosen):
        return np.zeros(len(positions), dtype=bool)
    nearest = np.minimum(np.searchsorted(chosen, positions), len(chosen) - 1)
    return np.asarray(chosen[nearest] == positions)
