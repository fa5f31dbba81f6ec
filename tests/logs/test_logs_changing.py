"""A log that changes while it is read is an error; one that is followed may grow."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from log_reading import columns_of, read_all

from recmill.errors import LogError
from recmill.logs.base import open_source
from recmill.logs.counted import CountedLog
from recmill.logs.tail import Tail
from recmill.logs.tally import Tally
from recmill.recipe.load import recipe_from_dict
from recmill.recipe.recipe import Log

Write = Callable[[Path, int], None]


def _text(num_rows: int) -> str:
    return "".join(f"u{n}\t{n % 10}\n" for n in range(num_rows))


def _plain(path: Path, num_rows: int) -> None:
    path.write_text(_text(num_rows))


def _gzip(path: Path, num_rows: int) -> None:
    path.write_bytes(gzip.compress(_text(num_rows).encode()))


def _jsonl(path: Path, num_rows: int) -> None:
    path.write_text("".join(f'{{"user": "u{n}", "item": {n % 10}}}\n' for n in range(num_rows)))


def _parquet(path: Path, num_rows: int) -> None:
    rows = pl.DataFrame(
        {"user": [f"u{n}" for n in range(num_rows)], "item": [n % 10 for n in range(num_rows)]}
    )
    rows.write_parquet(path, row_group_size=500)


FORMATS: dict[str, tuple[str, Write]] = {
    "log.tsv": ("delimited", _plain),
    "log.tsv.gz": ("delimited", _gzip),
    "log.jsonl": ("jsonl", _jsonl),
    "log.parquet": ("parquet", _parquet),
}


def _log(name: str) -> Log:
    return Log(files=(name,), columns=columns_of(user="text", item="int"), format=FORMATS[name][0])  # type: ignore[arg-type]


@pytest.mark.parametrize("num_rows", [1_000, 2_000, 3_000])
@pytest.mark.parametrize("name", FORMATS)
def test_a_file_rewritten_while_it_is_read_is_an_error(tmp_path: Path, name: str, num_rows: int) -> None:
    FORMATS[name][1](tmp_path / name, 2_000)
    source = open_source(_log(name), str(tmp_path))
    batches = source.read(source.units(parts=1)[0], 1 << 12)
    next(batches)
    FORMATS[name][1](tmp_path / name, num_rows)
    with pytest.raises(LogError, match=f"{name}: changed while it was being read: .* bytes of .* now"):
        list(batches)


@pytest.mark.parametrize("name", FORMATS)
def test_a_pass_notices_what_changed_after_its_units_were_read(tmp_path: Path, name: str) -> None:
    FORMATS[name][1](tmp_path / name, 2_000)
    source = open_source(_log(name), str(tmp_path))
    read_all(source, parts=3)
    source.check_unchanged()
    before = (tmp_path / name).stat()
    FORMATS[name][1](tmp_path / "copy", 2_000)
    os.utime(tmp_path / "copy", ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(tmp_path / "copy", tmp_path / name)
    with pytest.raises(LogError, match="was replaced while it was being read"):
        source.check_unchanged()


def test_a_removed_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "log.tsv").write_text(_text(100))
    source = open_source(_log("log.tsv"), str(tmp_path))
    (tmp_path / "log.tsv").unlink()
    with pytest.raises(LogError, match="was removed"):
        source.check_unchanged()


def test_a_log_that_may_grow_is_read_up_to_where_it_was_found(tmp_path: Path) -> None:
    path = tmp_path / "log.tsv"
    path.write_text(_text(2_000))
    source = open_source(_log("log.tsv"), str(tmp_path), may_grow=True)
    batches = source.read(source.units(parts=1)[0], 1 << 12)
    num_rows = next(batches).num_rows
    with open(path, "a") as file:
        file.write(_text(10))
    assert num_rows + sum(batch.num_rows for batch in batches) == 2_000
    os.truncate(path, 100)
    with pytest.raises(LogError, match="changed while it was being read"):
        source.check_unchanged()


def test_training_from_a_log_notices_rows_that_changed_since_they_were_counted(tmp_path: Path) -> None:
    path = tmp_path / "log.tsv"
    path.write_text(_text(1_000))
    types = {"user": "text", "item": "int"}
    recipe = recipe_from_dict(
        {
            "name": "changing",
            "log": {"files": ["log.tsv"], "columns": [{"name": n, "type": t} for n, t in types.items()]},
            "features": [{"columns": "item", "steps": ["key"]}],
        }
    )
    log = CountedLog(recipe, str(tmp_path), max_bad=0.0, num_workers=1)
    path.write_text(_text(1_000).replace("u", "v"))  # as many rows, and bytes
    with pytest.raises(LogError, match="changed while it was being read"):
        list(log.read(log.pieces[0]))


def test_a_loop_of_links_is_not_followed_and_a_file_counts_once(tmp_path: Path) -> None:
    (tmp_path / "day" / "deep").mkdir(parents=True)
    (tmp_path / "day" / "log.tsv").write_text(_text(1_000))
    (tmp_path / "day" / "deep" / "again").symlink_to(tmp_path / "day", target_is_directory=True)
    (tmp_path / "day" / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "day" / "other-name.tsv").symlink_to("log.tsv")
    log = Log(files=("**/*.tsv",), columns=columns_of(user="text", item="int"))
    source = open_source(log, str(tmp_path))
    assert [file.name for file in source.files] == ["day/log.tsv"]
    assert read_all(source).num_rows == 1_000


def test_a_link_to_a_directory_hides_none_of_its_files(tmp_path: Path) -> None:
    for day in ("16", "17"):
        (tmp_path / "2026" / "11" / day).mkdir(parents=True)
        (tmp_path / "2026" / "11" / day / "log.tsv").write_text(_text(10))
    (tmp_path / "latest").symlink_to("2026/11/17")
    (tmp_path / "loop").symlink_to(".")
    (tmp_path / "itself").symlink_to("itself")
    log = Log(files=("*/*/*/log.tsv",), columns=columns_of(user="text", item="int"))
    for data in (str(tmp_path), tmp_path.as_uri()):
        source = open_source(log, data)
        assert [file.name for file in source.files] == ["2026/11/16/log.tsv", "2026/11/17/log.tsv"]


def _follow(log: Log, data: Path, done: dict[str, int] | None = None) -> tuple[Tail, Callable[[], int]]:
    tail = Tail(log, str(data), done or {})
    return tail, lambda: sum(rows.height for rows in tail.read(Tally()))


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_followed_log_that_became_another_one_is_an_error(
    tmp_path: Path, is_replaced: bool, is_restarted: bool
) -> None:
    path = tmp_path / "log.tsv"
    path.write_text(_text(100))
    tail, read = _follow(_log(path.name), tmp_path)
    assert read() == 100
    if is_restarted:
        tail, read = _follow(_log(path.name), tmp_path, tail.done)
    other = tmp_path / "other" if is_replaced else path
    other.write_text(_text(500).replace("u", "user"))  # more than was there
    other.replace(path)
    with pytest.raises(LogError, match=r"no longer begins with the 590 bytes .* new export"):
        read()


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_followed_file_that_is_read_as_a_whole_must_not_grow_any_more(
    tmp_path: Path, is_restarted: bool
) -> None:
    path = tmp_path / "log.tsv.gz"
    _gzip(path, 100)
    tail, read = _follow(_log(path.name), tmp_path)
    assert [read(), read(), read()] == [0, 100, 0]
    if is_restarted:
        tail, read = _follow(_log(path.name), tmp_path, tail.done)
    with open(path, "ab") as file:
        file.write(gzip.compress(_text(50).encode()))
    with pytest.raises(LogError, match=r"bytes, but .* were read before"):
        read()


def test_what_an_earlier_follower_read_of_a_file_that_grew_since_is_an_error(tmp_path: Path) -> None:
    _gzip(tmp_path / "log.tsv.gz", 100)
    tail = Tail(_log("log.tsv.gz"), str(tmp_path))
    with pytest.raises(LogError, match="were read before"):
        list(tail.read(Tally(), until={"log.tsv.gz": 50}))
