"""Steps over numbers: literal values in, literal values out."""

from __future__ import annotations

import polars as pl
import pytest
from feature_fitting import fitted, outputs, transformed

from recmill.errors import FeatureError
from recmill.features.base import divided
from recmill.features.numeric import histogram_keys


def test_fill_replaces_missing_values_by_a_constant() -> None:
    assert transformed("int", [{"fill": 7}], [1, None]) == [1.0, 7.0]
    assert transformed("int", [{"fill": 0.5}], [1, None]) == [1.0, 0.5]
    assert transformed("bool", [{"fill": True}], [False, None]) == [0.0, 1.0]


def test_fill_with_the_mean_of_the_training_rows() -> None:
    assert transformed("int", [{"fill": {"statistic": "mean"}}], [1, None, 2, 6]) == [1.0, 3.0, 2.0, 6.0]


def test_median_of_an_even_number_of_values_is_the_lower_one() -> None:
    assert transformed("int", [{"fill": {"statistic": "median"}}], [4, 1, None, 3, 2]) == [
        4.0,
        1.0,
        2.0,
        3.0,
        2.0,
    ]


def test_median_of_a_column_without_values_is_0() -> None:
    assert transformed("float", [{"fill": {"statistic": "median"}}], [None]) == [0.0]


@pytest.mark.parametrize("value", [8191.0, -8191.0, 123456.789, -123456.789, 1e-9, -0.0])
def test_a_histogram_edge_is_at_most_0_025_percent_below_the_value(value: float) -> None:
    edge = histogram_keys(pl.Series([value])).to_numpy().view("f8")[0]
    assert edge <= value <= edge + abs(value) * 0.00025


def test_whole_numbers_below_8192_are_their_own_histogram_edges() -> None:
    numbers = pl.Series(range(-8191, 8192)).cast(pl.Float64)
    assert histogram_keys(numbers).to_numpy().view("f8").tolist() == numbers.to_list()


def test_missing_and_infinite_values_are_in_no_histogram() -> None:
    assert histogram_keys(pl.Series([None, float("nan"), float("inf"), 1.0])).is_null().to_list() == [
        True,
        True,
        True,
        False,
    ]


def test_clip_rounds_its_bounds_inwards_for_whole_numbers() -> None:
    assert transformed("int", [{"clip": {"min": -1.5, "max": 2.5}}], [-7, 0, 7, None]) == [
        -1.0,
        0.0,
        2.0,
        0.0,
    ]


def test_log_of_what_is_at_most_0_is_0() -> None:
    assert transformed("float", ["log"], [-5.0, 0.0, 1.718281828459045]) == [0.0, 0.0, 1.0]


def test_log_of_a_list_takes_each_element() -> None:
    assert transformed("list of int", ["log"], [[0, None, -3], [], None]) == [[0.0, 0.0, 0.0], [], []]


def test_cast_makes_text_that_is_no_number_missing() -> None:
    texts = ["12", " 1", "1.5", "x", "", None]
    assert transformed("text", [{"cast": "int"}, {"fill": -1}], texts) == [12.0, -1.0, -1.0, -1.0, -1.0, -1.0]


def test_cast_makes_text_that_is_not_finite_missing() -> None:
    assert transformed("text", [{"cast": "float"}, {"fill": -1}], ["1.5", "nan", "inf", "1e999"]) == [
        1.5,
        -1.0,
        -1.0,
        -1.0,
    ]


def test_cast_to_bool_reads_true_and_1() -> None:
    assert transformed("text", [{"cast": "bool"}], ["true", "1", "false", "yes"]) == [1.0, 1.0, 0.0, 0.0]


def test_add_adds_a_constant() -> None:
    assert transformed("int", [{"add": 0.5}], [1, None]) == [1.5, 0.0]


def test_standardise_uses_mean_and_deviation_of_the_training_rows() -> None:
    plan = fitted({"x": "int"}, ["standardise"], {"x": [1, 3, None]})
    assert outputs(plan, {"x": [1, 3, 7, None]}) == [-1.0, 1.0, 5.0, 0.0]


