"""Item-item models: weighted neighbours of each item. A user's list sums those of their items.

Four kinds with the same interface: who interacted with both (`co_clicks`), what came after (`transitions`), which
items predict the others best (`ease`), and whose given vectors, such as those of texts, are near (`content`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np

from recmill import _native
from recmill.errors import RecmillError
from recmill.recall.interactions import Array, Interactions, Sequences

NUM_NEIGHBOURS = 100
NUM_EASE_NEIGHBOURS = 300  # its weights fall more slowly, and negative ones matter too
MAX_PROFILE = 500  # latest items of a user
MAX_ITEMS = 2_000_000  # beyond this there are no neighbours
MAX_CONTENT_ITEMS = 200_000  # all pairs are compared: one minute of one core at 64 numbers per vector
MAX_EASE_ITEMS = 5_000  # the inverse costs the cube of it: two seconds for this many
_SMALL_MATRIX = 256  # rows up to which a matrix is inverted directly
_SMALLEST_WEIGHT = 0.01  # smallest weight of an item in a profile; older ones are left out
_MAX_PAIRS = 1_000_000_000  # beyond this, users are sampled evenly
_SHRINK = 10.0
_MAX_GAP = 5
_HISTORY_POWER = 0.5  # measured, as the next one: docs/log.md, 2026-11-19
_ITEM_POWER = 0.2
_COMPARED_AT_ONCE = 256  # items that are compared with all others at once


@dataclass(frozen=True)
class ItemNeighbours:
    """Neighbours of each item, best first, with their weights, one list behind the other.

    Those of row i are [offsets[i], offsets[i + 1]). A row is an item by index; a model of some items alone has them in
    `items`: rows and indices are then those of this array. Most items of a large catalogue have few neighbours or none.
    """

    offsets: Array  # int64 [rows + 1]
    indices: Array  # int32
    weights: Array  # float32
    items: Array | None = None  # int32 [rows], ascending

    @classmethod
    def of_rows(cls, indices: Array, weights: Array, items: Array | None = None) -> ItemNeighbours:
        """From as many neighbours for each row, [rows, n], with index -1 where there are no more."""
        is_neighbour = indices >= 0
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_neighbour.sum(axis=1))])
        return cls(offsets, indices[is_neighbour], weights[is_neighbour], items)

    def save(self, folder: Path, name: str) -> None:
        np.save(folder / f"{name}.offsets.npy", self.offsets)
        np.save(folder / f"{name}.indices.npy", self.indices)
        np.save(folder / f"{name}.weights.npy", self.weights)
        if self.items is not None:
            np.save(folder / f"{name}.items.npy", self.items)

    def __len__(self) -> int:
        """Rows."""
        return len(self.offsets) - 1

    def padded(self, rows: Array) -> tuple[Array, Array]:
        """Indices and weights of some rows, [rows, n], -1 and 0 where there are no more."""
        starts, lengths = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        columns = np.arange(lengths.max(initial=0))
        is_neighbour = columns < lengths[:, None]
        places = np.where(is_neighbour, starts[:, None] + columns, 0)
        if not places.size:
            return np.empty(places.shape, np.int32), np.empty(places.shape, np.float32)
        return np.where(is_neighbour, self.indices[places], -1), np.where(
            is_neighbour, self.weights[places], np.float32(0)
        )

    def rows_of(self, items: Array) -> Array:
        """The rows of items; -1 for items outside the model."""
        if self.items is None:
            return np.where(items < len(self), items, -1)
        rows = np.minimum(np.searchsorted(self.items, items), len(self.items) - 1)
        return np.where(self.items[rows] == items, rows, -1)

    def items_of(self, rows: Array) -> Array:
        """The inverse of `rows_of`, -1 for -1."""
        return rows if self.items is None else np.where(rows >= 0, self.items[rows], -1)

    def lists(
        self,
        profiles: Sequences,
        half_life: float | None,
        banned: Sequences,
        k: int,
        allowed: Array | None = None,
    ) -> tuple[Array, Array]:
        """The k best items of each profile and their scores: [users, k], padded with -1.

        The latest item of a profile has weight 1, the one `half_life` before it a half.
        """
        profiles = profiles.last(profile_length(half_life))
        if self.items is None:
            profiles = profiles.where(profiles.items < len(self))  # newer items have no neighbours
        weights = (
            np.ones(len(profiles.items)) if half_life is None else 0.5 ** (profiles.from_end / half_life)
        )
        weights = weights[self.rows_of(profiles.items) >= 0]
        profiles, banned = self._in_rows(profiles), self._in_rows(banned)
        if allowed is not None and self.items is not None:
            allowed = allowed[self.items]
        indices, scores = _native.recommend_related(
            profiles.offsets,
            np.ascontiguousarray(profiles.items, np.int32),
            weights.astype(np.float32),
            self._native_lists,
            banned.offsets,
            np.ascontiguousarray(banned.items, np.int32),
            None if allowed is None else np.ascontiguousarray(allowed, np.uint8),
            k,
        )
        return self.items_of(indices).reshape(-1, k), scores.reshape(-1, k)

    def _in_rows(self, sequences: Sequences) -> Sequences:
        """Sequences of rows instead of items, without items outside the model."""
        rows = self.rows_of(sequences.items)
        return replace(sequences.where(rows >= 0), items=rows[rows >= 0])

    def search(self, profile: Array, half_life: float | None) -> _native.Search:
        """Looks for what `lists` gives for one profile, int64."""
        profile = profile[-profile_length(half_life) :]
        if self.items is None:
            profile = profile[profile < len(self)]  # newer items have no neighbours
        weights = _profile_weights(half_life)
        return self._native_lists.search(profile, weights[len(weights) - len(profile) :])

    @cached_property
    def _native_lists(self) -> _native.NeighbourLists:
        return _native.NeighbourLists(self.offsets, self.indices, self.weights, self.items)


@lru_cache(maxsize=64)
def _profile_weights(half_life: float | None) -> Array:
    """Of the items of the longest profile that counts, latest last."""
    from_end = np.arange(profile_length(half_life) - 1, -1, -1)
    weights = np.ones(len(from_end)) if half_life is None else 0.5 ** (from_end / half_life)
    return weights.astype(np.float32)


def profile_length(half_life: float | None) -> int:
    """How many of a user's latest items have weight."""
    if half_life is None:
        return MAX_PROFILE
    return min(MAX_PROFILE, 1 + int(half_life * np.log2(1 / _SMALLEST_WEIGHT)))


