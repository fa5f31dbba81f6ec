"""The rules of delimited logs, one literal case each."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from log_reading import columns_of, read_all, read_text

from recmill.errors import LogError
from recmill.logs import text as text_module
from recmill.logs.base import BadRow, LogRange, open_source
from recmill.recipe.recipe import Column, Log

INT_TEXT = columns_of(a="int", b="text")


def test_each_type_is_read_as_its_polars_type(tmp_path: Path) -> None:
    columns = columns_of(i="int", f="float", t="text", h="hex", b="bool")
    found = read_text(tmp_path, b"7\t1.5\tab\tff\ttrue\n-7\t-2e3\tc d\t0xFF\tFalse\n", columns)
    assert found.rows == [(0, 7, 1.5, "ab", 255, True), (17, -7, -2000.0, "c d", 255, False)]


def test_empty_fields_are_nulls_of_every_type(tmp_path: Path) -> None:
    columns = columns_of(i="int", f="float", t="text", h="hex", b="bool")
    found = read_text(tmp_path, b"\t\t\t\t\n1\t1\tx\t1\t1\n", columns)
    assert found.values == [(None,) * 5, (1, 1.0, "x", 1, True)]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("int", "0", 0),
        ("int", "+5", 5),
        ("int", "-0", 0),
        ("int", "00012", 12),
        ("int", "12345678", 12345678),
        ("int", "123456789", 123456789),
        ("int", "5.0", 5),
        ("int", "-5.000", -5),
        ("int", "9223372036854775807", 2**63 - 1),
        ("int", "-9223372036854775808", -(2**63)),
        ("float", "1", 1.0),
        ("float", "+1.5", 1.5),
        ("float", ".5", 0.5),
        ("float", "5.", 5.0),
        ("float", "1e-3", 0.001),
        ("float", "5e-324", 5e-324),
        ("hex", "68fd1e64", 0x68FD1E64),
        ("hex", "68FD1E64", 0x68FD1E64),
        ("hex", "0", 0),
        ("hex", "7fffffffffffffff", 2**63 - 1),
        ("hex", "8000000000000000", -(2**63)),
        ("hex", "0xffffffffffffffff", -1),
        ("bool", "0", False),
        ("bool", "1", True),
        ("bool", "True", True),
        ("bool", "false", False),
        ("text", "żółć 東京 🛒", "żółć 東京 🛒"),
        ("text", "NULL", "NULL"),
        ("text", " ", " "),
    ],
)
def test_value_is_read(tmp_path: Path, kind: str, text: str, value: object) -> None:
    found = read_text(tmp_path, f"{text}\n".encode(), columns_of(x=kind))
    assert found.values == [(value,)]


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("int", "x", "not an integer"),
        ("int", "1x", "not an integer"),
        ("int", "+", "not an integer"),
        ("int", "--1", "not an integer"),
        ("int", "5.", "not an integer"),
        ("int", "5.01", "not an integer"),
        ("int", ".0", "not an integer"),
        ("int", " 5", "not an integer"),
        ("int", "1e3", "not an integer"),
        ("int", "9223372036854775808", "not an integer"),
        ("int", "-9223372036854775809", "not an integer"),
        ("int", "99999999999999999999999", "not an integer"),
        ("float", "nan", "not a number"),
        ("float", "-inf", "not a number"),
        ("float", "Infinity", "not a number"),
        ("float", "1e999", "not a number"),
        ("float", "0x1p3", "not a number"),
        ("float", "+-1", "not a number"),
        ("float", ".", "not a number"),
        ("hex", "68fd1e6g", "not hexadecimal"),
        ("hex", "0x", "not hexadecimal"),
        ("hex", "10000000000000000", "not hexadecimal"),
        ("hex", "-1", "not hexadecimal"),
        ("bool", "TRUE", "not a boolean"),
        ("bool", "2", "not a boolean"),
    ],
)
def test_value_that_cannot_be_read_sets_its_row_aside(
    tmp_path: Path, kind: str, text: str, reason: str
) -> None:
    found = read_text(tmp_path, f"1\t{text}\n2\t\n".encode(), columns_of(a="int", x=kind))
    assert found.bad == [BadRow("log.txt", 0, reason, "x", f"1\t{text}".encode())]
    assert found.values == [(2, None)]


def test_a_bad_row_leaves_nothing_behind_in_the_columns_before_it(tmp_path: Path) -> None:
    columns = columns_of(t="text", i="int", b="bool", x="int")
    text = b"a\t1\t1\t1\n\t\t\tbad\nlong text\t5\t1\tbad\nb\t2\t0\t2\n\t\t\t3\n"
    found = read_text(tmp_path, text, columns)
    assert found.values == [("a", 1, True, 1), ("b", 2, False, 2), (None, None, None, 3)]


def test_wrong_number_of_fields_is_a_bad_row(tmp_path: Path) -> None:
    found = read_text(tmp_path, b"1\n1\ta\n1\ta\tb\n\n1\ta\t\n", INT_TEXT)
    assert found.values == [(1, "a")]
    assert found.reasons == [("wrong number of fields", None)] * 4
    assert [row.offset for row in found.bad] == [0, 6, 12, 13]


def test_empty_line_is_a_null_only_for_a_single_text_column(tmp_path: Path) -> None:
    assert read_text(tmp_path, b"a\n\r\n\nb", columns_of(t="text")).values == [
        ("a",),
        (None,),
        (None,),
        ("b",),
    ]
    found = read_text(tmp_path, b"1\n\n\r\n2", columns_of(i="int"))
    assert found.values == [(1,), (2,)]
    assert found.reasons == [("wrong number of fields", None)] * 2


def test_carriage_returns_before_newlines_are_no_part_of_the_row(tmp_path: Path) -> None:
    found = read_text(tmp_path, b"1\ta\r\n2\t\r\n3\tb\r\r\n4\tc\r", INT_TEXT)
    assert found.rows == [(0, 1, "a"), (5, 2, None), (9, 3, "b\r"), (15, 4, "c")]


def test_last_line_needs_no_newline(tmp_path: Path) -> None:
    assert read_text(tmp_path, b"1\ta\n2\tb", INT_TEXT).values == [(1, "a"), (2, "b")]


def test_a_file_shorter_than_a_byte_order_mark_is_counted_whole(tmp_path: Path) -> None:
    assert read_text(tmp_path, b"\n1", columns_of(i="int")).num_rows == 2


def test_empty_file_has_no_rows(tmp_path: Path) -> None:
    assert read_text(tmp_path, b"", INT_TEXT).num_rows == 0
    assert read_text(tmp_path, b"", INT_TEXT, header=True).num_rows == 0


@pytest.mark.parametrize("separator", ["\t", ",", "\x01", "::", ":::", "|", "é"])
def test_any_separator(tmp_path: Path, separator: str) -> None:
    text = f"1{separator}a:b\n{separator}\n2{separator}c".encode()
    found = read_text(tmp_path, text, INT_TEXT, separator=separator)
    assert found.values == [(1, "a:b"), (None, None), (2, "c")]


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    assert read_text(tmp_path, b"\xef\xbb\xbf1\ta\n", INT_TEXT).rows == [(3, 1, "a")]
    assert read_text(tmp_path, b"\xef\xbb\xbfb\ta\nx\t1\n", INT_TEXT, header=True).rows == [(7, 1, "x")]


def test_header_may_have_another_order_and_more_columns(tmp_path: Path) -> None:
    found = read_text(tmp_path, b"b\tmore\ta\r\nx\t?\xff\t1\n\ty\t\n", INT_TEXT, header=True)
    assert found.rows == [(10, 1, "x"), (17, None, None)]


def test_each_file_has_its_own_header(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("a,b\n1,x\n")
    (tmp_path / "2.csv").write_text("b,a\ny,2\n")
    log = Log(files=("*.csv",), columns=INT_TEXT, header=True, separator=",")
    assert read_all(open_source(log, str(tmp_path))).rows == [(4, 1, "x"), (2**44 + 4, 2, "y")]


def test_missing_header_column_names_the_nearest(tmp_path: Path) -> None:
    columns = columns_of(item_id="int")
    with pytest.raises(
        LogError, match=r'no column "item_id".*has: user_id, itemid\. Did you mean "itemid"\?'
    ):
        read_text(tmp_path, b"user_id\titemid\n1\t2\n", columns, header=True)
    with pytest.raises(LogError, match="more than once"):
        read_text(tmp_path, b"item_id\titem_id\n1\t2\n", columns, header=True)


def test_quotes_hold_separators_newlines_and_doubled_quotes(tmp_path: Path) -> None:
    text = b'1,"a,b"\n2,"two\nlines"\n"3","say ""hi"""\n4,""\n5,plain "quotes" inside\r\n6,"x"\r\n'
    found = read_text(tmp_path, text, INT_TEXT, separator=",", quote='"')
    assert found.values == [
        (1, "a,b"),
        (2, "two\nlines"),
        (3, 'say "hi"'),
        (4, None),
        (5, 'plain "quotes" inside'),
        (6, "x"),
    ]


