"""Users and items as of the log's end, from logs small enough to read."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_logs import SIDE_TABLES, clicks_recipe, entity_snapshot, history

import recmill.logs.reduced as module
from recmill.errors import LogError, TooManyBadRows

# user, item, time, page, click, price, country
EVENTS = """
    ann,1,10,home,1,5.0,DE
    bob,1,11,home,0,6.0,FR
    ann,2,12,list,1,7.0,DE
    ann,3,13,list,0,8.0,AT
"""
MORE_EVENTS = """
    bob,2,9,home,1,1.0,FR
    ann,1,14,home,1,9.0,IT
    cat,3,14,home,0,8.5,ES
"""


@pytest.fixture(params=["held", "reduced again and again"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results must not depend on how often rows are reduced."""
    if request.param != "held":
        monkeypatch.setattr(module, "_HELD_BYTES", 1)


@pytest.mark.usefixtures("memory")
def test_the_last_values_in_time_win_whatever_file_they_are_in(tmp_path: Path) -> None:
    found = entity_snapshot(clicks_recipe(), tmp_path, EVENTS, MORE_EVENTS)
    assert found.items is not None
    assert found.users is not None
    assert found.items.columns == ["item", "price"]
    assert dict(found.items.iter_rows()) == {1: 9.0, 2: 7.0, 3: 8.5}
    assert dict(found.users.iter_rows()) == {"ann": "IT", "bob": "FR", "cat": "ES"}
    assert found.log_end == 14
    assert (found.num_rows, found.num_bad) == (7, 0)


def test_of_equal_times_the_later_row_of_the_log_wins(tmp_path: Path) -> None:
    found = entity_snapshot(clicks_recipe(), tmp_path, "ann,1,5,a,1,1.0,DE\nann,1,5,a,1,2.0,FR")
    assert found.items is not None
    assert found.items.rows() == [(1, 2.0)]


@pytest.mark.usefixtures("memory")
def test_items_come_by_their_clicks_and_ties_by_id(tmp_path: Path) -> None:
    found = entity_snapshot(clicks_recipe(), tmp_path, EVENTS, MORE_EVENTS)
    assert found.items is not None
    assert found.counts is not None
    assert found.items["item"].to_list() == [1, 2, 3]
    assert found.counts.tolist() == [2, 2, 0]


@pytest.mark.usefixtures("memory")
def test_a_history_ends_with_the_last_click(tmp_path: Path) -> None:
    recipe = clicks_recipe(rows=[history(where="click = 1", max_length=2)])
    found = entity_snapshot(recipe, tmp_path, EVENTS, MORE_EVENTS)
    assert found.users is not None
    assert dict(found.users.select("user", "item_history").iter_rows()) == {
        "ann": [2, 1],
        "bob": [2],
        "cat": [],
    }


def test_rows_that_a_history_takes_out_of_the_table_still_happened(tmp_path: Path) -> None:
    """min_length and last choose what is learned from; a first click is a click all the same."""
    found = entity_snapshot(clicks_recipe(rows=[history(min_length=1, last=1)]), tmp_path, EVENTS)
    assert found.users is not None
    assert found.counts is not None
    assert dict(found.users.select("user", "item_history").iter_rows()) == {"ann": [1, 2, 3], "bob": [1]}
    assert found.counts.tolist() == [1, 1, 0]


def test_filtered_rows_do_not_count(tmp_path: Path) -> None:
    recipe = clicks_recipe(rows=[{"filter": "page = 'home'"}, history()])
    found = entity_snapshot(recipe, tmp_path, EVENTS)
    assert found.items is not None
    assert found.users is not None
    assert found.items["item"].to_list() == [1]
    assert found.users.rows() == [("ann", "DE", [1]), ("bob", "FR", [1])]
    assert found.log_end == 11


