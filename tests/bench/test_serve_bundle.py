"""The bench bundle from its generated log to answers of a real server, at a tiny size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from recmill.cli import main
from recmill.errors import RecmillError
from recmill.recipe.load import load_recipe
from recmill.stages.bench.serve.bundle import RECIPE
from recmill.stages.bench.serve.config import BenchTarget, CsvClientConfig, ServeBenchConfig
from recmill.stages.bench.serve.csv_client import batch_ranges
from recmill.stages.bench.serve.inference import parse_column
from recmill.stages.bench.serve.log import (
    CONTEXT_KINDS,
    CONTEXT_NUMBERS,
    ITEM_KINDS,
    USER_KINDS,
    USER_NUMBERS,
    LogSize,
    write_log,
)
from recmill.stages.bench.serve.run import bench_serve
from recmill.stages.bench.serve.server import BenchServer, start_server

ITEMS = 400
pytestmark = pytest.mark.xdist_group("bench bundle")  # one process makes the bundle


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> pl.DataFrame:
    folder = tmp_path_factory.mktemp("log")
    write_log(LogSize.of(4000), folder)
    return pl.read_parquet(folder / "log.parquet")


def test_the_log_has_the_shape_of_the_reference(log: pl.DataFrame) -> None:
    assert len(USER_NUMBERS) + len(CONTEXT_NUMBERS) == 13
    assert len(["user_id", *USER_KINDS, *CONTEXT_KINDS]) == 11
    assert len(["item_id", *ITEM_KINDS]) == 15
    ranking = load_recipe(str(RECIPE)).ranking
    assert ranking is not None
    assert len(ranking.features) == 13 + 26


def test_every_item_is_in_the_log_and_keeps_its_columns(log: pl.DataFrame) -> None:
    assert log["item_id"].n_unique() == 4000
    assert log.select(pl.struct("item_id", *ITEM_KINDS).n_unique()).item() == 4000
    assert log.select(pl.struct("user_id", *USER_KINDS).n_unique()).item() == log["user_id"].n_unique()
    assert log["time"].is_sorted()


def test_users_click_what_they_like(log: pl.DataFrame) -> None:
    likes = (
        (pl.col("ik1") == pl.col("uk1")) | (pl.col("ik1") == pl.col("uk2")) | (pl.col("ik1") == pl.col("uk3"))
    )
    rates = {bool(liked[0]): rows["click"].mean() for liked, rows in log.group_by(likes)}
    assert rates[True] > 0.5  # type: ignore[operator]
    assert rates[False] < 0.2  # type: ignore[operator]


def test_equal_seeds_write_equal_logs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_log(LogSize.of(200), tmp_path / name, seed=3)
    assert pl.read_parquet(tmp_path / "a" / "log.parquet").equals(
        pl.read_parquet(tmp_path / "b" / "log.parquet")
    )


@pytest.mark.parametrize(
    ("texts", "datatype", "values"),
    [
        (["1", "", "3"], "INT64", [1, None, 3]),
        (["80218964", None], "BYTES", ["80218964", None]),  # ids in base 16 go as the log writes them
        (["0.5", ""], "FP64", [0.5, None]),
        (["a", ""], "BYTES", ["a", None]),
        (["1", "false", "True"], "BOOL", [True, False, True]),
    ],
)
def test_texts_of_a_file_become_what_the_model_reads(
    texts: list[str | None], datatype: str, values: list[object]
) -> None:
    assert parse_column(pl.Series("c", texts, pl.String), datatype).to_list() == values


def test_a_text_where_a_number_is_read_is_named() -> None:
    with pytest.raises(RecmillError, match='Column "price" must hold numbers, but it holds "cheap"'):
        parse_column(pl.Series("price", ["1", "cheap"]), "FP64")


def test_a_short_file_is_read_again_and_a_whole_one_once() -> None:
    asked = CsvClientConfig(Path("x"), batch_size=4, num_iteration=3)
    assert list(batch_ranges(9, asked)) == [(0, 4), (4, 4), (0, 4)]
    assert list(batch_ranges(9, CsvClientConfig(Path("x"), batch_size=4, out=Path("y")))) == [
        (0, 4),
        (4, 4),
        (8, 1),
    ]
    assert list(batch_ranges(2, asked)) == [(0, 2)] * 3


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    pytest.importorskip("onnxruntime")
    from recmill.stages.bench.serve.bundle import make_bundle

    return make_bundle(ITEMS, tmp_path_factory.mktemp("bundles"), "int8")


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[BenchServer]:
    pytest.importorskip("grpc")
    with start_server(bundle) as running:
        yield running


@pytest.mark.processes
def test_a_bundle_is_made_once(bundle: Path) -> None:
    from recmill.stages.bench.serve.bundle import make_bundle

    before = (bundle / "current").stat().st_mtime_ns
    assert make_bundle(ITEMS, bundle.parent.parent, "int8") == bundle
    assert (bundle / "current").stat().st_mtime_ns == before


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_our_own_server_is_measured_through_both_transports(transport: str, bundle: Path) -> None:
    options = ServeBenchConfig(
        k=5,
        candidates=50,
        transport="grpc" if transport == "grpc" else "http",
        rate=(10.0,),
        seconds=1.5,
        warm_up=0.5,
        deadline_ms=20_000.0,
        labels=bundle.parent / "log" / "labels.parquet",
        label_users=30,
        without_echo=True,
    )
    result = bench_serve(BenchTarget(bundle), options)
    (load,) = result["loads"]
    assert (load["failed"], load["errors"]) == (0, {})
    assert load["answers"]["items_per_answer"] == 5
    assert load["server"]["stages_ms"]
    assert load["traced_stages_ms"]
    assert load["server"]["resident_bytes"] > 10_000_000
    assert load["server"]["cpu_ms_per_request"] > 0
    assert 0 <= result["accuracy"]["auc"] <= 1
    assert result["seconds_to_ready"] > 0


@pytest.mark.processes
def test_the_csv_client_scores_a_file_alike_over_both_transports(
    server: BenchServer, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = pl.read_parquet(bundle.parent / "log" / "log.parquet").head(50)
    rows.with_columns(uk4=None).write_csv(tmp_path / "eval.csv")
    scores = []
    for transport, address in (("grpc", server.grpc), ("http", server.http)):
        flags = ["-s", str(address), "-d", str(tmp_path / "eval.csv"), "-b", "16", "--transport", transport]
        out = tmp_path / f"{transport}.csv"
        assert main(["client", *flags, "--json", "--out", str(out)]) == 0
        result = json.loads(capsys.readouterr().out)
        assert (result["rows"], result["batches"]) == (50, 4)
        assert 0 < result["auc"] < 1
        scores.append(pl.read_csv(out)["probability"])
    assert len(scores[0]) == 50
    assert (scores[0] - scores[1]).abs().max() < 1e-6  # type: ignore[operator]
