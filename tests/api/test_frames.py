"""Data given as frames, files, lists and dicts: the same rows make the same Table, and errors name the argument."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import recmill

SHOP = Path(__file__).parent.parent / "fixtures" / "shop"
FILES = {"log": SHOP / "events.csv", "users": SHOP / "users.csv", "items": SHOP / "items.csv"}
RECIPE = recmill.load_recipe("quickstart")
PLAIN = {
    "name": "plain",
    "log": {
        "files": ["events.csv"],
        "separator": ",",
        "header": True,
        "columns": [
            {"name": "user", "type": "text"},
            {"name": "time", "type": "int"},
            {"name": "y", "type": "int"},
        ],
    },
    "labels": [{"name": "y", "columns": "y"}],
    "features": [{"columns": "user", "steps": ["vocabulary"]}, {"columns": "time", "steps": ["standardise"]}],
}


def frames(read: Callable[[Path], Any]) -> dict[str, Any]:
    return {name: read(path) for name, path in FILES.items()}


def digest_of(data: Any) -> str:
    return recmill.prepare(RECIPE, data, quiet=True).digest


@pytest.fixture(scope="module")
def digest() -> str:
    return digest_of(SHOP)


def with_other_types(path: Path) -> pd.DataFrame:
    """The same rows in types that a pandas user has: categories, times, integers and text that may be missing."""
    frame = pd.read_csv(path).convert_dtypes()
    for name in ("device", "category", "country"):
        if name in frame:
            frame[name] = frame[name].astype("category")
    if "time" in frame:
        frame["time"] = pd.to_datetime(frame["time"].astype("int64"), unit="s")
    return frame


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(frames(pl.read_csv), id="Polars"),
        pytest.param(frames(pl.scan_csv), id="lazy Polars"),
        pytest.param(frames(pd.read_csv), id="pandas"),
        pytest.param(frames(lambda path: pd.read_csv(path, dtype_backend="pyarrow")), id="pandas on Arrow"),
        pytest.param(frames(with_other_types), id="pandas with categories and times"),
        pytest.param(frames(pa.csv.read_csv), id="Arrow"),
        pytest.param(frames(lambda path: pa.csv.read_csv(path).to_reader()), id="Arrow stream"),
        pytest.param(FILES, id="files"),
        pytest.param({**FILES, "users": pl.read_csv(FILES["users"])}, id="files and a frame"),
        pytest.param({"log": SHOP, "users": SHOP, "items": SHOP}, id="directories"),
        pytest.param({"events.csv": FILES["log"], "users": SHOP, "items": SHOP}, id="the log by its name"),
        pytest.param({**FILES, "log": f"file://{FILES['log']}"}, id="a file's URL"),
    ],
)
def test_the_same_rows_make_the_same_table(data: Any, digest: str) -> None:
    assert digest_of(data) == digest


def test_a_single_frame_is_the_log() -> None:
    frame = pl.DataFrame({"user": ["a", "b", "a"], "time": [1, 2, 3], "y": [0, 1, 0]})
    table = recmill.prepare(PLAIN, frame, quiet=True)
    assert table.to_polars()["user"].to_list() == [1, 2, 1]
    assert table.to_pandas()["user"].tolist() == [1, 2, 1]
    assert table.to_arrow()["user"].to_pylist() == [1, 2, 1]


def test_times_become_seconds_since_1970() -> None:
    times = ["1969-12-31T23:59:59.5", "1970-01-01T00:00:07.9", None]
    frame = pl.DataFrame({"user": ["a", "b", "c"], "time": times, "y": [0, 1, 1]}).with_columns(
        pl.col("time").str.to_datetime()
    )
    recipe = recmill.load_recipe(PLAIN, {"features": [{"columns": "time"}]})
    for given in (frame, frame.with_columns(pl.col("time").dt.replace_time_zone("UTC"))):
        rows = recmill.prepare(recipe, given, quiet=True).to_polars()
        assert rows["time"].to_list()[:2] == [-1.0, 7.0]


def test_files_whose_names_a_pattern_matches_may_be_a_list(tmp_path: Path) -> None:
    recipe = recmill.load_recipe(PLAIN, {"log.files": ["day_*.csv"]})
    parts = [pl.DataFrame({"user": [name], "time": [1], "y": [y]}) for name, y in (("a", 0), ("b", 1))]
    for number, part in enumerate(parts):
        part.write_csv(tmp_path / f"day_{number}.csv")
        part.write_csv(tmp_path / f"{number}.txt")
    expected = recmill.prepare(recipe, tmp_path, quiet=True).digest
    named = [tmp_path / "day_0.csv", tmp_path / "day_1.csv"]
    for data in (named, [tmp_path / "0.txt", tmp_path / "1.txt"], parts):
        assert recmill.prepare(recipe, data, quiet=True).digest == expected


def test_parquet_is_read_under_a_recipe_for_text(tmp_path: Path) -> None:
    frame = pl.DataFrame({"user": ["a", "b"], "time": [1, 2], "y": [0, 1]})
    frame.write_parquet(tmp_path / "events.csv")
    from_file = recmill.prepare(PLAIN, tmp_path, quiet=True)
    assert from_file.digest == recmill.prepare(PLAIN, frame, quiet=True).digest


def test_a_cell_that_runs_again_finds_its_table(tmp_path: Path) -> None:
    frame = pl.DataFrame({"user": ["a", "b"], "time": [1, 2], "y": [0, 1]})
    first = recmill.prepare(PLAIN, frame, into=tmp_path / "table", quiet=True)
    again = recmill.prepare(PLAIN, frame.clone(), into=tmp_path / "table", quiet=True)
    assert again.digest == first.digest
    with pytest.raises(recmill.ArtifactError, match="already holds a Table of another recipe or log"):
        recmill.prepare(PLAIN, frame.with_columns(time=pl.lit(9)), into=tmp_path / "table", quiet=True)


GOOD = pl.DataFrame({"user": ["a"], "time": [1], "y": [1]})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (42, "data: got int. Expected a directory, a file"),
        ({"user": ["a"], "y": [1]}, 'data: recipe "plain" has no "user"; known: log. Keys are'),
        ([{"user": "a", "y": 1}], r"data\[0\]: got dict. .* Make a frame of it: polars.DataFrame"),
        ([], "data: is an empty list"),
        (GOOD.drop("y"), 'data: no column "y"; the frame has: user, time'),
        ({"log": GOOD.rename({"user": "usr"})}, r'data\["log"\]: no column "user"; .* Did you mean "usr"\?'),
        (GOOD.to_pandas().set_index("user"), r"It is the frame's index: call reset_index\(\) first"),
        (GOOD.with_columns(user=pl.lit(1.5)), 'data: column "user" is double, which cannot be read as text'),
        (pd.DataFrame({"user": ["a", 1], "time": [1, 2], "y": [0, 1]}), "data: .* Give each column one type"),
        ([GOOD, GOOD], 'data: has 2 files or frames; the recipe reads "events.csv". Concatenate the frames'),
        ({"log": "/no/such/file"}, "/no/such/file: no such directory"),
    ],
)
def test_wrong_data_is_an_error_that_names_the_argument(data: Any, message: str) -> None:
    with pytest.raises(recmill.LogError, match=message):
        recmill.prepare(PLAIN, data, quiet=True)


def test_side_tables_that_are_not_given_are_named() -> None:
    with pytest.raises(
        recmill.LogError, match=r'also reads items and users\. Give all of it: data=\{"log": \.\.\.'
    ):
        recmill.prepare(RECIPE, pl.read_csv(FILES["log"]), quiet=True)
    with pytest.raises(recmill.LogError, match='has no "user"; did you mean "users"'):
        recmill.prepare(RECIPE, {**FILES, "user": FILES["users"]}, quiet=True)


def test_frames_are_written_with_the_declared_columns_alone(tmp_path: Path) -> None:
    from recmill.logs.frames import open_data

    wide = GOOD.with_columns(other=pl.lit("x"))
    folder = open_data(recmill.load_recipe(PLAIN), wide, lambda: tmp_path)
    assert pq.read_schema(Path(folder) / "events.csv").names == ["user", "time", "y"]
