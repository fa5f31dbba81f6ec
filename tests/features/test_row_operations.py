"""Row operations as functions of frames."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from recmill.errors import RecipeError
from recmill.features.expressions import keep_where
from recmill.features.history import add_history
from recmill.logs.rows import join_side, keep_one, keep_share
from recmill.recipe import recipe as r
from recmill.recipe.load import recipe_from_dict
from recmill.recipe.recipe import COPY, POSITION, SPLIT
from recmill.stages.prepare import rows


def frame_of(**columns: list[Any]) -> pl.DataFrame:
    height = len(next(iter(columns.values())))
    return pl.DataFrame({**columns, POSITION: list(range(height))})


def test_filter_keeps_the_rows_for_which_sql_is_true() -> None:
    kept = keep_where("x > 1 or y = 'b'", frame_of(x=[1, 2, None], y=["b", "a", "a"]))
    assert kept["x"].to_list() == [1, 2]


def test_a_condition_that_fails_is_named_before_any_row_is_read() -> None:
    tree = {
        "name": "test",
        "log": {"files": ["log.tsv"], "columns": [{"name": "x", "type": "int"}]},
        "rows": [{"filter": "x +"}],
        "features": [{"columns": "x"}],
    }
    with pytest.raises(RecipeError, match=r"rows\[0\].filter.sql, at character 4: expected a column"):
        recipe_from_dict(tree)


def test_a_sample_keeps_the_same_rows_in_any_cutting() -> None:
    frame, sample = frame_of(x=list(range(4000))), r.Sample(0.25, seed=3)
    kept = keep_share(sample, frame)
    assert 900 < kept.height < 1100
    assert (
        pl.concat([keep_share(sample, frame[2000:]), keep_share(sample, frame[:2000])]).sort("x").equals(kept)
    )


def test_a_join_gives_missing_values_where_nothing_matches() -> None:
    side = pl.DataFrame({"item": [2, 1], "price": [20, 10]})
    joined = join_side(side, "item", frame_of(item=[1, 3, 2, None]))
    assert joined["price"].to_list() == [10, None, 20, None]


@pytest.mark.parametrize(("keep", "kept"), [("first", ["b", "d"]), ("last", ["c", "d"])])
def test_dedupe_keeps_one_row_and_equal_times_go_by_place(keep: Any, kept: list[str]) -> None:
    frame = frame_of(user=[1, 1, 1, 2], time=[5, 3, 5, 1], name=["a", "b", "c", "d"])
    assert sorted(keep_one(r.Dedupe(("user",), "time", keep), frame)["name"]) == kept


def test_dedupe_of_equal_times_keeps_the_earlier_place_first() -> None:
    frame = frame_of(user=[1, 1], time=[5, 5], name=["a", "b"])
    assert keep_one(r.Dedupe(("user",), "time", "first"), frame)["name"].to_list() == ["a"]


# histories


def histories(frame: pl.DataFrame, **options: Any) -> dict[int, list[Any]]:
    """Place of each row that is left -> its history of items."""
    found = add_history(r.History(("item",), "user", "time", **options), frame)
    return dict(sorted(zip(found[POSITION].to_list(), found["item_history"].to_list(), strict=True)))


EVENTS = frame_of(user=[1, 1, 2, 1, 1], time=[1, 2, 2, 3, 4], item=["a", "b", "z", "c", "d"])


def test_history_excludes_the_event_itself_and_other_users() -> None:
    assert histories(EVENTS) == {0: [], 1: ["a"], 2: [], 3: ["a", "b"], 4: ["a", "b", "c"]}


def test_rows_of_the_same_time_do_not_see_each_other() -> None:
    frame = frame_of(user=[1, 1, 1, 1], time=[1, 2, 2, 3], item=["a", "b", "c", "d"])
    assert histories(frame) == {0: [], 1: ["a"], 2: ["a"], 3: ["a", "b", "c"]}


def test_with_same_time_rows_see_those_before_them_in_the_log() -> None:
    frame = frame_of(user=[1, 1, 1, 1], time=[1, 2, 2, 3], item=["a", "b", "c", "d"])
    seen = {0: [], 1: ["a"], 2: ["a", "b"], 3: ["a", "b", "c"]}
    assert histories(frame, same_time=True) == seen


def test_packed_histories_of_training_rows_have_each_event_once() -> None:
    frame = frame_of(user=[1] * 7, time=list(range(7)), item=list("abcdefg"))
    frame = frame.with_columns(pl.Series(SPLIT, [0, 0, 0, 0, 0, 1, 2]))
    # With their own items abc and cde; and every row that is held out has its history.
    packed = {0: [], 1: [], 2: ["a", "b"], 3: [], 4: ["c", "d"], 5: ["d", "e"], 6: ["e", "f"]}
    assert histories(frame, max_length=2, packed=True) == packed


def test_history_does_not_depend_on_the_order_of_rows() -> None:
    assert histories(EVENTS.sort("item", descending=True)) == histories(EVENTS)


def test_history_counts_the_events_that_meet_its_condition() -> None:
    frame = EVENTS.with_columns(clicked=pl.Series([1, 0, 1, None, 1]))
    assert histories(frame, where="clicked = 1") == {0: [], 1: ["a"], 2: [], 3: ["a"], 4: ["a"]}


def test_history_keeps_the_latest_events() -> None:
    assert histories(EVENTS, max_length=2)[4] == ["b", "c"]


def test_rows_with_a_short_history_are_dropped() -> None:
    assert histories(EVENTS, min_length=2) == {3: ["a", "b"], 4: ["a", "b", "c"]}


def test_last_keeps_the_latest_rows_of_each_user() -> None:
    assert histories(EVENTS, last=1) == {2: [], 4: ["a", "b", "c"]}


def test_rows_without_user_have_no_history() -> None:
    frame = frame_of(user=[None, None, 1], time=[1, 2, 3], item=["a", "b", "c"])
    assert histories(frame) == {0: [], 1: [], 2: []}


def test_history_of_no_rows_has_no_rows() -> None:
    assert histories(EVENTS.clear()) == {}


def lags(frame: pl.DataFrame, shift: int = 1) -> dict[int, Any]:
    found = rows.add_lag(r.Lag(("price",), "user", "time", shift), frame)
    return dict(sorted(zip(found[POSITION].to_list(), found[f"price_lag{shift}"].to_list(), strict=True)))


def test_lag_is_the_difference_to_an_earlier_row_of_the_same_group() -> None:
    frame = frame_of(user=[1, 2, 1, 1], time=[1, 1, 3, 2], price=[10, 50, 30, 15])
    assert lags(frame) == {0: None, 1: None, 2: 15, 3: 5}
    assert lags(frame, shift=2) == {0: None, 1: None, 2: 20, 3: None}


def test_rows_without_group_have_no_lag() -> None:
    assert lags(frame_of(user=[None, None], time=[1, 2], price=[10, 50])) == {0: None, 1: None}


# drawing items

CATALOGUE = rows.NegativeSampler(
    pl.DataFrame({"item": ["a", "b", "c", "d"], "__count": [60, 30, 9, 1], "brand": ["A", "B", "C", None]}),
    "item",
)


def negatives(frame: pl.DataFrame, **options: Any) -> pl.DataFrame:
    return rows.add_negatives(r.Negatives("click", **options), CATALOGUE, frame)


def test_negatives_follow_their_row_with_another_item_and_label() -> None:
    found = negatives(frame_of(item=["a", "b"], brand=["A", "B"], click=[1, 1]), per_row=2)
    assert found[COPY].to_list() == [0, 1, 2, 0, 1, 2]
    assert found[POSITION].to_list() == [0, 0, 0, 1, 1, 1]
    assert found["click"].to_list() == [1, 0, 0, 1, 0, 0]
    brands = {"a": "A", "b": "B", "c": "C", "d": None}
    assert found["brand"].to_list() == [brands[item] for item in found["item"]]


@pytest.mark.parametrize("by", ["uniform", "popularity"])
def test_a_negative_never_equals_its_positive(by: Any) -> None:
    found = negatives(frame_of(item=["a", "b", "c", "d", "new"] * 200, click=[1] * 1000), per_row=3, by=by)
    positive = found["item"].gather(pl.Series(np.arange(found.height) // 4 * 4))
    assert (found["item"] == positive).to_list() == [True, False, False, False] * 1000


def test_negatives_are_the_same_in_any_cutting() -> None:
    frame = frame_of(item=["a", "b"] * 50, click=[1] * 100)
    assert pl.concat([negatives(frame[:33]), negatives(frame[33:])]).equals(negatives(frame))
    assert not negatives(frame, seed=1).equals(negatives(frame))


@pytest.mark.parametrize(
    ("by", "shares"),
    [("uniform", {"b": 1 / 3, "c": 1 / 3, "d": 1 / 3}), ("popularity", {"b": 0.75, "c": 0.225, "d": 0.025})],
)
def test_negatives_are_drawn_in_proportion_to_what_is_left(by: Any, shares: dict[str, float]) -> None:
    found = negatives(frame_of(item=["a"] * 20_000, click=[1] * 20_000), by=by).filter(pl.col(COPY) == 1)
    counts = dict(found["item"].value_counts().iter_rows())
    assert {item: count / 20_000 for item, count in counts.items()} == pytest.approx(shares, abs=0.015)


def test_history_negatives_are_other_items_for_each_element() -> None:
    frame = frame_of(items=[["a", "b"], [], None, ["new"]])
    operation = r.HistoryNegatives("items", per_item=2)
    found = rows.add_history_negatives(operation, CATALOGUE, frame)["items_negatives"].to_list()
    assert [len(items) for items in found] == [4, 0, 0, 2]
    assert "a" not in found[0][:2]
    assert "b" not in found[0][2:]
    cut = [
        rows.add_history_negatives(operation, CATALOGUE, frame[row])["items_negatives"].to_list()[0]
        for row in range(4)
    ]
    assert cut == found
