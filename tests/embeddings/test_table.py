"""What a table promises, with literal numbers."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from tables import MakeTable

from recmill.embeddings.table import AdmissionState, EmbeddingTable, KeyRecords, TableSpec


def keys(*values: int) -> Any:
    return np.array(values, np.int64)


def read(table: EmbeddingTable, *values: int) -> Any:
    return table.pool(table.lookup(keys(*values), train=False))


def see(table: EmbeddingTable, *values: int, step: int = 0) -> None:
    table.lookup(keys(*values), train=True, step=step)


def set_row(table: EmbeddingTable, key: int, row: Any) -> None:
    states = np.zeros((1, table.num_states), np.float32)
    table.load(KeyRecords(keys(key), np.array([row], np.float32), states, np.array([1]), np.array([0])))


def contents(table: EmbeddingTable) -> dict[int, tuple[Any, ...]]:
    return {
        int(key): (row.tolist(), state.tolist(), int(count), int(step))
        for piece in table.begin_snapshot()
        for key, row, state, count, step in zip(
            piece.keys, piece.rows, piece.states, piece.counts, piece.steps, strict=True
        )
    }


# --- initial rows ------------------------------------------------------------------------------------------------


def test_rows_depend_on_seed_and_key_not_on_arrival(make_table: MakeTable) -> None:
    spec = TableSpec("t", 8, "sgd", seed=5)
    forward, backward = make_table(spec), make_table(spec)
    every = np.arange(-500, 500, dtype=np.int64)
    see(forward, *every)
    for key in every[::-1]:
        see(backward, key)
    np.testing.assert_array_equal(read(forward, *every), read(backward, *every))
    assert not np.array_equal(read(forward, 1), read(make_table(TableSpec("t", 8, "sgd", seed=6)), 1))


def test_initial_rows_are_uniform_within_the_scale(make_table: MakeTable) -> None:
    rows = read(make_table(TableSpec("t", 16, init_scale=0.5)), *range(5000))
    assert np.abs(rows).max() <= 0.5
    assert abs(rows.mean()) < 0.01
    assert rows.std() == pytest.approx(0.5 / np.sqrt(3), rel=0.02)


def test_reading_never_inserts_and_an_absent_key_reads_its_initial_row(make_table: MakeTable) -> None:
    table = make_table(TableSpec("t", 4))
    before = read(table, 7, -7)
    assert table.statistics().keys == 0
    see(table, 7, -7)
    np.testing.assert_array_equal(read(table, 7, -7), before)
    assert table.statistics().keys == 2


# --- bounded tables ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [-1, 10, 2**62])
@pytest.mark.parametrize("train", [True, False])
def test_a_key_out_of_range_is_an_error_that_names_it(make_table: MakeTable, key: int, train: bool) -> None:
    table = make_table(TableSpec("color", 4, num_rows=10))
    with pytest.raises(IndexError, match=rf'Table "color": key {key} is outside 0\.\.9'):
        table.lookup(keys(3, key), train)
    assert table.statistics().keys == 0


def test_key_zero_of_a_bounded_table_is_an_ordinary_row(make_table: MakeTable) -> None:
    table = make_table(TableSpec("t", 2, "sgd", num_rows=3))
    before = read(table, 0)
    table.update(table.lookup(keys(0), True), np.ones((1, 2), np.float32), 0.5)
    np.testing.assert_array_equal(read(table, 0), before - np.float32(0.5))


# --- pooling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pooling", "weights", "expected"),
    [
        ("sum", None, [[3, 30], [0, 0], [2, 20]]),
        ("mean", None, [[1.5, 15], [0, 0], [2, 20]]),
        ("sum", [1, 3, 0.5], [[7, 70], [0, 0], [1, 10]]),
        ("mean", [1, 3, 0.5], [[1.75, 17.5], [0, 0], [2, 20]]),
    ],
)
def test_bags_are_pooled(make_table: MakeTable, pooling: Any, weights: Any, expected: Any) -> None:
    table = make_table(TableSpec("t", 2, "sgd"))
    set_row(table, 1, [1, 10])
    set_row(table, 2, [2, 20])
    weights = None if weights is None else np.array(weights, np.float32)
    pooled = table.pool(table.lookup(keys(1, 2, 2), False), keys(0, 2, 2, 3), weights, pooling)
    assert pooled.tolist() == expected


@pytest.mark.parametrize("offsets", [[], [0, 2], [1, 3], [0, 4], [0, 2, 1, 3]])
def test_wrong_offsets_are_refused(make_table: MakeTable, offsets: list[int]) -> None:
    table = make_table(TableSpec("t", 2))
    with pytest.raises(ValueError, match="offsets must"):
        table.pool(table.lookup(keys(1, 2, 3), False), keys(*offsets), pooling="sum")


def test_keys_in_floats_are_refused(make_table: MakeTable) -> None:
    with pytest.raises(TypeError, match="must be integers, got float64"):
        make_table(TableSpec("t", 2)).lookup(np.array([1.0]), False)


# --- optimizers --------------------------------------------------------------------------------------------------

W, G1, G2, LR = np.array([0.5, -0.25, 1.0]), np.array([0.1, -0.2, 0.3]), np.array([-0.4, 0.5, 0.6]), 0.1


def trained(
    make_table: MakeTable, optimizer: str, steps: tuple[int, int] = (1, 2), **parameters: float
) -> Any:
    """The row W after the gradients G1 and G2; each comes as two halves on equal keys."""
    table = make_table(TableSpec("t", 3, optimizer, parameters))
    see(table, 9)
    states = next(iter(table.begin_snapshot())).states
    table.load(KeyRecords(keys(9), W[None], states, np.array([1]), np.array([0])))
    for step, grad in zip(steps, (G1, G2), strict=True):
        lookup = table.lookup(keys(9, 9), True, step)
        table.update(lookup, np.stack([grad / 2, grad / 2]).astype(np.float32), LR, step)
    return read(table, 9)[0]


def test_sgd(make_table: MakeTable) -> None:
    np.testing.assert_allclose(trained(make_table, "sgd"), W - LR * (G1 + G2), rtol=1e-6)
    first = W - LR * (G1 + 0.5 * W)
    np.testing.assert_allclose(
        trained(make_table, "sgd", weight_decay=0.5), first - LR * (G2 + 0.5 * first), rtol=1e-6
    )


def test_adagrad(make_table: MakeTable) -> None:
    sums = 0.1 + G1**2
    first = W - LR * G1 / np.sqrt(sums)
    expected = first - LR * G2 / np.sqrt(sums + G2**2)
    np.testing.assert_allclose(
        trained(make_table, "adagrad", initial_accumulator=0.1, eps=0), expected, rtol=1e-6
    )


def test_rowwise_adagrad(make_table: MakeTable) -> None:
    sums = np.mean(G1**2)
    first = W - LR * G1 / (np.sqrt(sums) + 1e-3)
    expected = first - LR * G2 / (np.sqrt(sums + np.mean(G2**2)) + 1e-3)
    np.testing.assert_allclose(trained(make_table, "rowwise_adagrad", eps=1e-3), expected, rtol=1e-6)


def test_adam_counts_the_steps_of_the_row_not_of_the_run(make_table: MakeTable) -> None:
    w, m, v = W.copy(), np.zeros(3), np.zeros(3)
    for t, grad in enumerate((G1, G2), start=1):
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        w = w - LR * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8) + 0.01 * w)
    np.testing.assert_allclose(trained(make_table, "adam", steps=(50, 9000), weight_decay=0.01), w, rtol=2e-6)


def test_ftrl_as_in_mcmahan(make_table: MakeTable) -> None:
    w, z, n, l1, l2, beta = W.copy(), np.zeros(3), np.zeros(3), 0.9, 0.5, 1.0
    for grad in (G1, G2):
        sigma = (np.sqrt(n + grad**2) - np.sqrt(n)) / LR
        z, n = z + grad - sigma * w, n + grad**2
        w = np.where(np.abs(z) <= l1, 0, -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / LR + l2))
    assert (w == 0).any()
    assert (w != 0).any()
    np.testing.assert_allclose(
        trained(make_table, "ftrl", l1=l1, l2=l2, beta=beta, initial_accumulator=0.0), w, rtol=2e-6
    )


def test_adagrad_decay_applies_every_missed_period_down_to_the_floor(make_table: MakeTable) -> None:
    sums = 0.05 + G1**2
    first = W - LR * G1 / np.sqrt(sums)
    for _ in range(4):  # steps 5 and 47 are four periods of ten apart
        sums = np.maximum(sums * 0.8, 0.05)
    expected = first - LR * G2 / np.sqrt(sums + G2**2)
    options = {"initial_accumulator": 0.05, "decay_rate": 0.8, "decay_period": 10, "eps": 0}
    np.testing.assert_allclose(trained(make_table, "adagrad_decay", (5, 47), **options), expected, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_a_gradient_that_is_not_finite_names_its_key_and_changes_nothing(
    make_table: MakeTable, bad: float
) -> None:
    table = make_table(TableSpec("t", 2, "adam"))
    lookup = table.lookup(keys(1, 2, 3), True)
    before = contents(table)
    grads = np.ones((3, 2), np.float32)
    grads[1, 0] = bad
    with pytest.raises(ValueError, match='Table "t": the gradient of key 2 is not finite'):
        table.update(lookup, grads, 0.1)
    assert contents(table) == before


def test_only_training_lookups_can_be_updated(make_table: MakeTable) -> None:
    table = make_table(TableSpec("t", 2))
    with pytest.raises(ValueError, match="train=True"):
        table.update(table.lookup(keys(1), False), np.ones((1, 2), np.float32), 0.1)


def test_a_learning_rate_of_zero_changes_no_row_and_ftrl_refuses_it(make_table: MakeTable) -> None:
    for optimizer in ("sgd", "adagrad", "rowwise_adagrad", "adam", "adagrad_decay"):
        table = make_table(TableSpec("t", 2, optimizer))
        before = read(table, 1)
        table.update(table.lookup(keys(1), True), np.ones((1, 2), np.float32), 0.0)
        np.testing.assert_array_equal(read(table, 1), before)
    table = make_table(TableSpec("t", 2, "ftrl"))
    with pytest.raises(ValueError, match="must not be 0"):
        table.update(table.lookup(keys(1), True), np.ones((1, 2), np.float32), 0.0)


# --- admission ---------------------------------------------------------------------------------------------------


def test_a_key_is_admitted_at_its_nth_sighting_and_reads_zeros_before(make_table: MakeTable) -> None:
    table = make_table(TableSpec("t", 2, "sgd", admit_after=3))
    lookup = table.lookup(keys(5, 5), True, step=1)
    table.update(lookup, np.ones((2, 2), np.float32), 0.1)
    assert table.pool(lookup).tolist() == [[0, 0], [0, 0]]
    assert (table.statistics().keys, table.statistics().waiting) == (0, 1)
    see(table, 5, step=2)
    assert (table.statistics().keys, table.statistics().waiting) == (1, 0)
    np.testing.assert_array_equal(read(table, 5), read(make_table(TableSpec("t", 2)), 5))
    assert contents(table)[5][2:] == (3, 2)


def test_reading_does_not_count_towards_admission(make_table: MakeTable) -> None:
    table = make_table(TableSpec("t", 2, admit_after=2))
    for _ in range(5):
        read(table, 5)
    see(table, 5)
    assert table.statistics().keys == 0


def test_bloom_admission_is_never_late_and_rarely_early(make_table: MakeTable) -> None:
    table = make_table(TableSpec("t", 1, "sgd", admit_after=3, bloom_counters=20_000))
    once, thrice = np.arange(2000), np.arange(10_000, 10_500)
    see(table, *once)
    for _ in range(3):
        see(table, *thrice)
    admitted = contents(table).keys()
    assert set(thrice.tolist()) <= admitted
    assert len(admitted) < 500 + 20
    assert table.statistics().admission_bytes == 40_000


def test_a_waiting_key_trains_a_shared_row_and_starts_from_it(make_table: MakeTable) -> None:
    table = make_table(TableSpec("t", 2, "adagrad", admit_after=2, shared_rows=1))
    before = read(table, 1)
    np.testing.assert_array_equal(read(table, 2), before)
    table.update(table.lookup(keys(1, 2), True), np.array([[1, 2], [3, 4]], np.float32), 0.5)
    shared = read(table, 77)
    np.testing.assert_allclose(shared, before - 0.5, rtol=1e-6)  # adagrad's first step: the sign of the sum
    see(table, 1)
    np.testing.assert_array_equal(read(table, 1), shared)
    table.update(table.lookup(keys(1), True), np.ones((1, 2), np.float32), 0.5)
    np.testing.assert_array_equal(read(table, 2), shared)
    assert not np.array_equal(read(table, 1), shared)


# --- eviction ----------------------------------------------------------------------------------------------------


def test_eviction_by_age_keeps_what_is_exactly_of_that_age(make_table: MakeTable) -> None:
    table = make_table(TableSpec("t", 2))
    for step in (1, 2, 3):
        see(table, step, step=step)
    assert table.evict_by_age(step=12, max_age=10) == 1
    assert contents(table).keys() == {2, 3}


def test_eviction_by_norm_compares_the_norm_itself(make_table: MakeTable) -> None:
    table = make_table(TableSpec("t", 2))
    for key, row in {1: [3, 4], 2: [3, 3.9], 3: [0, 0]}.items():
        set_row(table, key, row)
    assert table.evict_by_norm(5.0) == 2
    assert contents(table).keys() == {1}


def test_eviction_by_capacity_breaks_ties_by_recency_then_key(make_table: MakeTable) -> None:
    table = make_table(TableSpec("t", 2))
    see(table, 9, 9, 9, step=1)
    see(table, 7, 8, step=5)
    see(table, 3, step=4)
    assert sorted(zip(*(part.tolist() for part in table.least_frequent(2)), strict=True)) == [
        (3, 1, 4),
        (8, 1, 5),
    ]
    assert table.evict_by_capacity(2) == 2
    assert contents(table).keys() == {9, 7}
    assert table.evict_by_capacity(2) == 0


def test_an_evicted_key_starts_anew(make_table: MakeTable) -> None:
    table = make_table(TableSpec("t", 2, "adagrad", admit_after=2))
    see(table, 1, 1, step=3)
    table.update(table.lookup(keys(1), True), np.ones((1, 2), np.float32), 0.5)
    assert table.remove(keys(1, 1, 99)) == 1
    see(table, 1, step=4)
    assert table.statistics().keys == 0
    see(table, 1, step=5)
    fresh = make_table(TableSpec("t", 2, "adagrad"))
    assert contents(table)[1] == (read(fresh, 1)[0].tolist(), [0, 0], 2, 5)


def test_a_lookup_outlives_the_eviction_of_its_keys(make_table: MakeTable) -> None:
    table = make_table(TableSpec("t", 2, "sgd"))
    lookup = table.lookup(keys(1, 2), True)
    table.remove(keys(1))
    see(table, 3)  # takes the slot of key 1
    before = read(table, 3)
    table.update(lookup, np.ones((2, 2), np.float32), 0.5)
    np.testing.assert_array_equal(read(table, 3), before)
    assert contents(table).keys() == {2, 3}


# --- snapshots ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [None, 30_000])
def test_full_and_five_deltas_restore_the_live_table(make_table: MakeTable, num_rows: int | None) -> None:
    spec = TableSpec("t", 4, "adam", num_rows=num_rows, admit_after=2, shared_rows=5)
    live, restored = make_table(spec), make_table(spec)
    random = np.random.default_rng(1)

    def train(step: int) -> None:
        lookup = live.lookup(random.integers(0, 30_000, 3_000), True, step)
        live.update(lookup, random.standard_normal((3_000, 4)).astype(np.float32), 0.1, step)

    sizes = []
    for step in range(0, 120, 20):
        for inner in range(step, step + 10):
            train(inner)
        live.evict_by_age(step, 25)
        snapshot = live.begin_snapshot(delta=step > 0)
        expected = snapshot.waiting
        restored.remove(snapshot.removed)
        size = 0
        for records in snapshot:
            restored.load(records)
            size += len(records.keys)
            train(step + 10)  # the snapshot must not notice
        sizes.append((size, len(snapshot.removed)))
        restored.load_waiting(expected)
    last = live.begin_snapshot(delta=True)
    restored.remove(last.removed)
    for records in last:
        restored.load(records)
    restored.load_waiting(last.waiting)
    assert all(removed > 0 for _, removed in sizes[2:])
    assert contents(restored) == contents(live)
    again, other = restored.begin_snapshot().waiting, live.begin_snapshot().waiting
    assert dict(zip(again.keys, again.counts, strict=True)) == dict(
        zip(other.keys, other.counts, strict=True)
    )
    np.testing.assert_array_equal(again.shared_states, other.shared_states)


@pytest.mark.parametrize("num_rows", [None, 20_000])
def test_a_snapshot_holds_its_moment_while_training_goes_on(
    make_table: MakeTable, num_rows: int | None
) -> None:
    table = make_table(TableSpec("t", 8, num_rows=num_rows))
    drive(table, 0, 15_000, seed=0)
    expected = contents(table)

    snapshot = table.begin_snapshot()
    found = {}
    drive(table, 0, 20_000, seed=1)
    for piece in snapshot:
        for i, key in enumerate(piece.keys.tolist()):
            assert key not in found
            states = piece.states[i].tolist()
            found[key] = (piece.rows[i].tolist(), states, int(piece.counts[i]), int(piece.steps[i]))
        table.evict_by_capacity(6_000)
        drive(table, 0, 20_000, seed=2)
    assert len(found) > 2 * 4096
    assert found == expected


def test_an_update_that_was_looked_up_before_the_snapshot_belongs_to_the_next_delta(
    make_table: MakeTable,
) -> None:
    table = make_table(TableSpec("t", 2, "sgd"))
    lookup = table.lookup(keys(1), True)
    before = read(table, 1)
    snapshot = table.begin_snapshot()
    table.update(lookup, np.ones((1, 2), np.float32), 0.5)
    np.testing.assert_array_equal(next(iter(snapshot)).rows, before)
    snapshot.close()
    list(table.begin_snapshot())
    lookup = table.lookup(keys(1), True)
    list(table.begin_snapshot(delta=True))
    table.update(lookup, np.ones((1, 2), np.float32), 0.5)
    np.testing.assert_array_equal(next(iter(table.begin_snapshot(delta=True))).rows, read(table, 1))


def test_a_delta_holds_only_what_changed(make_table: MakeTable) -> None:
    table = make_table(TableSpec("t", 2))
    see(table, *range(10_000))
    list(table.begin_snapshot())
    see(table, 4, 9_999)
    table.remove(keys(5, 6))
    see(table, 6)
    delta = table.begin_snapshot(delta=True)
    assert sorted(np.concatenate([piece.keys for piece in delta]).tolist()) == [4, 6, 9_999]
    assert delta.removed.tolist() == [5, 6]
    assert list(table.begin_snapshot(delta=True)) == []


def test_an_abandoned_snapshot_leaves_its_changes_to_the_next_delta(make_table: MakeTable) -> None:
    table = make_table(TableSpec("t", 2))
    see(table, *range(9_000))
    list(table.begin_snapshot())
    see(table, 1, 2)
    table.remove(keys(3))
    with table.begin_snapshot(delta=True):
        see(table, 8)
        with pytest.raises(RuntimeError, match="finish or close it first"):
            table.begin_snapshot()
    delta = table.begin_snapshot(delta=True)
    assert sorted(np.concatenate([piece.keys for piece in delta]).tolist()) == [1, 2, 8]
    assert delta.removed.tolist() == [3]


def test_a_restored_table_counts_as_saved(make_table: MakeTable) -> None:
    table = make_table(TableSpec("t", 2, "sgd"))
    set_row(table, 1, [1, 2])
    table.mark_saved()
    assert list(table.begin_snapshot(delta=True)) == []


def test_admission_state_of_another_size_is_refused(make_table: MakeTable) -> None:
    table = make_table(TableSpec("t", 2, "sgd", admit_after=2, bloom_counters=8))
    none = np.zeros(0, np.int64)
    rows = np.zeros((0, 2))
    with pytest.raises(ValueError, match="of another size"):
        table.load_waiting(AdmissionState(none, none, none, np.zeros(9), rows, np.zeros((0, 0))))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("part", ["rows", "states"])
def test_records_that_are_not_finite_are_refused_and_nothing_changes(
    make_table: MakeTable, part: str, bad: float
) -> None:
    table = make_table(TableSpec("t", 2, "adagrad"))
    see(table, 1)
    before = contents(table)
    values = {"rows": np.ones((3, 2)), "states": np.ones((3, 2))}
    values[part][2, 1] = bad
    whose = "row" if part == "rows" else "optimizer state"
    with pytest.raises(ValueError, match=f'Table "t": the {whose} of key 9 is not finite'):
        table.load(KeyRecords(keys(1, 4, 9), values["rows"], values["states"], np.ones(3), np.ones(3)))
    assert contents(table) == before


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shared_rows": np.array([[1, 2], [1, np.nan]])}, "shared row 1 is not finite"),
        (
            {"shared_states": np.array([[1, 2], [1, np.inf]])},
            "the optimizer state of shared row 1 is not finite",
        ),
        ({"counts": np.array([1, 0])}, "key 8 waits with a count of 0"),
    ],
)
def test_wrong_admission_state_is_refused_and_nothing_changes(
    make_table: MakeTable, wrong: dict[str, Any], message: str
) -> None:
    table = make_table(TableSpec("t", 2, "adagrad", admit_after=3, shared_rows=2))
    see(table, 5)
    before = table.begin_snapshot().waiting
    given = {"shared_rows": np.ones((2, 2)), "shared_states": np.ones((2, 2)), "counts": np.array([1, 1])}
    with pytest.raises(ValueError, match=message):
        table.load_waiting(
            AdmissionState(keys=keys(7, 8), steps=np.array([1, 1]), bloom=np.zeros(0), **{**given, **wrong})
        )
    after = table.begin_snapshot().waiting
    assert after.keys.tolist() == [5]
    np.testing.assert_array_equal(after.shared_rows, before.shared_rows)


# --- threads -----------------------------------------------------------------------------------------------------


def run_threads(*works: Any) -> None:
    failures: list[BaseException] = []

    def guarded(work: Any) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def drive(table: EmbeddingTable, start: int, stop: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    for step in range(60):
        lookup = table.lookup(random.integers(start, stop, 300), True, step)
        grads = random.standard_normal((300, 8)).astype(np.float32)
        table.update(lookup, grads + table.pool(lookup), 0.1, step)


@pytest.mark.parametrize("num_rows", [None, 40_000])
def test_threads_on_disjoint_keys_give_what_one_thread_gives(
    make_table: MakeTable, num_rows: int | None
) -> None:
    spec = TableSpec("t", 8, num_rows=num_rows)
    together, alone = make_table(spec), make_table(spec)
    parts = [(i * 10_000, (i + 1) * 10_000, i) for i in range(4)]
    run_threads(*[lambda part=part: drive(together, *part) for part in parts])
    for part in parts:
        drive(alone, *part)
    assert contents(together) == contents(alone)


def test_threads_may_train_evict_and_save_at_once(make_table: MakeTable) -> None:
    table = make_table(TableSpec("t", 8, admit_after=2, shared_rows=7), num_threads=2)

    def evict() -> None:
        for step in range(40):
            table.evict_by_capacity(500)
            table.evict_by_age(step, 10)

    def save() -> None:
        for turn in range(40):
            for piece in table.begin_snapshot(delta=turn % 2 == 1):
                assert len(set(piece.keys.tolist())) == len(piece.keys)
                assert np.isfinite(piece.rows).all()

    run_threads(lambda: drive(table, 0, 3000, 1), lambda: drive(table, 0, 3000, 2), evict, save)
    found = table.statistics()
    assert found.keys == len(contents(table)) == found.admitted - found.evicted


# --- specs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dim": 0}, "dim must be a positive integer, got 0"),
        ({"optimizer": "adamax"}, 'no optimizer is called "adamax"; there are: sgd, adagrad'),
        ({"parameters": {"beta3": 1}}, 'rowwise_adagrad has no parameter "beta3"'),
        ({"num_rows": 0}, "num_rows must be a positive integer, got 0"),
        ({"admit_after": 0}, "admit_after must be within"),
        ({"shared_rows": 4}, "need admit_after > 1"),
    ],
)
def test_wrong_specs_say_what_is_wrong(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TableSpec(**{"name": "t", "dim": 4, **wrong})


def test_statistics_count_keys_bytes_and_hits(make_table: MakeTable) -> None:
    table = make_table(TableSpec("t", 16, "rowwise_adagrad"))
    see(table, 1, 2, 2)
    see(table, 2, 3)
    found = table.statistics()
    assert (found.keys, found.admitted, found.evicted, found.hits, found.misses) == (3, 3, 0, 1, 4)
    assert found.record_bytes == 4096 * 88
    assert found.num_bytes == found.resident_bytes + found.index_bytes
