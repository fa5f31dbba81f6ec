"""Popularity: counts of interactions, with an optional half-life."""

from __future__ import annotations

import numpy as np

from recmill.recall.interactions import Array, Interactions

# Half-lives as fractions of all interactions; None: no decay.
HALF_LIVES = (None, 0.3, 0.1, 0.03, 0.01, 0.003)

_TRENDING = 0.05  # half-life of trending items, as a fraction of all interactions
_FEWEST_TRENDING = 100.0


def trending(interactions: Interactions) -> Array:
    """The trending score of each item, from its latest interactions."""
    return popularity(interactions, max(_FEWEST_TRENDING, _TRENDING * len(interactions)))


def popularity(interactions: Interactions, half_life: float | None) -> Array:
    """The popularity score of each item: a click counts half as much as one `half_life` interactions later.

    Age is counted in interactions, not in seconds: this works for logs without times, and quiet nights do not age
    items. Items with equal scores are ordered by how often they occur.
    """
    counts = interactions.counts.astype(np.float64)
    if half_life is None:
        return counts.astype(np.float32)
    age = np.arange(len(interactions))[::-1]
    decayed = np.bincount(interactions.items, 0.5 ** (age / half_life), minlength=interactions.num_items)
    scores: Array = decayed + 1e-6 * counts / max(1.0, counts.max(initial=0.0))
    return scores.astype(np.float32)
