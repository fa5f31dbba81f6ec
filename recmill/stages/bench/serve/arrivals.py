"""When requests are due and which users they are for: drawn before a run, equal for equal seeds."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def poisson_times(rate: float, seconds: float, seed: int) -> Array:
    """Seconds from the start at which requests are due: a Poisson process of `rate` a second."""
    random = np.random.default_rng(seed)
    number = int(rate * seconds + 10 * (rate * seconds) ** 0.5 + 10)
    times = np.cumsum(random.exponential(1 / rate, number))
    return times[times < seconds]


def draw_indices(num_users: int, number: int, seed: int, zipf: float | None = None) -> Array:
    """Indices of `number` users, uniform, or by a Zipf law over users in random order."""
    random = np.random.default_rng(seed)
    if zipf is None:
        return random.integers(0, num_users, number)
    weights = np.cumsum(np.arange(1, num_users + 1, dtype=np.float64) ** -zipf)
    ranks = np.searchsorted(weights, random.random(number) * weights[-1], side="right")
    indices: Array = random.permutation(num_users)[np.minimum(ranks, num_users - 1)]
    return indices
