"""Ray Datasets and Spark DataFrames as logs: the Table is that of the same rows in a file, in their order."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from engine_confs import EngineConf

import recmill

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray Data's, of its own settings

SHOP = Path(__file__).parents[1] / "fixtures" / "shop"
FILES = {"log": SHOP / "events.csv", "users": SHOP / "users.csv", "items": SHOP / "items.csv"}
PLAIN = {
    "name": "plain",
    "log": {
        "files": ["events.csv"],
        "columns": [{"name": "number", "type": "int"}, {"name": "y", "type": "int"}],
    },
    "labels": [{"name": "y", "columns": "y"}],
    "features": [{"columns": "number"}],
    "table": {"keep": ["number"]},
}
NUMBERS = pa.table({"number": range(4_000), "y": [n % 2 for n in range(4_000)]})
# Every type that Arrow, Ray and Spark have in common, with a missing value in each.
TYPES = pa.table(
    {
        "user": pa.array(["a", None, "c ü", ""]),
        "at": pa.array([datetime(2026, 1, 2, 3, 4, 5, 600_000, UTC), None, datetime(1969, 7, 20, tzinfo=UTC),
                        datetime(9999, 12, 31, tzinfo=UTC)], pa.timestamp("us", "UTC")),
        "day": pa.array([date(2026, 1, 2), date(1970, 1, 1), None, date(9999, 12, 31)]),
        "tags": pa.array([["x", "y"], [], None, ["x"]]),
        "codes": pa.array([[1, 2], None, [3], []]),
        "flag": pa.array([True, None, False, True]),
        "small": pa.array([1, 2, None, -4], pa.int8()),
        "price": pa.array([Decimal("1.50"), None, Decimal("2.25"), Decimal("-3.00")], pa.decimal128(8, 2)),
        "real": pa.array([0.5, None, -1.25, 2.0], pa.float32()),
        "y": pa.array([0, 1, 1, 0]),
    }
)  # fmt: skip
TYPED = {
    "name": "typed",
    "log": {
        "files": ["events.parquet"],
        "format": "parquet",
        "columns": [
            {"name": "user", "type": "text"},
            {"name": "at", "type": "time"},
            {"name": "day", "type": "text"},
            {"name": "tags", "type": "text"},
            {"name": "codes", "type": "text"},
            {"name": "flag", "type": "bool"},
            {"name": "small", "type": "int"},
            {"name": "price", "type": "float"},
            {"name": "real", "type": "float"},
            {"name": "y", "type": "int"},
        ],
    },
    "labels": [{"name": "y", "columns": "y"}],
    "features": [{"columns": "user", "steps": ["vocabulary"]}],
    "table": {"keep": ["user", "at", "day", "tags", "codes", "flag", "small", "price", "real"]},
}

Make = Callable[[pa.Table], Any]


def ray_dataset(table: pa.Table) -> Any:
    import ray.data

    step = -(-table.num_rows // 8) or 1
    return ray.data.from_arrow([table.slice(start, step) for start in range(0, max(1, table.num_rows), step)])


def spark_frame(table: pa.Table) -> Any:
    from pyspark.sql import SparkSession

    return SparkSession.active().createDataFrame(table)


@pytest.fixture
def make(cluster_engine: EngineConf) -> Make:
    """What makes a frame of the engine's library."""
    return {"ray": ray_dataset, "spark": spark_frame}[cluster_engine.name]


def frames_of(make: Make) -> dict[str, Any]:
    return {name: make(pl.read_csv(path).to_arrow()) for name, path in FILES.items()}


def test_the_same_rows_make_the_same_table(make: Make) -> None:
    expected = recmill.prepare("quickstart", SHOP, quiet=True).digest
    frames = frames_of(make)
    assert recmill.prepare("quickstart", frames, quiet=True).digest == expected
    some = {**frames, "users": FILES["users"], "items": pl.read_csv(FILES["items"])}
    assert recmill.prepare("quickstart", some, quiet=True).digest == expected


def test_their_own_cluster_prepares_them_too(cluster_engine: EngineConf, make: Make, tmp_path: Path) -> None:
    expected = recmill.prepare("quickstart", SHOP, quiet=True).digest
    table = recmill.prepare(
        "quickstart",
        frames_of(make),
        into=tmp_path / "table",
        engine=cluster_engine.name,  # type: ignore[arg-type]
        quiet=True,
    )
    assert table.digest == expected
    assert [path.name for path in tmp_path.iterdir()] == ["table"]


def test_values_of_all_types_are_those_of_other_frames(make: Make) -> None:
    expected = recmill.prepare(TYPED, TYPES, quiet=True)
    table = recmill.prepare(TYPED, make(TYPES), quiet=True)
    assert table.to_polars().equals(expected.to_polars())
    assert table.digest == expected.digest


