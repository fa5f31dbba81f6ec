"""A collection that is sharded over workers answers as one that is not, bit for bit."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from processes import together

from recmill.distributed.gradients import reduce_over_workers
from recmill.distributed.sharding import WIRES, ShardedCollection, pack, prefetch, unpack
from recmill.distributed.workers import Workers
from recmill.embeddings.collection import EmbeddingCollection, EmbeddingFeature
from recmill.embeddings.table import EmbeddingTable, KeyRecords, KeyShard, TableSpec
from recmill.learner.gradients import ReducedStep, RowGradients, StepGradients

DIM = 6
SPECS = (
    TableSpec("any", DIM, "rowwise_adagrad", admit_after=3, seed=5),
    TableSpec("ids", DIM, "adagrad", num_rows=50, seed=5),
    TableSpec("few", DIM, "adam", num_rows=7, seed=5),
    TableSpec("ftrl", DIM, "ftrl", seed=5),
)
FEATURES = (
    EmbeddingFeature("a", "any"),
    EmbeddingFeature("lists", "any", "mean"),
    EmbeddingFeature("ids", "ids"),
    EmbeddingFeature("weighted", "ids", "sum"),
    EmbeddingFeature("few", "few"),
    EmbeddingFeature("few_lists", "few", "mean"),
    EmbeddingFeature("ftrl", "ftrl"),
)
REPLICATED = "few"
BATCHES = (40, 3, 1, 57, 20)  # some workers have no rows of some


def columns_of(random: np.random.Generator, size: int) -> dict[str, Any]:
    def lists(high: int) -> tuple[Any, Any]:
        offsets = np.concatenate([[0], np.cumsum(random.integers(0, 4, size))])
        return random.integers(0, high, offsets[-1]), offsets

    weighted = lists(50)
    return {
        "a": (random.integers(-30, 30, size) * (1 << 40), None),
        "lists": lists(40),
        "ids": (random.integers(0, 50, size), None),
        "weighted": (*weighted, random.random(len(weighted[0])).astype(np.float32)),
        "few": (random.integers(0, 7, size), None),
        "few_lists": lists(7),
        "ftrl": (random.integers(0, 1 << 60, size) % 90, None),
    }


def rows_between(columns: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (keys, offsets, *weights) in columns.items():
        if offsets is None:
            found[name] = (keys[begin:end], None)
            continue
        part = slice(offsets[begin], offsets[end])
        found[name] = (keys[part], offsets[begin : end + 1] - offsets[begin], *(w[part] for w in weights))
    return found


def own(workers: Workers, size: int) -> tuple[int, int]:
    edges = [size * rank // workers.size for rank in range(workers.size + 1)]
    return list(pairwise(edges))[workers.rank]


def exact_grads(random: np.random.Generator, size: int) -> Any:
    """Multiples of a power of two: their sums have the same bits in any order. Not so with weights and means."""
    grads = random.integers(-8, 8, (size, len(FEATURES), DIM)).astype(np.float32) / 64
    grads[:, [1, 3, 5]] = 0
    return grads


def records_of(tables: dict[str, EmbeddingTable]) -> dict[str, dict[int, tuple[Any, ...]]]:
    found: dict[str, dict[int, tuple[Any, ...]]] = {}
    for name, table in tables.items():
        with table.begin_snapshot() as snapshot:
            found[name] = {
                int(key): (
                    piece.rows[i].tobytes(),
                    piece.states[i].tobytes(),
                    piece.counts[i],
                    piece.steps[i],
                )
                for piece in snapshot
                for i, key in enumerate(piece.keys)
            }
            waiting = snapshot.waiting
            found[f"{name} waits"] = {
                int(key): (int(waiting.counts[i]), int(waiting.steps[i]))
                for i, key in enumerate(waiting.keys)
            }
    return found


def collections(workers: Workers, wire: str = "float32") -> tuple[EmbeddingCollection, ShardedCollection]:
    shard = KeyShard(workers.rank, workers.size)
    tables = [EmbeddingTable(spec, shard=None if spec.name == REPLICATED else shard) for spec in SPECS]
    alone = EmbeddingCollection([EmbeddingTable(spec) for spec in SPECS], FEATURES)
    return alone, ShardedCollection(tables, FEATURES, workers, wire=wire)


def reduced(workers: Workers, sharded: ShardedCollection, lookup: Any, grads: Any) -> ReducedStep:
    """A step of rows alone, as a learner takes it."""
    rows = RowGradients("deep", sharded, lookup, np.ascontiguousarray(grads))
    return reduce_over_workers(workers, StepGradients(0.0, float(np.square(grads).sum()), [], [rows]))


def check_bits(workers: Workers) -> str:
    """Each worker has the whole story beside its part of it."""
    alone, sharded = collections(workers)
    random = np.random.default_rng(3)
    ahead = [columns_of(random, size) for size in BATCHES]
    parts = [rows_between(columns, *own(workers, size)) for columns, size in zip(ahead, BATCHES, strict=True)]
    for step, (size, columns, part) in enumerate(zip(BATCHES, ahead, parts, strict=True), start=1):
        begin, end = own(workers, size)
        if step > 2:  # some keys are prefetched, some exchanged when they are needed
            prefetch([sharded], [part])
        for train in (False, True):
            whole = alone.lookup(columns, train, step)
            own_rows = sharded.lookup(part, train, step)
            assert (own_rows.values == whole.values[begin:end]).all(), (step, train)
        grads = exact_grads(random, size)
        alone.update(whole, grads, 0.1, step)
        reduced(workers, sharded, own_rows, grads[begin:end]).updates[0](0.1, step)
        for collection in (alone, sharded):
            for name in ("any", "ftrl"):
                collection.tables[name].evict_by_age(step, 3)
    expected = records_of(alone.tables)
    every = workers.steps.all_gather(records_of(sharded.tables))
    for name, records in expected.items():
        if name.startswith(REPLICATED):
            assert all(theirs[name] == records for theirs in every), name
        else:
            assert sum(len(theirs[name]) for theirs in every) == len(records), name
            assert {key: value for theirs in every for key, value in theirs[name].items()} == records, name
    assert all(theirs["ids"] for theirs in every)
    return "same"


def check_wire(workers: Workers, wire: str) -> str:
    alone, sharded = collections(workers, wire)
    random = np.random.default_rng(4)
    sizes = [60] * 12
    for step, size in enumerate(sizes, start=1):
        begin, end = own(workers, size)
        columns = columns_of(random, size)
        whole = alone.lookup(columns, True, step)
        own_rows = sharded.lookup(rows_between(columns, begin, end), True, step)
        np.testing.assert_allclose(own_rows.values, whole.values[begin:end], atol=0.02, rtol=0.02)
        # Gradients of a mean over many rows are small: 16 bits must not lose them.
        grads = (random.normal(size=whole.values.shape) * 1e-9).astype(np.float32)
        alone.update(whole, grads, 0.05, step)
        reduced(workers, sharded, own_rows, grads[begin:end]).updates[0](0.05, step)
    return "near"


def check_not_finite(workers: Workers) -> str:
    _, sharded = collections(workers)
    columns = columns_of(np.random.default_rng(7), 12)
    own_rows = sharded.lookup(rows_between(columns, *own(workers, 12)), True, 1)
    before = records_of(sharded.tables)
    grads = np.zeros_like(own_rows.values)
    if workers.rank == 1:
        grads[0, 0, 0] = np.nan
    assert not np.isfinite(reduced(workers, sharded, own_rows, grads).norm)
    assert records_of(sharded.tables) == before
    return "known to all"


def check_all(workers: Workers) -> list[str]:
    wires = [check_wire(workers, wire) for wire in ("float16", "bfloat16")]
    return [check_bits(workers), *wires, check_not_finite(workers)]


@pytest.mark.processes
@pytest.mark.parametrize("size", [2, 4])
def test_sharded_lookup_equals_that_of_one_process(tmp_path, size):
    assert together(tmp_path, size, check_all) == [["same", "near", "near", "known to all"]] * size


@pytest.mark.parametrize("options", [{}, {"num_rows": 1000}, {"admit_after": 2, "shared_rows": 30}])
def test_every_key_has_exactly_one_worker(options):
    keys = np.arange(0, 1000, dtype=np.int64)
    spec = TableSpec("t", 2, **options)
    owns = np.stack([EmbeddingTable(spec, shard=KeyShard(rank, 3)).owns(keys) for rank in range(3)])
    assert (owns.sum(axis=0) == 1).all()
    assert (owns.sum(axis=1) > 250).all()


def test_a_shard_of_a_bounded_table_takes_its_part_of_the_memory():
    spec = TableSpec("t", 16, num_rows=100_000)
    keys = np.arange(100_000, dtype=np.int64)
    whole, part = EmbeddingTable(spec), EmbeddingTable(spec, shard=KeyShard(1, 4))
    whole.lookup(keys, train=True)
    part.lookup(keys[part.owns(keys)], train=True)
    assert part.statistics().keys == 25_000
    assert part.statistics().record_bytes < whole.statistics().record_bytes / 3


def test_a_shard_loads_and_removes_its_own_keys_alone():
    spec = TableSpec("t", 2, "sgd", num_rows=30)
    table = EmbeddingTable(spec, shard=KeyShard(2, 3))
    keys = np.arange(30)
    rows = np.repeat(keys[:, None], 2, axis=1).astype(np.float32)
    zeros = np.zeros(30, np.uint32)
    table.load(KeyRecords(keys, rows, np.empty((30, 0), np.float32), zeros, zeros))
    found = {
        int(key): piece.rows[i, 0] for piece in table.begin_snapshot() for i, key in enumerate(piece.keys)
    }
    assert found == {key: key for key in range(2, 30, 3)}
    assert table.remove(np.arange(6)) == 2


@pytest.mark.parametrize("wire", ["float32", "float16", "bfloat16"])
def test_rows_come_out_of_the_wire_as_they_went_in_up_to_its_width(wire):
    rows = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    packed = pack(rows, WIRES[wire])
    assert packed.nbytes == rows.nbytes // (1 if wire == "float32" else 2)
    np.testing.assert_allclose(unpack(packed, WIRES[wire], 3), rows, rtol=1e-2)
