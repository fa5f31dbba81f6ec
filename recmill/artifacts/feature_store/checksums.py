"""A checksum behind each value: XXH64 of all its other bytes, little-endian. Damage is noticed, whatever its kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recmill.features.kernels import hash_bytes

Array = np.ndarray[Any, np.dtype[Any]]

NUM_BYTES = 8


def sealed(values: Sequence[bytes]) -> list[bytes]:
    """Each value with its checksum behind it."""
    offsets = np.concatenate([[0], np.cumsum([len(value) for value in values], dtype=np.int64)])
    sums = hash_bytes(b"".join(values), offsets.astype(np.int64)).astype("<u8").tobytes()
    starts = range(0, len(sums), NUM_BYTES)
    return [value + sums[start : start + NUM_BYTES] for value, start in zip(values, starts, strict=True)]


def are_whole(joined: bytes, ends: Array) -> Array:
    """Which of some values, one behind the other, are as they were sealed. Each has at least a checksum's bytes."""
    offsets = np.zeros(2 * len(ends) + 1, np.int64)
    offsets[1::2], offsets[2::2] = ends - NUM_BYTES, ends
    expected = hash_bytes(joined, offsets)[::2]
    places = offsets[1::2, None] + np.arange(NUM_BYTES)
    stored = np.frombuffer(joined, np.uint8)[places].view("<u8").reshape(-1)
    whole: Array = stored == expected
    return whole


def opened(value: bytes) -> bytes | None:
    """A value without its checksum; None when it is damaged."""
    if len(value) < NUM_BYTES or not are_whole(value, np.array([len(value)])).all():
        return None
    return value[:-NUM_BYTES]
