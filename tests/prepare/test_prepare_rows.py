"""Splits, orders and layouts: which rows land where."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from logs_and_recipes import events_recipe, prepared, rows_of, write_events

from recmill.recipe.load import load_recipe
from recmill.stages.prepare.prepare import PrepareConfig, prepare
from recmill.synthetic.generate import generate


def times(table, split):
    return rows_of(table, split)["raw_time"].to_list() if table.num_rows(split) else []


def split_of(tmp_path, num_rows, files=1, **split):
    data = write_events(tmp_path / "log", num_rows, files)
    table = prepared(events_recipe(split=split), data, tmp_path / "table", partitions=5).table
    return [times(table, name) for name in ("train", "eval", "test")]


def test_pieces_of_a_log_of_which_no_row_is_left(tmp_path):
    recipe = events_recipe(rows=[{"filter": "time >= 80"}])
    table = prepared(recipe, write_events(tmp_path / "log", 100), tmp_path / "table", partitions=5).table
    assert times(table, "train") == list(range(80, 100))


def test_tail_holds_out_the_last_rows_and_halves_them(tmp_path):
    train, evaluation, test = split_of(tmp_path, 100, by="tail", held_out=0.1, halve=True)
    assert (train, evaluation, test) == (list(range(90)), list(range(90, 95)), list(range(95, 100)))


def test_tail_counts_bad_rows_too(tmp_path):
    data = write_events(tmp_path / "log", 20)
    file = data / "events0.tsv"
    file.write_text("bad\n" * 20 + file.read_text())
    recipe = events_recipe(split={"by": "tail", "held_out": 0.25})
    table = prepared(recipe, data, tmp_path / "table", max_bad=0.6, partitions=3).table
    assert times(table, "eval") == list(range(10, 20))


def test_files_holds_out_whole_files_and_halves_their_rows(tmp_path):
    split = {"by": "files", "held_out_files": ["events2.tsv"], "halve": True}
    train, evaluation, test = split_of(tmp_path, 30, 3, **split)
    assert (train, evaluation, test) == (list(range(20)), list(range(20, 25)), list(range(25, 30)))


def test_time_holds_out_at_most_the_share_asked_for(tmp_path):
    train, evaluation, test = split_of(tmp_path, 40, by="time", column="time", held_out=0.2, halve=True)
    assert (train, evaluation, test) == (list(range(32)), list(range(32, 36)), list(range(36, 40)))


def test_time_cuts_where_the_recipe_says(tmp_path):
    train, evaluation, test = split_of(tmp_path, 10, by="time", column="time", eval_from=6, test_from=8)
    assert (train, evaluation, test) == ([0, 1, 2, 3, 4, 5], [6, 7], [8, 9])


def test_hash_keeps_all_rows_of_a_value_together(tmp_path):
    train, evaluation, _ = split_of(tmp_path, 200, by="hash", column="user", held_out=0.4, seed=1)
    users = [{time % 7 for time in rows} for rows in (train, evaluation)]
    assert users[0]
    assert users[1]
    assert not users[0] & users[1]


def test_last_holds_out_each_users_last_two_rows(tmp_path):
    train, evaluation, test = split_of(tmp_path, 21, by="last", column="user", order="time")
    assert sorted(test) == list(range(14, 21))
    assert sorted(evaluation) == list(range(7, 14))
    assert sorted(train) == list(range(7))


def test_fitting_reads_the_training_rows_only(tmp_path):
    data = write_events(tmp_path / "log", 20)
    (data / "events1.tsv").write_text("unknown user\t99\t100\t1000000.0\t1\n" * 3)
    recipe = events_recipe(split={"by": "files", "held_out_files": ["events1.tsv"]})
    table = prepared(recipe, data, tmp_path / "table").table
    assert rows_of(table, "eval")["user"].to_list() == [0, 0, 0]
    assert "unknown user" not in table.plan.tables["user"].frame["value"].to_list()
    assert max(rows_of(table)["price"]) < 3


def test_log_order_is_kept_without_shuffle(tmp_path):
    data = write_events(tmp_path / "log", 50, files=2)
    assert times(prepared(events_recipe(), data, tmp_path / "table", partitions=7).table, "train") == list(
        range(50)
    )


def test_grouped_rows_return_to_log_order(tmp_path):
    data = write_events(tmp_path / "log", 60)
    rows = [{"history": {"columns": ["item"], "by": "user", "order": "time"}}]
    table = prepared(events_recipe(rows=rows), data, tmp_path / "table", partitions=7).table
    assert times(table, "train") == list(range(60))


def test_shuffle_depends_on_its_seed_alone(tmp_path):
    data = write_events(tmp_path / "log", 80)
    orders = [
        times(
            prepared(
                events_recipe(table={"order": "shuffle", "seed": seed, "keep": ["time"]}),
                data,
                tmp_path / name,
                partitions=parts,
            ).table,
            "train",
        )
        for name, seed, parts in (("a", 1, 1), ("b", 1, 6), ("c", 2, 6))
    ]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(80))
    assert orders[0] != list(range(80))


def test_interleave_takes_all_files_side_by_side(tmp_path):
    data = tmp_path / "log"
    data.mkdir()
    for day in range(3):
        (data / f"events{day}.tsv").write_text("".join(f"u{day}\t1\t{n}\t1.0\t1\n" for n in range(10, 16)))
    recipe = events_recipe(table={"order": "interleave", "keep": ["time", "user"]})
    rows = rows_of(prepared(recipe, data, tmp_path / "table", partitions=4).table)
    assert rows["raw_time"].to_list() == [n for n in range(10, 16) for _ in range(3)]
    assert rows["raw_user"].to_list() == ["u0", "u1", "u2"] * 6


def test_negatives_follow_their_row_and_stay_in_its_split(tmp_path):
    data = write_events(tmp_path / "log", 40)
    recipe = events_recipe(
        rows=[{"negatives": {"label": "click", "per_row": 2}}], split={"by": "tail", "held_out": 0.25}
    )
    table = prepared(recipe, data, tmp_path / "table", partitions=3).table
    assert table.num_rows() == 90
    assert table.num_rows("eval") == 30
    rows = rows_of(table)
    assert times(table, "train") == [n for n in range(30) for _ in range(3)]
    assert rows["clicked"].gather_every(3, 1).sum() == rows["clicked"].gather_every(3, 2).sum() == 0
    items = rows["raw_item"].to_numpy().reshape(-1, 3)
    assert (items[:, 0] != items[:, 1]).all()
    assert (items[:, 0] != items[:, 2]).all()


def test_one_raw_row_through_the_plan_equals_its_row_in_the_table(tmp_path):
    generate("shop", 3000, 5, tmp_path / "log")
    recipe = load_recipe(
        "quickstart", ["table.order=log", 'table.keep=["time", "user_id", "item_id", "position"]']
    )
    table = prepare(recipe, str(tmp_path / "log"), tmp_path / "table", PrepareConfig(partitions=4)).table
    users = pl.read_csv(tmp_path / "log" / "users.csv")
    items = pl.read_csv(tmp_path / "log" / "items.csv")
    events = pl.read_csv(tmp_path / "log" / "events.csv").join(users, on="user_id").join(items, on="item_id")
    features = [
        column.name
        for column in table.columns
        if column.role == "feature" and not column.name.startswith("recent")
    ]
    for expected in rows_of(table).sample(20, seed=1).iter_rows(named=True):
        raw = events.filter(
            (pl.col("time") == expected["raw_time"])
            & (pl.col("user_id") == expected["raw_user_id"])
            & (pl.col("item_id") == expected["raw_item_id"])
            & (pl.col("position") == expected["raw_position"])
        )
        served = table.plan.apply(raw.head(1), labels=False, only=features)
        assert served.row(0, named=True) == {name: expected[name] for name in features}


def test_binary_rows_are_160_bytes_of_label_counts_and_ids(tmp_path):
    generate("criteo", 2000, 1, tmp_path / "log")
    # Without standardise, so that the Table's numbers are the logarithms of what the file has.
    numbers = 'features[0].steps=[{ fill = 0 }, { clip = { min = 0 } }, "log"]'
    recipe = load_recipe("criteo-dlrm", [numbers])
    table = prepare(
        recipe, str(tmp_path / "log"), tmp_path / "table", PrepareConfig(partitions=3, binary=True)
    ).table
    for split in ("train", "eval", "test"):
        content = np.fromfile(table.path / "binary" / f"{split}.bin", dtype="<i4").reshape(-1, 40)
        rows = rows_of(table, split)
        assert len(content) == rows.height
        assert content[:, 0].tolist() == rows["click"].to_list()
        np.testing.assert_allclose(
            np.log1p(content[:, 1:14]), rows.select(f"i{n}" for n in range(1, 14)).to_numpy(), rtol=1e-6
        )
        assert (content[:, 14:] == rows.select(f"c{n}" for n in range(1, 27)).to_numpy()).all()


def test_binary_of_another_shape_is_refused(tmp_path):
    from recmill.errors import FeatureError

    data = write_events(tmp_path / "log", 20)
    with pytest.raises(FeatureError, match="13 number and 26 id features"):
        prepared(events_recipe(), data, tmp_path / "table", binary=True)
