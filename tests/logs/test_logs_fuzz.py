"""Whatever the bytes: rows in equal good plus bad rows, or there is a LogError. Never anything else."""

from __future__ import annotations

import contextlib
import gzip
import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from log_reading import columns_of, cut_lines, parse_fields, read_all, split_quoted

from recmill.errors import LogError
from recmill.logs.base import open_source
from recmill.recipe.recipe import Log

KINDS = ["int", "text", "float", "hex", "bool"]
COLUMNS = columns_of(i="int", t="text", f="float", h="hex", b="bool")
DELIMITED = (
    "1\tab\t1.5\tff\t1\n-22\tżółć\t\t0x1\ttrue\r\n\t\t\t\t\n9223372036854775807\tx\t-1e300\t68fd1e64\t0\n"
).encode()
JSON_LINES = b'{"i":1,"t":"\\u00e9\xc3\xa9","f":1e3,"h":"ff","b":true}\n{"i":-5,"more":{"x":[1,2]}}\n{}\n' * 2


def mutated(text: bytes) -> st.SearchStrategy[bytes]:
    """The text with a few pieces replaced, cut out or put in."""
    edits = st.tuples(
        st.integers(0, len(text)), st.integers(0, 8), st.one_of(st.just(b""), st.binary(max_size=8))
    )

    def apply(chosen: list[tuple[int, int, bytes]]) -> bytes:
        result = text
        for at, size, new in chosen:
            result = result[:at] + new + result[at + size :]
        return result

    return st.lists(edits, min_size=1, max_size=5).map(apply)


def fuzzed(text: bytes) -> st.SearchStrategy[bytes]:
    tokens = st.sampled_from(
        [b"\n", b"\t", b"\r", b'"', b"1", b"-", b".", b"e", b"\xc3\xa9", b"\xff", b"\0", b"{", b"}"]
    )
    return st.one_of(st.binary(max_size=200), st.lists(tokens, max_size=60).map(b"".join), mutated(text))


parts = st.integers(1, 4)
chunks = st.sampled_from([1, 7, 64, 1 << 20])


def write_and_open(directory: Path, text: bytes, name: str = "fuzz.txt", **log: Any) -> Any:
    (directory / name).write_bytes(text)
    spec = Log(files=(name,), columns=COLUMNS, **log)
    return open_source(spec.with_text(spec.text), str(directory))


@examples(100)
@given(text=fuzzed(DELIMITED), parts=parts, chunk_bytes=chunks)
def test_delimited_bytes_are_read_like_the_slow_twin(
    scratch: Path, text: bytes, parts: int, chunk_bytes: int
) -> None:
    found = read_all(write_and_open(scratch, text), parts, chunk_bytes)
    body = text.removeprefix(b"\xef\xbb\xbf")
    rows = [parse_fields(KINDS, line.removesuffix(b"\r").split(b"\t")) for _, line in cut_lines(body)]
    assert found.values == [row for row in rows if row is not None]
    assert found.num_rows == len(rows)


@examples(50)
@given(text=fuzzed(DELIMITED.replace(b"ab", b'"a""\t\nb"')), parts=parts, chunk_bytes=chunks)
def test_quoted_bytes_are_read_like_the_slow_twin(
    scratch: Path, text: bytes, parts: int, chunk_bytes: int
) -> None:
    found = read_all(write_and_open(scratch, text, quote='"'), parts, chunk_bytes)
    body = text.removeprefix(b"\xef\xbb\xbf")
    rows = [fields and parse_fields(KINDS, fields) for _, _, fields in split_quoted(body, b"\t", b'"')]
    assert found.values == [row for row in rows if row is not None]
    assert found.num_rows == len(rows)


@examples(30)
@given(text=fuzzed(DELIMITED), parts=parts, chunk_bytes=chunks)
def test_latin_1_text_is_never_invalid(scratch: Path, text: bytes, parts: int, chunk_bytes: int) -> None:
    (scratch / "fuzz.txt").write_bytes(text)
    form = {"encoding": "latin-1", "separator": "\x02", "quote": "", "header": False}
    log = Log(files=("fuzz.txt",), columns=columns_of(t="text"), **form)
    found = read_all(open_source(log, str(scratch)), parts, chunk_bytes)
    body = text.removeprefix(b"\xef\xbb\xbf")
    lines = [line.removesuffix(b"\r") for _, line in cut_lines(body)]
    assert found.values == [(line.decode("latin-1") or None,) for line in lines if b"\x02" not in line]
    assert found.num_rows == len(lines)


@examples(50)
@given(text=fuzzed(b"b\tf\tmore\ti\th\tt\n" + DELIMITED), parts=parts, chunk_bytes=chunks)
def test_any_header_is_matched_or_refused(scratch: Path, text: bytes, parts: int, chunk_bytes: int) -> None:
    source = write_and_open(scratch, text, header=True)
    with contextlib.suppress(LogError):
        found = read_all(source, parts, chunk_bytes)
        assert found.num_rows == max(len(cut_lines(text.removeprefix(b"\xef\xbb\xbf"))) - 1, 0)


@examples(100)
@given(text=fuzzed(JSON_LINES), parts=parts, chunk_bytes=chunks)
def test_json_bytes_lose_no_line(scratch: Path, text: bytes, parts: int, chunk_bytes: int) -> None:
    source = write_and_open(scratch, text, format="jsonl")
    found, whole = read_all(source, parts, chunk_bytes), read_all(source)
    assert found.num_rows == len(cut_lines(text.removeprefix(b"\xef\xbb\xbf")))
    assert (found.rows, found.bad) == (whole.rows, whole.bad)


@examples(50)
@given(data=mutated(gzip.compress(DELIMITED, mtime=0)), chunk_bytes=chunks)
def test_damaged_gzip_is_whole_or_an_error(scratch: Path, data: bytes, chunk_bytes: int) -> None:
    source = write_and_open(scratch, data, "fuzz.gz")
    try:
        expected = gzip.decompress(data)
    except Exception:
        expected = None
    with contextlib.suppress(LogError):
        found = read_all(source, chunk_bytes=chunk_bytes)
        assert expected is not None
        assert found.num_rows == len(cut_lines(expected))


@examples(30)
@given(data=mutated(pa.compress(DELIMITED * 3, "zstd", asbytes=True)), chunk_bytes=chunks)
def test_damaged_zstd_raises_nothing_but_log_errors(scratch: Path, data: bytes, chunk_bytes: int) -> None:
    with contextlib.suppress(LogError):
        read_all(write_and_open(scratch, data, "fuzz.zst"), chunk_bytes=chunk_bytes)


def parquet_bytes() -> bytes:
    table = pa.table(
        {
            "i": [1, None, 3] * 5,
            "t": ["a", "é", None] * 5,
            "f": [1.5] * 15,
            "h": ["ff"] * 15,
            "b": [True] * 15,
        }
    )
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=7, write_page_checksum=True)
    return out.getvalue()


@examples(40)
@given(data=st.one_of(mutated(parquet_bytes()), st.binary(max_size=100)), parts=parts)
def test_damaged_parquet_raises_nothing_but_log_errors(scratch: Path, data: bytes, parts: int) -> None:
    with contextlib.suppress(LogError):
        read_all(write_and_open(scratch, data, "fuzz.parquet", format="parquet"), parts)
