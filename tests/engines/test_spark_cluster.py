"""Spark's own ways: retries, adaptive shuffles, settings, sessions, Spark Connect. The rest is in test_clusters.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from spark_cluster import SparkConf, connect_server, shared_spark

import recmill
from recmill.engines.spark import SparkCluster
from recmill.errors import LogError, MissingPackage, RecmillError

pytestmark = [pytest.mark.services, pytest.mark.xdist_group("spark")]


@pytest.fixture(autouse=True)
def spark() -> SparkConf:
    return shared_spark()


@pytest.fixture
def cluster(tmp_path: Path) -> SparkCluster:
    return SparkCluster(tmp_path)


def silent(number: int) -> None:
    """Nobody listens."""


def remainders(number: int, part: int) -> Iterator[tuple[int, pl.DataFrame]]:
    """Numbers 0 to 99 of a part, to the bucket of their remainder by 5."""
    numbers = pl.DataFrame({"part": [part] * 100, "number": range(100)})
    for bucket in range(5):
        yield bucket, numbers.filter(pl.col("number") % 5 == bucket)


def sums(bucket: int, frames: Iterator[pl.DataFrame]) -> tuple[int, int, int]:
    rows = pl.concat([pl.DataFrame({"part": [0], "number": [0]}), *frames])
    return bucket, rows["part"].sum(), rows["number"].sum()


SUMS_OF_PARTS_1_TO_6 = [(bucket, 20 * 21, 6 * (950 + 20 * bucket)) for bucket in range(5)]


def executor() -> int:
    """The Java process above this Python worker."""
    daemon = os.getppid()
    return int(Path(f"/proc/{daemon}/stat").read_text().rpartition(")")[2].split()[1])


def test_tasks_run_in_executors_of_their_own(cluster: SparkCluster) -> None:
    assert cluster.parallelism() == 2
    found = set(cluster.each(range(8), lambda number, part: executor(), silent))
    assert len(found) == 2
    assert os.getpid() not in found


@pytest.mark.parametrize("bytes_wanted", ["1", "1g"], ids=["many small partitions", "one partition"])
def test_adaptive_execution_neither_splits_nor_merges_buckets(tmp_path: Path, bytes_wanted: str) -> None:
    adaptive = {
        "spark.sql.adaptive.enabled": "true",
        "spark.sql.adaptive.advisoryPartitionSizeInBytes": bytes_wanted,
        "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
        "spark.sql.adaptive.forceOptimizeSkewedJoin": "true",
    }
    cluster = SparkCluster(tmp_path, conf=adaptive)
    assert cluster.exchange(range(1, 7), remainders, 5, sums, silent) == SUMS_OF_PARTS_1_TO_6


def test_large_frames_travel_in_pieces(cluster: SparkCluster) -> None:
    def scatter(number: int, part: int) -> Iterator[tuple[int, pl.DataFrame]]:
        yield 0, pl.DataFrame({"value": [os.urandom(1000).hex() for _ in range(12_000)]})

    def gather(bucket: int, frames: Iterator[pl.DataFrame]) -> tuple[int, int]:
        sizes = [(frame.height, frame.estimated_size()) for frame in frames]
        return sum(height for height, _ in sizes), max(size for _, size in sizes)

    ((rows, largest),) = cluster.exchange([0], scatter, 1, gather, silent)
    assert rows == 12_000
    assert largest < 5 << 20


def test_nothing_is_made_of_a_bucket_when_a_part_failed(cluster: SparkCluster, tmp_path: Path) -> None:
    def scatter(number: int, part: int) -> Iterator[tuple[int, pl.DataFrame]]:
        yield from remainders(number, part)
        if part == 2:
            raise LogError("part 2 is bad")

    def gather(bucket: int, frames: Iterator[pl.DataFrame]) -> None:
        rows = sum(frame.height for frame in frames)
        (tmp_path / f"bucket-{bucket}").write_text(str(rows))

    def hide() -> None:  # as a file system does that shows other machines a new file late
        while not is_over.wait(0.001):
            for file in (tmp_path / "calls").glob("*/given-up"):
                file.unlink(missing_ok=True)

    is_over = threading.Event()
    thread = threading.Thread(target=hide)
    thread.start()
    with pytest.raises(LogError, match=r"^part 2 is bad"):
        cluster.exchange([1, 2, 3], scatter, 5, gather, silent)
    is_over.set()
    thread.join()
    assert list(tmp_path.glob("bucket-*")) == []


def test_any_other_error_arrives_too_after_some_attempts(cluster: SparkCluster, tmp_path: Path) -> None:
    def divide(number: int, part: int) -> float:
        (tmp_path / f"attempt-{os.urandom(4).hex()}").touch()
        return 1 / part

    with pytest.raises(ZeroDivisionError):
        cluster.each([0], divide, silent)
    assert len(list(tmp_path.glob("attempt-*"))) == 4


def test_a_killed_executor_changes_no_answer(cluster: SparkCluster, tmp_path: Path) -> None:
    killed = tmp_path / "killed"

    def scatter(number: int, part: int) -> Iterator[tuple[int, pl.DataFrame]]:
        for sent, piece in enumerate(remainders(number, part)):
            yield piece
            if part == 5 and sent == 2 and not killed.exists():
                killed.touch()
                os.kill(executor(), signal.SIGKILL)
                signal.pause()

    assert cluster.exchange(range(1, 7), scatter, 5, sums, silent) == SUMS_OF_PARTS_1_TO_6
    assert killed.exists()


def test_settings_of_the_user_win(spark: SparkConf, tmp_path: Path) -> None:
    from pyspark.sql import SparkSession

    assert SparkSession.active().sparkContext.appName == "tests of recmill"
    partitions = "spark.sql.shuffle.partitions"
    assert SparkCluster(tmp_path, conf={partitions: "3"})._session.conf.get(partitions) == "3"


def test_an_active_session_is_used_and_left_as_it_was(spark: SparkConf, tmp_path: Path) -> None:
    from pyspark.sql import SparkSession

    before = SparkSession.active().conf.get("spark.sql.shuffle.partitions")
    cluster = SparkCluster(tmp_path, spark.address, {"spark.sql.shuffle.partitions": "3"})
    cluster.each([1], lambda number, part: part, silent)
    cluster.close()
    assert SparkSession.active().range(3).count() == 3
    assert SparkSession.active().conf.get("spark.sql.shuffle.partitions") == before
    assert list((tmp_path / "calls").iterdir()) == []


def test_what_cannot_be_had_from_an_active_session_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        RecmillError, match=r"active at local-cluster\[2,1,700\], but the address given is yarn"
    ):
        SparkCluster(tmp_path, "yarn")
    with pytest.raises(RecmillError, match=r"--spark-conf spark.executor.cores=9 cannot be set"):
        SparkCluster(tmp_path, conf={"spark.executor.cores": "9"})


def test_a_server_that_does_not_answer_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(RecmillError, match=r"No Spark Connect server answers at sc://127\.0\.0\.1:1"):
        SparkCluster(tmp_path, "sc://127.0.0.1:1")


def test_a_missing_package_is_an_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(
        MissingPackage, match=r'Engine "spark" needs pyspark. Install it: pip install "recmill\[spark\]"'
    ):
        SparkCluster(tmp_path)


def test_missing_java_is_an_install_line(tmp_path: Path) -> None:
    code = "import pathlib; from recmill.engines.spark import SparkCluster; SparkCluster(pathlib.Path('.'))"
    environment = {**os.environ, "PATH": str(tmp_path)}
    environment.pop("JAVA_HOME", None)
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert 'Engine "spark" needs Java 17 or later, and there is no java.' in answer.stderr
    assert "apt-get install openjdk-17-jre-headless" in answer.stderr


def check_frames_of_spark_connect(address: str) -> None:
    """A DataFrame of a Spark Connect session is a log, beside an active session of the other kind."""
    from pyspark.sql.connect.session import SparkSession

    recipe = {
        "name": "plain",
        "log": {"files": ["events"], "columns": [{"name": "n", "type": "int"}, {"name": "y", "type": "int"}]},
        "labels": [{"name": "y", "columns": "y"}],
        "features": [{"columns": "n"}],
    }
    session = SparkSession.builder.remote(address).create()
    frame = session.range(0, 1_000, 1, 4).selectExpr("id AS n", "id % 2 AS y")
    assert recmill.prepare(recipe, frame, quiet=True).to_polars()["n"].to_list() == list(range(1_000))
    with pytest.raises(LogError, match='no column "y"; the frame has: n'):
        recmill.prepare(recipe, frame.select("n"), quiet=True)
    session.stop()


def test_spark_connect_gives_the_same_answers(tmp_path: Path) -> None:
    with connect_server(tmp_path) as address:
        cluster = SparkCluster(tmp_path, address)
        assert cluster.parallelism() == 2
        assert cluster.each([1, 2, 3], lambda number, part: part * 2, silent) == [2, 4, 6]
        assert cluster.exchange(range(1, 7), remainders, 5, sums, silent) == SUMS_OF_PARTS_1_TO_6

        def bad(number: int, part: int) -> None:
            raise LogError("bad")

        with pytest.raises(LogError, match=r"^bad"):
            cluster.each([1], bad, silent)
        cluster.close()
        check_frames_of_spark_connect(address)
