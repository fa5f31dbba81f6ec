"""Boosts: conditions of a request that multiply the scores of items before the list is cut."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from recmill.dataset.batch import Array
from recmill.errors import BadRequest
from recmill.stages.serve.limits import LARGEST_BOOST, SMALLEST_BOOST
from recmill.stages.serve.messages import Answer, Boost
from recmill.stages.serve.recall import Recaller


def boosts_of(recaller: Recaller, boosts: Sequence[Boost], indices: Array, deadline: float | None) -> Array:
    """The factor of each item: the product of all boosts whose condition it meets."""
    product = np.ones(len(indices), np.float32)
    for boost in boosts:
        if not SMALLEST_BOOST <= boost.factor <= LARGEST_BOOST:
            raise BadRequest(
                f"factor of a boost must be from {SMALLEST_BOOST} to {LARGEST_BOOST:g}, got {boost.factor:g}; "
                "to leave items out, use where."
            )
        product[recaller.matches(boost.where, deadline)[indices]] *= boost.factor
    return product


def boosted(scores: Array, boosts: Array) -> Array:
    """Scores times boosts. A factor above 1 raises negative scores too, which serve_score may return."""
    return np.where(scores < 0, scores / boosts, scores * boosts).astype(scores.dtype)


def with_boosts(answer: Answer, boosts: Array | None) -> Answer:
    """The answer with the boost of each boosted item."""
    if boosts is None:
        return answer
    items = [
        item if boost == 1 else msgspec.structs.replace(item, boost=boost)
        for item, boost in zip(answer.items, boosts.tolist(), strict=True)
    ]
    return msgspec.structs.replace(answer, items=items)
