"""Rankers in native code give what the learner gives, from the rows of a bundle, on every CPU that this one can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_graphs import (
    COLUMN_SETS,
    COLUMNS,
    OF_USER,
    OWNERS,
    SPECS,
    logits_of,
    random_batch,
    ranker_of,
    trained_ranker,
)

from recmill import _native
from recmill.artifacts.bundle.features import FeatureRows
from recmill.artifacts.bundle.layers import ByteRanges, RankerLayers
from recmill.artifacts.bundle.native_ranker import NativeRanker, SideFeatures
from recmill.artifacts.bundle.row_files import write_rows
from recmill.artifacts.bundle.rows import RowCollection
from recmill.dataset.batch import Array, Batch, between
from recmill.features.chain import ColumnInfo
from recmill.learner.graphs.layers import layers_of
from recmill.learner.ranking import Ranker
from recmill.recipe import recipe as r

pytestmark = pytest.mark.stages

DIM = 4
COVERED = ["cat", "cat, no bottom", "cat, no top", "dot", "deep", "linear", "wide and deep", "dot, wide"]
TARGETS = [("plain", "plain"), ("avx2", "avx2"), ("avx2", "avxvnni"), ("avx512", "avx512vnni")]
RUNNABLE = [
    pair
    for pair in [*TARGETS, ("neon", "plain")]
    if pair[0] in _native.dense_targets() and pair[1] in _native.serving_targets()
]
# Keys of any value beside bounded ids, one of them a list, and dims of their own.
MANY_KINDS = [
    *[replace(column, dim=6 if column.name in ("item", "device") else column.dim) for column in COLUMNS],
    ColumnInfo("shop", "key", "feature", "item", dim=3, vocabulary="shop"),
    ColumnInfo("city", "key", "feature", "user", vocabulary="city"),
    ColumnInfo("colours", "keys", "feature", "item", vocabulary="city"),
]
OWNER_OF = {**OWNERS, "shop": "item", "city": "user", "colours": "item"}


def written(ranker: Ranker, into: Path, dtype: str) -> dict[str, RowCollection]:
    """The ranker's rows as a bundle has them."""
    found = {}
    for name, collection in ranker.collections.items():
        for table in collection.tables.values():
            write_rows(into / name / table.spec.name, table, dtype)
        found[name] = RowCollection.open(into / name, collection.features)
    return found


def sides_of(ranker: Ranker) -> tuple[list[str], list[SideFeatures]]:
    deep = [name for names in ranker.pooled_features(ranker.deep_collections).values() for name in names]
    kinds = (ranker.layout.numbers, deep, ranker.spec.wide)

    def side(is_user: bool) -> SideFeatures:
        owned = [
            [name for name in names if (OWNER_OF[name] in ("user", "context")) == is_user] for names in kinds
        ]
        return SideFeatures(*owned)

    return deep, [side(True), side(False)]


def native_of(
    ranker: Ranker,
    rows: Mapping[str, RowCollection],
    targets: tuple[str, str] = ("", ""),
) -> NativeRanker:
    layers = layers_of(ranker)
    assert layers is not None
    read = RankerLayers.from_bytes(layers.to_bytes(), layers.interaction, "layers")
    keys, sides = sides_of(ranker)
    return NativeRanker(read, ranker.layout, keys, *sides, rows, *targets)


def asked(ranker: Ranker, batch: Batch) -> tuple[FeatureRows, FeatureRows]:
    """One user and all items."""
    return FeatureRows.of(between(batch, 0, 1), ranker.layout), FeatureRows.of(batch, ranker.layout)


def batch_of(ranker: Ranker, num_rows: int) -> Batch:
    """Rows of one user; few brands and colours, so that some features have few different rows."""
    of_user = [*OF_USER, "city"]
    batch = random_batch(ranker.layout, num_rows, of_user)
    return batch


def has_items(ranker: Ranker) -> bool:
    return bool(sides_of(ranker)[1][1].numbers or sides_of(ranker)[1][1].keys)


