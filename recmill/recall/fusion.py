"""Weighted reciprocal rank fusion of several lists, with weights fitted to held-out interactions.

Scores of two channels are not comparable: a cosine, a sum of counts and a probability have no common unit. Ranks are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from recmill.recall.interactions import Array

_WEIGHTS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5)
_OFFSETS = (3.0, 10.0, 30.0, 60.0)
_ROUNDS = 4
_USEFUL = 0.8  # of the best channel's metric: a channel that reaches this fraction takes part at first
_LEAST_GAIN = 0.002  # relative: a smaller gain is not worth a channel


@dataclass(frozen=True)
class Fusion:
    """An item's score is the weighted mean of offset / (offset + rank) over all channels, ranks from 0.

    The first item of every channel gives 1. A channel without a weight does not take part.
    """

    weights: Mapping[str, float]
    offset: float = 60.0

    def share(self, channel: str) -> float:
        """A channel's fraction of the sum of all weights."""
        return self.weights.get(channel, 0.0) / max(1e-9, sum(self.weights.values()))

    def gains(self, channel: str, number: int) -> Array:
        """What each rank of a channel adds to an item's score."""
        return _gains(self.share(channel), self.offset, 1 << max(0, number - 1).bit_length())[:number]


@lru_cache(maxsize=64)  # a server needs the same few for each request
def _gains(share: float, offset: float, number: int) -> Array:
    found: Array = (share * offset / (offset + np.arange(number))).astype(np.float32)
    found.flags.writeable = False
    return found


@dataclass(frozen=True)
class RankedLists:
    """Lists of several channels for the same queries, over the union of their items.

    `ranks[channel][q, i]` is the rank of query q's item i in that channel, infinite where it is not in its list.
    """

    items: Array  # int64 [queries, union], padded with -1
    ranks: Mapping[str, Array]  # float32 [queries, union]

    @classmethod
    def of(cls, lists: Sequence[Mapping[str, Array]]) -> RankedLists:
        """The union of each query's items by channel, best first."""
        channels = list(dict.fromkeys(name for query in lists for name in query))
        unions = [np.unique(np.concatenate(list(query.values()))) for query in lists]
        width = max((len(union) for union in unions), default=0)
        items = np.full((len(lists), width), -1, np.int64)
        ranks = {name: np.full((len(lists), width), np.inf, np.float32) for name in channels}
        for number, (query, union) in enumerate(zip(lists, unions, strict=True)):
            items[number, : len(union)] = union
            for name, found in query.items():
                ranks[name][number, union.searchsorted(found)] = np.arange(len(found))
        return cls(items, ranks)

    def top(self, fusion: Fusion, k: int) -> Array:
        """The k best items of each query, best first; ties go to the smaller index; padded with -1."""
        scores = self.scores(fusion)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        items = np.take_along_axis(self.items, best, axis=1)
        return np.where(np.take_along_axis(scores, best, axis=1) > 0, items, -1)

    def scores(self, fusion: Fusion) -> Array:
        """Scores of each item of the union: 0 where it is in no list of a channel with a weight."""
        scores = np.zeros(self.items.shape, np.float32)
        for name, weight in fusion.weights.items():
            if name in self.ranks and weight:
                scores += np.float32(weight) / (np.float32(fusion.offset) + self.ranks[name])
        return scores


@dataclass(frozen=True)
class FusionFit:
    """Weights and the metrics behind them: quality on held-out interactions, also of each channel alone."""

    fusion: Fusion
    quality: float
    alone: Mapping[str, float]


def quality(ndcg: float, recall: float) -> float:
    """The metric that channels and weights are chosen by: both parts count alike, whatever their scales."""
    return float(np.sqrt(ndcg * recall))