def test_a_quote_that_never_closes_costs_one_line(tmp_path: Path) -> None:
    found = read_text(tmp_path, b'1,a\n2,"open\n3,c\n', INT_TEXT, separator=",", quote='"')
    assert found.values == [(1, "a"), (3, "c")]
    assert found.bad == [BadRow("log.txt", 4, "quote never closed", None, b'2,"open')]


def test_text_after_a_closing_quote_is_a_bad_row(tmp_path: Path) -> None:
    found = read_text(tmp_path, b'1,"a"b\n2,"b"\n', INT_TEXT, separator=",", quote='"')
    assert found.values == [(2, "b")]
    assert found.reasons == [("text after a closing quote", None)]


def test_quoted_header(tmp_path: Path) -> None:
    found = read_text(
        tmp_path,
        b'"b ""x""","a"\nz,1\n',
        columns_of(**{'b "x"': "text"}),
        header=True,
        separator=",",
        quote='"',
    )
    assert found.values == [("z",)]


def test_latin_1_becomes_utf_8(tmp_path: Path) -> None:
    text = "1::Léon ÿ\n2::plain\n".encode("latin-1")
    found = read_text(tmp_path, text, INT_TEXT, separator="::", encoding="latin-1")
    assert found.values == [(1, "Léon ÿ"), (2, "plain")]
    quoted = read_text(
        tmp_path, '1,"é""é"\n'.encode("latin-1"), INT_TEXT, separator=",", quote='"', encoding="latin-1"
    )
    assert quoted.values == [(1, 'é"é')]


