"""Columns of times, escaped quotes and UTF-16: what real files have beside plain CSV."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import polars as pl
import pytest
from log_reading import read_all

from recmill.logs.base import open_source
from recmill.logs.times import parse_times
from recmill.recipe.recipe import Column, Log

NOON = 1_577_880_000.0  # 2020-01-01 12:00 UTC


@pytest.mark.parametrize(
    ("text", "format", "expected"),
    [
        ("2020-01-01T12:00:00Z", "", NOON),
        ("2020-01-01 12:00", "", NOON),
        ("2020-01-01 12:00:00.250", "", NOON + 0.25),
        ("2020-01-01T14:00:00+02:00", "", NOON),
        ("2020-01-01T06:30:00-0530", "", NOON),
        ("2020/1/1", "", NOON - 43_200),
        ("1577880000", "", NOON),
        ("1577880000.5", "", NOON + 0.5),
        ("1577880000000", "", NOON),
        ("1577880000000000", "", NOON),
        ("01/02/2020", "%d/%m/%Y", NOON + 30.5 * 86_400),
        ("Wed Jan 01 12:00:00 +0000 2020", "%a %b %d %H:%M:%S %z %Y", NOON),
        ("2020-02-30", "", None),
        ("2020-01-01 25:00", "", None),
        ("soon", "", None),
        ("1e999", "", None),
    ],
)
def test_a_time_is_seconds_since_1970(text: str, format: str, expected: float | None) -> None:
    values, unreadable = parse_times(pl.Series([text, ""]), format)
    assert values.to_list() == [expected, None]
    assert unreadable.to_list() == [expected is None, False]


def log(**options: object) -> Log:
    columns = (Column("user", "text"), Column("at", "time"))
    return Log(files=("events",), columns=columns, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", ["delimited", "jsonl", "parquet"])
def test_times_are_the_same_in_every_format(format: str, tmp_path: Path) -> None:
    path, users, times = tmp_path / "events", ["a", "b"], ["2020-01-01 12:00", "1577880000000"]
    if format == "delimited":
        path.write_text("".join(f"{user}\t{time}\n" for user, time in zip(users, times, strict=True)))
    elif format == "jsonl":
        rows = [{"user": "a", "at": times[0]}, {"user": "b", "at": int(times[1])}]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pl.DataFrame({"user": users, "at": [datetime(2020, 1, 1, 12)] * 2}).write_parquet(path)
    found = read_all(open_source(log(format=format), str(tmp_path)))
    assert found.values == [("a", NOON), ("b", NOON)]


def test_a_row_whose_time_cannot_be_read_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("a\tsoon\nb\t1577880000\n")
    found = read_all(open_source(log(header=False), str(tmp_path)))
    assert found.values == [("b", NOON)]
    assert found.reasons == [("not a time", "at")]
    assert (found.bad[0].text, found.bad[0].offset) == (b"a\tsoon", 0)


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1 << 20])
def test_escaped_quotes_are_quotes_wherever_the_text_is_cut(chunk_bytes: int, tmp_path: Path) -> None:
    (tmp_path / "events").write_text('"say \\"hi\\"; x";"1"\n"back\\\\";"2"\n"plain \\n";"3"\n')
    spec = Log(("events",), (Column("a", "text"), Column("b", "int")), separator=";", quote='"', escape="\\")
    found = read_all(open_source(spec, str(tmp_path)), chunk_bytes=chunk_bytes)
    assert found.values == [('say "hi"; x', 1), ("back\\", 2), ("plain \\n", 3)]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_is_read_by_its_byte_order_mark(encoding: str, tmp_path: Path) -> None:
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
    (tmp_path / "events").write_bytes(mark + "user\tat\ncafé\t1577880000\n".encode(encoding))
    found = read_all(open_source(log(header=True, encoding="utf-16"), str(tmp_path)), parts=3)
    assert found.values == [("café", NOON)]
