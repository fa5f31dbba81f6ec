"""Steps over text, lists and several columns: literal values in, literal values out."""

from __future__ import annotations

import polars as pl
import pytest
from feature_fitting import fitted, outputs, transformed

from recmill.errors import FeatureError, RecipeError


def test_split_of_empty_text_is_an_empty_list() -> None:
    assert transformed("text", [{"split": "|"}, "length"], ["a|b", "a", "", "||", None]) == [
        2.0,
        1.0,
        0.0,
        0.0,
        0.0,
    ]


def test_first_keeps_the_beginning_of_a_list() -> None:
    assert transformed("list of int", [{"first": 2}], [[3, 1, 2], [4], [], None]) == [
        [3.0, 1.0],
        [4.0],
        [],
        [],
    ]


def test_concat_joins_tokens_into_one_text() -> None:
    steps = [{"split": "\t"}, {"first": 2}, {"concat": "_"}, {"map": {"": 1, "Photo": 2, "Photo_GIF": 3}}]
    assert transformed("text", steps, ["Photo\tGIF\tVideo", "Photo", "", "Video"]) == [3, 2, 1, 0]


def test_length_of_a_missing_list_is_0() -> None:
    assert transformed("list of text", ["length"], [["a", None], [], None]) == [2.0, 0.0, 0.0]


def test_pad_keeps_the_last_elements_and_fills_on_the_right() -> None:
    assert transformed("list of int", [{"pad": 2}], [[1, 2, 3], [4], [], None]) == [
        [2.0, 3.0],
        [4.0, 0.0],
        [0.0, 0.0],
        [0.0, 0.0],
    ]


def test_pad_fills_with_another_value() -> None:
    assert transformed("list of float", [{"pad": {"length": 2, "value": -1}}], [[0.5]]) == [[0.5, -1.0]]


def test_mask_marks_the_real_elements_of_what_pad_makes() -> None:
    assert transformed("list of int", [{"mask": 2}], [[1, 2, 3], [4], None]) == [
        [1.0, 1.0],
        [1.0, 0.0],
        [0.0, 0.0],
    ]


def test_pack_makes_a_list_and_its_missing_elements_0() -> None:
    columns = {"x": [1, None], "y": [0.5, 2.0], "z": [True, None]}
    types = {"x": "int", "y": "float", "z": "bool"}
    assert outputs(fitted(types, ["pack"], columns), columns) == [[1.0, 0.5, 1.0], [0.0, 2.0, 0.0]]


def test_a_missing_element_of_a_list_is_0() -> None:
    assert transformed("text", [{"split": "|"}, {"cast": "int"}], ["1|x|3"]) == [[1.0, 0.0, 3.0]]


# expressions


def expression(sql: str, columns: dict[str, list[float | None]], type: str = "float") -> list[float]:
    types = dict.fromkeys(columns, "float")
    plan = fitted(types, [{"expression": {"sql": sql, "type": type}}], columns)
    return outputs(plan, columns)


def test_an_expression_computes_row_by_row() -> None:
    assert expression("clicks / (views + 1)", {"clicks": [1.0, None], "views": [3.0, 2.0]}) == [0.25, 0.0]
    assert expression("x > 0 and x < 5", {"x": [1.0, 7.0]}, type="int") == [1.0, 0.0]


@pytest.mark.parametrize("sql", ["sum(x)", "x - avg(x)", "max(x) over ()", "row_number() over (order by x)"])
def test_an_expression_that_aggregates_is_refused(sql: str) -> None:
    with pytest.raises(RecipeError, match="an expression must treat rows one by one"):
        expression(sql, {"x": [1.0, 2.0]})


@pytest.mark.parametrize("divisor", [3, 5, 7, 49])
def test_an_expression_that_divides_gives_one_row_what_it_gives_many(divisor: int) -> None:
    steps = [{"expression": f"x / {divisor}"}, {"buckets": [number / 7 for number in range(1, 400)]}]
    numbers = list(range(1, 200))
    plan = fitted({"x": "int"}, steps, {"x": numbers})
    assert [outputs(plan, {"x": [number]})[0] for number in numbers] == outputs(plan, {"x": numbers})


def test_an_expression_that_gives_nan_for_some_number_is_no_aggregate() -> None:
    assert expression("sqrt(x)", {"x": [4.0]}) == [2.0]


@pytest.mark.parametrize("sql", ["x +", "x + 'a'", "nothing(x)"])
def test_an_expression_that_cannot_be_read_or_does_not_fit_is_refused(sql: str) -> None:
    with pytest.raises(RecipeError, match=r"features\[0\].steps\[0\].expression.sql, at character"):
        expression(sql, {"x": [1.0]})


@pytest.mark.parametrize("kind", ["int", "float", "text", "bool"])
def test_an_expression_may_read_a_list_of_any_kind(kind: str) -> None:
    step = {"expression": {"sql": "array_length(x_history)", "type": "int"}}
    plan = fitted({"x_history": f"list of {kind}"}, [step], {"x_history": [[], None]})
    assert outputs(plan, {"x_history": [[None, None], []]}) == [2.0, 0.0]


# functions


def total_length(left: pl.Series, right: pl.Series) -> pl.Series:
    return left.str.len_chars() + right.str.len_chars()


def a_list(texts: pl.Series) -> list[int]:
    return [len(text) for text in texts]


def too_few(texts: pl.Series) -> pl.Series:
    return texts.head(1)


def as_it_is(texts: pl.Series) -> pl.Series:
    return texts


def call(name: str, **columns: list[str]) -> list[float]:
    step = {"function": {"path": f"test_features_lists:{name}", "type": "int"}}
    return outputs(fitted(dict.fromkeys(columns, "text"), [step], columns), columns)


def test_a_function_takes_columns_and_returns_one() -> None:
    assert call("total_length", x=["ab", "é"], y=["c", ""]) == [3.0, 1.0]


def test_a_function_that_returns_no_series_is_an_error() -> None:
    with pytest.raises(FeatureError, match="must return a Polars series, got list"):
        call("a_list", x=["ab"])


def test_a_function_that_loses_rows_is_an_error() -> None:
    with pytest.raises(FeatureError, match="got 1 values for 2 rows"):
        call("too_few", x=["ab", "c"])


def test_a_function_that_returns_another_type_is_an_error() -> None:
    with pytest.raises(FeatureError, match="gave String, which is not int"):
        call("as_it_is", x=["ab"])


@pytest.mark.parametrize("path", ["no_such_package:f", "test_features_lists:no_such_function"])
def test_a_function_that_cannot_be_imported_is_an_error(path: str) -> None:
    plan = fitted({"x": "text"}, [{"function": path}], {"x": ["a"]})
    with pytest.raises(FeatureError, match=f"Function {path} cannot be imported"):
        outputs(plan, {"x": ["a"]})
