"""Sharded reads in parallel training: a collection whose keys are sharded over workers.

Each worker looks up the keys that it owns and gets the rows it reads from the others. A batch costs four exchanges,
each for all tables at once: numbers of keys, keys with counts, rows, gradients. The first two do not depend on any
row, so they can be prefetched. Small tables may be replicated instead: they are read locally, and their gradients and
counts travel with those of the dense weights.

Shapes: B rows of the batch, U distinct keys of it, D embedding dim, W workers, T tables.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from recmill import _native
from recmill.distributed.collectives import GlooGroup, PendingTransfer
from recmill.distributed.workers import Workers
from recmill.embeddings.collection import BatchLookup, Column, EmbeddingCollection, EmbeddingFeature
from recmill.embeddings.table import Array, EmbeddingTable, Segment

WIRES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_REQUEST = np.dtype([("key", np.int64), ("count", np.uint32)])  # 12 bytes for each distinct key
_MAX_EXPONENT = 14  # exponent of the largest gradient in a float16 message; the format's own limit is 15
_MAX_SCALE_EXPONENT = 64  # smaller gradients count as 0


@dataclass(frozen=True)
class KeyRequests:
    """The distinct keys of a batch: what this worker reads from each other one, and what each other reads from it."""

    native: _native.EmbeddingRequest
    num_keys: Array  # keys that this worker reads, by the worker that owns them
    their_sizes: Array  # keys that others read here, by worker and table
    theirs: Array  # these keys and their counts, in that order

    @property
    def num_theirs(self) -> Array:
        return np.asarray(self.their_sizes.sum(axis=1))


@dataclass(frozen=True)
class ShardedLookup(BatchLookup):
    """The rows that a batch read; `lookups` are those of the keys that this worker owns."""

    requests: KeyRequests


class ShardedCollection(EmbeddingCollection):
    """A collection with the same results as in a single process. All workers call its methods in the same order.

    Tables with a shard hold this worker's keys; tables without one are replicas, and must have num_rows.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingTable],
        features: Sequence[EmbeddingFeature],
        workers: Workers,
        num_threads: int = 1,
        wire: str = "float32",
    ) -> None:
        super().__init__(tables, features, num_threads)
        self.workers = workers
        self.wire = WIRES[wire]
        self._sharded = [table for table in tables if table.shard is not None]
        self._replicas = [table for table in tables if table.shard is None]
        self._indices = {
            table.spec.name: index
            for group in (self._sharded, self._replicas)
            for index, table in enumerate(group)
        }
        rows = [table.spec.num_rows or 0 for table in self._replicas]
        self._first_rows = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows, dtype=np.int64)])
        names = {table.spec.name for table in self._replicas}
        self._is_replica = [feature.table in names for feature in self.features]
        self._prefetched: deque[tuple[Mapping[str, Column], Future[KeyRequests]]] = deque()

    def prefetch(self, columns: Mapping[str, Column]) -> None:
        """Begin to exchange the keys of a training batch; lookups must follow in the same order."""

        def exchange() -> KeyRequests:
            return self._exchange_keys(columns, self.workers.prefetching)

        self._prefetched.append((columns, self.workers.run_ahead(exchange)))

    def finish_prefetch(self) -> None:
        """Complete the exchange that is in progress: the others wait for it."""
        while self._prefetched:
            with suppress(Exception):  # an error is raised where the result is needed
                self._prefetched.popleft()[1].result()

    def _exchange_keys(self, columns: Mapping[str, Column], group: GlooGroup) -> KeyRequests:
        """Send every worker the keys that this batch reads from it, with counts."""
        segments, _ = self._split(
            [self._segment(feature, columns[feature.name], None) for feature in self.features]
        )
        request = _native.request_keys(
            [table.native for table in self._sharded], segments, self.workers.size, self.num_threads
        )
        sizes = request.sizes.reshape(self.workers.size, len(self._sharded))
        ones = np.ones(self.workers.size, np.int64)
        their_sizes = group.all_to_all(sizes, ones, ones).wait()
        keys = request.keys
        requested = np.empty(len(keys), _REQUEST)
        requested["key"], requested["count"] = keys, request.counts
        num_keys = sizes.sum(axis=1)
        theirs = group.all_to_all(requested, num_keys, their_sizes.sum(axis=1)).wait()
        return KeyRequests(request, num_keys, their_sizes, theirs)

    def lookup(self, columns: Mapping[str, Column], train: bool, step: int = 0) -> BatchLookup:
        values_BFD, sequences = self._room(columns)
        requests = self._requests(columns, train)
        theirs_UD = np.empty((len(requests.theirs), self.dim), np.float32)
        lookups = _native.lookup_parts(
            [table.native for table in self._sharded],
            requests.their_sizes,
            np.ascontiguousarray(requests.theirs["key"]),
            np.ascontiguousarray(requests.theirs["count"]),
            train,
            step,
            theirs_UD,
            self.num_threads,
        )
        arriving = self.workers.steps.all_to_all(
            pack(theirs_UD, self.wire), requests.num_theirs, requests.num_keys
        )
        segments = self._segments(columns, values_BFD, sequences)
        sharded, replicas = self._split(segments)
        # Replicas count keys once all workers' counts are known: see update_replicas.
        natives = [table.native for table in self._replicas]
        _native.lookup_tables(natives, replicas, False, step, self.num_threads)
        rows_UD = unpack(arriving.wait(), self.wire, self.dim)
        _native.pool_rows(requests.native, sharded, rows_UD, self.num_threads)
        return ShardedLookup(values_BFD, sequences, lookups, segments, requests)

    def update(
        self,
        lookup: BatchLookup,
        grads: Array,
        learning_rate: float,
        step: int = 0,
        sequence_grads: Mapping[str, Array] | None = None,
    ) -> None:
        raise NotImplementedError("gradients of all workers are needed: see recmill/distributed/gradients.py")

    def begin_update(
        self, lookup: BatchLookup, grads: Array, sequence_grads: Mapping[str, Array] | None = None
    ) -> ShardedUpdate:
        """Sum this worker's gradients by key. Nothing is sent or changed yet."""
        assert isinstance(lookup, ShardedLookup)
        sharded, replicas = self._split(self._gradient_segments(lookup, grads, sequence_grads or {}))
        sums_UD = _native.sum_gradients(lookup.requests.native, sharded, self.dim, self.num_threads)
        return ShardedUpdate(self, lookup, sums_UD, self._replica_sums(replicas))

    def _replica_sums(self, segments: Sequence[Segment]) -> Array:
        """Gradients [R, D] and counts [R] of all rows of all replicas, flat; most are zeros."""
        num_rows = int(self._first_rows[-1])
        sums = np.zeros(num_rows * (self.dim + 1), np.float32)
        if not num_rows:
            return sums
        natives = [table.native for table in self._replicas]
        request = _native.request_keys(natives, segments, 1, self.num_threads)
        indices = request.keys + np.repeat(self._first_rows[:-1], request.sizes[0])
        sums[: num_rows * self.dim].reshape(num_rows, self.dim)[indices] = _native.sum_gradients(
            request, segments, self.dim, self.num_threads
        )
        sums[num_rows * self.dim :][indices] = request.counts
        return sums

    def update_replicas(self, sums: Array, learning_rate: float, step: int) -> None:
        """One step by the sums of all workers; the same on each worker."""
        num_rows = int(self._first_rows[-1])
        if not num_rows:
            return
        grads_RD, counts_R = sums[: num_rows * self.dim].reshape(num_rows, self.dim), sums[-num_rows:]
        seen = np.flatnonzero(counts_R)
        sizes_1T = np.diff(np.searchsorted(seen, self._first_rows))[None].astype(np.int64)
        lookups = _native.lookup_parts(
            [table.native for table in self._replicas],
            sizes_1T,
            seen - np.repeat(self._first_rows[:-1], sizes_1T[0]),
            counts_R[seen].astype(np.uint32),
            True,
            step,
            np.empty((len(seen), self.dim), np.float32),
            self.num_threads,
        )
        _native.update_parts(
            lookups, sizes_1T, np.ascontiguousarray(grads_RD[seen]), learning_rate, step, self.num_threads
        )

    def _requests(self, columns: Mapping[str, Column], train: bool) -> KeyRequests:
        if not train or not self._prefetched:
            return self._exchange_keys(columns, self.workers.steps)
        prefetched, requests = self._prefetched.popleft()
        assert all(prefetched[name][0] is columns[name][0] for name in columns), (
            "another batch was prefetched"
        )
        with self.workers.steps.waiting():
            return requests.result()

    def _split(self, segments: Sequence[Segment]) -> tuple[list[Segment], list[Segment]]:
        """The features that read shards, and those that read replicas."""
        marked = list(zip(segments, self._is_replica, strict=True))
        return [part for part, is_replica in marked if not is_replica], [
            part for part, is_replica in marked if is_replica
        ]


