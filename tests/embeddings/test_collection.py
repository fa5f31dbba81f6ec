"""Many features over many tables equal the same tables driven one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recmill.embeddings.collection import EmbeddingCollection, EmbeddingFeature
from recmill.embeddings.table import EmbeddingTable, TableSpec

SPECS = [TableSpec(f"t{i}", 8, "adagrad", seed=i, num_rows=1000 if i % 2 else None) for i in range(5)]


def table(spec: TableSpec) -> EmbeddingTable:
    return EmbeddingTable(spec)


def rows_of(tables: Any) -> Any:
    return [t.pool(t.lookup(np.arange(1000), False)) for t in tables]


@pytest.mark.parametrize("num_threads", [1, 2, 8])
@pytest.mark.parametrize("num_tables", [1, 5])
def test_a_collection_equals_its_tables_one_by_one(num_threads: int, num_tables: int) -> None:
    specs = SPECS[:num_tables]
    features = [EmbeddingFeature(f"f{i}", spec.name, "mean" if i else "none") for i, spec in enumerate(specs)]
    collection = EmbeddingCollection([table(spec) for spec in specs], features, num_threads)
    alone = [table(spec) for spec in specs]
    random = np.random.default_rng(0)
    for step in range(3):
        columns: dict[str, Any] = {}
        for feature in features:
            sizes = random.integers(0, 4, 700) if feature.pooling == "mean" else np.ones(700, np.int64)
            offsets = np.concatenate([[0], np.cumsum(sizes)])
            keys = random.integers(0, 1000, offsets[-1])
            columns[feature.name] = (keys, offsets if feature.pooling == "mean" else None)
        looked = collection.lookup(columns, train=True, step=step)
        grads = random.standard_normal(looked.values.shape).astype(np.float32)
        collection.update(looked, grads, 0.1, step)
        for place, feature in enumerate(features):
            keys, offsets = columns[feature.name]
            lookup = alone[place].lookup(keys, True, step)
            rows = alone[place].pool(lookup, offsets, None, feature.pooling)
            np.testing.assert_array_equal(looked.values[:, place], rows)
            alone[place].update(lookup, grads[:, place], 0.1, step, offsets, None, feature.pooling)
    for left, right in zip(rows_of(collection.tables.values()), rows_of(alone), strict=True):
        np.testing.assert_array_equal(left, right)


def test_features_that_share_a_table_train_a_common_key_once() -> None:
    features = [EmbeddingFeature("clicked", "t0"), EmbeddingFeature("shown", "t0", "sum")]
    collection = EmbeddingCollection([table(SPECS[0])], features)
    columns: Any = {
        "clicked": (np.array([4]), None),
        "shown": (np.array([4, 4]), np.array([0, 2]), np.array([1.0, 2.0], np.float32)),
    }
    looked = collection.lookup(columns, train=True)
    np.testing.assert_allclose(looked.values[:, 1], 3 * looked.values[:, 0], rtol=1e-6)
    collection.update(looked, np.ones((1, 2, 8), np.float32), 0.1)
    alone = table(SPECS[0])
    alone.update(alone.lookup(np.array([4]), True), np.full((1, 8), 4, np.float32), 0.1)
    np.testing.assert_array_equal(*rows_of([collection.tables["t0"], alone]))


def test_a_sequence_keeps_the_vector_of_each_key_and_shares_a_table() -> None:
    features = [EmbeddingFeature("clicked", "t0"), EmbeddingFeature("before", "t0", "sequence")]
    collection = EmbeddingCollection([table(SPECS[0])], features)
    columns: Any = {
        "clicked": (np.array([4, 5]), None),
        "before": (np.array([7, 4, 7]), np.array([0, 0, 3])),  # the first row has none
    }
    looked = collection.lookup(columns, train=True)
    assert looked.values.shape == (2, 1, 8)
    assert looked.sequences["before"].shape == (3, 8)
    np.testing.assert_array_equal(looked.sequences["before"][1], looked.values[0, 0])
    grads = np.array([[1], [2], [4]], np.float32) * np.ones((1, 8), np.float32)
    collection.update(looked, np.ones((2, 1, 8), np.float32), 0.1, sequence_grads={"before": grads})
    alone = table(SPECS[0])
    sums = np.array([[3], [1], [5]], np.float32) * np.ones((1, 8), np.float32)
    alone.update(alone.lookup(np.array([4, 5, 7]), True), sums, 0.1)
    np.testing.assert_array_equal(*rows_of([collection.tables["t0"], alone]))


def test_a_sequence_without_its_gradient_is_an_error() -> None:
    features = [EmbeddingFeature("clicked", "t0"), EmbeddingFeature("before", "t0", "sequence")]
    collection = EmbeddingCollection([table(SPECS[0])], features)
    looked = collection.lookup({"clicked": (np.array([4]), None), "before": (np.array([7]), None)}, True)
    with pytest.raises(ValueError, match=r"gradients of sequences must be those of \['before'\], got \[\]"):
        collection.update(looked, np.ones((1, 1, 8), np.float32), 0.1)


def test_a_bad_gradient_in_the_last_table_leaves_the_first_untouched() -> None:
    features = [EmbeddingFeature("a", "t0"), EmbeddingFeature("b", "t1")]
    collection = EmbeddingCollection([table(spec) for spec in SPECS[:2]], features, num_threads=2)
    looked = collection.lookup({"a": (np.array([1]), None), "b": (np.array([2]), None)}, train=True)
    before = rows_of(collection.tables.values())
    grads = np.ones((1, 2, 8), np.float32)
    grads[0, 1, 3] = np.nan
    with pytest.raises(ValueError, match='Table "t1": the gradient of key 2'):
        collection.update(looked, grads, 0.1)
    for left, right in zip(rows_of(collection.tables.values()), before, strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_key_out_of_range_stops_the_whole_batch() -> None:
    features = [EmbeddingFeature("a", "t0"), EmbeddingFeature("b", "t1")]
    collection = EmbeddingCollection([table(spec) for spec in SPECS[:2]], features, num_threads=2)
    with pytest.raises(IndexError, match='Table "t1": key 1000 is outside'):
        collection.lookup({"a": (np.array([1]), None), "b": (np.array([1000]), None)}, train=True)
    assert collection.tables["t0"].statistics().keys == 0


def test_wrong_collections_and_batches_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match='Feature "a" reads table "x", but there are: t0'):
        EmbeddingCollection([table(SPECS[0])], [EmbeddingFeature("a", "x")])
    with pytest.raises(ValueError, match="have one dim, got: t0 8, wide 9"):
        EmbeddingCollection([table(SPECS[0]), table(TableSpec("wide", 9))], [])
    pair = [EmbeddingFeature("a", "t0"), EmbeddingFeature("b", "t0")]
    collection = EmbeddingCollection([table(SPECS[0])], pair)
    with pytest.raises(ValueError, match='Feature "b" is missing; the batch has: a'):
        collection.lookup({"a": (np.array([1]), None)}, train=False)
    with pytest.raises(ValueError, match="same number of rows"):
        collection.lookup({"a": (np.array([1]), None), "b": (np.array([1, 2]), None)}, train=False)


def test_an_empty_batch_reads_nothing() -> None:
    collection = EmbeddingCollection([table(SPECS[0])], [EmbeddingFeature("a", "t0")])
    looked = collection.lookup({"a": (np.zeros(0, np.int64), None)}, train=True)
    collection.update(looked, np.zeros((0, 1, 8), np.float32), 0.1)
    assert looked.values.shape == (0, 1, 8)
