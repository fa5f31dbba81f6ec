"""Batches hold the Table's rows, each once, and go on from any cursor with the very next row."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from recmill.dataset.batch import Layout, collate
from recmill.dataset.loader import Batches
from recmill.dataset.schedule import Cursor
from recmill.dataset.table import Table
from recmill.engines import shards
from recmill.errors import ArtifactError
from recmill.features.chain import ColumnInfo
from recmill.recipe.load import load_recipe
from recmill.stages.prepare.prepare import PrepareConfig, prepare
from recmill.synthetic.generate import generate


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Table:
    """A small shop in many small row groups, so that batches run across units and shards."""
    folder = tmp_path_factory.mktemp("shop")
    generate("shop", 700, 1, folder / "log")
    recipe = load_recipe("quickstart", ['table.keep=["time"]'])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "ROWS_PER_GROUP", 37)
        return prepare(recipe, str(folder / "log"), folder / "table", PrepareConfig(partitions=3)).table


def all_batches(batches, cursor=Cursor()):  # noqa: B008
    return list(batches.read(cursor))


def signature(batch):
    return [batch.numbers.tolist(), {name: keys.values.tolist() for name, keys in batch.keys.items()}]


def test_batches_hold_the_rows_of_the_table_in_order(table):
    rows = table.scan().collect()
    batches = Batches(table, 64)
    found = [batch for batch, _ in all_batches(batches)]
    assert [batch.size for batch in found] == [64] * (rows.height // 64) + [rows.height % 64]
    assert len(found) == batches.batches_per_epoch
    assert np.concatenate([batch.labels["click"] for batch in found]).tolist() == rows["click"].to_list()
    assert (
        np.concatenate([batch.keys["item_id"].values for batch in found]).tolist()
        == rows["item_id"].to_list()
    )
    numbers = np.concatenate([batch.numbers for batch in found])
    assert numbers.tolist() == rows.select(batches.layout.numbers).to_numpy().tolist()


def test_lists_keep_their_rows(table):
    rows = table.scan().collect()
    batch, _ = all_batches(Batches(table, 50))[0]
    recent = batch.keys["recent_items"]
    lists = [
        recent.values[a:b].tolist() for a, b in zip(recent.offsets[:-1], recent.offsets[1:], strict=True)
    ]
    assert lists == rows["recent_items"].head(50).to_list()


@examples(10)
@given(
    batch_size=st.integers(1, 300),
    stop=st.integers(0, 20),
    seed=st.sampled_from([None, 3]),
    where=st.sampled_from([None, "click"]),
)
def test_a_cursor_goes_on_with_the_very_next_row(table, batch_size, stop, seed, where):
    batches = Batches(table, batch_size, seed=seed, where=where)
    whole = all_batches(batches)
    stop = min(stop, len(whole) - 1)
    resumed = all_batches(Batches(table, batch_size, seed=seed, where=where), whole[stop][1])
    if whole[stop][1].epoch == 0:
        assert [signature(batch) for batch, _ in resumed] == [
            signature(batch) for batch, _ in whole[stop + 1 :]
        ]
    else:
        assert stop == len(whole) - 1


def test_a_run_may_go_on_with_another_batch_size(table):
    first, cursor = all_batches(Batches(table, 100))[0]
    rest = all_batches(Batches(table, 33), cursor)
    assert first.size + sum(batch.size for batch, _ in rest) == table.num_rows()


def test_a_seed_gives_each_epoch_its_own_order_of_the_same_rows(table):
    batches = Batches(table, 90, seed=7)
    orders = [
        np.concatenate([batch.numbers[:, 0] for batch, _ in all_batches(batches, Cursor(epoch))]).tolist()
        for epoch in (0, 1, 0)
    ]
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_the_last_cursor_of_an_epoch_begins_the_next(table):
    assert all_batches(Batches(table, 64))[-1][1] == Cursor(1)


def test_where_keeps_the_rows_that_have_the_label(table):
    clicks = table.scan().collect().filter(pl.col("click") == 1)
    batches = Batches(table, 16, where="click")
    found = [batch for batch, _ in all_batches(batches)]
    assert batches.num_rows == clicks.height
    assert len(found) == batches.batches_per_epoch
    assert {label for batch in found for label in batch.labels["click"]} == {1.0}
    items = np.concatenate([batch.keys["item_id"].values for batch in found])
    assert items.tolist() == clicks["item_id"].to_list()


def test_only_the_named_features_are_read(table):
    batch, _ = all_batches(Batches(table, 10, features=["price", "item_id"]))[0]
    assert batch.numbers.shape == (10, 1)
    assert list(batch.keys) == ["item_id"]


def test_what_a_plan_makes_of_one_request_collates_like_the_table(table):
    layout = Layout.of(table.columns, ["item_id", "price"])
    raw = pl.DataFrame({"item_id": ["i1"], "price": [9.5]})
    batch = collate(table.plan.apply(raw, labels=False, only=["item_id", "price"]), layout, with_labels=False)
    assert batch.size == 1
    assert batch.keys["item_id"].values.dtype == np.int64


def test_an_id_out_of_range_is_an_error():
    layout = Layout.of([ColumnInfo("c", "id", "feature", size=5)])
    with pytest.raises(ArtifactError, match='"c" has id 5, but its ids are 0 to 4'):
        collate(pl.DataFrame({"c": pl.Series([1, 5], dtype=pl.Int32)}), layout)


def test_a_split_without_rows_is_an_error(tmp_path):
    generate("criteo", 50, 1, tmp_path / "log")
    recipe = load_recipe("criteo-dlrm", ["split=", "ranking=", "tune="])
    table = prepare(recipe, str(tmp_path / "log"), tmp_path / "table").table
    with pytest.raises(ArtifactError, match="no eval rows"):
        Batches(table, 10, split="eval")