class ShardedUpdate:
    """A step of a collection's rows in progress: `replicated_grads` and `scale` must be summed over all workers."""

    def __init__(
        self, collection: ShardedCollection, lookup: ShardedLookup, sums_UD: Array, replicated_grads: Array
    ) -> None:
        self.collection, self.lookup, self.replicated_grads = collection, lookup, replicated_grads
        self.scale = _scale(sums_UD) if collection.wire == torch.float16 else 1.0
        self._sums_UD = sums_UD
        self._arriving: PendingTransfer | None = None

    def send(self) -> None:
        """Begin to send gradients to the workers that own their keys."""
        requests, wire = self.lookup.requests, self.collection.wire
        sums_UD = self._sums_UD if self.scale == 1.0 else self._sums_UD * np.float32(self.scale)
        self._arriving = self.collection.workers.steps.all_to_all(
            pack(sums_UD, wire), requests.num_keys, requests.num_theirs
        )

    def apply(self, replicated_grads: Array, scales_W: Array, learning_rate: float, step: int) -> None:
        """Train this worker's rows with all workers' gradients, and the replicas with the sums."""
        assert self._arriving is not None
        collection, requests = self.collection, self.lookup.requests
        grads_UD = unpack(self._arriving.wait(), collection.wire, collection.dim)
        if collection.wire == torch.float16:
            grads_UD *= np.repeat(1.0 / scales_W, requests.num_theirs)[:, None].astype(np.float32)
        _native.update_parts(
            self.lookup.lookups, requests.their_sizes, grads_UD, learning_rate, step, collection.num_threads
        )
        collection.update_replicas(replicated_grads, learning_rate, step)


def pack(rows: Array, wire: torch.dtype) -> Array:
    """Rows in the wire format: float32, or 16 bits."""
    if wire == torch.float32:
        return rows
    return np.asarray(torch.from_numpy(rows).to(wire).view(torch.int16).numpy())


def unpack(rows: Array, wire: torch.dtype, dim: int) -> Array:
    """The inverse of `pack`, up to the precision of 16 bits."""
    rows = rows.reshape(-1, dim)
    if wire == torch.float32:
        return rows
    return np.asarray(torch.from_numpy(rows).view(wire).float().numpy())


def _scale(sums_UD: Array) -> float:
    """A power of two that brings the largest gradient close to the limit of float16, against underflow."""
    most = float(np.abs(sums_UD).max(initial=0.0))
    return (
        2.0 ** min(_MAX_EXPONENT - int(np.ceil(np.log2(most))), _MAX_SCALE_EXPONENT)
        if 0 < most < np.inf
        else 1.0
    )
