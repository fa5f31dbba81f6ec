"""Steps that give ids, keys, counts and codes: literal values in, literal values out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from feature_fitting import fit_units, fitted, outputs, recipe_of, rows_of, transformed

from recmill.errors import FeatureError
from recmill.features.category import fold_of
from recmill.features.kernels import hash64
from recmill.features.plan import Plan
from recmill.recipe.recipe import POSITION, SPLIT


def test_map_gives_0_to_every_other_value() -> None:
    assert transformed("text", [{"map": {"Quote": 1, "": 2}}], ["Quote", "", "Reply", None]) == [1, 2, 0, 0]
    assert transformed("int", [{"map": {"-3": 1}}], [-3, 3]) == [1, 0]
    assert transformed("bool", [{"map": {"false": 1, "true": 2}}], [True, False, None]) == [2, 1, 0]


# vocabularies


def test_unseen_item_maps_to_the_unknown_id() -> None:
    plan = fitted({"x": "text"}, ["vocabulary"], {"x": ["a", "b", "a"]})
    assert outputs(plan, {"x": ["a", "b", "c", "", None]}) == [1, 2, 0, 0, 0]


def test_the_most_frequent_value_has_id_1_and_ties_break_by_value() -> None:
    assert transformed("text", ["vocabulary"], ["c", "b", "a", "b", "é"]) == [3, 1, 2, 1, 4]
    assert transformed("int", ["vocabulary"], [7, -7, 0]) == [3, 1, 2]


def test_empty_text_is_a_value_of_its_own() -> None:
    assert transformed("text", ["vocabulary"], ["", None, ""]) == [1, 0, 1]


def test_rare_values_have_id_0() -> None:
    assert transformed("text", [{"vocabulary": {"min_count": 2}}], ["a", "b", "a", "c"]) == [1, 0, 1, 0]


def test_max_size_keeps_the_most_frequent_values() -> None:
    assert transformed("text", [{"vocabulary": {"max_size": 1}}], ["b", "a", "b"]) == [1, 0, 1]


def test_first_seen_order_follows_the_log() -> None:
    assert transformed("text", [{"vocabulary": {"order": "first_seen"}}], ["z", "a", "a", "m"]) == [
        1,
        2,
        2,
        3,
    ]


def test_values_of_held_out_rows_have_no_id() -> None:
    recipe = recipe_of({"x": "text"}, [{"name": "f", "columns": ["x"], "steps": ["vocabulary"]}])
    rows = rows_of(recipe, {"x": ["a", "b"]}, splits=[0, 1])
    assert fit_units(recipe, [[rows]]).apply(rows)["f"].to_list() == [1, 0]


def test_two_columns_share_one_vocabulary() -> None:
    shared = {"vocabulary": {"named": "user", "min_count": 2}}
    recipe = recipe_of({"x": "text", "y": "text"}, [{"columns": ["x", "y"], "steps": [shared]}])
    rows = rows_of(recipe, {"x": ["ann", "bob"], "y": ["bob", "cy"]})
    plan = fit_units(recipe, [[rows]])
    assert plan.tables["user"].frame.to_dict(as_series=False) == {"value": ["bob"], "count": [2]}
    assert plan.apply(rows)["x"].to_list() == [0, 1]
    assert plan.apply(rows)["y"].to_list() == [1, 0]


def test_a_shared_vocabulary_waits_for_columns_that_need_a_pass_of_their_own() -> None:
    shared = {"vocabulary": {"named": "size"}}
    features = [
        {"name": "early", "columns": ["x"], "steps": [shared]},
        {"name": "late", "columns": ["y"], "steps": ["count", shared]},
    ]
    recipe = recipe_of({"x": "int", "y": "text"}, features)
    plan = fit_units(recipe, [[rows_of(recipe, {"x": [5, 5], "y": ["a", "a"]})]])
    assert plan.tables["size"].frame.to_dict(as_series=False) == {"value": [2, 5], "count": [2, 2]}


def test_vocabularies_that_depend_on_each_other_are_an_error() -> None:
    features = [
        {
            "name": "f",
            "columns": ["x"],
            "steps": [{"vocabulary": {"named": "a"}}, {"vocabulary": {"named": "b"}}],
        },
        {
            "name": "g",
            "columns": ["x"],
            "steps": [{"vocabulary": {"named": "b"}}, {"vocabulary": {"named": "a"}}],
        },
    ]
    recipe = recipe_of({"x": "int"}, features)
    with pytest.raises(FeatureError, match="Features f, g depend on each other"):
        fit_units(recipe, [[rows_of(recipe, {"x": [1]})]])


def test_a_list_has_the_ids_of_its_elements() -> None:
    assert transformed("list of text", ["vocabulary"], [["a", "b"], ["a", None], [], None]) == [
        [1, 2],
        [1, 0],
        [],
        [],
    ]


def test_most_frequent_keeps_the_token_that_was_counted_most() -> None:
    steps = [{"split": "|"}, {"vocabulary": {"keep": "most_frequent"}}]
    plan = fitted({"x": "text"}, steps, {"x": ["a|b", "b", "c|a|d", "b"]})
    assert plan.tables["f"].frame["value"].to_list() == ["b", "a", "c", "d"]
    assert outputs(plan, {"x": ["a|b", "d|c", "new|d", "new", "", None]}) == [1, 3, 4, 0, 0, 0]


def test_a_lookup_does_not_count_into_the_vocabulary() -> None:
    features = [
        {"name": "item", "columns": ["x"], "steps": [{"vocabulary": {"named": "item"}}]},
        {"name": "f", "columns": ["y_history"], "steps": [{"lookup": "item"}]},
    ]
    recipe = recipe_of({"x": "int", "y_history": "list of int"}, features)
    rows = rows_of(recipe, {"x": [5, 6, 6], "y_history": [[5, 9, 9, 9], [6], None]})
    assert fit_units(recipe, [[rows]]).apply(rows)["f"].to_list() == [[2, 0, 0, 0], [1], []]


def extended(folder: Path, first: list[str], then: list[str], **options: Any) -> list[str]:
    fitted({"x": "text"}, ["vocabulary"], {"x": first}).save(folder)
    plan = fitted({"x": "text"}, [{"vocabulary": {"extend": str(folder), **options}}], {"x": then})
    return plan.tables["f"].frame["value"].to_list()


def test_extend_keeps_old_ids_and_adds_new_values_behind_them(tmp_path: Path) -> None:
    assert extended(tmp_path, ["b", "b", "a"], ["z", "c", "c", "a"]) == ["b", "a", "c", "z"]


def test_extend_keeps_old_values_however_rare_they_are_now(tmp_path: Path) -> None:
    assert extended(tmp_path, ["b", "a"], ["z", "c", "c"], min_count=2) == ["a", "b", "c"]


def test_max_size_never_drops_an_old_id(tmp_path: Path) -> None:
    assert extended(tmp_path, ["b", "a"], ["c"], max_size=1) == ["a", "b"]


def test_extend_of_an_absent_vocabulary_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(FeatureError, match="Give the directory of a Table"):
        fitted({"x": "text"}, [{"vocabulary": {"extend": str(tmp_path)}}], {"x": ["a"]})


def test_extend_with_values_of_another_type_is_an_error(tmp_path: Path) -> None:
    fitted({"x": "int"}, ["vocabulary"], {"x": [1]}).save(tmp_path)
    with pytest.raises(FeatureError, match="holds Int64, but the column is String"):
        fitted({"x": "text"}, [{"vocabulary": {"extend": str(tmp_path)}}], {"x": ["a"]})


# hashes and keys


def test_the_hash_is_xxh64() -> None:
    assert [hex(value) for value in hash64(pl.Series(["", "abc"]), 0)] == [
        "0xef46db3751d8e999",
        "0x44bc2cf5ad770999",
    ]


def test_hash_is_1_plus_the_remainder_and_missing_is_0() -> None:
    expected = [1 + 0xEF46DB3751D8E999 % 1000, 1 + 0x44BC2CF5AD770999 % 1000, 0]
    assert transformed("text", [{"hash": 1000}], ["", "abc", None]) == expected


def test_key_is_the_whole_hash_as_a_signed_number() -> None:
    expected = [0xEF46DB3751D8E999 - 2**64, 0x44BC2CF5AD770999, 0]
    assert transformed("text", ["key"], ["", "abc", None]) == expected


def test_a_number_is_hashed_as_8_little_endian_bytes() -> None:
    as_text = (0x6766656463626160).to_bytes(8, "little").decode()
    assert transformed("int", ["key"], [0x6766656463626160]) == transformed("text", ["key"], [as_text])


def test_the_seed_changes_the_hash() -> None:
    assert transformed("text", [{"key": {"seed": 1}}], ["abc"]) != transformed("text", ["key"], ["abc"])


def test_crosses_of_different_parts_do_not_collide() -> None:
    types, steps = {"x": "text", "y": "text"}, ["cross", "vocabulary"]
    columns = {"x": ["a", "ab", "a"], "y": ["bc", "c", "bc"]}
    assert outputs(fitted(types, steps, columns), columns) == [1, 2, 1]


def test_numbers_are_crossed_by_their_intervals() -> None:
    ids = {"1_a": 1, "2_a": 2, "3_a": 3, "0_a": 4}
    steps = [{"cross": {"separator": "_", "edges": [[0, 10], []]}}, {"map": ids}]
    columns = {"x": [-0.5, 0.0, 9.9, 10.0, None], "y": ["a"] * 5}
    assert outputs(fitted({"x": "float", "y": "text"}, steps, columns), columns) == [1, 2, 2, 3, 4]


def test_a_missing_part_of_a_cross_is_empty_text() -> None:
    types, steps = {"x": "text", "y": "int"}, [{"cross": "_"}, {"map": {"_7": 1, "a_": 2, "_": 3}}]
    columns = {"x": [None, "a", None], "y": [7, None, None]}
    assert outputs(fitted(types, steps, columns), columns) == [1, 2, 3]


# counts and codes


def test_count_is_0_for_unseen_and_missing_values() -> None:
    plan = fitted({"x": "text"}, ["count"], {"x": ["a", "b", "a", None]})
    assert outputs(plan, {"x": ["a", "b", "c", None]}) == [2.0, 1.0, 0.0, 0.0]


def test_frequency_is_a_share_of_all_training_rows() -> None:
    plan = fitted({"x": "text"}, ["frequency"], {"x": ["a", "b", "a", None]})
    assert outputs(plan, {"x": ["a", "b", "c"]}) == [0.5, 0.25, 0.0]


def target_plan(
    columns: dict[str, list[Any]], splits: list[int] | None = None, **options: Any
) -> tuple[Plan, pl.DataFrame]:
    recipe = recipe_of(
        {"x": "text", "y": "float"},
        [{"name": "f", "columns": ["x"], "steps": [{"target": {"label": "click", **options}}]}],
        [{"name": "click", "columns": "y"}],
    )
    rows = rows_of(recipe, columns, splits)
    return fit_units(recipe, [[rows]]), rows


def test_target_codes_by_hand() -> None:
    values, labels = ["a", "a", "a", "b", "b", "a"], [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    plan, rows = target_plan({"x": values, "y": labels}, folds=2, smooth=2)
    fold = fold_of(rows, 2, 0).to_list()
    assert set(fold) == {0, 1}

    def by_hand(row: int) -> float:
        others = [other for other in range(6) if fold[other] != fold[row]]
        same = [other for other in others if values[other] == values[row]]
        mean = sum(labels[other] for other in others) / len(others)
        return (sum(labels[other] for other in same) + mean * 2) / (len(same) + 2) if same else mean

    assert plan.apply(rows)["f"].to_list() == pytest.approx([by_hand(row) for row in range(6)])
    # New rows see all training rows: mean 4/6; "a" has 3 of 4, "b" 1 of 2.
    expected = [(3 + 4 / 6 * 2) / 6, (1 + 4 / 6 * 2) / 4, 4 / 6, 4 / 6]
    assert outputs(plan, {"x": ["a", "b", "new", None], "y": [0.0] * 4}) == pytest.approx(expected)


def test_held_out_rows_see_all_training_rows() -> None:
    plan, rows = target_plan(
        {"x": ["a"] * 5, "y": [1.0, 0.0, 1.0, 0.0, 1.0]}, splits=[0, 0, 0, 0, 1], smooth=0
    )
    assert plan.apply(rows)["f"].to_list()[-1] == 0.5


@pytest.mark.parametrize("smooth", [0, 20])
def test_no_label_of_a_fold_changes_the_codes_of_that_fold(smooth: int) -> None:
    values = ["a", "b"] * 10
    labels = [0.1 * row for row in range(20)]
    plan, rows = target_plan({"x": values, "y": labels}, smooth=smooth)
    fold = fold_of(rows, 5, 0).to_numpy()
    for number in range(5):
        changed = np.where(fold == number, 1000.7, labels).tolist()
        other, other_rows = target_plan({"x": values, "y": changed}, smooth=smooth)
        codes, other_codes = plan.apply(rows)["f"].to_numpy(), other.apply(other_rows)["f"].to_numpy()
        assert codes[fold == number].tolist() == other_codes[fold == number].tolist()
        assert (codes != other_codes)[fold != number].any()


def test_without_smoothing_a_value_of_one_fold_has_the_mean_of_the_others() -> None:
    plan, rows = target_plan({"x": ["a", *"bbbbbbbbb"], "y": [1.0] + [0.0] * 9}, smooth=0)
    assert plan.apply(rows)["f"].to_list()[0] == 0.0
    assert outputs(plan, {"x": ["a", "new"], "y": [0.0, 0.0]}) == pytest.approx([1.0, 0.1])


STATISTICS = {
    "mean": 3.0,
    "sum": 9.0,
    "min": 1.0,
    "max": 6.0,
    "count": 3.0,
    "std": (14 / 3) ** 0.5,
    "first": 6.0,
    "last": 2.0,
    "distinct": 3.0,
}


@pytest.mark.parametrize("statistic", STATISTICS)
def test_aggregate_joins_a_statistic_back(statistic: str) -> None:
    step = {"aggregate": {"column": "y", "statistic": statistic}}
    recipe = recipe_of({"x": "text", "y": "int"}, [{"name": "f", "columns": ["x"], "steps": [step]}])
    rows = rows_of(recipe, {"x": ["a", "a", "b", "a", "a", None], "y": [6, 1, None, None, 2, 50]})
    found = fit_units(recipe, [[rows]]).apply(rows)["f"].to_list()
    assert found == pytest.approx([STATISTICS[statistic]] * 2 + [0.0] + [STATISTICS[statistic]] * 2 + [0.0])


def test_first_and_last_follow_the_log_whatever_the_order_of_the_pieces() -> None:
    step = {"aggregate": {"column": "y", "statistic": "first"}}
    recipe = recipe_of({"x": "text", "y": "int"}, [{"name": "f", "columns": ["x"], "steps": [step]}])
    rows = rows_of(recipe, {"x": ["a", "a", "a"], "y": [3, 2, 1]})
    plan = fit_units(recipe, [[rows[2]], [rows[1], rows[0]]], workers=2)
    assert plan.apply(rows)["f"].to_list() == [3.0, 3.0, 3.0]


def test_aggregate_of_a_column_without_values_is_missing() -> None:
    step = {"aggregate": {"column": "y"}}
    recipe = recipe_of(
        {"x": "text", "y": "int"}, [{"name": "f", "columns": ["x"], "steps": [step, {"fill": -1}]}]
    )
    rows = rows_of(recipe, {"x": ["a", None], "y": [None, None]})
    assert fit_units(recipe, [[rows]]).apply(rows)["f"].to_list() == [-1.0, -1.0]


def test_one_hot_of_an_id() -> None:
    assert transformed("int", [{"one_hot": 3}], [0, 2, None]) == [
        [1.0, 0.0, 0.0],
        [0.0, 0.0, 1.0],
        [1.0, 0.0, 0.0],
    ]


@pytest.mark.parametrize("value", [-1, 3])
def test_one_hot_refuses_an_id_out_of_range(value: int) -> None:
    with pytest.raises(FeatureError, match=f"one_hot has size 3, but an id is {value}"):
        transformed("int", [{"one_hot": 3}], [0, value])


def test_places_and_splits_are_carried_along() -> None:
    recipe = recipe_of({"x": "text"}, [{"name": "f", "columns": ["x"], "steps": ["vocabulary"]}])
    rows = rows_of(recipe, {"x": ["a"]}, first=7)
    assert fit_units(recipe, [[rows]]).apply(rows).row(0, named=True) == {"f": 1, POSITION: 7, SPLIT: 0}
