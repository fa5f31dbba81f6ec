"""The rules of Parquet logs, one literal case each."""

from __future__ import annotations

import decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from log_reading import Everything, columns_of, read_all

from recmill.errors import LogError
from recmill.logs.base import BadRow, LogFiles, LogRange, open_source
from recmill.recipe.recipe import Column, Log


def open_table(directory: Path, table: pa.Table, columns: tuple[Column, ...], **options: Any) -> LogFiles:
    pq.write_table(table, directory / "log.parquet", **options)
    return open_source(Log(files=("log.parquet",), columns=columns, format="parquet"), str(directory))


def read_column(directory: Path, array: pa.Array, kind: str) -> Everything:
    return read_all(open_table(directory, pa.table({"x": array}), columns_of(x=kind)))


def test_columns_are_matched_by_name_and_positions_are_row_numbers(tmp_path: Path) -> None:
    table = pa.table({"t": ["a", "", None], "more": [1, 2, 3], "i": pa.array([1, None, 3], pa.int32())})
    assert read_all(open_table(tmp_path, table, columns_of(i="int", t="text"))).rows == [
        (0, 1, "a"),
        (1, None, None),
        (2, 3, None),
    ]


@pytest.mark.parametrize(
    ("array", "kind", "values"),
    [
        (pa.array([True, None]), "int", [1, None]),
        (pa.array([2.0, float("nan")]), "int", [2, None]),
        (pa.array(["7", "5.0", ""]), "int", [7, 5, None]),
        (pa.array([decimal.Decimal("7.00")]), "int", [7]),
        (pa.array([1, 2], pa.int8()), "float", [1.0, 2.0]),
        (pa.array([1.5, float("nan"), None], pa.float32()), "float", [1.5, None, None]),
        (pa.array(["ff", "0x10"]), "hex", [255, 16]),
        (pa.array([2**64 - 1], pa.uint64()), "hex", [-1]),
        (pa.array([0, 1, None]), "bool", [False, True, None]),
        (pa.array(["true", "0"]), "bool", [True, False]),
        (pa.array([17, None]), "text", ["17", None]),
        (pa.array([b"ab"], pa.binary()), "text", ["ab"]),
        (pa.array(["a", "b", "a"]).dictionary_encode(), "text", ["a", "b", "a"]),
        (pa.array(["a"], pa.string_view()), "text", ["a"]),
        (pa.array([["a", "b"], [], None, ["c", None]]), "text", ["a\tb", None, None, "c\t"]),
        (pa.array([[1, 2]]), "text", ["1\t2"]),
        (pa.nulls(2), "text", [None, None]),
        (pa.nulls(2), "int", [None, None]),
        (pa.nulls(2), "hex", [None, None]),
        (pa.nulls(2), "float", [None, None]),
    ],
)
def test_values_are_cast(tmp_path: Path, array: pa.Array, kind: str, values: list[Any]) -> None:
    assert read_column(tmp_path, array, kind).values == [(value,) for value in values]


@pytest.mark.parametrize(
    ("array", "kind", "reason"),
    [
        (pa.array([1.5]), "int", "not an integer"),
        (pa.array([1e30]), "int", "not an integer"),
        (pa.array([2**63], pa.uint64()), "int", "not an integer"),
        (pa.array([decimal.Decimal("7.50")]), "int", "not an integer"),
        (pa.array(["x"]), "int", "not an integer"),
        (pa.array([float("inf")]), "float", "not a number"),
        (pa.array(["nan"]), "float", "not a number"),
        (pa.array(["g"]), "hex", "not hexadecimal"),
        (pa.array([2]), "bool", "not a boolean"),
        (pa.array([b"\xff"]), "text", "invalid UTF-8"),
        (pa.array([b"\xff"]).view(pa.string()), "text", "invalid UTF-8"),
        (pa.array([b"\xff"]), "int", "not an integer"),
    ],
)
def test_value_that_cannot_be_cast_sets_its_row_aside(
    tmp_path: Path, array: pa.Array, kind: str, reason: str
) -> None:
    found = read_column(tmp_path, array, kind)
    assert found.reasons == [(reason, "x")]
    assert found.values == []


