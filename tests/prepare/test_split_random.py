"""A random share of each user's rows is held out, the same rows however the log is cut."""

from __future__ import annotations

import pytest
from logs_and_recipes import events_recipe, prepared, rows_of, write_events

from recmill.errors import RecipeError
from recmill.recipe.recipe import SPLITS

SPLIT = {"by": "random", "column": "user", "held_out": 0.2, "halve": True}


def table_of(tmp_path, num_rows, partitions=3, name="table", **changes):
    data = write_events(tmp_path / "log", num_rows)
    recipe = events_recipe(split={**SPLIT, **changes}, table={"keep": ["time", "user"]})
    return prepared(recipe, data, tmp_path / name, partitions=partitions).table


def counts_by_user(table, split):
    if not table.num_rows(split):
        return {}
    return dict(rows_of(table, split).group_by("raw_user").len().iter_rows())


def test_each_user_gives_a_tenth_to_eval_and_a_tenth_to_test(tmp_path):
    table = table_of(tmp_path, 7 * 30)
    users = {f"u{number}" for number in range(7)}
    assert [counts_by_user(table, split) for split in SPLITS] == [
        dict.fromkeys(users, 24),
        dict.fromkeys(users, 3),
        dict.fromkeys(users, 3),
    ]


def test_no_row_is_in_two_splits_and_none_is_lost(tmp_path):
    table = table_of(tmp_path, 200)
    times = [time for split in SPLITS for time in rows_of(table, split)["raw_time"]]
    assert sorted(times) == list(range(200))
    assert sorted(rows_of(table, "test")["raw_time"]) != list(range(180, 200))


@pytest.mark.parametrize(
    ("rows_each", "expected"), [(1, (1, 0, 0)), (2, (1, 0, 1)), (3, (1, 1, 1)), (19, (17, 1, 1))]
)
def test_users_of_few_rows_keep_one_and_give_to_test_first(tmp_path, rows_each, expected):
    table = table_of(tmp_path, 7 * rows_each)
    assert tuple(table.num_rows(split) for split in SPLITS) == tuple(7 * number for number in expected)


def test_without_halves_all_of_it_is_eval(tmp_path):
    table = table_of(tmp_path, 7 * 10, halve=False)
    assert [table.num_rows(split) for split in SPLITS] == [56, 14, 0]


def test_the_rows_do_not_depend_on_partitions_but_on_the_seed(tmp_path):
    one = table_of(tmp_path, 300, partitions=1, name="one")
    five = table_of(tmp_path, 300, partitions=5, name="five")
    other = table_of(tmp_path, 300, partitions=1, name="other", seed=7)
    assert one.digest == five.digest != other.digest


def test_rows_of_nobody_train(tmp_path):
    data = write_events(tmp_path / "log", 70)
    file = data / "events0.tsv"
    file.write_text(file.read_text() + "\t3\t99\t1.0\t1\n" * 30)
    recipe = events_recipe(split=SPLIT, table={"keep": ["time", "user"]})
    table = prepared(recipe, data, tmp_path / "table").table
    assert rows_of(table, "train")["raw_user"].null_count() == 30


def test_a_history_beside_a_random_split_is_a_leak():
    history = {"history": {"columns": ["item"], "by": "user", "order": "time"}}
    with pytest.raises(
        RecipeError, match=r"rows\[0\]\.history would show held-out rows to the training rows"
    ):
        events_recipe(split=SPLIT, rows=[history])
