"""Random operation sequences: the native table and its plain-Python twin must agree after every step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tables import MakeTable, make_in_memory, make_on_disk
from twin import Twin, TwinSnapshot, assert_same_records, assert_same_waiting, records_of

from recmill.embeddings.table import KeyRecords, Snapshot, TableSpec

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl", "adagrad_decay")
KEYS = 24


@st.composite
def specs(draw: st.DrawFn) -> TableSpec:
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    parameters: dict[str, float] = {}
    if optimizer != "ftrl":
        parameters["weight_decay"] = draw(st.sampled_from([0.0, 0.01]))
    if optimizer == "ftrl":
        parameters.update(l1=draw(st.sampled_from([0.0, 0.2])), l2=0.1)
    if optimizer == "adagrad_decay":
        parameters["decay_period"] = 3
    admit_after = draw(st.sampled_from([1, 1, 2, 4]))
    waits = admit_after > 1
    return TableSpec(
        "t",
        dim=draw(st.sampled_from([1, 3, 16])),
        optimizer=optimizer,
        parameters=parameters,
        num_rows=draw(st.sampled_from([None, KEYS])),
        init_scale=draw(st.sampled_from([0.0, 0.5])),
        seed=draw(st.integers(0, 3)),
        admit_after=admit_after,
        bloom_counters=draw(st.sampled_from([None, 64])) if waits else None,
        shared_rows=draw(st.sampled_from([0, 3])) if waits else 0,
    )


class Pair:
    """A table and its twin, driven alike."""

    def __init__(self, make_table: MakeTable, spec: TableSpec, seed: int) -> None:
        self.make_table = make_table
        self.table, self.twin = make_table(spec, num_threads=1 + seed % 2), Twin(spec)
        self.spec, self.random, self.step = spec, np.random.default_rng(seed), 0
        self.reading: tuple[Snapshot, TwinSnapshot, list[KeyRecords], Any] | None = None
        self.late: list[Any] = []
        # Unbounded tables get keys from all over the 64-bit range.
        self.keys = np.arange(KEYS) if spec.num_rows else self.random.integers(-(2**63), 2**63 - 1, KEYS)

    def batch(self) -> tuple[Any, Any, Any, str]:
        keys = self.random.choice(self.keys[: self.random.integers(1, KEYS + 1)], self.random.integers(0, 12))
        pooling = str(self.random.choice(["none", "sum", "mean"]))
        offsets = weights = None
        if pooling != "none" and self.random.random() < 0.8:
            cuts = np.sort(self.random.integers(0, len(keys) + 1, self.random.integers(0, 6)))
            offsets = np.concatenate([[0], cuts, [len(keys)]])
        if self.random.random() < 0.5:
            weights = self.random.integers(-1, 4, len(keys)).astype(np.float32) / 2
        return keys, offsets, weights, pooling

    def look(self, train: bool) -> None:
        keys, offsets, weights, pooling = self.batch()
        self.step += int(self.random.integers(0, 4))
        lookup = self.table.lookup(keys, train, self.step)
        expected = self.twin.lookup(keys.tolist(), train, self.step)
        assert lookup.unique_keys.tolist() == expected.unique
        np.testing.assert_array_equal(lookup.unique_keys[lookup.inverse], keys)
        rows = self.table.pool(lookup, offsets, weights, pooling)
        np.testing.assert_allclose(
            rows, self.twin.pool(expected, offsets, weights, pooling), rtol=1e-6, atol=1e-9
        )
        if train:
            self.late.append((lookup, expected, offsets, weights, pooling, rows.shape))

    def train(self) -> None:
        self.look(train=True)
        self.update_late()

    def update_late(self) -> None:
        """Gradients may come after other lookups, evictions or a snapshot."""
        for lookup, expected, offsets, weights, pooling, shape in self.late:
            wide = self.random.standard_normal((shape[0], 2, shape[1])).astype(np.float32)
            self.table.update(lookup, wide[:, 1], 0.1, self.step, offsets, weights, pooling)
            self.twin.update(expected, wide[:, 1], 0.1, self.step, offsets, weights, pooling)
        self.late.clear()

    def evict(self) -> None:
        kind = self.random.integers(0, 4)
        if kind == 0:
            age = int(self.random.integers(0, 12))
            assert self.table.evict_by_age(self.step, age) == self.twin.evict_by_age(self.step, age)
        elif kind == 1:
            assert self.table.evict_by_norm(0.3) == self.twin.evict_by_norm(0.3)
        elif kind == 2:
            size = int(self.random.integers(0, 12))
            assert self.table.evict_by_capacity(size) == self.twin.evict_by_capacity(size)
        else:
            keys = self.random.choice(self.keys, 3)
            assert self.table.remove(keys) == self.twin.remove(keys.tolist())

    def begin(self) -> None:
        if self.reading:
            self.finish()
        delta = bool(self.random.integers(0, 2))
        snapshot = self.table.begin_snapshot(delta)
        assert_same_waiting(snapshot.waiting, self.twin)
        self.reading = (snapshot, self.twin.snapshot(delta), [], iter(snapshot))

    def finish(self) -> None:
        if not self.reading:
            return
        snapshot, expected, pieces, rest = self.reading
        pieces.extend(rest)
        assert_same_records(records_of(pieces), expected.records)
        assert snapshot.removed.tolist() == expected.removed
        self.reading = None

    def restore(self) -> None:
        """A new table from a full snapshot goes on in place of the old one."""
        self.finish()
        snapshot = self.table.begin_snapshot()
        self.table = self.make_table(self.spec)
        for records in snapshot:
            self.table.load(records)
        self.table.load_waiting(snapshot.waiting)
        self.table.mark_saved()
        self.twin.snapshot(delta=False)
        self.twin.admitted = self.twin.evicted = self.twin.hits = self.twin.misses = 0
        self.late.clear()

    def check(self) -> None:
        lookup, expected = (
            self.table.lookup(self.keys, False),
            self.twin.lookup(self.keys.tolist(), False, 0),
        )
        np.testing.assert_allclose(
            self.table.pool(lookup), self.twin.pool(expected, None, None, "none"), rtol=1e-6, atol=1e-9
        )
        found = self.table.statistics()
        twin = self.twin
        assert (found.keys, found.waiting) == (len(twin.records), len(twin.waiting))
        assert (found.admitted, found.evicted) == (twin.admitted, twin.evicted)
        assert (found.hits, found.misses) == (twin.hits, twin.misses)


ACTIONS: dict[str, Any] = {
    "train": Pair.train,
    "train more": Pair.train,
    "look ahead": lambda pair: pair.look(train=True),
    "update": Pair.update_late,
    "evaluate": lambda pair: pair.look(train=False),
    "evict": Pair.evict,
    "begin": Pair.begin,
    "finish": Pair.finish,
    "restore": Pair.restore,
}


@pytest.mark.parametrize("make_table", [make_in_memory, make_on_disk], ids=["memory", "disk"])
@examples(130, suppress_health_check=[HealthCheck.too_slow])
@given(
    spec=specs(),
    seed=st.integers(0, 2**16),
    actions=st.lists(st.sampled_from(sorted(ACTIONS)), min_size=1, max_size=25),
)
def test_table_equals_its_twin(make_table: MakeTable, spec: TableSpec, seed: int, actions: list[str]) -> None:
    pair = Pair(make_table, spec, seed)
    for action in actions:
        ACTIONS[action](pair)
        pair.check()
    pair.begin()
    pair.finish()


@pytest.mark.parametrize("num_rows", [None, 20_000])
def test_many_chunks_and_index_growth_equal_the_twin(make_table: MakeTable, num_rows: int | None) -> None:
    spec = TableSpec("t", 2, "sgd", num_rows=num_rows, init_scale=1.0)
    table, twin = make_table(spec), Twin(spec)
    random = np.random.default_rng(0)
    for step in range(2):
        keys = random.permutation(20_000)[:6_000]
        lookup = table.lookup(keys, True, step)
        table.update(lookup, table.pool(lookup), 0.5, step)
        for key in keys.tolist():
            expected = twin.lookup([key], True, step)
            row = twin.read(key, "row")[None].copy()
            twin.update(expected, row, 0.5, step, None, None, "none")
        assert table.evict_by_capacity(9_000) == twin.evict_by_capacity(9_000)
    assert_same_records(records_of(list(table.begin_snapshot())), twin.records)