@pytest.mark.parametrize(
    "broken",
    [b"\xff", b"\xc3", b"\xc0\xaf", b"\xe0\x80\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xf0\x9f\x9b"],
)
def test_invalid_utf_8_is_a_bad_row(tmp_path: Path, broken: bytes) -> None:
    found = read_text(tmp_path, b"1\tab" + broken + b"cdefghij\n2\tok\n", INT_TEXT)
    assert found.reasons == [("invalid UTF-8", "b")]
    assert found.values == [(2, "ok")]


def test_allowed_and_required_values(tmp_path: Path) -> None:
    columns = (
        Column("label", "int", allowed=(0, 1), required=True),
        Column("kind", "text", allowed=("buy", "view")),
        Column("price", "float", allowed=(0.5, 1)),
        Column("code", "hex", allowed=("ff", 1)),
        Column("flag", "bool", allowed=(True,)),
    )
    text = b"1\tbuy\t1\tff\t1\n0\t\t\t\t\n2\t\t\t\t\n\t\t\t\t\n"
    text += b"1\tsell\t\t\t\n1\t\t2\t\t\n1\t\t\t2\t\n1\t\t\t\t0\n"
    found = read_text(tmp_path, text, columns)
    assert found.values == [(1, "buy", 1.0, 255, True), (0, None, None, None, None)]
    assert found.reasons == [
        ("value not allowed", "label"),
        ("missing required value", "label"),
        ("value not allowed", "kind"),
        ("value not allowed", "price"),
        ("value not allowed", "code"),
        ("value not allowed", "flag"),
    ]


def test_a_log_of_bad_rows_comes_in_small_batches(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_bytes(b"x\n" * 10_000)
    source = open_source(Log(files=("log.txt",), columns=columns_of(i="int")), str(tmp_path))
    batches = list(source.read(source.units()[0]))
    assert max(batch.num_rows for batch in batches) <= 4096
    assert sum(len(batch.bad) for batch in batches) == 10_000


def test_a_row_longer_than_the_chunk_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_bytes(b"1\t" + b"x" * 300_000 + b"\n2\ty\n")
    source = open_source(Log(files=("log.txt",), columns=INT_TEXT), str(tmp_path))
    assert read_all(source, chunk_bytes=100).values == [(1, "x" * 300_000), (2, "y")]


def test_a_row_without_end_is_an_error_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "MAX_ROW_BYTES", 1 << 20)
    with pytest.raises(LogError, match="the row at byte 4 is longer than 1 MB"):
        read_text(tmp_path, b"1\ta\n" + b"x" * (9 << 20), INT_TEXT)


def test_a_row_belongs_to_the_unit_that_holds_its_first_byte(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_bytes(b"1\ta\n2\tb\n3\tc\n")
    source = open_source(Log(files=("log.txt",), columns=INT_TEXT), str(tmp_path))
    read = {
        (start, end): [row for batch in source.read(LogRange(0, start, end)) for row in batch.frame["a"]]
        for start, end in [(0, 4), (0, 5), (4, 5), (5, 8), (3, 4), (1, 9), (9, 12)]
    }
    assert read == {
        (0, 4): [1],
        (0, 5): [1, 2],
        (4, 5): [2],
        (5, 8): [],
        (3, 4): [],
        (1, 9): [2, 3],
        (9, 12): [],
    }


def test_a_file_that_shrank_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_bytes(b"1\ta\n" * 100)
    source = open_source(Log(files=("log.txt",), columns=INT_TEXT), str(tmp_path))
    (tmp_path / "log.txt").write_bytes(b"1\ta\n")
    with pytest.raises(LogError, match=r"4 bytes of .* now, 400 bytes of .* when it was found"):
        read_all(source)


def test_sources_and_units_can_be_pickled(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_bytes(b"1\ta\n")
    source = pickle.loads(pickle.dumps(open_source(Log(files=("log.txt",), columns=INT_TEXT), str(tmp_path))))
    assert read_all(source).values == [(1, "a")]
    assert len(pickle.dumps(source)) < 2000


def test_separators_and_quotes_that_cannot_work_are_refused(tmp_path: Path) -> None:
    for options in (
        {"separator": ""},
        {"separator": "\n"},
        {"separator": '"', "quote": '"'},
        {"quote": "''"},
    ):
        with pytest.raises(LogError, match="must be"):
            read_text(tmp_path, b"", INT_TEXT, **options)
