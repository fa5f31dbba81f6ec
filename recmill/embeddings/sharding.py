"""A collection whose keys are spread over workers: each looks up what it holds, and gets from the others what it reads.

A batch costs four exchanges, each for all tables at once: how many keys, the keys with their counts, rows, gradients.
The first two do not depend on any row, so they may run ahead. Small tables may be replicated instead: read locally,
their gradients and counts travel with those of dense weights.

Shapes: B rows of the batch, U different keys of it, D embedding dim, W workers, T tables.
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
from recmill.embeddings.collection import Column, EmbeddingCollection, EmbeddingFeature, Looked
from recmill.embeddings.peers import Peers, PendingResult, ProcessGroup
from recmill.embeddings.table import Array, EmbeddingTable, Segment

WIRES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_ASK = np.dtype([("key", np.int64), ("count", np.uint32)])  # 12 bytes for each different key
_SAFE = 14  # exponent of the largest gradient of a message in float16, whose own limit is 15
_MOST_SCALED = 64  # smaller gradients than that many powers of two bring there are nothing


@dataclass(frozen=True)
class Asked:
    """The different keys of a batch: which of them this worker wants of whom, and what all want of this one."""

    request: _native.EmbeddingRequest
    num_keys: Array
    their_sizes: Array
    theirs: Array  # keys and counts, by worker and table

    @property
    def num_theirs(self) -> Array:
        return np.asarray(self.their_sizes.sum(axis=1))


@dataclass(frozen=True)
class ShardedLooked(Looked):
    """What a batch read; `lookups` are those of the keys that this worker holds."""

    asked: Asked


class ShardedCollection(EmbeddingCollection):
    """Like a collection of one process, with the same answers. All workers call the same methods in the same order.

    Tables with a shard hold this worker's keys; tables without one are replicas, and must have num_rows.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingTable],
        features: Sequence[EmbeddingFeature],
        peers: Peers,
        num_threads: int = 1,
        wire: str = "float32",
    ) -> None:
        super().__init__(tables, features, num_threads)
        self.peers = peers
        self.wire = WIRES[wire]
        self._sharded = [table for table in tables if table.shard is not None]
        self._replicas = [table for table in tables if table.shard is None]
        self._places = {
            table.spec.name: place
            for group in (self._sharded, self._replicas)
            for place, table in enumerate(group)
        }
        rows = [table.spec.num_rows or 0 for table in self._replicas]
        self._first_rows = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows, dtype=np.int64)])
        names = {table.spec.name for table in self._replicas}
        self._is_replica = [feature.table in names for feature in self.features]
        self._expected: deque[tuple[Mapping[str, Column], Future[Asked]]] = deque()

    def expect(self, columns: Mapping[str, Column]) -> None:
        """Begin to ask for the keys of a batch that will train; batches must come in the order of this."""
        self._expected.append((columns, self.peers.run_ahead(lambda: self.ask(columns, self.peers.ahead))))

    def expect_no_more(self) -> None:
        """Leave nothing under way: the others wait for what was begun."""
        while self._expected:
            with suppress(Exception):  # what went wrong is raised where it was needed
                self._expected.popleft()[1].result()

    def ask(self, columns: Mapping[str, Column], group: ProcessGroup) -> Asked:
        """Tell every worker which of its keys this batch reads, and how often."""
        segments, _ = self._split(
            [self._segment(feature, columns[feature.name], None) for feature in self.features]
        )
        request = _native.request_keys(
            [table.native for table in self._sharded], segments, self.peers.size, self.num_threads
        )
        sizes = request.sizes.reshape(self.peers.size, len(self._sharded))
        ones = np.ones(self.peers.size, np.int64)
        their_sizes = group.all_to_all(sizes, ones, ones).wait()
        keys = request.keys
        asks = np.empty(len(keys), _ASK)
        asks["key"], asks["count"] = keys, request.counts
        num_keys = sizes.sum(axis=1)
        theirs = group.all_to_all(asks, num_keys, their_sizes.sum(axis=1)).wait()
        return Asked(request, num_keys, their_sizes, theirs)

    def lookup(self, columns: Mapping[str, Column], train: bool, step: int = 0) -> Looked:
        values_BFD = np.empty((self._batch_size(columns), len(self.features), self.dim), np.float32)
        asked = self._asked(columns, train)
        theirs_UD = np.empty((len(asked.theirs), self.dim), np.float32)
        lookups = _native.lookup_parts(
            [table.native for table in self._sharded],
            asked.their_sizes,
            np.ascontiguousarray(asked.theirs["key"]),
            np.ascontiguousarray(asked.theirs["count"]),
            train,
            step,
            theirs_UD,
            self.num_threads,
        )
        arriving = self.peers.steps.all_to_all(pack(theirs_UD, self.wire), asked.num_theirs, asked.num_keys)
        segments = [
            self._segment(feature, columns[feature.name], values_BFD[:, place])
            for place, feature in enumerate(self.features)
        ]
        sharded, replicas = self._split(segments)
        # A replica learns which keys there are when all workers' counts are known: see update_replicas.
        natives = [table.native for table in self._replicas]
        _native.lookup_tables(natives, replicas, False, step, self.num_threads)
        rows_UD = unpack(arriving.wait(), self.wire, self.dim)
        _native.pool_rows(asked.request, sharded, rows_UD, self.num_threads)
        return ShardedLooked(values_BFD, lookups, segments, asked)

    def update(self, looked: Looked, grads: Array, learning_rate: float, step: int = 0) -> None:
        """Train by the gradient of looked.values, of all workers. Not finite anywhere: a ValueError everywhere."""
        update = self.begin_update(looked, grads)
        replicated_grads = np.concatenate(
            [update.replicated_grads, self._scales(update), [np.square(grads).sum()]], dtype=np.float32
        )
        replicated_grads = self.peers.steps.all_reduce(replicated_grads).wait()
        if not np.isfinite(replicated_grads[-1]):
            raise ValueError("a gradient is not finite; nothing was updated")
        update.send()
        size = len(update.replicated_grads)
        update.apply(
            replicated_grads[:size], replicated_grads[size : size + self.peers.size], learning_rate, step
        )

    def begin_update(self, looked: Looked, grads: Array) -> RowUpdate:
        """Add up this worker's gradients by key. Nothing is sent yet, nothing changes."""
        assert isinstance(looked, ShardedLooked)
        if grads.shape != looked.values.shape or grads.dtype != np.float32:
            raise ValueError(
                f"gradients must be float32 {looked.values.shape}, got {grads.dtype} {grads.shape}"
            )
        if grads.strides[-1] != grads.itemsize:
            grads = np.ascontiguousarray(grads)
        sharded, replicas = self._split(
            [(*part[:5], grads[:, place]) for place, part in enumerate(looked.segments)]
        )
        sums_UD = _native.sum_gradients(looked.asked.request, sharded, self.dim, self.num_threads)
        return RowUpdate(self, looked, sums_UD, self._replica_sums(replicas))

    def _scales(self, update: RowUpdate) -> Array:
        scales_W = np.zeros(self.peers.size, np.float32)
        scales_W[self.peers.rank] = update.scale
        return scales_W

    def _replica_sums(self, segments: Sequence[Segment]) -> Array:
        """Gradients [R, D] and counts [R] of all rows of all replicas, most of them zeros; flat."""
        num_rows = int(self._first_rows[-1])
        sums = np.zeros(num_rows * (self.dim + 1), np.float32)
        if not num_rows:
            return sums
        natives = [table.native for table in self._replicas]
        request = _native.request_keys(natives, segments, 1, self.num_threads)
        places = request.keys + np.repeat(self._first_rows[:-1], request.sizes[0])
        sums[: num_rows * self.dim].reshape(num_rows, self.dim)[places] = _native.sum_gradients(
            request, segments, self.dim, self.num_threads
        )
        sums[num_rows * self.dim :][places] = request.counts
        return sums

    def update_replicas(self, sums: Array, learning_rate: float, step: int) -> None:
        """One step by everybody's sums; the same on every worker."""
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

    def _asked(self, columns: Mapping[str, Column], train: bool) -> Asked:
        if not train or not self._expected:
            return self.ask(columns, self.peers.steps)
        expected, asked = self._expected.popleft()
        assert all(expected[name][0] is columns[name][0] for name in columns), "another batch was expected"
        return asked.result()

    def _split(self, segments: Sequence[Segment]) -> tuple[list[Segment], list[Segment]]:
        """Of the features that read shards, and of those that read replicas."""
        marked = list(zip(segments, self._is_replica, strict=True))
        return [part for part, is_replica in marked if not is_replica], [
            part for part, is_replica in marked if is_replica
        ]