def co_clicks(interactions: Interactions, threads: int) -> ItemNeighbours:
    """Weights by the cosine of who interacted with both, over users' latest items."""
    return _related(interactions, threads, max_gap=0, own_power=0.5, other_power=0.5)


def transitions(interactions: Interactions, threads: int) -> ItemNeighbours:
    """Weights by how often an item soon followed another one; frequent followers are not discounted."""
    return _related(interactions, threads, max_gap=_MAX_GAP, own_power=1.0, other_power=0.0)


def lifted_transitions(interactions: Interactions, threads: int) -> ItemNeighbours:
    """Weights by how much more often than elsewhere an item soon followed another one."""
    return _related(interactions, threads, max_gap=_MAX_GAP, own_power=1.0, other_power=0.5)


def _related(
    interactions: Interactions, threads: int, max_gap: int, own_power: float, other_power: float
) -> ItemNeighbours:
    sequences = _sampled(interactions.sequences.last(MAX_PROFILE), max_gap)
    num_items = interactions.num_items
    n = max(1, min(NUM_NEIGHBOURS, num_items - 1))
    return ItemNeighbours(
        *_native.related_items(
            sequences.offsets,
            sequences.items,
            num_items,
            max_gap,
            own_power,
            other_power,
            _SHRINK,
            n,
            threads,
        )
    )


