"""The grammar of conditions and expressions: what is read, what is refused and where, what it means."""
# ruff: noqa: E501

from __future__ import annotations

import os
import random
from pathlib import Path

import polars as pl
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from where_oracle import HOSTILE, KINDS, ROWS, Writer, meets, some_input

from recmill.errors import ExpressionError
from recmill.features.expressions import compiled, keep_where, kinds_of_schema
from recmill.recipe.expressions import columns_of, parse_condition, parse_expression, parse_filter

FRAME = pl.DataFrame(
    ROWS,
    schema={
        "n": pl.Int64, "price": pl.Float64, "word": pl.String, "is_new": pl.Boolean, "in": pl.Int64,
        "tags": pl.List(pl.String), "ids": pl.List(pl.Int64), "vals": pl.List(pl.Float64),
    },
)  # fmt: skip


def rows_that_meet(text: str) -> list[int]:
    condition = compiled(parse_condition(text, KINDS)).fill_null(False)
    met = FRAME.select(condition.alias("met"), pl.col("n").alias("rows"))["met"]
    return [row for row, is_met in enumerate(met) if is_met]


def test_a_subquery_is_refused_and_reads_no_file(tmp_path: Path) -> None:
    secret = tmp_path / "tokens"
    secret.write_text("x\nsecret\n")
    with pytest.raises(
        ExpressionError, match=r"at character 11: expected .* found SELECT; there are no subqueries"
    ):
        keep_where(f"price IN (SELECT x FROM read_csv('{secret}'))", FRAME)


def test_no_fifo_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ExpressionError, match="at character 7"):
        keep_where(f"n in (select * from read_csv('{tmp_path / 'fifo'}'))", FRAME)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("price >", "at character 8: expected a column, a constant or (, found the end"),
        ("price > 3 price", "at character 11: expected and, or or the end, found price"),
        ("prize > 3", 'at character 1: there is no column prize; did you mean "price"?'),
        ("word = 3", 'at character 8: column "word" is text and 3 is int; they cannot be compared'),
        ("price in (1, 'a')", "at character 14: column \"price\" is float and 'a' is text; they cannot be compared"),
        ("tags = 'a'", 'at character 1: column "tags" is a list of text, which cannot be compared'),
        ("3 in tags", 'at character 1: 3 is int, but column "tags" is a list of text; give it text'),
        ("word in word", 'at character 9: expected a column of lists, but column "word" is text'),
        ("n like 'a'", 'at character 1: expected text before like, but column "n" is int'),
        ("price", 'at character 1: expected a condition, which is true or false for each row, but column "price" is float'),
        ("n and is_new", 'at character 1: expected what is true or false, but column "n" is int'),
        ("n = 99999999999999999999", "at character 5: a whole number of 20 digits is beyond 64 bits"),
        ("n < 1e400", "at character 5: the number is too large; the largest is about 1.8e308"),
        ("in = 3", "at character 1: expected a column, a constant or (, found in; a column called like a keyword needs double quotes: \"in\""),
        ("word = 'a", "at character 8: a quote (') is opened here and never closed"),
        ("n = 1; n = 2", "at character 6: ';' means nothing here"),
        ("n + 1 > 2", "at character 3: expected and, or or the end, found +; conditions of requests do not compute"),
        ("LPAD(word, 20000000, 'x') = 'a'", "at character 1: expected a column, found LPAD(); conditions have no functions"),
        ("least() > 1", "at character 1: expected a column, found least(); conditions have no functions"),
        ("(" * 40, "at character 33: expected at most 32 levels of nesting"),
        ("n in (" + "1," * 600 + "1)", "at character 1005: expected at most 500 columns, constants and operators"),
        ("is_new or " * 300, "at character 2001: expected at most 2,000 characters, got 3,000"),
        ("word like '" + "a" * 300 + "'", "at character 11: expected a pattern of at most 200 characters, got 300"),
    ],
)  # fmt: skip
def test_what_is_not_a_condition_is_refused_with_its_place(text: str, reason: str) -> None:
    with pytest.raises(ExpressionError) as raised:
        parse_condition(text, KINDS)
    assert str(raised.value) == reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("least() > 1", "least() takes 1 or more arguments, got 0"),
        ("lpad(word, 20000000, 'x') = 'a'", "there is no function lpad()"),
        ("sum(n) > 1", "an expression must treat rows one by one"),
        ("round(price, n) > 1", "argument 2 of round() must be a constant from 0 to 15"),
        ("word + 1 > 2", 'expected a number to +, but column "word" is text'),
        ("case n when 1 then true end", "expected when, found n"),
    ],
)
def test_what_recipes_cannot_compute_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ExpressionError) as raised:
        parse_filter(text, KINDS)
    assert reason in str(raised.value)


