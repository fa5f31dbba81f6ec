"""When requests are due, and whose they are: drawn once before a run, equal for equal seeds."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def poisson_times(rate: float, seconds: float, seed: int) -> Array:
    """Seconds from the start at which requests are due, `rate` a second on average, as from many users at once."""
    random = np.random.default_rng(seed)
    number = int(rate * seconds + 10 * (rate * seconds) ** 0.5 + 10)
    times = np.cumsum(random.exponential(1 / rate, number))
    return times[times < seconds]


def drawn_places(num_known: int, number: int, seed: int, zipf: float | None = None) -> Array:
    """`number` places among the known ones, all alike, or the n-th most active as 1 / n**zipf.

    Who is active does not depend on the order of the known ones.
    """
    random = np.random.default_rng(seed)
    if zipf is None:
        return random.integers(0, num_known, number)
    weights = np.cumsum(np.arange(1, num_known + 1, dtype=np.float64) ** -zipf)
    ranks = np.searchsorted(weights, random.random(number) * weights[-1], side="right")
    places: Array = random.permutation(num_known)[np.minimum(ranks, num_known - 1)]
    return places
