"""Search for the items with the greatest inner product: exact up to 200,000 items, else by clusters.

faiss builds and stores the clusters; native code searches them, as half floats in the file that faiss mapped.

An opened index is the mapped file as built, plus later changes. There are few changes, so they are searched exactly,
and the vectors that they replace are hidden in the file. Shapes: N items, Q queries, V vector size.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from recmill import _native
from recmill.artifacts.manifest import write_whole
from recmill.errors import ArtifactError, MissingPackage

Array = np.ndarray[Any, np.dtype[Any]]
_Vectors = tuple[
    Array, Array | None, Array, Array
]  # as built, with hidden indices, changed indices, and their vectors
_NOTHING = np.empty(0, np.int64)

EXACT_BELOW = 200_000  # beyond it a scan takes longer than a request may
_BEST, _RECALL = 500, 0.98  # the target: recall@500
_NUM_QUERIES = 200
_MIN_SCANNED_PER_ANSWER = 5  # items
_MIN_SHARE = 1e-3  # of allowed items, when the number of items to scan is chosen
_CLUSTERS, _SAMPLED_PER_CLUSTER, _ROUNDS = 4, 48, 6  # clusters for each square root of the number of items
_INDEX, _SETTINGS = "clusters.faiss", "clusters.json"


@dataclass(frozen=True)
class _Changes:
    """Changes since the index was built: hidden indices, and additional vectors. Immutable."""

    hidden: Array  # bool [N as built]
    num_hidden: int
    indices: Array  # int64, sorted
    vectors: Array  # float32 [changed, V]

    @classmethod
    def none(cls, num_items: int, dim: int) -> _Changes:
        empty = np.empty((0, dim), np.float32)
        return cls(np.zeros(num_items, bool), 0, np.empty(0, np.int64), empty)

    def without(self, indices: Array) -> _Changes:
        hidden = self.hidden.copy()
        hidden[indices[indices < len(hidden)]] = True
        kept = ~np.isin(self.indices, indices)
        return _Changes(hidden, int(hidden.sum()), self.indices[kept], self.vectors[kept])

    def with_vectors(self, indices: Array, vectors: Array) -> _Changes:
        rest = self.without(indices)
        merged = np.concatenate([rest.indices, indices])
        order = np.argsort(merged, kind="stable")
        vectors = np.concatenate([rest.vectors, vectors])[order]
        return replace(rest, indices=merged[order], vectors=vectors)


class Index(ABC):
    """Items by vector. Searches run in the caller's thread, concurrently, also while items change."""

    def __init__(self, vectors_NV: Array) -> None:
        self._vectors_NV = vectors_NV
        self._changes = _Changes.none(*vectors_NV.shape)
        self._changing = threading.Lock()

    @property
    def dim(self) -> int:
        return int(self._vectors_NV.shape[1])

    def __len__(self) -> int:
        changes = self._changes
        return len(self._vectors_NV) - changes.num_hidden + len(changes.indices)

    def search(
        self, vectors_QV: Array, k: int, banned: Array | None = None, allowed: Array | None = None
    ) -> tuple[Array, Array]:
        """Indices (int64) and inner products (float32), each [Q, k], best first, ties by index; padded with -1.

        Excludes the sorted items of `banned`, and with a mask `allowed` all others.
        """
        queries = np.ascontiguousarray(vectors_QV, np.float32)
        indices = np.full((len(queries), k), -1, np.int64)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        for row, query_V in enumerate(queries if k else ()):
            found, found_scores = self.nearest(query_V, k, banned, allowed)
            indices[row, : len(found)] = found
            scores[row, : len(found)] = found_scores
        return indices, scores

    def nearest(
        self, query_V: Array, k: int, banned: Array | None = None, allowed: Array | None = None
    ) -> tuple[Array, Array]:
        """What `search` gives for one vector, float32 and contiguous, without padding."""
        banned = _NOTHING if banned is None else banned
        wanted = self.native_search(query_V, k, len(banned), allowed)
        mask = None if allowed is None else allowed.view(np.uint8)
        return _native.run_searches([wanted], k, banned, mask)[0]

    def native_search(self, query_V: Array, k: int, num_banned: int, allowed: Array | None) -> _native.Search:
        """Looks for what `nearest` gives, with other searches of a request."""
        changes = self._changes
        hidden = changes.hidden.view(np.uint8) if changes.num_hidden else None
        vectors = (self._vectors_NV, hidden, changes.indices, changes.vectors)
        return self._search(vectors, query_V, k + num_banned, allowed)

    def add(self, indices: Array, vectors: Array) -> None:
        """Add items or replace their vectors. If an index occurs twice, the last one wins."""
        indices = np.asarray(indices, np.int64)
        vectors = np.asarray(vectors, np.float32).reshape(len(indices), self.dim)
        _, last = np.unique(indices[::-1], return_index=True)
        last = len(indices) - 1 - last
        with self._changing:
            self._changes = self._changes.with_vectors(indices[last], vectors[last])

    def remove(self, indices: Array) -> None:
        """Remove items; unknown indices are ignored."""
        indices = np.asarray(indices, np.int64)
        with self._changing:
            self._changes = self._changes.without(indices[indices >= 0])

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the files for `open_index` except the vectors, as built: without later changes."""

    @abstractmethod
    def _search(
        self, vectors: _Vectors, query_V: Array, wanted: int, allowed: Array | None
    ) -> _native.Search:
        """Looks for the best that may be shown; so many are wanted, with those that are banned."""


class ExactIndex(Index):
    """Scans every vector."""

    def save(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def _search(
        self, vectors: _Vectors, query_V: Array, wanted: int, allowed: Array | None
    ) -> _native.Search:
        return _native.search_all(*vectors, query_V)


class ClusteredIndex(Index):
    """Scans the clusters nearest to a query: as many as reached the target recall when it was built."""

    def __init__(self, vectors_NV: Array, faiss_index: Any, probes: int, recall: float) -> None:
        super().__init__(vectors_NV)
        self._faiss = _import_faiss()
        self._index = faiss_index
        self._num_clusters = int(
            faiss_index.nlist
        )  # faiss takes longer to say so than a search's preparation
        self._probes = probes
        self.recall = recall  # recall@500 when it was built

    def save(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._faiss.write_index(self._index, str(path / _INDEX))
        settings = {"probes": self._probes, "recall": self.recall}
        write_whole(path / _SETTINGS, json.dumps(settings) + "\n")

    def _search(
        self, vectors: _Vectors, query_V: Array, wanted: int, allowed: Array | None
    ) -> _native.Search:
        # Scan enough items to choose from.
        share = 1.0 if allowed is None else max(_MIN_SHARE, np.count_nonzero(allowed) / max(1, len(allowed)))
        least = _MIN_SCANNED_PER_ANSWER * max(wanted / share, _BEST)
        probes = max(self._probes, -(-int(least) * self._num_clusters // max(1, len(self._vectors_NV))))
        return self._clusters.search(*vectors, query_V, probes)

    @cached_property
    def _clusters(self) -> _native.VectorClusters:
        """The lists of the faiss index, where they are mapped."""
        lists, number = self._index.invlists, self._num_clusters
        codes, items = (
            np.array([int(address(cluster) or 0) for cluster in range(number)], np.uint64)
            for address in (lists.get_codes, lists.get_ids)
        )
        sizes = np.array([lists.list_size(cluster) for cluster in range(number)], np.int64)
        centers = self._index.quantizer.reconstruct_n(0, number)
        return _native.VectorClusters(centers, codes, items, sizes)


def build_index(vectors: Array, kind: str = "auto", queries: Array | None = None) -> Index:
    """Build an index of unit vectors [N, V]: "exact", "clustered", or "auto" by their number.

    `queries` are typical query vectors, to choose the number of clusters to scan; by default, mixtures of two items.
    """
    vectors = np.ascontiguousarray(vectors, np.float32)
    if kind == "exact" or (kind == "auto" and len(vectors) <= EXACT_BELOW):
        return ExactIndex(vectors)
    if kind not in ("auto", "clustered"):
        raise ValueError(f'kind must be "auto", "exact" or "clustered", got "{kind}"')
    faiss = _import_faiss()
    num_clusters = max(1, min(len(vectors) // 2, int(_CLUSTERS * len(vectors) ** 0.5)))
    # Half floats halve what a search must read; the results are rescored with the float32 vectors.
    index = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatIP(vectors.shape[1]),
        vectors.shape[1],
        num_clusters,
        faiss.ScalarQuantizer.QT_fp16,
        faiss.METRIC_INNER_PRODUCT,
        False,
    )
    index.cp.spherical, index.cp.niter, index.cp.seed = True, _ROUNDS, 1
    index.cp.min_points_per_centroid, index.cp.max_points_per_centroid = 1, _SAMPLED_PER_CLUSTER
    index.train(vectors)
    index.add(vectors)
    random = np.random.default_rng(0)
    probes, recall = _probes_needed(
        vectors, index, _mixtures(vectors, random) if queries is None else queries[:_NUM_QUERIES]
    )
    return ClusteredIndex(vectors, index, probes, recall)


def open_index(path: Path, vectors: Array) -> Index:
    """Open a saved index over the vectors it was built from. It is mapped, not loaded."""
    if not (path / _SETTINGS).exists():
        if path.is_dir() and any(path.iterdir()):
            raise ArtifactError(f"Index {path} is of an unknown kind. Run `recmill export` again.")
        return ExactIndex(np.asarray(vectors))
    faiss = _import_faiss()
    try:
        settings = json.loads((path / _SETTINGS).read_text(encoding="utf-8"))
        index = faiss.read_index(str(path / _INDEX), faiss.IO_FLAG_MMAP_IFC)
        faiss.omp_set_num_threads(1)  # searches run concurrently, each in its caller's thread
        probes, recall = int(settings["probes"]), float(settings["recall"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ArtifactError(f"Index {path} cannot be read: {reason}. Run `recmill export` again.") from None
    if (index.ntotal, index.d) != vectors.shape:
        raise ArtifactError(
            f"Index {path} is not of these {len(vectors):,} items. Run `recmill export` again."
        )
    return ClusteredIndex(np.asarray(vectors), index, probes, recall)


def _import_faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise MissingPackage(f"An index of more than {EXACT_BELOW:,} items", "faiss", "serve") from None
    return faiss


def _mixtures(vectors_NV: Array, random: np.random.Generator) -> Array:
    pairs = random.choice(len(vectors_NV), (_NUM_QUERIES, 2))
    return _as_units(vectors_NV[pairs[:, 0]] + 0.5 * vectors_NV[pairs[:, 1]])


def _probes_needed(vectors_NV: Array, index: Any, queries_QV: Array) -> tuple[int, float]:
    """Clusters to scan for the target recall, at a cost of at most an exact search of EXACT_BELOW items."""
    centers_CV = index.quantizer.reconstruct_n(0, index.nlist)
    ranks = []
    for query_V in queries_QV:
        # Ties with the last one do not count: items that no user clicked twice may all have the same vector.
        scores = _products(vectors_NV, query_V)
        best = np.argpartition(-scores, min(_BEST, len(scores) - 1))[:_BEST]
        rank_of = np.empty(index.nlist, np.int64)
        rank_of[np.argsort(-_products(centers_CV, query_V), kind="stable")] = np.arange(index.nlist)
        ranks.append(rank_of[index.quantizer.assign(vectors_NV[best], 1)[:, 0]])
    found = np.concatenate(ranks)
    needed = int(np.quantile(found, _RECALL, method="higher")) + 1
    affordable = max(1, index.nlist * EXACT_BELOW // len(vectors_NV))
    probes = min(needed, affordable)
    return probes, float((found < probes).mean())


def _as_units(vectors: Array) -> Array:
    units: Array = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return units


def _products(vectors_NV: Array, query_V: Array) -> Array:
    """Inner products, in this thread alone."""
    # From 9,216 elements on, OpenBLAS splits a product over its own threads; a server has a thread per request.
    dim = vectors_NV.shape[1]
    rows = max(1, 8_192 // dim)
    whole = len(vectors_NV) // rows * rows
    scores = np.empty(len(vectors_NV), np.float32)
    blocks = vectors_NV[:whole].reshape(-1, rows, dim)
    np.matmul(blocks, query_V, out=scores[:whole].reshape(-1, rows))
    np.matmul(vectors_NV[whole:], query_V, out=scores[whole:])
    return scores
