"""The rules of JSON lines, one literal case each."""

from __future__ import annotations

from pathlib import Path

import pytest
from log_reading import Everything, columns_of, read_text

from recmill.errors import LogError
from recmill.logs.base import BadRow
from recmill.recipe.recipe import Column

ALL = columns_of(i="int", f="float", t="text", h="hex", b="bool")


def read_lines(directory: Path, text: bytes, columns: tuple[Column, ...] = ALL) -> Everything:
    return read_text(directory, text, columns, format="jsonl")


def test_each_type_is_read_as_its_polars_type(tmp_path: Path) -> None:
    text = b'{"i":7,"f":1.5,"t":"a\\tb","h":"0xff","b":true,"more":[1,{}]}\n{"f":2}\n{"t":""}\r\n{"i":null}'
    assert read_lines(tmp_path, text).rows == [
        (0, 7, 1.5, "a\tb", 255, True),
        (61, None, 2.0, None, None, None),
        (69, None, None, None, None, None),
        (79, None, None, None, None, None),
    ]


def test_whole_floats_are_integers_even_beside_bad_rows(tmp_path: Path) -> None:
    found = read_lines(tmp_path, b'{"i":5.0}\n{"i":1e3}\nnonsense\n {"i":6} \n', columns_of(i="int"))
    assert found.values == [(5,), (1000,), (6,)]
    assert found.bad == [BadRow("log.txt", 20, "not JSON", None, b"nonsense")]


@pytest.mark.parametrize(
    ("line", "reason", "column"),
    [
        (b'{"i":"5"}', "wrong type", "i"),
        (b'{"i":true}', "wrong type", "i"),
        (b'{"i":1.5}', "not an integer", "i"),
        (b'{"i":9223372036854775808}', "not an integer", "i"),
        (b'{"i":[1]}', "wrong type", "i"),
        (b'{"f":"1"}', "wrong type", "f"),
        (b'{"f":1e999}', "number out of range", None),
        (b'{"f":' + b"9" * 400 + b"}", "not a number", "f"),
        (b'{"f":NaN}', "not JSON", None),
        (b'{"t":5}', "wrong type", "t"),
        (b'{"t":"\xff"}', "invalid UTF-8", None),
        (b'{"h":255}', "wrong type", "h"),
        (b'{"h":"xyz"}', "not hexadecimal", "h"),
        (b'{"b":1}', "wrong type", "b"),
        (b'{"b":"true"}', "wrong type", "b"),
        (b"[1]", "not an object", None),
        (b"null", "not an object", None),
        (b"", "not JSON", None),
        (b'{"i":5', "not JSON", None),
        (b"{}{}", "not JSON", None),
        (b'{"deep":' + b"[" * 5000 + b"]" * 5000 + b"}", "not JSON", None),
    ],
)
def test_line_that_cannot_be_read_is_set_aside(
    tmp_path: Path, line: bytes, reason: str, column: str | None
) -> None:
    found = read_lines(tmp_path, b'{"i":1}\n' + line + b'\n{"i":2}\n')
    assert found.bad == [BadRow("log.txt", 8, reason, column, line)]
    assert [row[0] for row in found.values] == [1, 2]


def test_objects_across_lines_do_not_make_up_for_two_in_a_line(tmp_path: Path) -> None:
    found = read_lines(tmp_path, b'{}{}\n{"i":\n1}\n')
    assert found.values == []
    assert len(found.bad) == 3


def test_allowed_and_required_values(tmp_path: Path) -> None:
    columns = (Column("i", "int", allowed=(0, 1), required=True), Column("t", "text", allowed=("a",)))
    found = read_lines(tmp_path, b'{"i":1,"t":"a"}\n{"i":2}\n{}\n{"i":0,"t":"b"}\n', columns)
    assert found.values == [(1, "a")]
    assert found.reasons == [
        ("value not allowed", "i"),
        ("missing required value", "i"),
        ("value not allowed", "t"),
    ]


def test_a_column_that_no_json_key_can_match_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="cannot be a JSON key"):
        read_lines(tmp_path, b"{}", columns_of(**{'a"b': "int"}))


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    assert read_lines(tmp_path, b'\xef\xbb\xbf{"i":1}', columns_of(i="int")).rows == [(3, 1)]