def test_a_bad_row_keeps_its_row_number_and_its_values_as_json(tmp_path: Path) -> None:
    table = pa.table({"i": [1.0, 2.5], "t": ["a", "é"]})
    found = read_all(open_table(tmp_path, table, columns_of(t="text", i="int")))
    assert found.rows == [(0, "a", 1)]
    (bad,) = found.bad
    assert (bad.file, bad.offset, bad.reason, bad.column) == ("log.parquet", 1, "not an integer", "i")
    assert bad.text.decode() in ('{"i": 2.5, "t": "é"}', '{"t": "é", "i": 2.5}')


def test_allowed_and_required_values(tmp_path: Path) -> None:
    columns = (Column("b", "bool", required=True), Column("h", "hex", allowed=("ff",)))
    table = pa.table({"b": [True, None, True], "h": ["ff", "ff", "fe"]})
    found = read_all(open_table(tmp_path, table, columns))
    assert found.values == [(True, 255)]
    assert found.reasons == [("missing required value", "b"), ("value not allowed", "h")]


@pytest.mark.parametrize("parts", [1, 2, 3, 10, 100])
@pytest.mark.parametrize("chunk_bytes", [30, 1 << 20])
def test_units_are_ranges_of_row_groups(tmp_path: Path, parts: int, chunk_bytes: int) -> None:
    table = pa.table({"i": list(range(300)), "t": [str(i) for i in range(300)]})
    source = open_table(tmp_path, table, columns_of(i="int", t="text"), row_group_size=21)
    assert read_all(source, parts, chunk_bytes).rows == [(i, i, str(i)) for i in range(300)]
    assert min(parts, 15) // 2 <= len(source.units(parts=parts)) <= parts + 1


def test_any_range_of_rows_can_be_read(tmp_path: Path) -> None:
    source = open_table(tmp_path, pa.table({"i": list(range(100))}), columns_of(i="int"), row_group_size=7)
    rows = [value for batch in source.read(LogRange(0, 5, 23), 50) for value in batch.frame["i"]]
    assert rows == list(range(5, 23))


def test_missing_column_names_those_found(tmp_path: Path) -> None:
    source = open_table(tmp_path, pa.table({"itemid": [1], "user": [1]}), columns_of(item_id="int"))
    with pytest.raises(LogError, match=r'no column "item_id".*has: itemid, user\. Did you mean "itemid"\?'):
        read_all(source)


@pytest.mark.parametrize(
    ("array", "kind"), [([1.5], "text"), ([{"a": 1}], "int"), ([[1.5]], "text"), ([[1]], "int")]
)
def test_types_without_a_safe_cast_are_refused(tmp_path: Path, array: list[Any], kind: str) -> None:
    with pytest.raises(LogError, match=f'column "x" is .*, which cannot be read as {kind}'):
        read_column(tmp_path, pa.array(array), kind)


def test_a_file_without_rows_has_no_rows(tmp_path: Path) -> None:
    assert read_column(tmp_path, pa.array([], pa.int64()), "int").num_rows == 0


def test_truncated_files_are_errors(tmp_path: Path) -> None:
    source = open_table(tmp_path, pa.table({"i": list(range(1000))}), columns_of(i="int"))
    path = tmp_path / "log.parquet"
    whole = path.read_bytes()
    for size in (0, 3, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(LogError, match=r"log\.parquet: is not a whole Parquet file"):
            read_all(source)


def test_invalid_utf_8_costs_only_its_row(tmp_path: Path) -> None:
    found = read_column(tmp_path, pa.array([b"a", b"\xff", None, b"b"]), "text")
    assert found.rows == [(0, "a"), (2, None), (3, "b")]
    lists = pa.ListArray.from_arrays([0, 1, 2], pa.array([b"a", b"\xff"]).view(pa.string()))
    assert read_column(tmp_path, lists, "text").rows == [(0, "a")]


def test_bad_row_text_survives_invalid_utf_8(tmp_path: Path) -> None:
    found = read_column(tmp_path, pa.array([b"a\xff"]).view(pa.string()), "text")
    assert found.bad == [BadRow("log.parquet", 0, "invalid UTF-8", "x", '{"x": "a\ufffd"}'.encode())]