def test_rows_keep_their_order(make: Make) -> None:
    table = recmill.prepare(PLAIN, make(NUMBERS), quiet=True)
    assert table.to_polars()["raw_number"].to_list() == list(range(4_000))


def test_a_pattern_and_a_list_of_frames(make: Make) -> None:
    recipe = recmill.load_recipe(PLAIN, {"log.files": ["day_*.csv"]})
    halves = [make(NUMBERS.slice(0, 2_000)), make(NUMBERS.slice(2_000))]
    for data in (make(NUMBERS), halves, [halves[0], NUMBERS.slice(2_000)]):
        rows = recmill.prepare(recipe, data, quiet=True).to_polars()
        assert rows["raw_number"].to_list() == list(range(4_000))


def test_wrong_frames_are_errors_that_name_the_argument(make: Make) -> None:
    with pytest.raises(recmill.LogError, match='data: no column "y"; the frame has: number'):
        recmill.prepare(PLAIN, make(NUMBERS.select(["number"])), quiet=True)
    lists = pa.table({"number": [[1.5]], "y": [1]})
    with pytest.raises(recmill.LogError, match=r'data\["log"\]: column "number" is list<.*cannot be read as'):
        recmill.prepare(PLAIN, {"log": make(lists)}, quiet=True)


def test_frames_of_other_machines_are_written_beside_the_result(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recmill.api.arguments import data_of
    from recmill.logs.cluster_frames import is_elsewhere, is_ray

    frame = make(NUMBERS)
    assert not is_elsewhere(frame)
    if not is_ray(frame):
        return  # where Spark runs follows from its address
    monkeypatch.setattr(socket, "gethostname", lambda: "a-laptop")
    assert is_elsewhere(frame)
    with pytest.raises(recmill.LogError, match="Give into, a directory on a file system that all machines"):
        recmill.preview(PLAIN, frame)
    folder = Path(data_of(recmill.load_recipe(PLAIN), frame, tmp_path / "runs" / "table"))
    assert folder.parent == tmp_path / "runs"
    assert folder.name.startswith(".table-data-")
    assert recmill.prepare(PLAIN, folder, quiet=True).num_rows("train") == 4_000


@pytest.mark.stages
def test_every_stage_that_reads_a_log_reads_frames(make: Make, tmp_path: Path) -> None:
    """check, preview, train, score: the rest goes through the same function."""
    ranking = {"model": "lr", "label": "y", "embedding_dim": 1, "train": {"batch_size": 500, "max_steps": 8}}
    recipe = recmill.load_recipe(
        {**PLAIN, "features": [{"columns": "number", "steps": [{"hash": 64}]}], "ranking": ranking}
    )
    assert recmill.check(recipe, make(NUMBERS)).good
    assert recmill.preview(recipe, make(NUMBERS), 3).height == 3
    options: Any = {"quiet": True, "threads": 1}
    trained = recmill.train(recipe, from_log=make(NUMBERS), into=tmp_path / "a", **options)
    same = recmill.train(recipe, from_log=NUMBERS, into=tmp_path / "b", **options)
    scores = recmill.score(trained, make(NUMBERS), quiet=True).to_polars()
    assert (
        scores["score"].to_list() == recmill.score(same, NUMBERS, quiet=True).to_polars()["score"].to_list()
    )


@pytest.mark.stages
def test_fit_decides_as_for_a_file(make: Make, tmp_path: Path) -> None:
    num_items = 24
    events = pa.table(
        {
            "who": [u for u in range(40) for _ in range(8)],
            "film": [(u + 2 * n) % num_items for u in range(40) for n in range(8)],
            "at": [1_600_000_000 + 100 * n + u for u in range(40) for n in range(8)],
        }
    )
    films = pa.table({"film": range(num_items), "title": [f"Film {n}" for n in range(num_items)]})
    columns = {"user": "who", "item": "film", "time": "at"}
    fitted = recmill.fit(make(events), items=make(films), into=tmp_path / "a", quiet=True, **columns)
    expected = recmill.fit(events, items=films, into=tmp_path / "b", quiet=True, **columns)
    text = (tmp_path / "a" / "recipe.toml").read_text()
    assert text == (tmp_path / "b" / "recipe.toml").read_text()
    assert fitted.recommend(4, k=3).ids == expected.recommend(4, k=3).ids
    first = recmill.Table.open(tmp_path / "a" / "table")
    assert first.digest == recmill.Table.open(tmp_path / "b" / "table").digest


@pytest.mark.services
@pytest.mark.xdist_group("ray")
class TestRay:
    """What only Ray has."""

    @pytest.fixture(autouse=True)
    def ray(self) -> None:
        from ray_cluster import shared_ray

        shared_ray()

    def test_blocks_that_end_late_keep_their_order_and_are_written_elsewhere(self) -> None:
        import time

        def slow_first(block: pa.Table) -> pa.Table:
            if block["number"][0].as_py() == 0:
                time.sleep(1)
            return block.append_column("process", pa.array([os.getpid()] * block.num_rows))

        dataset = ray_dataset(NUMBERS).map_batches(slow_first, batch_format="pyarrow", batch_size=None)
        recipe = recmill.load_recipe(
            PLAIN,
            {
                "log.columns": [*PLAIN["log"]["columns"], {"name": "process", "type": "int"}],  # type: ignore[index]
                "table.keep": ["number", "process"],
            },
        )
        rows = recmill.prepare(recipe, dataset, quiet=True).to_polars()
        assert rows["raw_number"].to_list() == list(range(4_000))
        assert os.getpid() not in set(rows["raw_process"])
        assert not dataset.context.execution_options.preserve_order

    def test_blocks_of_pandas_differ_in_type_where_values_are_missing(self) -> None:
        import pandas as pd
        import ray.data

        blocks = [
            pd.DataFrame({"number": [n, other], "y": [0, 1]}) for n, other in ((1, 2), (3, None), (5, 6))
        ]
        assert blocks[0]["number"].dtype != blocks[1]["number"].dtype
        rows = recmill.prepare(PLAIN, ray.data.from_pandas(blocks), quiet=True).to_polars()
        assert rows["raw_number"].to_list() == [1, 2, 3, None, 5, 6]

    def test_an_error_in_a_users_function_is_said(self) -> None:
        def broken(block: pa.Table) -> pa.Table:
            raise ValueError("the sensor was off")

        dataset = ray_dataset(NUMBERS).map_batches(broken, batch_format="pyarrow")
        with pytest.raises(
            recmill.LogError, match=r"data: the Ray Dataset cannot be written .*the sensor was off"
        ):
            recmill.prepare(PLAIN, dataset, quiet=True)

    def test_a_dataset_without_rows_has_no_rows(self) -> None:
        for dataset in (
            ray_dataset(NUMBERS).limit(0),
            ray_dataset(NUMBERS).map_batches(lambda block: block.slice(0, 0), batch_format="pyarrow"),
        ):
            with pytest.raises(recmill.LogError, match="no rows"):
                recmill.prepare(PLAIN, dataset, quiet=True)


@pytest.mark.services
@pytest.mark.xdist_group("spark")
class TestSpark:
    """What only Spark has."""

    @pytest.fixture(autouse=True)
    def spark(self) -> None:
        from spark_cluster import shared_spark

        shared_spark()

    def test_a_sorted_frame_is_a_log_in_that_order(self) -> None:
        frame = spark_frame(NUMBERS).repartition(5).sort("number", ascending=False)
        rows = recmill.prepare(PLAIN, frame, quiet=True).to_polars()
        assert rows["raw_number"].to_list() == list(range(4_000))[::-1]

    def test_names_with_dots_and_of_other_case_are_columns(self) -> None:
        odd = NUMBERS.rename_columns(["a.b `c`", "y"])
        recipe = recmill.load_recipe(
            PLAIN, {"log.columns[0]": {"name": "number", "type": "int", "in_file": "a.b `c`"}}
        )
        assert recmill.prepare(recipe, spark_frame(odd), quiet=True).to_polars().height == 4_000
        with pytest.raises(recmill.LogError, match='no column "y"; the frame has: number, Y'):
            recmill.prepare(PLAIN, spark_frame(NUMBERS.rename_columns(["number", "Y"])), quiet=True)

    def test_a_session_keeps_its_settings(self) -> None:
        from pyspark.sql import SparkSession

        name = "spark.sql.parquet.outputTimestampType"
        before = SparkSession.active().conf.get(name)
        recmill.prepare(PLAIN, spark_frame(NUMBERS), quiet=True)
        assert SparkSession.active().conf.get(name) == before

    def test_a_frame_without_rows_has_no_rows(self) -> None:
        for frame in (spark_frame(NUMBERS).limit(0), spark_frame(NUMBERS).where("number < 0")):
            with pytest.raises(recmill.LogError, match="no rows"):
                recmill.prepare(PLAIN, frame, quiet=True)

    def test_an_error_of_spark_is_said(self) -> None:
        frame = spark_frame(NUMBERS).selectExpr("raise_error('the sensor was off') AS number", "y")
        with pytest.raises(
            recmill.LogError, match=r"data: the Spark DataFrame cannot be written .*the sensor was off"
        ):
            recmill.prepare(PLAIN, frame, quiet=True)
