"""Simple recommenders on the same split, as baselines of the served list."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from recmill.recall.als import MAX_INTERACTIONS, als
from recmill.recall.interactions import Array, Interactions, Sequences
from recmill.recall.neighbours import (
    CONTENT,
    MAX_EASE_ITEMS,
    MAX_ITEMS,
    VARIANTS,
    ItemNeighbours,
    content,
    fit_neighbours,
)
from recmill.recall.popularity import popularity
from recmill.stages.replay.queries import HeldOutQueries

POPULAR = "popular"
Neighbours = Mapping[tuple[str, str], ItemNeighbours]  # (channel, variant) -> its model


def baseline_lists(
    interactions: Interactions,
    queries: HeldOutQueries,
    popular_half_life: float | None,
    ease_variant: str,
    threads: int,
    k: int,
) -> dict[str, Array]:
    """Name -> the k best items of each query.

    Popular items serve users without clicks, and fill lists that are too short.
    """
    seen = seen_of(interactions, queries)
    popular = popular_lists(popularity(interactions, None), seen, k)
    lists_of = {POPULAR: popular}
    if popular_half_life is not None:
        lists_of["popular lately"] = popular_lists(popularity(interactions, popular_half_life), seen, k)
    models = {"item-kNN": ("co_clicks", "cosine"), "EASE": ("ease", ease_variant)}
    for name, (channel, variant) in models.items() if interactions.num_items <= MAX_ITEMS else ():
        model = fit_neighbours(channel, variant, interactions, threads)
        lists_of[name] = filled(model.lists(seen, None, seen, k)[0].astype(np.int64), popular)
    # EASE leaves out rare items of large catalogues.
    if interactions.num_items > MAX_EASE_ITEMS and len(interactions) <= MAX_INTERACTIONS:
        lists = als(interactions).lists(np.maximum(queries.indices, 0), seen, k)
        lists[queries.is_new] = -1
        lists_of["ALS"] = filled(lists, popular)
    return lists_of


def fit_all_neighbours(interactions: Interactions, threads: int, vectors: Array | None = None) -> Neighbours:
    """Every variant of every item-item model; none when there are too many items."""
    if interactions.num_items > MAX_ITEMS:
        return {}
    models = {
        (channel, variant): fit(interactions, threads)
        for channel, variants in VARIANTS.items()
        for variant, fit in variants.items()
    }
    return models if vectors is None else {**models, (CONTENT, "cosine"): content(vectors)}


def seen_of(interactions: Interactions, queries: HeldOutQueries) -> Sequences:
    """The items that the queries' users clicked before; none for new users."""
    nothing = Sequences(
        np.append(interactions.sequences.offsets, interactions.sequences.offsets[-1]),
        interactions.sequences.items,
    )
    return nothing.take(np.where(queries.is_new, len(nothing) - 1, queries.indices))


def has_clicks(interactions: Interactions, queries: HeldOutQueries) -> Array:
    """Whether each user clicked before; users of a side table may not have, though they are known."""
    found: Array = np.diff(seen_of(interactions, queries).offsets) > 0
    return found


def popular_lists(scores: Array, seen: Sequences, k: int) -> Array:
    """The k most popular items that each user has not seen."""
    order = np.lexsort((np.arange(len(scores)), -scores))
    rank_of = np.empty(len(order), np.int64)
    rank_of[order] = np.arange(len(order))
    lists = np.full((len(seen), k), -1, np.int64)
    for number in range(len(seen)):
        ranks = rank_of[seen.of(number)]
        best = order[np.setdiff1d(np.arange(min(k + len(ranks), len(order))), ranks)][:k]
        lists[number, : len(best)] = best
    return lists


def filled(lists: Array, popular: Array) -> Array:
    """Fill lists up with popular items, each item once."""
    result = lists.copy()
    for number in np.flatnonzero((lists < 0).any(axis=1)):
        own = lists[number][lists[number] >= 0]
        more = popular[number][~np.isin(popular[number], own)]
        together = np.concatenate([own, more])[: lists.shape[1]]
        result[number, : len(together)] = together
    return result