def _sampled(sequences: Sequences, max_gap: int) -> Sequences:
    """All users, or a sample whose pairs of items can be counted in reasonable time."""
    lengths = np.diff(sequences.offsets)
    num_pairs = int((lengths * (lengths if max_gap == 0 else np.minimum(lengths, max_gap))).sum())
    every = -(-num_pairs // _MAX_PAIRS)
    return sequences.take(np.arange(0, len(sequences), every)) if every > 1 else sequences


def ease(interactions: Interactions, threads: int, l2: float) -> ItemNeighbours:
    """EASE (Steck, 2019): the linear model that predicts each item of a user from the others, in closed form.

    It covers the most frequent items if there are many; neighbours with the largest weights are kept, negative ones
    too.
    """
    return _ease(interactions, threads, l2, np.ones(interactions.num_users))


def balanced_ease(interactions: Interactions, threads: int, l2: float) -> ItemNeighbours:
    """EASE in which no few users and items decide most: long histories and popular items of a profile count less."""
    lengths = np.maximum(np.diff(interactions.sequences.offsets), 1)
    weights = lengths**-_HISTORY_POWER
    # On average a row keeps its weight, so that an L2 penalty means the same as without weights.
    return _ease(interactions, threads, l2, weights * lengths.sum() / (weights * lengths).sum(), _ITEM_POWER)


def _ease(
    interactions: Interactions, threads: int, l2: float, weights: Array, item_power: float = 0.0
) -> ItemNeighbours:
    """EASE with a weight for each user; those of an item in profiles fall with a power of its users."""
    num_items = interactions.num_items
    chosen = np.sort(np.argsort(-interactions.counts, kind="stable")[:MAX_EASE_ITEMS])
    index_of = np.full(num_items, -1, np.int32)
    index_of[chosen] = np.arange(len(chosen))
    sequences = interactions.sequences.where(index_of[interactions.sequences.items] >= 0)
    items = index_of[sequences.items]
    gram = _native.co_counts(
        sequences.offsets, items, weights.astype(np.float32), len(chosen), threads
    ).reshape(len(chosen), len(chosen))
    np.fill_diagonal(gram, gram.diagonal() + l2)
    inverse = _inverse(gram)
    found = inverse / -inverse.diagonal()
    np.fill_diagonal(found, 0.0)
    if item_power:
        num_users = np.maximum(np.bincount(items, minlength=len(chosen)), 1)
        found *= ((num_users / num_users.mean()) ** -item_power).astype(np.float32)[:, None]
    return _truncated(found, None if len(chosen) == num_items else chosen.astype(np.int32))


def _inverse(matrix: Array) -> Array:
    """The inverse of a symmetric positive definite matrix, by halves: half of the work of a general inverse."""
    if len(matrix) <= _SMALL_MATRIX:
        return np.linalg.inv(matrix)
    half = len(matrix) // 2
    first = _inverse(matrix[:half, :half])
    across = first @ matrix[:half, half:]
    last = _inverse(matrix[half:, half:] - matrix[half:, :half] @ across)
    beside = across @ last
    return np.block([[first + beside @ across.T, -beside], [-beside.T, last]])


def _truncated(weights: Array, items: Array | None) -> ItemNeighbours:
    n = max(1, min(NUM_EASE_NEIGHBOURS, len(weights) - 1))
    largest = np.argpartition(-np.abs(weights), n - 1, axis=1)[:, :n]
    kept = np.take_along_axis(weights, largest, axis=1)
    order = np.argsort(-kept, axis=1, kind="stable")
    indices, kept = (np.take_along_axis(each, order, axis=1) for each in (largest, kept))
    return ItemNeighbours.of_rows(indices.astype(np.int32), kept.astype(np.float32), items)


def content(vectors: Array) -> ItemNeighbours:
    """Weights by the cosine of given vectors, for items without clicks too. A zero vector has no neighbours."""
    num_items = len(vectors)
    if num_items > MAX_CONTENT_ITEMS:
        raise RecmillError(
            f"recall.content compares all pairs of items, of which there are {num_items:,}; it is for up to "
            f"{MAX_CONTENT_ITEMS:,}. Remove it, and give the vectors to the item tower instead."
        )
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    n = max(1, min(NUM_NEIGHBOURS, num_items - 1))
    indices, weights = np.empty((num_items, n), np.int32), np.empty((num_items, n), np.float32)
    for first in range(0, num_items, _COMPARED_AT_ONCE):
        rows = np.arange(first, min(first + _COMPARED_AT_ONCE, num_items))
        cosines = units[rows] @ units.T
        cosines[np.arange(len(rows)), rows] = -np.inf  # an item is not its own neighbour
        nearest = np.argpartition(-cosines, n - 1, axis=1)[:, :n]
        kept = np.take_along_axis(cosines, nearest, axis=1)
        order = np.argsort(-kept, axis=1, kind="stable")
        indices[rows], weights[rows] = (np.take_along_axis(each, order, axis=1) for each in (nearest, kept))
    return ItemNeighbours.of_rows(np.where(weights > 0, indices, -1), weights)


# Name of a channel -> its variants; the best one on eval is used.
Fit = Callable[[Interactions, int], ItemNeighbours]
EASE_L2 = (100.0, 300.0, 1000.0)
BALANCED_EASE_L2 = (100.0, 1000.0)
# The baseline EASE is one of these.
PLAIN_EASE = {f"l2={l2:g}": partial(ease, l2=l2) for l2 in EASE_L2}
VARIANTS: Mapping[str, Mapping[str, Fit]] = {
    "co_clicks": {"cosine": co_clicks},
    "transitions": {"probability": transitions, "lift": lifted_transitions},
    "ease": {
        **PLAIN_EASE,
        **{f"balanced l2={l2:g}": partial(balanced_ease, l2=l2) for l2 in BALANCED_EASE_L2},
    },
}


CONTENT = "content"
NEIGHBOUR_CHANNELS = (*VARIANTS, CONTENT)


def fit_neighbours(
    name: str, variant: str, interactions: Interactions, threads: int, vectors: Array | None = None
) -> ItemNeighbours:
    """Fit one variant. `vectors` describe the items, for the channel that compares them."""
    if name != CONTENT:
        return VARIANTS[name][variant](interactions, threads)
    assert vectors is not None
    return content(vectors)


PROFILE_HALF_LIVES = (1.0, 3.0, 6.0, 12.0, 30.0, None)