def test_columns_are_neither_texts_nor_functions_nor_keywords() -> None:
    sql = 'CASE WHEN "odd ""name""" > 1e5 AND lower (titre_é) = ' + "'it''s end' THEN x1 ELSE abs(n) END"
    kinds = {'odd "name"': "float", "titre_é": "text", "x1": "int", "n": "int"}
    assert columns_of(parse_expression(sql, kinds)) == ['odd "name"', "titre_é", "x1", "n"]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("word in ('a', 'ab')", [1, 2]),
        ("word not in ('a', null)", []),
        ("'a' in tags", [1, 2]),
        ("n in ids", [1, 4, 7]),
        ("not 'a' in tags", [0, 4, 5, 6, 7]),
        ("price between 0 and 3", [0, 1, 2]),
        ("price > 1e308", [4, 5]),
        ("word like 'a%'", [1, 2, 4]),
        ("word ilike 'AB%'", [2, 7]),
        ("word like 'a%b_c'", [4]),
        ("word like '%_''s_'", [5]),
        ("is_new is not true", [1, 2, 3, 5, 7]),
        ("is_new = 1", [0, 4, 6]),
        ("n is null or not is_new", [1, 3, 5, 7]),
        ("true", [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_conditions_mean_what_sql_means(text: str, rows: list[int]) -> None:
    assert rows_that_meet(text) == rows


@examples(100)
@given(st.integers(0, 2**32))
def test_polars_and_plain_python_agree_on_every_condition(seed: int) -> None:
    text = some_input(Writer(random.Random(seed)))
    try:
        tree = parse_condition(text, KINDS)
    except ExpressionError:
        return
    assert rows_that_meet(text) == [number for number, row in enumerate(ROWS) if meets(tree, row)]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_are_refused_or_evaluated(text: str) -> None:
    for parse in (parse_condition, parse_expression):
        try:
            FRAME.select(compiled(parse(text, KINDS)).alias("value"))
        except ExpressionError as refused:
            refusal = str(refused)
            assert len(refusal) < 500


@pytest.mark.parametrize("divisor", ["3", "7.0", "n3"])
def test_a_filter_that_divides_keeps_a_row_alone_as_among_others(divisor: str) -> None:
    frame = pl.DataFrame({"x": [float(number) for number in range(1, 200)], "n3": 3})
    edges = [number / 7 for number in range(1, 60)]
    for edge in edges:
        sql = f"x / {divisor} > {edge!r}"
        alone = [keep_where(sql, frame[row]).height == 1 for row in range(0, frame.height, 7)]
        among = keep_where(sql, frame)["x"].to_list()
        assert alone == [frame["x"][row] in among for row in range(0, frame.height, 7)]


def test_kinds_of_a_schema_leave_out_what_conditions_cannot_read() -> None:
    schema = {"a": pl.Int8(), "b": pl.Date(), "c": pl.List(pl.List(pl.Int64())), "d": pl.List(pl.Float32())}
    assert kinds_of_schema(schema) == {"a": "int", "d": "list of float"}