def fit_fusion(lists: RankedLists, relevant: Sequence[Array], k: int = 10) -> FusionFit:
    """Coordinate ascent from equal weights of all useful channels; a channel that adds nothing gets none.

    A change has to gain more than its standard error over the queries. With few queries, weights hardly move, because
    the best of many choices on few queries is mostly luck.
    """
    measure = _Measure(lists, relevant, k)
    alone = {name: _quality(measure(Fusion({name: 1.0}))) for name in lists.ranks}
    first = max(alone, key=lambda name: alone[name])
    useful = {name: 1.0 for name in alone if alone[name] > _USEFUL * alone[first]} or {first: 1.0}
    best, other = (_climb(Fusion(start), measure, list(lists.ranks)) for start in (useful, {first: 1.0}))
    if _is_better(measure(other), measure(best)):
        best = other
    return FusionFit(best, _quality(measure(best)), alone)


def _climb(best: Fusion, measure: _Measure, channels: Sequence[str]) -> Fusion:
    found = measure(best)
    for _ in range(_ROUNDS):
        before = best
        for name in channels:
            tried = [(candidate, measure(candidate)) for candidate in _candidates(best, name)]
            candidate, result = max(tried, key=lambda pair: _quality(pair[1]))
            if _is_better(result, found):
                best, found = candidate, result
        if best is before:
            break
    return best


def _quality(metrics: Array) -> float:
    return quality(*metrics.mean(axis=1))


def _is_better(found: Array, before: Array) -> bool:
    """Whether the relative gain exceeds its standard error over queries."""
    gain = ((found - before) / np.maximum(before.mean(axis=1, keepdims=True), 1e-9)).mean(axis=0)
    return bool(gain.mean() > max(_LEAST_GAIN, gain.std() / np.sqrt(len(gain))))


def _candidates(fusion: Fusion, name: str) -> list[Fusion]:
    """The fusion with another weight of one channel, or with another offset."""
    others = [{**fusion.weights, name: weight} for weight in _WEIGHTS]
    weights = [{channel: value for channel, value in some.items() if value} for some in others]
    return [
        *(Fusion(some, fusion.offset) for some in weights if some),
        *(Fusion(fusion.weights, offset) for offset in _OFFSETS),
    ]


class _Measure:
    """NDCG@k and recall@k of each query: [2, queries].

    Only items of some list can be hit; the ideal list contains all relevant items.
    """

    def __init__(self, lists: RankedLists, relevant: Sequence[Array], k: int) -> None:
        self.lists, self.k = lists, k
        is_relevant = np.zeros(lists.items.shape, bool)
        for number, items in enumerate(relevant):
            is_relevant[number] = np.isin(lists.items[number], items)
        self.discounts = 1 / np.log2(np.arange(2, k + 2))
        ideal = np.concatenate([[np.inf], np.cumsum(self.discounts)])
        self.num_relevant = np.maximum(1, [len(items) for items in relevant])
        self.ideal = ideal[np.minimum([len(items) for items in relevant], k)]
        self.queries, self.indices = np.nonzero(is_relevant)

    def __call__(self, fusion: Fusion) -> Array:
        scores = self.lists.scores(fusion)
        queries, ranks = self._ranks_within_k(scores)
        ndcg = np.bincount(queries, self.discounts[ranks], minlength=len(scores)) / self.ideal
        recall = np.bincount(queries, minlength=len(scores)) / self.num_relevant
        return np.stack([ndcg, recall])

    def _ranks_within_k(self, scores: Array) -> tuple[Array, Array]:
        """The query and the rank of each relevant item among the k best: the number of items before it."""
        width, k = scores.shape[1], self.k
        kth = np.partition(scores, -k, axis=1)[:, -k] if width > k else np.zeros(len(scores))
        own = scores[self.queries, self.indices]
        near = np.flatnonzero(
            (own > 0) & (own >= kth[self.queries])
        )  # more than k of a query where scores tie
        queries, indices, own = self.queries[near], self.indices[near], own[near, None]
        others = scores[queries]
        is_earlier = np.arange(width) < indices[:, None]
        ranks = ((others > own) | ((others == own) & is_earlier)).sum(axis=1)
        is_within = ranks < k
        return queries[is_within], ranks[is_within]
