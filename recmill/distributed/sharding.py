"""Sharded reads in parallel training: a collection whose keys are sharded over workers.

Each worker looks up the keys that it owns and gets the rows it reads from the others. A batch costs four exchanges,
each for all tables at once: numbers of keys, keys with counts, rows, gradients. The first two do not depend on any
row, so they can be prefetched. Small tables may be replicated instead: they are read locally, and their gradients and
counts travel with those of the dense weights.

Shapes: B rows of the batch, U different keys of it, D embedding dim, W workers, T tables, C collections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise

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
class ArrivingRows:
    """The rows that a batch reads, on their way from the workers that hold them, and this worker's part in that."""

    requests: KeyRequests
    lookups: Sequence[_native.EmbeddingLookup]
    transfer: PendingTransfer


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
        self.prefetched: deque[PrefetchedKeys] = deque()

    def request(self, columns: Mapping[str, Column]) -> _native.EmbeddingRequest:
        """The different keys of a batch, by the worker that holds them."""
        segments, _ = self._split(
            [self._segment(feature, columns[feature.name], None) for feature in self.features]
        )
        return _native.request_keys(
            [table.native for table in self._sharded], segments, self.workers.size, self.num_threads
        )

    def lookup(self, columns: Mapping[str, Column], train: bool, step: int = 0) -> BatchLookup:
        values_BFD, sequences = self._room(columns)
        arriving = self._rows_of(columns, train, step)
        segments = self._segments(columns, values_BFD, sequences)
        sharded, replicas = self._split(segments)
        # Replicas count keys when all workers' counts are known: see update_replicas.
        natives = [table.native for table in self._replicas]
        _native.lookup_tables(natives, replicas, False, step, self.num_threads)
        rows_UD = unpack(arriving.transfer.wait(), self.wire, self.dim)
        _native.pool_rows(arriving.requests.native, sharded, rows_UD, self.num_threads)
        return ShardedLookup(values_BFD, sequences, arriving.lookups, segments, arriving.requests)

    def _rows_of(self, columns: Mapping[str, Column], train: bool, step: int) -> ArrivingRows:
        """The rows that a batch reads, on their way."""
        if not train or not self.prefetched:
            (requests,) = KeyExchange([self], [columns], self.workers.steps).wait()
            return self.send_rows(requests, train, step)
        return self.prefetched.popleft().rows_of(self, columns, step)

    def send_rows(self, requests: KeyRequests, train: bool, step: int) -> ArrivingRows:
        """Look up what others, and this worker, read here."""
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
        transfer = self.workers.steps.all_to_all(
            pack(theirs_UD, self.wire), requests.num_theirs, requests.num_keys
        )
        return ArrivingRows(requests, lookups, transfer)

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

    def _split(self, segments: Sequence[Segment]) -> tuple[list[Segment], list[Segment]]:
        """The features that read shards, and those that read replicas."""
        marked = list(zip(segments, self._is_replica, strict=True))
        return [part for part, is_replica in marked if not is_replica], [
            part for part, is_replica in marked if is_replica
        ]


class PrefetchedKeys:
    """The keys of a batch, exchanged ahead for all collections that its step looks up, each once."""

    def __init__(
        self, collections: Sequence[ShardedCollection], columns: Sequence[Mapping[str, Column]]
    ) -> None:
        self._collections, self._columns = collections, columns
        self._workers = collections[0].workers
        self.requests = self._workers.run_ahead(
            lambda: KeyExchange(collections, columns, self._workers.prefetching), KeyExchange.wait
        )
        self._arriving: list[ArrivingRows] = []

    def rows_of(
        self, collection: ShardedCollection, columns: Mapping[str, Column], step: int
    ) -> ArrivingRows:
        """The rows of one of them. Those of all set out together, so that workers wait for each other once."""
        index = self._collections.index(collection)
        assert all(self._columns[index][name][0] is columns[name][0] for name in columns), (
            "another batch was prefetched"
        )
        if not self._arriving:
            with self._workers.steps.waiting():
                requests = self.requests()
            self._arriving = [
                one.send_rows(of_one, True, step)
                for one, of_one in zip(self._collections, requests, strict=True)
            ]
        return self._arriving[index]


def prefetch(collections: Sequence[ShardedCollection], columns: Sequence[Mapping[str, Column]]) -> None:
    """Begin to exchange the keys of a batch that will train; lookups must come in the same order."""
    keys = PrefetchedKeys(collections, columns)
    for collection in collections:
        collection.prefetched.append(keys)


def finish_prefetch(collections: Iterable[ShardedCollection]) -> None:
    """Leave nothing under way: the others wait for what was begun."""
    for collection in collections:
        while collection.prefetched:
            with suppress(Exception):  # what went wrong is raised where it was needed
                collection.prefetched.popleft().requests()


class KeyExchange:
    """Sends every worker the keys that a batch reads from it, with their counts; all collections in one message."""

    def __init__(
        self,
        collections: Sequence[ShardedCollection],
        columns: Sequence[Mapping[str, Column]],
        group: GlooGroup,
    ) -> None:
        size = group.members.size
        self._natives = [one.request(of_one) for one, of_one in zip(collections, columns, strict=True)]
        sizes = [native.sizes.reshape(size, -1) for native in self._natives]
        self._num_tables = [part.shape[1] for part in sizes]
        self._num_keys_CW = np.stack([part.sum(axis=1) for part in sizes])
        own = [
            _slices(_requested(native), num_keys_W)
            for native, num_keys_W in zip(self._natives, self._num_keys_CW, strict=True)
        ]
        requested = np.concatenate([parts[worker] for worker in range(size) for parts in own])
        self._arriving = group.exchange(requested, np.concatenate(sizes, axis=1))

    def wait(self) -> list[KeyRequests]:
        """Of each collection."""
        arrived, all_sizes_WT = self._arriving.wait()
        ends = np.cumsum(self._num_tables)[:-1]
        sizes = [np.ascontiguousarray(part) for part in np.split(all_sizes_WT, ends, axis=1)]
        num_theirs_WC = np.stack([part.sum(axis=1) for part in sizes], axis=1)
        theirs = _slices(arrived, num_theirs_WC.reshape(-1))
        num = len(sizes)
        return [
            KeyRequests(
                self._natives[index],
                self._num_keys_CW[index],
                sizes[index],
                np.concatenate(theirs[index::num]),
            )
            for index in range(num)
        ]


def _requested(native: _native.EmbeddingRequest) -> Array:
    keys = native.keys
    requested = np.empty(len(keys), _REQUEST)
    requested["key"], requested["count"] = keys, native.counts
    return requested


def _slices(rows: Array, sizes: Array) -> list[Array]:
    """The rows in parts of these sizes."""
    return [rows[begin:end] for begin, end in pairwise([0, *accumulate(sizes.tolist())])]


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