@pytest.mark.parametrize("length", [1, 2])
def test_a_row_alone_is_divided_as_among_others(length: int) -> None:
    frame = pl.DataFrame({"x": [11.0] * length})
    assert frame.select(divided(pl.col("x"), 21.0))["x"].to_list() == [11.0 * (1.0 / 21.0)] * length


def test_standardise_makes_a_constant_column_0() -> None:
    assert transformed("float", ["standardise"], [0.1, 0.1, 0.1]) == [0.0, 0.0, 0.0]


def test_min_max_clips_what_is_outside_the_training_range() -> None:
    plan = fitted({"x": "int"}, ["min_max"], {"x": [10, 20]})
    assert outputs(plan, {"x": [5, 10, 15, 25]}) == [0.0, 0.0, 0.5, 1.0]


def test_a_negative_zero_is_0_alone_and_among_others() -> None:
    plan = fitted({"x": "float"}, ["min_max"], {"x": [-0.0]})
    assert repr(outputs(plan, {"x": [-0.0]})) == repr(outputs(plan, {"x": [-0.0, None]})[:1]) == "[0.0]"


def test_min_max_scales_to_another_range() -> None:
    plan = fitted({"x": "int"}, [{"min_max": {"min": -1, "max": 3}}], {"x": [0, 4]})
    assert outputs(plan, {"x": [0, 1, 4]}) == [-1.0, 0.0, 3.0]


def test_an_edge_belongs_to_the_bucket_above_it() -> None:
    assert transformed("float", [{"buckets": [1, 100]}], [0.5, 1.0, 99.9, 100.0, None]) == [1, 2, 2, 3, 0]


def test_quantiles_hold_about_as_many_rows_each() -> None:
    plan = fitted({"x": "int"}, [{"quantiles": 4}], {"x": list(range(100))})
    ids = outputs(plan, {"x": list(range(100))})
    assert [ids.count(number) for number in (1, 2, 3, 4)] == [25, 25, 25, 25]
    assert outputs(plan, {"x": [-5, 500, None]}) == [1, 4, 0]
    assert transformed("int", [{"quantiles": 100}], list(range(100))) == list(range(1, 101))


def test_a_value_that_fills_several_quantiles_has_one_bucket() -> None:
    assert transformed("int", [{"quantiles": 4}], [0] * 9 + [5, 7]) == [1] * 9 + [2, 2]


def test_quantiles_of_a_column_without_values_have_no_edges() -> None:
    plan = fitted({"x": "int"}, [{"quantiles": 4}], {"x": [None]})
    assert outputs(plan, {"x": [3, None]}) == [1, 0]


# 2024-02-29 23:59:00 UTC, a Thursday
LEAP_DAY = 1_709_251_140


@pytest.mark.parametrize(
    ("part", "number"),
    [
        ("minute", 59),
        ("hour", 23),
        ("weekday", 3),
        ("day", 29),
        ("week", 9),
        ("month", 2),
        ("year", 2024),
        ("day_of_year", 60),
    ],
)
def test_date_parts_of_a_leap_day(part: str, number: int) -> None:
    assert transformed("int", [{"date_part": part}], [LEAP_DAY]) == [number]


def test_date_parts_of_milliseconds_and_of_times_before_1970() -> None:
    assert transformed("int", [{"date_part": {"part": "year", "unit": "ms"}}], [LEAP_DAY * 1000]) == [2024.0]
    assert transformed("float", [{"date_part": "minute"}], [-0.5]) == [59.0]


def test_a_time_beyond_the_calendar_is_missing() -> None:
    assert transformed("int", [{"date_part": "year"}, {"fill": 7}], [2**62, 10**15, LEAP_DAY]) == [
        7.0,
        7.0,
        2024.0,
    ]


def test_a_number_that_is_not_finite_is_an_error_that_names_the_feature() -> None:
    plan = fitted({"x": "float"}, [{"add": 1}], {"x": [1.0]})
    with pytest.raises(FeatureError, match='Feature "f" gives inf'):
        outputs(plan, {"x": [1e300]})


def test_a_list_element_that_is_not_finite_is_an_error_too() -> None:
    plan = fitted({"x_history": "list of float"}, [{"add": 1}], {"x_history": [[1.0], []]})
    with pytest.raises(FeatureError, match='Feature "f" gives -inf'):
        outputs(plan, {"x_history": [[], [0.0, -1e300]]})
