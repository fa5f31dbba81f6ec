"""An embedding table: 64-bit keys to rows that are created on first sight, trained, evicted and saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from recmill import _native

Array = np.ndarray[Any, np.dtype[Any]]
_INT64 = np.dtype(np.int64)
Pooling = Literal["none", "sum", "mean"]
POOLINGS: Mapping[str, int] = {"none": 0, "sum": 1, "mean": 2}

# Optimizer -> its parameters and their defaults. The formulas are in native/embedding_optimizer.hpp.
OPTIMIZERS: Mapping[str, Mapping[str, float]] = {
    "sgd": {"weight_decay": 0.0},
    "adagrad": {"initial_accumulator": 0.0, "eps": 1e-8, "weight_decay": 0.0},
    "rowwise_adagrad": {"initial_accumulator": 0.0, "eps": 1e-8, "weight_decay": 0.0},
    "adam": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    "ftrl": {"l1": 0.0, "l2": 0.0, "beta": 0.0, "initial_accumulator": 0.1},
    "adagrad_decay": {
        "initial_accumulator": 0.1,
        "decay_rate": 0.9,
        "decay_period": 100_000,
        "eps": 1e-8,
        "weight_decay": 0.0,
    },
}


@dataclass(frozen=True)
class TableSpec:
    """The definition of a table. Tables of equal specs give equal results, whatever the order of their keys.

    num_rows bounds the keys to 0..num_rows-1; without it any 64-bit key is allowed. A key gets a row at its
    admit_after-th occurrence in training; until then it reads zeros, or trains one of shared_rows rows that it will
    start from. Occurrences are counted exactly, or by bloom_counters two-byte counters, which may admit early but
    never late, and which remember evicted keys: such a key is admitted again at once.
    """

    name: str
    dim: int
    optimizer: str = "rowwise_adagrad"
    parameters: Mapping[str, float] = field(default_factory=dict)
    num_rows: int | None = None
    init_scale: float = 0.01
    seed: int = 0
    admit_after: int = 1
    bloom_counters: int | None = None
    shared_rows: int = 0

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise ValueError(f'Table "{self.name}": {problem}')
        object.__setattr__(self, "parameters", MappingProxyType(dict(self.parameters)))

    def _problems(self) -> Iterator[str]:
        if self.dim < 1:
            yield f"dim must be a positive integer, got {self.dim}"
        if self.optimizer not in OPTIMIZERS:
            yield f'no optimizer is called "{self.optimizer}"; there are: {", ".join(OPTIMIZERS)}'
            return
        accepted = OPTIMIZERS[self.optimizer]
        for name in set(self.parameters) - set(accepted):
            yield f'{self.optimizer} has no parameter "{name}"; it has: {", ".join(accepted)}'
        if self.parameters.get("decay_period", 1) < 1:
            yield f"decay_period must be at least 1, got {self.parameters['decay_period']}"
        if self.num_rows is not None and self.num_rows < 1:
            yield f"num_rows must be a positive integer, got {self.num_rows}"
        if not 1 <= self.admit_after < 1 << 16:
            yield f"admit_after must be within 1..65535, got {self.admit_after}"
        if self.init_scale < 0 or not np.isfinite(self.init_scale):
            yield f"init_scale must be a number from 0 on, got {self.init_scale}"
        if self.bloom_counters is not None and self.bloom_counters < 1:
            yield f"bloom_counters must be a positive integer, got {self.bloom_counters}"
        if self.admit_after == 1 and (self.shared_rows or self.bloom_counters):
            yield "shared_rows and bloom_counters are for keys that wait: they need admit_after > 1"


@dataclass(frozen=True)
class KeyRecords:
    """The complete state of some keys at one moment. Row i of each array belongs to keys[i]."""

    keys: Array
    rows: Array
    states: Array
    counts: Array
    steps: Array


@dataclass(frozen=True)
class AdmissionState:
    """The keys not yet admitted: exact or Bloom counters, and the rows that these keys share."""

    keys: Array
    counts: Array
    steps: Array
    bloom: Array
    shared_rows: Array
    shared_states: Array


@dataclass(frozen=True)
class Statistics:
    """Statistics of a table. hits and misses count occurrences, by whether the key had a row at that time.

    record_bytes are all records, resident_bytes those in memory, disk_bytes their size on a disk tier.
    """

    keys: int
    record_bytes: int
    resident_bytes: int
    disk_bytes: int
    index_bytes: int
    admission_bytes: int
    admitted: int
    evicted: int
    hits: int
    misses: int
    waiting: int

    @property
    def num_bytes(self) -> int:
        """bytes in memory"""
        return self.resident_bytes + self.index_bytes + self.admission_bytes


class Snapshot:
    """A table as of one moment. Iterate once, to the end; training may continue meanwhile.

    To restore: remove the keys in `removed`, load every Records, then load `waiting`. A snapshot closed before its
    end does not count as saved: the next delta covers its changes too.
    """

    def __init__(self, native: _native.EmbeddingSnapshot) -> None:
        self._native = native
        self.removed: Array = native.removed
        self.waiting = AdmissionState(*native.waiting)

    def __iter__(self) -> Iterator[KeyRecords]:
        while (piece := self._native.next_piece()) is not None:
            yield KeyRecords(*piece)

    def close(self) -> None:
        self._native.close()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class LookupResult:
    """Resolved keys of a batch. Valid after evictions too: evicted keys read as absent, and updates skip them."""

    native: _native.EmbeddingLookup
    keys: Array

    @property
    def unique_keys(self) -> Array:
        """Distinct keys in the order of their first occurrence."""
        return self.native.unique_keys

    @property
    def inverse(self) -> Array:
        """For each key, its index in unique_keys."""
        return self.native.inverse


class DiskTier:
    """A file for records in this folder, of which at most memory_bytes stay in memory; tables may share it.

    The file is unlinked when it is created: nothing is left behind, however the process ends, so durable state needs
    a snapshot. A full disk is an OSError. The bound excludes 11 to 23 bytes of index per key (none with num_rows),
    waiting keys, the records of a running call, and records changed while a snapshot is read.
    """

    def __init__(self, folder: str | Path, memory_bytes: int) -> None:
        if memory_bytes < 0:
            raise ValueError(f"memory_bytes must be a number from 0 on, got {memory_bytes}")
        self.folder, self.memory_bytes = Path(folder), memory_bytes
        self.native = _native.EmbeddingDisk(str(folder), memory_bytes)


@dataclass(frozen=True)
class KeyShard:
    """The keys of a table that one of several workers owns. Every key has exactly one owner."""

    rank: int
    size: int


class EmbeddingTable:
    """A native table. Calls from several threads are safe and serialised; the GIL is released meanwhile.

    With a disk tier, records live there and the recently used ones in memory; results are the same bit for bit. With
    a shard, the table holds the keys of one worker: it loads only those, and nothing else may be looked up.
    """

    def __init__(
        self,
        spec: TableSpec,
        num_threads: int = 1,
        disk: DiskTier | None = None,
        shard: KeyShard | None = None,
    ) -> None:
        self.spec = spec
        self.num_threads = num_threads
        self.shard = shard
        self.native = _native.embedding_table(
            name=spec.name,
            dim=spec.dim,
            num_rows=spec.num_rows or 0,
            init_scale=spec.init_scale,
            seed=spec.seed % (1 << 64),
            optimizer=spec.optimizer,
            parameters={**OPTIMIZERS[spec.optimizer], **spec.parameters},
            admit_after=spec.admit_after,
            bloom_counters=spec.bloom_counters or 0,
            shared_rows=spec.shared_rows,
            disk=None if disk is None else disk.native,
            num_owners=1 if shard is None else shard.size,
        )

    @property
    def num_states(self) -> int:
        """Floats of optimizer state per key."""
        return self.native.num_states

    def lookup(self, keys: Array, train: bool, step: int = 0) -> LookupResult:
        """Find the keys; in training also count them, update their step and create rows for new ones.

        Without train nothing changes: an absent key reads the row it would start with.
        """
        keys = as_keys(keys)
        segments = [(0, keys, None, None, 0, None)]
        return LookupResult(
            _native.lookup_tables([self.native], segments, train, step, self.num_threads)[0], keys
        )

    def pool(
        self,
        lookup: LookupResult,
        offsets: Array | None = None,
        weights: Array | None = None,
        pooling: Pooling = "none",
        out: Array | None = None,
    ) -> Array:
        """One row per bag, keys[offsets[i]:offsets[i + 1]], or per key without offsets. An empty bag gives zeros.

        A mean with weights divides by their sum. out may be a view whose rows lie apart.
        """
        if out is None:
            num_rows = len(lookup.keys) if offsets is None else len(offsets) - 1
            out = np.empty((max(num_rows, 0), self.spec.dim), np.float32)
        segments = [segment(0, lookup.keys, offsets, weights, pooling, out)]
        _native.pool_tables([lookup.native], segments, self.num_threads)
        return out

    def update(
        self,
        lookup: LookupResult,
        grads: Array,
        learning_rate: float,
        step: int = 0,
        offsets: Array | None = None,
        weights: Array | None = None,
        pooling: Pooling = "none",
    ) -> None:
        """Train the rows with the gradient of the result of pool.

        Equal keys are summed first: one optimizer step per key.

        A gradient that is not finite raises ValueError, which names its key, and nothing changes.
        """
        segments = [segment(0, lookup.keys, offsets, weights, pooling, grads)]
        _native.update_tables([lookup.native], segments, learning_rate, step, self.num_threads)

    def evict_by_age(self, step: int, max_age: int) -> int:
        """Evict keys, waiting ones included, not seen for more than max_age steps.

        Returns the number of evicted rows.
        """
        return self.native.evict_older_than(step - max_age)

    def evict_by_norm(self, min_norm: float) -> int:
        """Evict keys whose row has an L2 norm below min_norm."""
        return self.native.evict_smaller_than(min_norm)

    def evict_by_capacity(self, max_keys: int) -> int:
        """Keep the most frequent keys; ties go to the more recently seen, then to the smaller key."""
        return self.native.evict_to(max_keys)

    def least_frequent(self, size: int) -> tuple[Array, Array, Array]:
        """The keys that `evict_by_capacity` would evict first, unordered: keys, counts and steps."""
        return self.native.least_frequent(size)

    def remove(self, keys: Array) -> int:
        """Evict these keys if they exist."""
        return self.native.remove(as_keys(keys)[self.owns(keys)])

    def owns(self, keys: Array) -> Array:
        """Which keys belong here: all of them, or those of the shard."""
        if self.shard is None:
            return np.ones(len(keys), bool)
        return np.asarray(self.native.owners_of(as_keys(keys), self.shard.size) == self.shard.rank)

    def _own(self, records: KeyRecords) -> KeyRecords:
        if self.shard is None:
            return records
        own = self.owns(records.keys)
        return KeyRecords(*(getattr(records, part.name)[own] for part in fields(records)))

    def begin_snapshot(self, delta: bool = False) -> Snapshot:
        """Begin a snapshot of this moment.

        A delta holds what changed since the last snapshot began, and the keys evicted since.
        """
        return Snapshot(_native.EmbeddingSnapshot(self.native, delta))

    def load(self, records: KeyRecords) -> None:
        """Insert records, replacing those of the same keys. Loaded keys count as admitted.

        A row or state that is not finite raises ValueError, which names its key, and nothing changes.
        """
        records = self._own(records)
        self.native.load(
            as_keys(records.keys),
            np.ascontiguousarray(records.rows, np.float32),
            np.ascontiguousarray(records.states, np.float32),
            np.ascontiguousarray(records.counts, np.uint32),
            np.ascontiguousarray(records.steps, np.uint32),
        )

    def load_waiting(self, waiting: AdmissionState) -> None:
        """Replace the admission counters and the shared rows. Shared rows that are not finite raise ValueError."""
        if self.shard is not None:
            own = self.owns(waiting.keys)
            parts = {name: getattr(waiting, name)[own] for name in ("keys", "counts", "steps")}
            waiting = replace(waiting, **parts)
        self.native.load_waiting(
            as_keys(waiting.keys),
            np.ascontiguousarray(waiting.counts, np.uint32),
            np.ascontiguousarray(waiting.steps, np.uint32),
            np.ascontiguousarray(waiting.bloom, np.uint16),
            np.ascontiguousarray(waiting.shared_rows, np.float32),
            np.ascontiguousarray(waiting.shared_states, np.float32),
        )

    def mark_saved(self) -> None:
        """Call after a restore: the next delta holds only later changes."""
        self.native.mark_saved()

    def statistics(self) -> Statistics:
        return Statistics(**self.native.statistics())


Segment = tuple[int, Array, Array | None, Array | None, int, Array | None]


def segment(
    table: int, keys: Array, offsets: Array | None, weights: Array | None, pooling: str, rows: Array | None
) -> Segment:
    """One feature's arguments of a native call; without rows, the keys alone."""
    if rows is not None and rows.dtype != np.float32:
        raise ValueError(f"rows must be float32, got {rows.dtype}")
    return (
        table,
        keys,
        None if offsets is None else as_keys(offsets),
        None if weights is None else np.ascontiguousarray(weights, np.float32),
        POOLINGS[pooling],
        rows,
    )


def as_keys(keys: Array) -> Array:
    """Contiguous int64; unsigned keys keep their bits. Floats are refused: they cannot represent every 64-bit key."""
    if keys.dtype == _INT64 and keys.flags.c_contiguous:  # the usual case, and a server asks often
        return keys
    if keys.dtype.kind not in "iu":
        raise TypeError(f"keys and offsets must be integers, got {keys.dtype}")
    return np.ascontiguousarray(keys).astype(np.int64, copy=False)
