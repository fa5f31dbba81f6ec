"""Finding, listing and opening the files of a log."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from log_reading import columns_of, read_all

from recmill.errors import LogError
from recmill.logs.base import open_source
from recmill.logs.describe import describe_files
from recmill.logs.files import match_pattern
from recmill.recipe.recipe import Column, Log

COLUMNS = columns_of(a="int")


def log_of(*files: str, format: str = "delimited") -> Log:
    return Log(files=files, columns=COLUMNS, format=format)  # type: ignore[arg-type]


def write_files(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("1\n")


def names_found(directory: Path, *patterns: str) -> list[str]:
    return [file.name for file in open_source(log_of(*patterns), str(directory)).files]


def test_files_come_in_natural_order_and_only_once(tmp_path: Path) -> None:
    write_files(tmp_path, "day_10", "day_2", "day_1", "other")
    assert names_found(tmp_path, "day_10", "day_*") == ["day_1", "day_2", "day_10"]
    write_files(tmp_path, "٣_1", "x3_1", "1_x")
    assert names_found(tmp_path, "*_1", "1_*") == ["1_x", "day_1", "x3_1", "٣_1"]


def test_globs_reach_into_directories(tmp_path: Path) -> None:
    write_files(tmp_path, "a/x.tsv", "a/b/x.tsv", "c/x.tsv", "x.tsv", ".hidden/x.tsv", "a/.x.tsv")
    assert names_found(tmp_path, "*/x.tsv") == ["a/x.tsv", "c/x.tsv"]
    assert names_found(tmp_path, "a/*.tsv") == ["a/x.tsv"]
    assert names_found(tmp_path, "**/x.tsv") == ["a/b/x.tsv", "a/x.tsv", "c/x.tsv", "x.tsv"]


def test_a_name_that_looks_like_a_glob_is_taken_as_a_name(tmp_path: Path) -> None:
    write_files(tmp_path, "log[1].tsv")
    assert names_found(tmp_path, "log[1].tsv") == ["log[1].tsv"]


def test_file_urls_are_read_like_paths(tmp_path: Path) -> None:
    write_files(tmp_path, "day_1", "day_2")
    source = open_source(log_of("day_*"), tmp_path.as_uri())
    assert [file.path for file in source.files] == [f"{tmp_path.as_uri()}/day_{i}" for i in (1, 2)]
    assert read_all(source).values == [(1,), (1,)]


def test_missing_pattern_names_what_is_there(tmp_path: Path) -> None:
    write_files(tmp_path, "train.tsv", "old/x")
    with pytest.raises(
        LogError, match=r'No file matches "day_\*", "x\.tsv" in .*It holds: old/, train\.tsv\.'
    ):
        open_source(log_of("day_*", "train.tsv", "x.tsv"), str(tmp_path))
    with pytest.raises(LogError, match="names no files"):
        open_source(log_of(), str(tmp_path))


def test_data_must_be_a_directory(tmp_path: Path) -> None:
    write_files(tmp_path, "log.tsv")
    with pytest.raises(LogError, match="no such directory"):
        open_source(log_of("x"), str(tmp_path / "nowhere"))
    with pytest.raises(LogError, match="is a file"):
        open_source(log_of("x"), str(tmp_path / "log.tsv"))
    with pytest.raises(LogError, match="nosuch://"):
        open_source(log_of("x"), "nosuch://bucket/x")


def test_a_directory_is_no_log_file(tmp_path: Path) -> None:
    write_files(tmp_path, "day/part")
    with pytest.raises(LogError, match=r'is a directory\. Name the files in it, such as "day/\*"'):
        open_source(log_of("day"), str(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_says_so(tmp_path: Path) -> None:
    write_files(tmp_path, "log.tsv")
    (tmp_path / "log.tsv").chmod(0)
    with pytest.raises(LogError, match="permission denied"):
        read_all(open_source(log_of("log.tsv"), str(tmp_path)))


@pytest.mark.parametrize("format", ["delimited", "jsonl", "parquet"])
def test_file_that_vanished_says_so(tmp_path: Path, format: str) -> None:
    write_files(tmp_path, "log")
    source = open_source(log_of("log", format=format), str(tmp_path))
    (tmp_path / "log").unlink()
    with pytest.raises(LogError, match="no such file"):
        read_all(source)


def zstd(text: bytes) -> bytes:
    return bytes(pa.compress(text, "zstd", asbytes=True))


COMPRESSIONS = [("gz", gzip.compress), ("zst", zstd)]
TEXT = b"".join(b"%d\n" % (i * i) for i in range(200_000))


@pytest.mark.parametrize(("suffix", "compress"), COMPRESSIONS)
def test_compressed_files_read_like_plain_ones(tmp_path: Path, suffix: str, compress) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "plain").write_bytes(TEXT)
    (tmp_path / f"log.{suffix}").write_bytes(
        compress(TEXT[:100_000]) + compress(b"") + compress(TEXT[100_000:])
    )
    plain = read_all(open_source(log_of("plain"), str(tmp_path)), parts=4)
    packed = read_all(open_source(log_of(f"log.{suffix}"), str(tmp_path)), parts=4, chunk_bytes=10_000)
    assert packed.rows == plain.rows


@pytest.mark.parametrize(("suffix", "compress"), COMPRESSIONS)
def test_truncated_streams_say_how_far_they_went(tmp_path: Path, suffix: str, compress) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / f"log.{suffix}"
    whole = compress(TEXT)
    for size in (1, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(
            LogError,
            match=rf"log\.{suffix}: damaged or cut off near byte [0-9,]+ of [0-9,]+, after [0-9,]+ bytes",
        ):
            read_all(open_source(log_of(path.name), str(tmp_path)))
    path.write_bytes(b"")
    with pytest.raises(LogError, match="stream is empty"):
        read_all(open_source(log_of(path.name), str(tmp_path)))


def test_corrupt_gzip_is_an_error(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress(TEXT))
    whole[len(whole) // 2] ^= 1
    (tmp_path / "log.gz").write_bytes(whole)
    with pytest.raises(LogError, match="damaged or cut off"):
        read_all(open_source(log_of("log.gz"), str(tmp_path)))
    (tmp_path / "log.gz").write_bytes(gzip.compress(b"1\n") + b"garbage")
    with pytest.raises(LogError, match="damaged or cut off near byte 29 of 29"):
        read_all(open_source(log_of("log.gz"), str(tmp_path)))


def test_other_compressions_are_refused(tmp_path: Path) -> None:
    write_files(tmp_path, "log.zip")
    with pytest.raises(LogError, match=r"Use \.gz, \.zst or plain text"):
        read_all(open_source(log_of("log.zip"), str(tmp_path)))


def test_report_tells_which_patterns_match_and_how_rows_read(tmp_path: Path) -> None:
    (tmp_path / "log.tsv").write_bytes(b"1\nx\n2\n")
    (tmp_path / "more.tsv.gz").write_bytes(gzip.compress(b"3\n"))
    report = describe_files(log_of("log.tsv", "*.gz"), str(tmp_path))
    assert [(file.name, file.compression) for files in report.matches.values() for file in files] == [
        ("log.tsv", None),
        ("more.tsv.gz", "gzip"),
    ]
    assert (report.num_good, [row.reason for row in report.bad]) == (3, ["not an integer"])
    assert report.problem is None


def test_report_looks_into_every_file_and_names_those_that_a_sequence_leaves_out(tmp_path: Path) -> None:
    for day in (0, 1, 3, 23):
        (tmp_path / f"day_{day}.gz").write_bytes(gzip.compress(b"x\n" if day == 3 else b"1\n" * 300))
    (tmp_path / "day_2").write_bytes(b"")
    report = describe_files(log_of("day_*"), str(tmp_path))
    assert [(row.file, row.reason) for row in report.bad] == [("day_3.gz", "not an integer")]
    assert report.num_good == 900
    assert report.missing == tuple(f"day_{day}" for day in range(4, 23))
    assert report.empty == ("day_2",)


def test_report_tells_what_is_missing_instead_of_raising(tmp_path: Path) -> None:
    write_files(tmp_path, "log.tsv")
    report = describe_files(log_of("log.tsv", "day_*"), str(tmp_path))
    assert report.matches["day_*"] == ()
    assert "No file matches" in (report.problem or "")
    assert "no such directory" in (describe_files(log_of("x"), str(tmp_path / "y")).problem or "")


def test_a_name_also_stands_for_its_compressed_form(tmp_path):
    (tmp_path / "train.txt.gz").write_bytes(gzip.compress(b"1\n"))
    assert [file.name for file in match_pattern("train.txt", str(tmp_path))] == ["train.txt.gz"]
    (tmp_path / "train.txt").write_bytes(b"1\n")
    assert [file.name for file in match_pattern("train.txt", str(tmp_path))] == ["train.txt"]


def test_globs_pass_over_names_with_a_leading_underscore(tmp_path):
    for name in ("_SUCCESS", "_truth.json", "part-0"):
        (tmp_path / name).write_text("1\n")
    assert [file.name for file in match_pattern("*", str(tmp_path))] == ["part-0"]
    assert [file.name for file in match_pattern("_SUCCESS", str(tmp_path))] == ["_SUCCESS"]


@pytest.mark.parametrize("format", ["delimited", "jsonl", "parquet"])
def test_a_column_may_have_another_name_in_the_file(tmp_path: Path, format: str) -> None:
    frame = pl.DataFrame({"name": ["A", "B"], "id": [7, 8]})
    path = tmp_path / "artists"
    {"delimited": frame.write_csv, "jsonl": frame.write_ndjson, "parquet": frame.write_parquet}[format](path)
    columns = (Column("artist", "int", in_file="id"), Column("name", "text"))
    text = {"separator": ",", "header": True} if format == "delimited" else {}
    source = open_source(Log(files=("artists",), columns=columns, format=format, **text), str(tmp_path))
    (unit,) = source.units(parts=1)
    (batch,) = source.read(unit)
    assert batch.frame.select("artist", "name").rows() == [(7, "A"), (8, "B")]


@pytest.mark.parametrize("pattern", ["events.csv", "events*", "**/events.csv"])
def test_a_directory_that_spark_wrote_counts_as_its_files(tmp_path: Path, pattern: str) -> None:
    names = [f"events.csv/part-{number}-a.csv" for number in ("00000", "00002", "00010")]
    write_files(tmp_path, *names, "events.csv/.part-00000-a.csv.crc", "events.csv/_committed")
    with pytest.raises(LogError, match=r"is a directory|No file matches"):
        open_source(log_of(pattern), str(tmp_path))
    (tmp_path / "events.csv" / "_SUCCESS").touch()
    assert names_found(tmp_path, pattern) == names
