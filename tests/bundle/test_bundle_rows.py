"""Rows of a bundle read as the trainer's tables do, whatever their keys, and change in memory only."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from recmill.artifacts.bundle.arrays import file_name
from recmill.artifacts.bundle.row_files import encode, write_rows
from recmill.artifacts.bundle.rows import RowCollection, RowTable
from recmill.dataset.batch import Keys
from recmill.embeddings.collection import EmbeddingCollection, EmbeddingFeature
from recmill.embeddings.table import EmbeddingTable, TableSpec
from recmill.errors import ArtifactError

BIG = 2**63 - 1
WAITING = TableSpec("tags", 4, "sgd", admit_after=3, shared_rows=2, bloom_counters=64, init_scale=0.5)


def read(table: EmbeddingTable, keys: Any) -> Any:
    return table.pool(table.lookup(np.asarray(keys, np.int64), train=False))


def trained(spec: TableSpec, keys: Any, times: int = 1) -> EmbeddingTable:
    """A table that has seen these keys; each key's gradient is its own."""
    table = EmbeddingTable(spec)
    for step in range(times):
        lookup = table.lookup(np.asarray(keys, np.int64), train=True, step=step)
        random = np.random.default_rng(step)
        table.update(lookup, random.standard_normal((len(keys), spec.dim)).astype(np.float32), 0.5, step)
    return table


def written(folder: Path, table: EmbeddingTable, dtype: str = "float32") -> RowTable:
    write_rows(folder / file_name(table.spec.name), table, dtype)
    return RowTable.open(folder / file_name(table.spec.name))


def test_known_and_absent_keys_read_what_the_trainer_reads(tmp_path: Path) -> None:
    table = trained(TableSpec("items", 4, init_scale=0.5), [5, -7, BIG, -BIG - 1, 0])
    rows = written(tmp_path, table)
    keys = [0, 9, -7, BIG, -BIG - 1, -BIG, 5, 9]
    assert rows.slots(np.array(keys)).tolist() == [2, -1, 1, 4, 0, -1, 3, -1]
    np.testing.assert_array_equal(rows.lookup(np.array(keys)), read(table, keys))


