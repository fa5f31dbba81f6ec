"""Popularity: counts of interactions, of which older ones may count less."""

from __future__ import annotations

import numpy as np

from recmill.recall.interactions import Array, Interactions

# As fractions of all interactions; None counts every one alike.
HALF_LIVES = (None, 0.3, 0.1, 0.03, 0.01, 0.003)

_TRENDING = 0.05  # of all interactions: the half-life of what is trending
_FEWEST_TRENDING = 100.0


def trending(interactions: Interactions) -> Array:
    """A score for each item by its latest interactions."""
    return popularity(interactions, max(_FEWEST_TRENDING, _TRENDING * len(interactions)))


def popularity(interactions: Interactions, half_life: float | None) -> Array:
    """A score for each item: an interaction counts half as much as one that is `half_life` interactions younger.

    Age is counted in interactions, not in seconds: logs without times have it too, and quiet nights do not age items.
    Items that differ by nothing else are ordered by how often they occur.
    """
    counts = interactions.counts.astype(np.float64)
    if half_life is None:
        return counts.astype(np.float32)
    age = np.arange(len(interactions))[::-1]
    decayed = np.bincount(interactions.items, 0.5 ** (age / half_life), minlength=interactions.num_items)
    scores: Array = decayed + 1e-6 * counts / max(1.0, counts.max(initial=0.0))
    return scores.astype(np.float32)