class RowUpdate:
    """A step of a collection's rows under way: `replicated_grads` and `scale` are reduced over all workers."""

    def __init__(
        self, collection: ShardedCollection, looked: ShardedLooked, sums_UD: Array, replicated_grads: Array
    ) -> None:
        self.collection, self.looked, self.replicated_grads = collection, looked, replicated_grads
        self.scale = _scale(sums_UD) if collection.wire == torch.float16 else 1.0
        self._sums_UD = sums_UD
        self._arriving: PendingResult | None = None

    def send(self) -> None:
        """Let gradients go to the workers that hold their keys."""
        asked, wire = self.looked.asked, self.collection.wire
        sums_UD = self._sums_UD if self.scale == 1.0 else self._sums_UD * np.float32(self.scale)
        self._arriving = self.collection.peers.steps.all_to_all(
            pack(sums_UD, wire), asked.num_keys, asked.num_theirs
        )

    def apply(self, replicated_grads: Array, scales_W: Array, learning_rate: float, step: int) -> None:
        """Train the rows of this worker by everybody's gradients, and the replicas by what rode along."""
        assert self._arriving is not None
        collection, asked = self.collection, self.looked.asked
        grads_UD = unpack(self._arriving.wait(), collection.wire, collection.dim)
        if collection.wire == torch.float16:
            grads_UD *= np.repeat(1.0 / scales_W, asked.num_theirs)[:, None].astype(np.float32)
        _native.update_parts(
            self.looked.lookups, asked.their_sizes, grads_UD, learning_rate, step, collection.num_threads
        )
        collection.update_replicas(replicated_grads, learning_rate, step)


def pack(rows: Array, wire: torch.dtype) -> Array:
    """Rows as they travel: float32, or 16 bits of it."""
    if wire == torch.float32:
        return rows
    return np.asarray(torch.from_numpy(rows).to(wire).view(torch.int16).numpy())


def unpack(rows: Array, wire: torch.dtype, dim: int) -> Array:
    """The inverse of `pack`, as far as 16 bits go."""
    rows = rows.reshape(-1, dim)
    if wire == torch.float32:
        return rows
    return np.asarray(torch.from_numpy(rows).view(wire).float().numpy())


def _scale(sums_UD: Array) -> float:
    """A power of two that brings the largest gradient near the largest float16: small ones stay above its smallest."""
    most = float(np.abs(sums_UD).max(initial=0.0))
    return 2.0 ** min(_SAFE - int(np.ceil(np.log2(most))), _MOST_SCALED) if 0 < most < np.inf else 1.0