def test_many_keys_at_once_have_the_slots_that_they_have_one_by_one(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    known = np.concatenate([random.integers(-BIG, BIG, 300), [0, 1, BIG, -BIG - 1]])
    rows = written(tmp_path, trained(TableSpec("t", 2), known))
    rows.update(np.array([7, 8]), np.ones((2, 2)))
    keys = np.concatenate([known, random.integers(-BIG, BIG, 100), [7, 8, 9]])
    one_by_one = [int(rows.slots(np.array([key]))[0]) for key in keys]
    assert rows.slots(keys).tolist() == one_by_one
    assert sorted(one_by_one) == [-1] * 101 + list(range(306))


def test_keys_that_wait_read_their_shared_row(tmp_path: Path) -> None:
    table = trained(WAITING, [1, 2, 3, 4], times=2)
    assert table.statistics().keys == 0
    np.testing.assert_array_equal(written(tmp_path, table).lookup(np.arange(9)), read(table, range(9)))


@pytest.mark.parametrize(
    "spec", [TableSpec("c", 3, num_rows=10), TableSpec("c", 3, num_rows=10, admit_after=2)]
)
def test_every_key_of_a_bounded_table_has_the_slot_of_its_number(tmp_path: Path, spec: TableSpec) -> None:
    table = trained(spec, [2, 9], times=2)
    rows = written(tmp_path, table)
    assert rows.num_rows == 10
    assert rows.slots(np.array([9, 3, 10, -1])).tolist() == [9, 3, -1, -1]
    np.testing.assert_array_equal(rows.gather(np.arange(10)), read(table, range(10)))
    with pytest.raises(IndexError, match="key 10 is outside"):
        rows.lookup(np.array([1, 10]))
    with pytest.raises(IndexError, match="key -1 is outside"):
        rows.update(np.array([-1]), np.ones((1, 3)))


def test_an_int8_row_is_its_largest_value_in_127_steps() -> None:
    codes, scales = encode(np.array([[127, -63.5, 0.4], [0, 0, 0], [0.02, 0.005, -0.02]], np.float32), "int8")
    assert codes.tolist() == [[127, -64, 0], [0, 0, 0], [127, 32, -127]]
    assert scales is not None
    np.testing.assert_allclose(scales, [1, 0, 0.02 / 127])


def test_a_number_beyond_float16_becomes_the_largest_there_is() -> None:
    assert encode(np.array([[1e6, -1e6, 2]], np.float32), "float16")[0].tolist() == [[65504, -65504, 2]]


@pytest.mark.parametrize(("dtype", "error"), [("float16", 2**-11), ("int8", 0.51 / 127)])
@pytest.mark.parametrize("num_rows", [None, 50])
def test_smaller_rows_are_near_the_large_ones(
    tmp_path: Path, dtype: str, error: float, num_rows: int | None
) -> None:
    table = trained(TableSpec("t", 8, num_rows=num_rows, init_scale=1.0), range(40))
    rows = written(tmp_path, table, dtype)
    expected = read(table, range(40))
    bound = error * np.abs(expected).max(axis=1, keepdims=True)
    assert (np.abs(rows.lookup(np.arange(40)) - expected) <= bound).all()
    assert rows.gather(np.array([3])).dtype == np.float32


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_changes_stay_in_memory(tmp_path: Path, dtype: str) -> None:
    rows = written(tmp_path, trained(TableSpec("t", 2), [1, 2, 3]), dtype)
    before = rows.lookup(np.array([1, 2, 3]))
    rows.update(np.array([2, 7, -4, 7]), np.array([[1, 1], [2, 2], [4, 4], [8, 8]], np.float32))
    assert rows.num_rows == 5
    assert rows.slots(np.array([-4, 7])).tolist() == [3, 4]
    assert rows.keys.tolist() == [1, 2, 3, -4, 7]
    found = rows.lookup(np.array([1, 2, 3, 7, -4]))
    np.testing.assert_array_equal(found[[0, 2]], before[[0, 2]])
    assert found[[1, 3, 4]].tolist() == [[1, 1], [8, 8], [4, 4]]
    np.testing.assert_array_equal(RowTable.open(rows.path).lookup(np.array([1, 2, 3])), before)


def test_a_removed_key_reads_as_absent_and_keeps_its_slot(tmp_path: Path) -> None:
    spec = TableSpec("t", 2, init_scale=0.5)
    rows = written(tmp_path, trained(spec, [1, 2, 3]))
    rows.update(np.array([8]), np.ones((1, 2)))
    rows.remove(np.array([2, 8, 99]))
    assert rows.slots(np.array([2, 8, 99])).tolist() == [1, 3, -1]
    np.testing.assert_array_equal(rows.gather(np.array([1, 3])), read(EmbeddingTable(spec), [2, 8]))


def test_keys_that_lost_their_row_follow_the_rows_that_they_share(tmp_path: Path) -> None:
    rows = written(tmp_path, trained(WAITING, [1], times=3))
    rows.update(np.array([50, 51, 52]), np.ones((3, 4)))
    rows.remove(np.array([50, 51, 52]))
    slots = rows.slots(np.array([50, 51, 52, 50]))
    assert slots.tolist() == [1, 2, 3, 1]
    rows.update(np.array([51]), np.full((1, 4), 9))
    rows.update_shared(np.full((2, 4), 5))
    assert rows.gather(slots)[:, 0].tolist() == [5, 9, 5, 5]
    assert rows.lookup(np.array([77]))[0].tolist() == [5, 5, 5, 5]


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    rows = written(tmp_path, trained(TableSpec("t", 2), [1]))
    with pytest.raises(ValueError, match=r'Table "t": 1 keys need finite rows \(1, 2\), got \(1, 3\)'):
        rows.update(np.array([1]), np.ones((1, 3)))
    with pytest.raises(ValueError, match="finite"):
        rows.update(np.array([1]), np.array([[1, np.nan]]))
    np.save(rows.path / "rows.npy", np.ones((5, 2), np.float32))
    with pytest.raises(ArtifactError, match="its rows do not fit its keys"):
        RowTable.open(rows.path)


def test_an_empty_table_and_no_keys_are_fine(tmp_path: Path) -> None:
    table = EmbeddingTable(TableSpec("a/b..", 2))
    rows = written(tmp_path, table, "int8")
    assert rows.lookup(np.empty(0, np.int64)).shape == (0, 2)
    np.testing.assert_array_equal(rows.lookup(np.array([4])), read(table, [4]))
    assert rows.path.name == "a%2Fb%2E%2E"


def test_lists_are_means_and_an_empty_one_is_zeros(tmp_path: Path) -> None:
    table = EmbeddingTable(TableSpec("t", 2))
    write_rows(tmp_path / "t", table)
    collection = RowCollection.open(
        tmp_path, [EmbeddingFeature("a", "t"), EmbeddingFeature("b", "t", "mean")]
    )
    collection.rows["t"].update(np.array([1, 2, 3]), np.array([[1, 10], [2, 20], [6, 60]]))
    keys = {"b": Keys(np.array([1, 2, 3]), np.array([0, 0, 3, 3])), "a": Keys(np.array([3, 2, 1]))}
    expected = [[[6, 60], [0, 0]], [[2, 20], [3, 30]], [[1, 10], [0, 0]]]
    assert collection.pooled(keys, ["a", "b"]).tolist() == expected
    assert collection.pooled(keys, ["b"])[:, 0].tolist() == [[0, 0], [3, 30], [0, 0]]


def test_features_of_other_sizes_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "t", EmbeddingTable(TableSpec("t", 2)))
    collection = RowCollection.open(tmp_path, [EmbeddingFeature("a", "t"), EmbeddingFeature("b", "t")])
    with pytest.raises(ValueError, match="features a, b: features must have the same number of rows"):
        collection.pooled({"a": Keys(np.array([1, 2])), "b": Keys(np.array([1]))}, ["a", "b"])


