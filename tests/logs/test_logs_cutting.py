"""Any cutting of a log into units and chunks gives the rows of a slow twin that reads it in one go."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from log_reading import columns_of, cut_lines, parse_fields, read_all, split_quoted

from recmill.logs.base import open_source
from recmill.recipe.recipe import Log

KINDS = ["int", "text", "float", "hex", "bool"]
COLUMNS = columns_of(i="int", t="text", f="float", h="hex", b="bool")
cells = st.tuples(
    st.one_of(st.just(""), st.integers(-(2**65), 2**65).map(str), st.integers(-99, 99).map(str)),
    st.text(st.characters(exclude_characters='\n\t,:"\r', exclude_categories=["Cs"]), max_size=12),
    st.one_of(st.just(""), st.floats().map(str)),
    st.one_of(
        st.just(""), st.integers(0, 2**66).map("{:x}".format), st.integers(0, 2**32).map("{:08x}".format)
    ),
    st.sampled_from(["", "0", "1", "true", "False", "no"]),
)
ends = st.sampled_from(["\n", "\r\n"])
lines = st.one_of(cells.map(list), cells.map(list), st.lists(st.sampled_from(["", "1", "x"]), max_size=7))
logs = st.tuples(st.lists(st.tuples(lines, ends), max_size=30), st.booleans())
parts = st.integers(1, 9)
chunks = st.sampled_from([1, 2, 3, 5, 8, 13, 64, 65, 200, 1 << 20])


def write_and_open(directory: Path, text: bytes, name: str = "log.txt", **log: Any) -> Any:
    (directory / name).write_bytes(text)
    return open_source(Log(files=(name,), columns=COLUMNS, **log), str(directory))


def join(log: tuple[list[tuple[list[str], str]], bool], separator: str) -> bytes:
    rows, ends_in_newline = log
    text = "".join(separator.join(fields) + end for fields, end in rows)
    return (text if ends_in_newline else text.removesuffix("\n")).encode()


@examples(50)
@given(log=logs, separator=st.sampled_from(["\t", ",", "::"]), parts=parts, chunk_bytes=chunks)
def test_delimited_rows_do_not_depend_on_cutting(
    scratch: Path, log: Any, separator: str, parts: int, chunk_bytes: int
) -> None:
    text = join(log, separator)
    good, bad = [], []
    for offset, line in cut_lines(text):
        values = parse_fields(KINDS, line.removesuffix(b"\r").split(separator.encode()))
        if values is None:
            bad.append((offset, line))
        else:
            good.append((offset, *values))
    found = read_all(write_and_open(scratch, text, separator=separator), parts, chunk_bytes)
    assert found.rows == good
    assert [(row.offset, row.text) for row in found.bad] == bad


@examples(30)
@given(log=logs, mark=st.booleans(), header=st.booleans(), parts=parts, chunk_bytes=chunks)
def test_header_and_byte_order_mark_do_not_depend_on_cutting(
    scratch: Path, log: Any, mark: bool, header: bool, parts: int, chunk_bytes: int
) -> None:
    text = b"b,f,i,t,h,more\n" * header + join(log, ",")
    source = write_and_open(scratch, b"\xef\xbb\xbf" * mark + text, header=header, separator=",")
    whole, cut = read_all(source), read_all(source, parts, chunk_bytes)
    assert (cut.rows, cut.bad) == (whole.rows, whole.bad)
    assert cut.num_rows == len(cut_lines(text)) - header


quoted_bytes = st.lists(
    st.sampled_from(['"', ",", "\n", "\r\n", '""', "a", "1", '1,"b",2,3,0', "é"]), max_size=40
)


@examples(60)
@given(pieces=quoted_bytes, separator=st.sampled_from([",", "::"]), parts=parts, chunk_bytes=chunks)
def test_quoted_rows_do_not_depend_on_chunks(
    scratch: Path, pieces: list[str], separator: str, parts: int, chunk_bytes: int
) -> None:
    text = "".join(pieces).replace(",", separator).encode()
    good, bad = [], []
    for begin, end, fields in split_quoted(text, separator.encode(), b'"'):
        values = None if fields is None else parse_fields(KINDS, fields)
        if values is None:
            bad.append((begin, text[begin:end].removesuffix(b"\n")))
        else:
            good.append((begin, *values))
    found = read_all(write_and_open(scratch, text, separator=separator, quote='"'), parts, chunk_bytes)
    assert found.rows == good
    assert [(row.offset, row.text) for row in found.bad] == bad


@examples(24)
@given(log=logs, parts=parts, chunk_bytes=chunks)
def test_compressed_rows_and_positions_equal_plain_ones(
    scratch: Path, log: Any, parts: int, chunk_bytes: int
) -> None:
    text = join(log, ",")
    plain = read_all(write_and_open(scratch, text, separator=","))
    packed = {"log.txt.gz": gzip.compress(text), "log.txt.zst": pa.compress(text, "zstd", asbytes=True)}
    for name, data in packed.items():
        found = read_all(write_and_open(scratch, data, name, separator=","), parts, chunk_bytes)
        assert found.rows == plain.rows
        assert [(row.offset, row.text) for row in found.bad] == [(row.offset, row.text) for row in plain.bad]


objects = st.one_of(
    st.fixed_dictionaries({}, optional={"i": st.integers(), "t": st.text(), "f": st.floats(allow_nan=False)}),
    st.fixed_dictionaries(
        {"h": st.sampled_from(["ff", "", "xyz", 5]), "b": st.sampled_from([True, None, 1])}
    ),
    st.fixed_dictionaries({"i": st.sampled_from([1, 1.0, 1.5, "1"])}),
).map(json.dumps)
json_lines = st.one_of(
    objects, objects, st.sampled_from(["", "{", "}", "{}{}", "[]", '{"i":', "1}", " {} ", "x"])
)


@examples(50)
@given(lines=st.lists(st.tuples(json_lines, ends), max_size=30), parts=parts, chunk_bytes=chunks)
def test_json_rows_do_not_depend_on_cutting(
    scratch: Path, lines: list[tuple[str, str]], parts: int, chunk_bytes: int
) -> None:
    text = "".join(line + end for line, end in lines).encode()
    alone = []
    for offset, line in cut_lines(text):
        found = read_all(write_and_open(scratch, line + b"\n", "line.jsonl", format="jsonl"))
        alone += [(offset, *found.values[0])] if found.rows else []
    found = read_all(write_and_open(scratch, text, format="jsonl"), parts, chunk_bytes)
    assert found.rows == alone
    assert found.num_rows == len(cut_lines(text))


@pytest.mark.parametrize("text", ["1\n2\n3\n4\n5\n6", "1\r\nx\r\n3\r\n\r\n5\r\n6\r\n", "1\n\n\n4\n5\n" * 40])
@pytest.mark.parametrize(("suffix", "quote"), [("", ""), (".gz", ""), ("", '"')])
def test_row_offsets_are_where_the_rows_begin(tmp_path, text, suffix, quote):
    content = text.encode()
    (tmp_path / f"a.tsv{suffix}").write_bytes(gzip.compress(content) if suffix else content)
    source = open_source(Log(files=("a.tsv",), columns=columns_of(a="int"), quote=quote), str(tmp_path))
    starts = [0, *(at + 1 for at, byte in enumerate(content[:-1]) if byte == ord("\n"))]
    for parts in (1, 3):
        found = []
        for unit in source.units(parts=parts):
            found += source.row_offsets(unit, range(source.count_rows(unit)))
        assert found == starts
