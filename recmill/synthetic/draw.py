"""Randomness as a function of (seed, name, index): no state, so chunks never change a drawn value."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_TWO_TO_MINUS_53 = 2.0**-53

# Four text bytes for each 16-bit value, so that hex is two lookups instead of eight.
_HEX_QUADS = np.array([f"{value:04x}".encode() for value in range(1 << 16)], dtype="S4").view(np.uint32)


def key_of(seed: int, *names: object) -> int:
    """A 64-bit key for one named stream of draws."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def bits(key: int, index: npt.NDArray[Any]) -> U64:
    """64 random bits for each index (splitmix64)."""
    mixed = index.astype(np.uint64)
    mixed *= _GOLDEN
    mixed += np.uint64(key)
    mixed ^= mixed >> np.uint64(30)
    mixed *= _MIX_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return mixed


def uniform(key: int, index: npt.NDArray[Any]) -> F64:
    """A number in [0, 1) for each index."""
    return (bits(key, index) >> np.uint64(11)).astype(np.float64) * _TWO_TO_MINUS_53


def normal(key: int, index: npt.NDArray[Any]) -> F64:
    """A nearly normal number for each index: mean 0, variance 1, never past 3.5."""
    # The sum of four uniforms needs no logarithm, so it is fast and the same on every machine.
    quarters = bits(key, index).view(np.uint16).reshape(*index.shape, 4)
    total = quarters[..., 0].astype(np.float64)
    for part in range(1, 4):
        total += quarters[..., part]
    total -= 2 * 65535.0
    total *= np.sqrt(3.0) / 65536.0
    return total


def vectors(key: int, index: npt.NDArray[Any]) -> F64:
    """Four independent numbers for each index, uniform with mean 0 and variance 1."""
    quarters = bits(key, index).view(np.uint16).reshape(*index.shape, 4).astype(np.float64)
    quarters -= 65535.0 / 2
    quarters *= np.sqrt(12.0) / 65536.0
    return quarters


def pair(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> U64:
    """One index for two, each below 2**32."""
    return (left.astype(np.uint64) << np.uint64(32)) | right.astype(np.uint64)


def zipf(draws: F64, count: int | I64, exponent: float) -> I64:
    """Ranks in [0, count), rank r drawn about as often as (r + 1) ** -exponent; `count` may differ for each draw."""
    if exponent == 1.0:
        spots = np.exp(draws * np.log(count + 1.0))
    else:
        power = 1.0 - exponent
        spots = (1.0 + draws * ((count + 1.0) ** power - 1.0)) ** (1.0 / power)
    ranks: I64 = np.minimum(spots.astype(np.int64) - 1, count - 1)
    return ranks


def zipf_weights(count: int, exponent: float) -> F64:
    """The probabilities with which `zipf` draws each rank."""
    edges = np.arange(1, count + 2, dtype=np.float64)
    mass = np.diff(np.log(edges) if exponent == 1.0 else edges ** (1.0 - exponent) / (1.0 - exponent))
    return np.asarray(mass / mass.sum())


def choose(draws: F64, weights: npt.ArrayLike) -> I64:
    """The index into `weights` that each draw falls on."""
    edges = np.cumsum(np.asarray(weights, dtype=np.float64))
    return np.searchsorted(edges[:-1] / edges[-1], draws, side="right").astype(np.int64)


def shuffled(key: int, count: int) -> I64:
    """A permutation of range(count)."""
    return np.argsort(bits(key, np.arange(count)), kind="stable")


def sigmoid(logits: F64) -> F64:
    return 1.0 / (1.0 + np.exp(-logits))


def hex8(values: U32, present: Bools | None) -> pl.Series:
    """Eight lower-case hex digits for each value; empty text where not present."""
    # Arrow's string view holds up to 12 bytes in place: [length, 12 bytes], so text is four integers a row.
    views = np.zeros((len(values), 4), dtype=np.uint32)
    views[:, 0] = 8
    views[:, 1] = _HEX_QUADS[values >> np.uint32(16)]
    views[:, 2] = _HEX_QUADS[values & np.uint32(0xFFFF)]
    if present is not None:
        views *= present[:, None]
    array = pa.Array.from_buffers(pa.string_view(), len(values), [None, pa.py_buffer(views)])
    return pl.Series(values=array)


def hex32(key: int, index: npt.NDArray[Any]) -> pl.Series:
    """Thirty-two upper-case hex digits for each index, as anonymised ids are written."""
    halves = np.stack([bits(key, index), bits(key ^ 0x5DEECE66D, index)], axis=1).view(np.uint16)
    letters = _HEX_QUADS[halves].view(np.uint8)
    letters = np.where(letters >= ord("a"), letters - 32, letters).astype(np.uint8)
    offsets = np.arange(0, 32 * len(index) + 1, 32, dtype=np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(letters))]
    return pl.Series(values=pa.Array.from_buffers(pa.large_utf8(), len(index), buffers))