specs = st.builds(
    lambda name, bound, waits, shared: TableSpec(
        name,
        4,
        "adagrad",
        num_rows=bound,
        init_scale=0.5,
        admit_after=waits,
        shared_rows=shared * (waits > 1),
    ),
    st.just("t"),
    st.sampled_from([None, None, 60]),
    st.sampled_from([1, 1, 2]),
    st.sampled_from([0, 3]),
)


@examples(24)
@given(st.lists(specs, min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_pooled_rows_equal_the_trainers_lookup(found: list[TableSpec], seed: int) -> None:
    random = np.random.default_rng(seed)
    tables = [EmbeddingTable(TableSpec(**{**_values(spec), "name": f"t{i}"})) for i, spec in enumerate(found)]
    features = [EmbeddingFeature(f"one{i}", f"t{i}") for i in range(len(tables))]
    features += [EmbeddingFeature(f"many{i}", f"t{i}", "mean") for i in range(len(tables))]
    collection = EmbeddingCollection(tables, features)
    for step in range(3):
        columns = _columns(random, features, tables)
        looked = collection.lookup(columns, train=True, step=step)
        grads = random.standard_normal(looked.values.shape).astype(np.float32)
        collection.update(looked, grads, 0.1, step)
    columns = _columns(random, features, tables)
    keys = {name: Keys(*column) for name, column in columns.items()}
    names = [feature.name for feature in features]
    with TemporaryDirectory() as folder:
        for table in tables:
            write_rows(Path(folder) / table.spec.name, table)
        served = RowCollection.open(Path(folder), features)
        expected = collection.lookup(columns, train=False).values
        np.testing.assert_allclose(served.pooled(keys, names), expected, atol=1e-6)
        for name in names:  # each alone, and again
            found = served.pooled({name: keys[name]}, [name])[:, 0]
            np.testing.assert_allclose(found, expected[:, names.index(name)], atol=1e-6)


def _values(spec: TableSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


def _columns(random: Any, features: list[EmbeddingFeature], tables: list[EmbeddingTable]) -> dict[str, Any]:
    """Seven rows of keys, half of them from a range that training is likely to have seen."""
    by_name = {table.spec.name: table for table in tables}
    columns = {}
    for feature in features:
        lengths = random.integers(0, 5, 7) if feature.pooling == "mean" else np.ones(7, np.int64)
        keys = random.integers(0, 60, lengths.sum())
        if by_name[feature.table].spec.num_rows is None:
            keys = np.where(random.random(len(keys)) < 0.3, ~keys - (2**62), keys)
        columns[feature.name] = (
            keys,
            np.concatenate([[0], np.cumsum(lengths)]) if feature.pooling == "mean" else None,
        )
    return columns


class Model:
    """What Rows must be: a dict from keys to rows, and the empty table for the others."""

    def __init__(self, spec: TableSpec) -> None:
        self.absent = EmbeddingTable(spec)
        self.rows: dict[int, Any] = {}

    def lookup(self, keys: list[int]) -> Any:
        return np.stack([self.rows[key] if key in self.rows else read(self.absent, [key])[0] for key in keys])


@examples(24)
@given(st.data())
def test_any_sequence_of_changes_reads_like_a_dictionary(data: st.DataObject) -> None:
    spec = TableSpec("t", 3, num_rows=data.draw(st.sampled_from([None, 20])), init_scale=0.5)
    keys = (
        st.integers(0, 19)
        if spec.num_rows
        else st.one_of(st.integers(-5, 14), st.sampled_from([BIG, -BIG - 1]))
    )
    model = Model(spec)
    with TemporaryDirectory() as folder:
        rows = written(Path(folder), EmbeddingTable(spec))
        for number in range(data.draw(st.integers(1, 6))):
            some = data.draw(st.lists(keys, min_size=1, max_size=8))
            act = data.draw(st.sampled_from(["update", "remove", "look"]))
            if act == "update":
                values = np.arange(len(some) * 3, dtype=np.float32).reshape(-1, 3) + 100 * number
                rows.update(np.array(some), values)
                model.rows.update(zip(some, values, strict=True))
            elif act == "remove":
                rows.remove(np.array(some))
                for key in some:
                    model.rows.pop(key, None)
            else:
                np.testing.assert_array_equal(rows.lookup(np.array(some)), model.lookup(some))
            wanted = data.draw(st.lists(keys, min_size=1, max_size=8))
            np.testing.assert_array_equal(rows.lookup(np.array(wanted)), model.lookup(wanted))
