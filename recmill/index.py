"""Which items have the greatest inner product with a vector: exactly for up to 200,000 of them, else by clusters.

An opened index is a map of what was built, plus what changed since. Changes are few, so they are searched exactly, and
what they replace is left out of the answers of the map. Shapes: N items, Q queries, V vector size.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from recmill.artifact import write_whole
from recmill.errors import ArtifactError

Array = np.ndarray[Any, np.dtype[Any]]

EXACT_BELOW = 200_000  # above it a scan takes longer than a request may
_BEST, _RECALL = 500, 0.97  # of the best so many, this share shall be found
_NUM_QUERIES = 200
_LOOK_AT_PER_ANSWER = 10  # never look at fewer items than this for each one wanted
_SAMPLED_PER_CLUSTER, _ROUNDS = 64, 8
_ROWS_AT_ONCE = 8_192
_ROWS_OF_BLOCK = 32
_ARRAYS = ("centers", "starts", "places", "blocks")
_SETTINGS = "clusters.json"


@dataclass(frozen=True)
class _Changes:
    """What differs from the map: places that it must not answer, and vectors to look at beside it. Never altered."""

    hidden: Array  # bool [N of the map]
    num_hidden: int
    places: Array  # int64, sorted
    vectors: Array  # float32 [changed, V]

    @classmethod
    def none(cls, num_items: int, dim: int) -> _Changes:
        empty = np.empty((0, dim), np.float32)
        return cls(np.zeros(num_items, bool), 0, np.empty(0, np.int64), empty)

    def without(self, places: Array) -> _Changes:
        hidden = self.hidden.copy()
        hidden[places[places < len(hidden)]] = True
        kept = ~np.isin(self.places, places)
        return _Changes(hidden, int(hidden.sum()), self.places[kept], self.vectors[kept])

    def with_vectors(self, places: Array, vectors: Array) -> _Changes:
        rest = self.without(places)
        merged = np.concatenate([rest.places, places])
        order = np.argsort(merged, kind="stable")
        vectors = np.concatenate([rest.vectors, vectors])[order]
        return replace(rest, places=merged[order], vectors=vectors)


class Index(ABC):
    """Items by vector. Searches run in the caller's thread, any number at once, also while items come and go."""

    def __init__(self, vectors_NV: Array) -> None:
        self._vectors_NV = vectors_NV
        self._changes = _Changes.none(*vectors_NV.shape)
        self._changing = threading.Lock()

    @property
    def dim(self) -> int:
        return int(self._vectors_NV.shape[1])

    def __len__(self) -> int:
        changes = self._changes
        return len(self._vectors_NV) - changes.num_hidden + len(changes.places)

    def search(self, vectors_QV: Array, k: int) -> tuple[Array, Array]:
        """Places (int64) and inner products (float32), each [Q, k], best first, ties by place; -1 pads."""
        queries = np.ascontiguousarray(vectors_QV, np.float32)
        places = np.full((len(queries), k), -1, np.int64)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        changes = self._changes
        for row, query_V in enumerate(queries):
            found, found_scores = self._search_map(query_V, k, changes)
            if len(changes.places):
                found = np.concatenate([found, changes.places])
                found_scores = np.concatenate([found_scores, _products(changes.vectors, query_V)])
            best = _best(found, found_scores, k)
            places[row, : len(best)] = found[best]
            scores[row, : len(best)] = found_scores[best]
        return places, scores

    def add(self, places: Array, vectors: Array) -> None:
        """Put items in; those that are known get a new vector. The last counts if a place is named twice."""
        places = np.asarray(places, np.int64)
        vectors = np.asarray(vectors, np.float32).reshape(len(places), self.dim)
        _, last = np.unique(places[::-1], return_index=True)
        last = len(places) - 1 - last
        with self._changing:
            self._changes = self._changes.with_vectors(places[last], vectors[last])

    def remove(self, places: Array) -> None:
        """Take items out; unknown places are no error."""
        places = np.asarray(places, np.int64)
        with self._changing:
            self._changes = self._changes.without(places[places >= 0])

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write what `open_index` needs besides the vectors, as built: without later changes."""

    @abstractmethod
    def _search_map(self, query_V: Array, k: int, changes: _Changes) -> tuple[Array, Array]:
        """Places and inner products of at least the best k of the map that are not hidden, in any order."""


class ExactIndex(Index):
    """Looks at every vector."""

    def save(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def _search_map(self, query_V: Array, k: int, changes: _Changes) -> tuple[Array, Array]:
        scores = _products(self._vectors_NV, query_V)
        if changes.num_hidden:
            scores[changes.hidden] = -np.inf
        places = _at_least_best(scores, k)
        places = places[~changes.hidden[places]]
        return places, scores[places]


class ClusteredIndex(Index):
    """Looks at the clusters nearest to a query: as many as it took, when built, to find nearly all of the best."""

    def __init__(self, vectors_NV: Array, clusters: Clusters) -> None:
        super().__init__(vectors_NV)
        self._clusters = clusters

    @property
    def recall(self) -> float:
        """Share of the best 500 that searches found, as measured when it was built."""
        return self._clusters.recall

    def save(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        for name in _ARRAYS:
            np.save(path / f"{name}.npy", getattr(self._clusters, name))
        settings = {"probes": self._clusters.probes, "recall": self._clusters.recall}
        write_whole(path / _SETTINGS, json.dumps(settings) + "\n")

    def _search_map(self, query_V: Array, k: int, changes: _Changes) -> tuple[Array, Array]:
        clusters = self._clusters
        num_shown = len(self._vectors_NV) - changes.num_hidden
        enough = min(_LOOK_AT_PER_ANSWER * k, num_shown)
        nearest = np.argsort(-_products(clusters.centers, query_V))
        num_in_reach = np.cumsum(np.diff(clusters.starts)[nearest])
        probes = max(clusters.probes, int(np.searchsorted(num_in_reach, enough)) + 1)
        while True:
            rows, scores = clusters.scan(nearest[:probes], query_V)
            if changes.num_hidden:
                shown = ~changes.hidden[clusters.places[rows]]
                rows, scores = rows[shown], scores[shown]
            if len(rows) >= enough:
                best = _at_least_best(scores, k)
                return clusters.places[rows[best]], scores[best]
            probes *= 2


@dataclass(frozen=True)
class Clusters:
    """Vectors cluster by cluster: those of cluster c are rows starts[c] to starts[c + 1]."""

    centers: Array  # float32 [clusters, V], unit vectors
    starts: Array  # int64 [clusters + 1]
    places: Array  # int64 [N], of each row
    blocks: Array  # float32 [blocks, rows of a block, V]; the last block is filled up with zeros
    probes: int  # clusters to look at
    recall: float

    def scan(self, chosen: Array, query_V: Array) -> tuple[Array, Array]:
        """Rows of these clusters, and their inner products."""
        begins, ends = self.starts[chosen], self.starts[chosen + 1]
        sizes = ends - begins
        stops = np.cumsum(sizes)
        scores = np.empty(int(stops[-1]), np.float32)
        firsts, lasts = begins // _ROWS_OF_BLOCK, -(-ends // _ROWS_OF_BLOCK)
        for first, last, skip, size, stop in np.stack(
            [firsts, lasts, begins - firsts * _ROWS_OF_BLOCK, sizes, stops], axis=1
        ).tolist():
            products = np.matmul(self.blocks[first:last], query_V).reshape(-1)
            scores[stop - size : stop] = products[skip : skip + size]
        rows = np.repeat(begins - (stops - sizes), sizes) + np.arange(len(scores))
        return rows, scores


def build_index(vectors: Array, kind: str = "auto", queries: Array | None = None) -> Index:
    """An index of these unit vectors [N, V]: "exact", "clustered", or what fits their number.

    `queries` are some vectors like those that will be asked for, to find out how many clusters to look at; without
    them, mixtures of two items are taken.
    """
    vectors = np.ascontiguousarray(vectors, np.float32)
    if kind == "exact" or (kind == "auto" and len(vectors) <= EXACT_BELOW):
        return ExactIndex(vectors)
    if kind not in ("auto", "clustered"):
        raise ValueError(f'kind must be "auto", "exact" or "clustered", got "{kind}"')
    random = np.random.default_rng(0)
    centers = _centers_of(vectors, random)
    cluster_of = _nearest(vectors, centers)
    order = np.argsort(cluster_of, kind="stable")
    starts = _starts(np.bincount(cluster_of, minlength=len(centers)))
    if queries is None:
        queries = _mixtures(vectors, random)
    probes, recall = _probes_needed(vectors, centers, cluster_of, queries[:_NUM_QUERIES])
    return ClusteredIndex(
        vectors, Clusters(centers, starts, order, _in_blocks(vectors, order), probes, recall)
    )


def open_index(path: Path, vectors: Array) -> Index:
    """The index that was saved there, over the vectors it was built of. Nothing is read before it is needed."""
    if not (path / _SETTINGS).exists():
        return ExactIndex(np.asarray(vectors))
    try:
        settings = json.loads((path / _SETTINGS).read_text(encoding="utf-8"))
        arrays = {name: np.asarray(np.load(path / f"{name}.npy", mmap_mode="r")) for name in _ARRAYS}
        clusters = Clusters(**arrays, probes=int(settings["probes"]), recall=float(settings["recall"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"Index {path} cannot be read: {error}. Run `recmill export` again.") from None
    num_blocks = -(-len(vectors) // _ROWS_OF_BLOCK)
    is_whole = (
        clusters.blocks.shape == (num_blocks, _ROWS_OF_BLOCK, vectors.shape[1])
        and clusters.places.shape == (len(vectors),)
        and clusters.starts.shape == (len(clusters.centers) + 1,)
    )
    if not is_whole:
        raise ArtifactError(
            f"Index {path} is not of these {len(vectors):,} items. Run `recmill export` again."
        )
    return ClusteredIndex(np.asarray(vectors), clusters)


def _centers_of(vectors_NV: Array, random: np.random.Generator) -> Array:
    """Spherical k-means over a sample."""
    num_clusters = min(len(vectors_NV), int(2 * len(vectors_NV) ** 0.5))
    num_sampled = min(len(vectors_NV), num_clusters * _SAMPLED_PER_CLUSTER)
    sample = vectors_NV[np.sort(random.choice(len(vectors_NV), num_sampled, replace=False))]
    centers = sample[random.choice(len(sample), num_clusters, replace=False)]
    for _ in range(_ROUNDS):
        cluster_of = _nearest(sample, centers)
        counts = np.bincount(cluster_of, minlength=num_clusters)
        filled = np.flatnonzero(counts)
        ordered = sample[np.argsort(cluster_of, kind="stable")]
        # A cluster that lost all its items starts anew somewhere else.
        centers = sample[random.choice(len(sample), num_clusters)]
        centers[filled] = np.add.reduceat(ordered, _starts(counts)[filled])
        centers = _as_units(centers)
    return centers


def _nearest(vectors_NV: Array, centers_CV: Array) -> Array:
    nearest = np.empty(len(vectors_NV), np.int64)
    for start in range(0, len(vectors_NV), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        nearest[rows] = (vectors_NV[rows] @ centers_CV.T).argmax(axis=1)
    return nearest


def _mixtures(vectors_NV: Array, random: np.random.Generator) -> Array:
    pairs = random.choice(len(vectors_NV), (_NUM_QUERIES, 2))
    return _as_units(vectors_NV[pairs[:, 0]] + 0.5 * vectors_NV[pairs[:, 1]])


def _probes_needed(
    vectors_NV: Array, centers_CV: Array, cluster_of: Array, queries_QV: Array
) -> tuple[int, float]:
    """Clusters to look at to find nearly all of the best, or as many as take no longer than an exact search may."""
    ranks = []
    for query_V in queries_QV:
        best = _at_least_best(_products(vectors_NV, query_V), _BEST)
        rank_of = np.empty(len(centers_CV), np.int64)
        rank_of[np.argsort(-_products(centers_CV, query_V), kind="stable")] = np.arange(len(centers_CV))
        ranks.append(rank_of[cluster_of[best]])
    found = np.concatenate(ranks)
    needed = int(np.quantile(found, _RECALL, method="higher")) + 1
    affordable = max(1, len(centers_CV) * EXACT_BELOW // len(vectors_NV))
    probes = min(needed, affordable)
    return probes, float((found < probes).mean())


def _in_blocks(vectors_NV: Array, order: Array) -> Array:
    num_blocks = -(-len(vectors_NV) // _ROWS_OF_BLOCK)
    rows = np.zeros((num_blocks * _ROWS_OF_BLOCK, vectors_NV.shape[1]), np.float32)
    np.take(vectors_NV, order, axis=0, out=rows[: len(order)])
    return rows.reshape(num_blocks, _ROWS_OF_BLOCK, -1)


def _as_units(vectors: Array) -> Array:
    units: Array = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return units


def _starts(sizes: Array) -> Array:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def _products(vectors_NV: Array, query_V: Array) -> Array:
    """Inner products, in this thread alone."""
    # OpenBLAS shares out products from 9,216 elements on among threads of its own; a server has a thread per request.
    dim = vectors_NV.shape[1]
    rows = max(1, 8_192 // dim)
    whole = len(vectors_NV) // rows * rows
    scores = np.empty(len(vectors_NV), np.float32)
    blocks = vectors_NV[:whole].reshape(-1, rows, dim)
    np.matmul(blocks, query_V, out=scores[:whole].reshape(-1, rows))
    np.matmul(vectors_NV[whole:], query_V, out=scores[whole:])
    return scores


def _at_least_best(scores: Array, k: int) -> Array:
    """Places of the k greatest scores, and of all that equal the last of them."""
    if k >= len(scores):
        return np.arange(len(scores))
    return np.flatnonzero(scores >= np.partition(scores, len(scores) - k)[len(scores) - k])


def _best(places: Array, scores: Array, k: int) -> Array:
    """Where the k best are, best first; ties by place."""
    kept = _at_least_best(scores, k)
    return kept[np.lexsort((places[kept], -scores[kept]))[:k]]
