"""The embedding table in plain Python: dicts and float32 NumPy, slow and obvious. The oracle of the tests."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recmill import _native
from recmill.embeddings.table import OPTIMIZERS, AdmissionState, KeyRecords, TableSpec

F = np.float32
MASK = (1 << 64) - 1
BLOOM_MAX = 65535


def hash_of(key: int, seed: int) -> int:
    return int(_native.hash_ints(np.array([key], np.int64), seed)[0])


def initial_row(spec: TableSpec, key: int, seed: int) -> Any:
    start = hash_of(key, seed)
    row = np.empty(spec.dim, F)
    for i in range(spec.dim):
        x = (start + (i + 1) * 0x9E3779B97F4A7C15) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        x ^= x >> 31
        row[i] = F(x >> 40) * (F(spec.init_scale) * F(2**-23)) - F(spec.init_scale)
    return row


def sum_of_squares(values: Any) -> Any:
    lanes = np.zeros(8, F)
    for i, value in enumerate(values):
        lanes[i % 8] += value * value
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]))


def initial_state(spec: TableSpec) -> Any:
    first = F({**OPTIMIZERS[spec.optimizer], **spec.parameters}.get("initial_accumulator", 0.0))
    dim, zeros, ones = spec.dim, np.zeros(spec.dim, F), np.full(spec.dim, first, F)
    parts = {
        "sgd": [],
        "adagrad": [ones],
        "rowwise_adagrad": [[first]],
        "adam": [zeros, zeros, [0]],
        "ftrl": [zeros, ones],
        "adagrad_decay": [ones, [0]],
    }[spec.optimizer]
    assert dim == len(zeros)
    return np.concatenate([np.zeros(0, F), *parts]).astype(F)


def optimize(spec: TableSpec, row: Any, state: Any, grad: Any, rate: float, step: int) -> None:
    """In place, every operation in float32."""
    given = {**OPTIMIZERS[spec.optimizer], **spec.parameters}
    p = {name: F(value) for name, value in given.items()}
    lr, dim = F(rate), spec.dim
    if spec.optimizer == "adam":
        m, v = state[:dim], state[dim : 2 * dim]
        state[2 * dim] += 1
        t = float(state[2 * dim])
        m[:] = p["beta1"] * m + F(1 - given["beta1"]) * grad
        v[:] = p["beta2"] * v + F(1 - given["beta2"]) * grad * grad
        m_hat, v_hat = m * F(1 / (1 - given["beta1"] ** t)), v * F(1 / (1 - given["beta2"] ** t))
        row -= lr * (m_hat / (np.sqrt(v_hat) + p["eps"]) + p["weight_decay"] * row)
        return
    if spec.optimizer == "ftrl":
        z, n = state[:dim], state[dim:]
        after = n + grad * grad
        z += grad - (np.sqrt(after) - np.sqrt(n)) / lr * row
        n[:] = after
        w = -(z - np.copysign(p["l1"], z)) / ((p["beta"] + np.sqrt(after)) / lr + p["l2"])
        row[:] = np.where(np.abs(z) <= p["l1"], F(0), w)
        return
    if p["weight_decay"]:
        grad = grad + p["weight_decay"] * row
    if spec.optimizer == "sgd":
        row -= lr * grad
    elif spec.optimizer == "rowwise_adagrad":
        state[0] += sum_of_squares(grad) / F(dim)
        row -= lr / (np.sqrt(state[0]) + p["eps"]) * grad
    else:
        if spec.optimizer == "adagrad_decay":
            period = step // int(given["decay_period"])
            missed = max(0, period - int(state[dim]))
            state[:dim] = np.maximum(state[:dim] * F(given["decay_rate"] ** missed), p["initial_accumulator"])
            state[dim] += missed
        state[:dim] += grad * grad
        row -= lr * grad / (np.sqrt(state[:dim]) + p["eps"])


@dataclass
class Record:
    row: Any
    state: Any
    count: int
    step: int


@dataclass
class TwinLookup:
    keys: list[int]
    unique: list[int]
    places: dict[int, int | str | None]  # key -> "row", the number of a shared row, or None


@dataclass
class Twin:
    spec: TableSpec
    records: dict[int, Record] = field(default_factory=dict)
    waiting: dict[int, list[int]] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)
    removed: set[int] = field(default_factory=set)
    admitted: int = 0
    evicted: int = 0
    hits: int = 0
    misses: int = 0

    def __post_init__(self) -> None:
        spec = self.spec
        self.bloom = np.zeros(spec.bloom_counters or 0, np.uint16)
        self.shared = [
            Record(initial_row(spec, i, spec.seed ^ 0x5EED), initial_state(spec), 0, 0)
            for i in range(spec.shared_rows)
        ]

    def lookup(self, keys: list[int], train: bool, step: int) -> TwinLookup:
        unique = list(dict.fromkeys(keys))
        places = {key: self._resolve(key, keys.count(key), train, step) for key in unique}
        return TwinLookup(keys, unique, places)

    def _resolve(self, key: int, count: int, train: bool, step: int) -> int | str | None:
        spec = self.spec
        shared = hash_of(key, 0) % spec.shared_rows if spec.shared_rows else None
        if key in self.records:
            self.hits += count
            if train:
                record = self.records[key]
                record.count, record.step = record.count + count, max(record.step, step)
                self.changed.add(key)
            return "row"
        self.misses += count
        if spec.admit_after == 1 and not train:
            return "row"
        if not train:
            return shared
        total = self._count(key, count, step) if spec.admit_after > 1 else count
        if total < spec.admit_after:
            return shared
        self.waiting.pop(key, None)
        origin = self.shared[shared] if shared is not None else None
        row = initial_row(spec, key, spec.seed) if origin is None else origin.row.copy()
        state = initial_state(spec) if origin is None else origin.state.copy()
        self.records[key] = Record(row, state, total, step)
        self.changed.add(key)
        self.admitted += 1
        return "row"

    def _count(self, key: int, count: int, step: int) -> int:
        if not len(self.bloom):
            seen, last = self.waiting.get(key, [0, 0])
            self.waiting[key] = [seen + count, max(last, step)]
            return seen + count
        at = [hash_of(key, i + 1) * len(self.bloom) >> 64 for i in range(4)]
        total = min(int(min(self.bloom[at])) + count, BLOOM_MAX)
        self.bloom[at] = np.maximum(self.bloom[at], total)
        return total

    def read(self, key: int, place: int | str | None) -> Any:
        if isinstance(place, int):
            return self.shared[place].row
        if place == "row" and key in self.records:
            return self.records[key].row
        if self.spec.admit_after == 1:
            return initial_row(self.spec, key, self.spec.seed)
        return np.zeros(self.spec.dim, F)

    def pool(self, lookup: TwinLookup, offsets: Any, weights: Any, pooling: str) -> Any:
        bags = bags_of(lookup.keys, offsets)
        out = np.zeros((len(bags), self.spec.dim), F)
        for i, bag in enumerate(bags):
            for at in bag:
                row = self.read(lookup.keys[at], lookup.places[lookup.keys[at]])
                out[i] += row if weights is None else F(weights[at]) * row
            out[i] *= factor_of(bag, weights, pooling)
        return out

    def update(
        self, lookup: TwinLookup, grads: Any, rate: float, step: int, offsets: Any, weights: Any, pooling: str
    ) -> None:
        sums = {key: np.zeros(self.spec.dim, F) for key in lookup.unique}
        for grad, bag in zip(grads, bags_of(lookup.keys, offsets), strict=True):
            factor = factor_of(bag, weights, pooling)
            for at in bag:
                sums[lookup.keys[at]] += grad * (factor if weights is None else F(weights[at]) * factor)
        shared: dict[int, Any] = {}
        for key in lookup.unique:
            place = lookup.places[key]
            if isinstance(place, int):
                shared[place] = shared[place] + sums[key] if place in shared else sums[key]
            elif place == "row" and key in self.records:
                record = self.records[key]
                optimize(self.spec, record.row, record.state, sums[key], rate, step)
                self.changed.add(key)
        for place, grad in shared.items():
            optimize(self.spec, self.shared[place].row, self.shared[place].state, grad, rate, step)

    def remove(self, keys: list[int]) -> int:
        gone = [key for key in dict.fromkeys(keys) if key in self.records]
        for key in gone:
            del self.records[key]
            self.changed.discard(key)
            self.removed.add(key)
        self.evicted += len(gone)
        return len(gone)

    def evict_by_age(self, step: int, max_age: int) -> int:
        self.waiting = {key: seen for key, seen in self.waiting.items() if step - seen[1] <= max_age}
        return self.remove([key for key, record in self.records.items() if step - record.step > max_age])

    def evict_by_norm(self, min_norm: float) -> int:
        norms = {key: np.linalg.norm(record.row.astype(np.float64)) for key, record in self.records.items()}
        return self.remove([key for key, norm in norms.items() if norm < min_norm])

    def evict_by_capacity(self, max_keys: int) -> int:
        order = sorted(self.records, key=lambda key: (-self.records[key].count, -self.records[key].step, key))
        return self.remove(order[max_keys:])

    def snapshot(self, delta: bool) -> TwinSnapshot:
        keys = self.changed if delta else self.records.keys()
        records = {key: copy.deepcopy(self.records[key]) for key in keys}
        found = TwinSnapshot(records, sorted(self.removed) if delta else [])
        self.changed, self.removed = set(), set()
        return found


@dataclass(frozen=True)
class TwinSnapshot:
    records: dict[int, Record]
    removed: list[int]


def bags_of(keys: list[int], offsets: Any) -> list[range]:
    if offsets is None:
        return [range(i, i + 1) for i in range(len(keys))]
    return [range(offsets[i], offsets[i + 1]) for i in range(len(offsets) - 1)]


def factor_of(bag: range, weights: Any, pooling: str) -> Any:
    if pooling != "mean" or not len(bag):
        return F(1)
    total = F(len(bag)) if weights is None else F(0)
    for at in bag if weights is not None else []:
        total += F(weights[at])
    return F(1) / total if total else F(0)


def records_of(pieces: list[KeyRecords]) -> dict[int, Record]:
    """Pieces of a snapshot as the twin keeps them; a key must occur once."""
    found: dict[int, Record] = {}
    for piece in pieces:
        for i, key in enumerate(piece.keys.tolist()):
            assert key not in found
            found[key] = Record(piece.rows[i], piece.states[i], int(piece.counts[i]), int(piece.steps[i]))
    return found


def assert_same_records(found: dict[int, Record], expected: dict[int, Record]) -> None:
    assert found.keys() == expected.keys()
    for key, record in expected.items():
        np.testing.assert_allclose(found[key].row, record.row, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(found[key].state, record.state, rtol=1e-6, atol=1e-9)
        assert (found[key].count, found[key].step) == (record.count, record.step)


def assert_same_waiting(found: AdmissionState, twin: Twin) -> None:
    seen = zip(found.keys.tolist(), found.counts.tolist(), found.steps.tolist(), strict=True)
    assert {key: [count, step] for key, count, step in seen} == twin.waiting
    np.testing.assert_array_equal(found.bloom, twin.bloom)
    for i, record in enumerate(twin.shared):
        np.testing.assert_allclose(found.shared_rows[i], record.row, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(found.shared_states[i], record.state, rtol=1e-6, atol=1e-9)