def test_a_filter_behind_a_history_does_not_change_the_history(tmp_path: Path) -> None:
    found = entity_snapshot(clicks_recipe(rows=[history(), {"filter": "page = 'home'"}]), tmp_path, EVENTS)
    assert found.users is not None
    assert dict(found.users.select("user", "item_history").iter_rows()) == {"ann": [1, 2, 3], "bob": [1]}


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(("keep", "price", "clicks"), [("first", 5.0, 1), ("last", 9.0, 1)])
def test_of_rows_that_dedupe_calls_equal_one_counts(
    tmp_path: Path, keep: str, price: float, clicks: int
) -> None:
    dedupe = {"dedupe": {"by": ["user", "item"], "order": "time", "keep": keep}}
    rows = [dedupe, {"filter": "country in ('DE', 'AT', 'IT')"}]
    found = entity_snapshot(clicks_recipe(rows=rows), tmp_path, EVENTS, MORE_EVENTS)
    assert found.items is not None
    assert found.counts is not None
    assert dict(found.items.iter_rows())[1] == price
    assert found.counts[found.items["item"].to_list().index(1)] == clicks


def test_cold_items_and_users_of_side_tables_are_there(tmp_path: Path) -> None:
    rows = [
        {"join": {"table": "goods", "on": "item"}},
        {"join": {"table": "people", "on": "user"}},
        history(),
    ]
    found = entity_snapshot(
        clicks_recipe(rows=rows, tables=SIDE_TABLES),
        tmp_path,
        EVENTS,
        goods="1,one\n9,nine\n3,three",
        people="zoe,30\nbob,40",
    )
    assert found.items is not None
    assert found.users is not None
    assert found.counts is not None
    assert found.items.columns == ["item", "price", "title"]
    assert found.items.rows() == [(1, 6.0, "one"), (2, 7.0, None), (3, 8.0, "three"), (9, None, "nine")]
    assert found.counts.tolist() == [1, 1, 0, 0]
    assert found.users.rows() == [
        ("ann", "AT", None, [1, 2, 3]),
        ("bob", "FR", 40, [1]),
        ("zoe", None, 30, []),
    ]


def test_a_filter_over_the_columns_of_items_holds_for_cold_ones_too(tmp_path: Path) -> None:
    rows = [{"join": {"table": "goods", "on": "item"}}, {"filter": "title is null or title != 'nine'"}]
    recipe = clicks_recipe(rows=rows, tables={"goods": SIDE_TABLES["goods"]})
    found = entity_snapshot(recipe, tmp_path, EVENTS, goods="8,eight\n9,nine")
    assert found.items is not None
    assert found.items["item"].to_list() == [1, 2, 3, 8]


def test_rows_without_user_or_item_are_nobodys(tmp_path: Path) -> None:
    found = entity_snapshot(clicks_recipe(), tmp_path, ",1,5,a,1,2.0,DE\nann,,6,a,1,3.0,FR")
    assert found.items is not None
    assert found.users is not None
    assert found.counts is not None
    assert found.items.rows() == [(1, 2.0)]
    assert found.counts.tolist() == [1]
    assert found.users.rows() == [("ann", "FR")]


def test_an_item_feature_of_a_context_column_takes_its_last_value(tmp_path: Path) -> None:
    features = [
        {"columns": ["user", "item"], "steps": ["key"]},
        {"columns": "page", "of": "item", "steps": ["key"]},
    ]
    found = entity_snapshot(clicks_recipe(features=features), tmp_path, EVENTS)
    assert found.items is not None
    assert found.items.columns == ["item", "price", "page"]
    assert found.items.sort("item")["page"].to_list() == ["home", "list", "list"]


def test_without_a_model_every_row_is_a_click(tmp_path: Path) -> None:
    found = entity_snapshot(clicks_recipe(retrieval=None, labels=[]), tmp_path, EVENTS)
    assert found.counts is not None
    assert found.counts.tolist() == [2, 1, 1]


@pytest.mark.usefixtures("memory")
def test_the_sample_has_histories_and_nothing_that_cannot_be_known(tmp_path: Path) -> None:
    lag = {"lag": {"columns": ["time"], "by": "user", "order": "time"}}
    found = entity_snapshot(clicks_recipe(rows=[history(), lag]), tmp_path, EVENTS)
    assert found.sample.height == 4
    assert found.sample.sort("time")["item_history"].to_list()[0] == [1, 2, 3]
    assert found.sample["time_lag1"].null_count() == 4


def test_a_log_of_bad_rows_alone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TooManyBadRows, match="2 of 2 rows"):
        entity_snapshot(clicks_recipe(), tmp_path, "ann,1\nbob,2")


def test_an_empty_log_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="The log is empty"):
        entity_snapshot(clicks_recipe(), tmp_path, "")