def assert_close(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", COLUMN_SETS)
@pytest.mark.parametrize("spec", COVERED)
def test_native_logits_are_those_of_training(spec: str, columns: str, tmp_path: Path) -> None:
    ranker = ranker_of(spec, columns)
    native = native_of(ranker, written(ranker, tmp_path, "float32"))
    for num_rows in (1, 7, 300):
        batch = batch_of(ranker, num_rows)
        logits, probabilities = native.rank(*asked(ranker, batch))
        assert_close(logits, logits_of(ranker, batch))
        np.testing.assert_allclose(probabilities, ranker.predict(batch), atol=1e-6)


@pytest.mark.parametrize("targets", RUNNABLE, ids="-".join)
@pytest.mark.parametrize("spec", ["cat", "dot, wide", "wide and deep"])
def test_every_target_scores_the_same(spec: str, targets: tuple[str, str], tmp_path: Path) -> None:
    ranker = ranker_of(spec, "mixed")
    native = native_of(ranker, written(ranker, tmp_path, "float32"), targets)
    for num_rows in (1, 2, 13, 255, 257, 700):
        batch = batch_of(ranker, num_rows)
        assert_close(native.rank(*asked(ranker, batch))[0], logits_of(ranker, batch))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("interaction", ["cat", "dot"])
def test_rows_of_every_type_and_dim_give_what_the_same_rows_give_in_numpy(
    dtype: str, interaction: str, tmp_path: Path
) -> None:
    spec = r.Ranking("dlrm", "click", (), DIM, (8, DIM), (24, 8), interaction, wide=("brand", "city"))
    ranker = trained_ranker(spec, MANY_KINDS)
    rows = written(ranker, tmp_path, dtype)
    batch = batch_of(ranker, 300)
    batch.keys["shop"].values[5] = 1_000_000  # a key that was never seen
    batch.keys["city"].values[:] = -7
    found, _ = native_of(ranker, rows).rank(*asked(ranker, batch))
    assert_close(found, reference(ranker, rows, batch))
    if dtype == "float32":
        np.testing.assert_allclose(
            1 / (1 + np.exp(-found.astype(np.float64))), ranker.predict(batch), atol=1e-6
        )


def reference(ranker: Ranker, rows: Mapping[str, RowCollection], batch: Batch) -> Array:
    """The model by plain products in float64, feature by feature."""
    layers = layers_of(ranker)
    assert layers is not None
    vectors = []
    for name, collection in rows.items():
        for feature in collection.features if name != "wide" else ():
            one = collection.pooled(batch.keys, [feature.name])[:, 0].astype(np.float64)
            vectors.append(
                one @ layers.projections[feature.name] if feature.name in layers.projections else one
            )
    below = chain(layers.bottom, batch.numbers.astype(np.float64), last_relu=True)
    if layers.interaction == "dot":
        every = [below, *vectors]
        products = [(every[i] * every[j]).sum(axis=1) for i in range(len(every)) for j in range(i)]
        mixed = np.concatenate([below, np.stack(products, axis=1)], axis=1)
    else:
        mixed = np.concatenate([below, *vectors], axis=1)
    wide = rows["wide"].pooled(batch.keys, ranker.spec.wide).sum(axis=(1, 2))
    return chain(layers.top, mixed, last_relu=False)[:, 0] + wide


def chain(layers: Sequence[tuple[Array, Array]], x: Array, last_relu: bool) -> Array:
    for index, (weights, bias) in enumerate(layers):
        x = x @ weights.T.astype(np.float64) + bias
        x = np.maximum(x, 0) if last_relu or index + 1 < len(layers) else x
    return x


def test_features_of_few_different_rows_are_multiplied_once_for_each_and_change_nothing(
    tmp_path: Path,
) -> None:
    ranker = ranker_of("cat", "mixed")
    native = native_of(ranker, written(ranker, tmp_path, "float32"))
    batch = batch_of(ranker, 600)
    for few in (["brand"], ["brand", "item"], ["item", "brand", "user_x_item"], []):
        for name in few:
            batch.keys[name].values[:] %= 3
        assert_close(native.rank(*asked(ranker, batch))[0], logits_of(ranker, batch))


@pytest.mark.parametrize("targets", RUNNABLE, ids="-".join)
@pytest.mark.parametrize("spec", ["cat", "dot", "wide and deep"])
def test_products_of_bytes_are_near_those_of_floats_and_equal_on_every_target(
    spec: str, targets: tuple[str, str], tmp_path: Path
) -> None:
    ranker = ranker_of(spec, "mixed")
    rows = written(ranker, tmp_path, "float32")
    batch = batch_of(ranker, 300)
    floats = native_of(ranker, rows)
    ranges = floats.ranges(*asked(ranker, batch))
    read = ByteRanges.from_bytes(ranges.to_bytes(), "ranges")
    expected = floats.rank(*asked(ranker, batch))[0]
    found = native_of(ranker, rows, targets).in_bytes(read).rank(*asked(ranker, batch))[0]
    spread = expected.std()
    assert np.corrcoef(found, expected)[0, 1] > 0.98
    assert np.abs(found - expected).max() < 0.3 * spread
    plain = native_of(ranker, rows, RUNNABLE[0]).in_bytes(read).rank(*asked(ranker, batch))[0]
    np.testing.assert_allclose(found, plain, atol=0.02 * spread)  # a rounded input may fall on the other side


def test_products_of_bytes_do_not_saturate(tmp_path: Path) -> None:
    """The largest inputs times the largest weights: 16-bit sums, which older CPUs offer, would be cut off."""
    for target in _native.serving_targets():
        ones = np.ones((16, 64), np.float32)
        ranker = _native.Ranker(
            is_dot=False, user_numbers=0, item_numbers=64, user_vectors=0, dim=1, dims=[], projections=[], bottom=[],
            once=(np.empty((16, 0), np.float32), np.zeros(16, np.float32)), each=ones,
            rest=[(np.ones((1, 16), np.float32), np.zeros(1, np.float32))], serving_target=target,
        )  # fmt: skip
        ranker.use_bytes(np.ones(64, np.float32), [np.full(16, 64, np.float32)])
        none = np.empty(0, np.float32)
        found = ranker.rank(none, none, np.ones((3, 64), np.float32), [], 0.0, [])[0]
        np.testing.assert_allclose(found, 1024, rtol=0.01)


def test_other_models_have_no_native_layers() -> None:
    for spec in SPECS:
        is_covered = layers_of(ranker_of(spec, "mixed")) is not None
        assert is_covered == (spec in COVERED), spec
