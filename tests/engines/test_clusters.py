"""The two primitives that a cluster engine stands on: a call for each part, and the exchange by bucket."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from engine_confs import ClusterConf

from recmill.engines.calls import new_call
from recmill.engines.cluster import Cluster, cut, decode, encode
from recmill.errors import (
    ArtifactError,
    LogError,
    MissingPackage,
    RecipeError,
    RecmillError,
    ResourceError,
)


@pytest.fixture
def cluster(tmp_path: Path, cluster_engine: ClusterConf) -> Iterator[Cluster]:
    found = cluster_engine.cluster(tmp_path)
    yield found
    found.close()


def silent(number: int) -> None:
    """Nobody listens."""


def numbers_by_remainder(number: int, part: int) -> Iterator[tuple[int, pl.DataFrame]]:
    """Numbers 0 to 9 of a part, to the bucket of their remainder by 3."""
    for bucket in range(3):
        numbers = list(range(bucket, 10, 3))
        yield bucket, pl.DataFrame({"part": [part] * len(numbers), "number": numbers})


def sums(bucket: int, frames: Iterator[pl.DataFrame]) -> tuple[int, int, int]:
    rows = pl.concat([pl.DataFrame({"part": [0], "number": [0]}), *frames])
    return bucket, int(rows["part"].sum()), int(rows["number"].sum())


SUMS_OF_1_2_3 = [(0, 24, 54), (1, 18, 36), (2, 18, 45), (3, 0, 0)]  # nothing is sent to bucket 3


def test_results_come_in_the_order_of_parts_and_each_part_is_reported_once(cluster: Cluster) -> None:
    reported: list[int] = []
    found = cluster.each(list("abcd"), lambda number, part: part * number, reported.append)
    assert found == ["", "b", "cc", "ddd"]
    assert sorted(reported) == [0, 1, 2, 3]


def test_what_is_sent_to_a_bucket_comes_together_there_even_if_it_is_nothing(cluster: Cluster) -> None:
    reported: list[int] = []
    found = cluster.exchange([1, 2, 3], numbers_by_remainder, 4, sums, reported.append)
    assert found == SUMS_OF_1_2_3
    assert sorted(reported) == [0, 1, 2]


def test_without_parts_there_are_no_results_and_all_buckets_are_empty(cluster: Cluster) -> None:
    assert cluster.each([], lambda number, part: part, silent) == []
    assert cluster.exchange([], numbers_by_remainder, 2, sums, silent) == [(0, 0, 0), (1, 0, 0)]


@pytest.mark.parametrize("place", ["each", "scatter", "gather"])
def test_an_error_arrives_as_it_was_raised(cluster: Cluster, place: str) -> None:
    def fails(*_: Any) -> Any:
        raise LogError("line 3 is not what the recipe says")

    calls = {
        "each": partial(cluster.each, [1, 2], fails, silent),
        "scatter": partial(cluster.exchange, [1, 2], fails, 4, sums, silent),
        "gather": partial(cluster.exchange, [1, 2], numbers_by_remainder, 4, fails, silent),
    }
    with pytest.raises(LogError) as caught:
        calls[place]()
    assert str(caught.value) == "line 3 is not what the recipe says"


def test_an_error_that_is_not_ours_keeps_its_type_and_says_where_it_came_from(cluster: Cluster) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        cluster.each([2, 0], lambda number, part: 1 / part, silent)
    assert "in <lambda>" in "".join(caught.value.__notes__)


class Shipped:
    """A function that leaves a file for each time that it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        with open(self.folder / str(os.getpid()), "a", encoding="utf-8") as file:
            file.write("once\n")

    def __call__(self, number: int, part: int) -> int:
        return os.getpid()


def test_a_function_is_unpickled_once_in_each_process(tmp_path: Path, cluster: Cluster) -> None:
    folder = tmp_path / "unpickled"
    folder.mkdir()
    pids = cluster.each(list(range(8)), Shipped(folder), silent)
    for pid in set(pids):
        assert (folder / str(pid)).read_text() == "once\n"
    assert os.getpid() not in pids


@pytest.mark.parametrize("place", ["scatter", "gather"])
def test_a_killed_process_changes_nothing(tmp_path: Path, cluster: Cluster, place: str) -> None:
    marker = tmp_path / "killed"

    def kill_once() -> None:
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def scatter(number: int, part: int) -> Iterator[tuple[int, pl.DataFrame]]:
        for sent in numbers_by_remainder(number, part):
            yield sent
            if place == "scatter" and part == 2:
                kill_once()  # after some was sent already

    def gather(bucket: int, frames: Iterator[pl.DataFrame]) -> Any:
        if place == "gather" and bucket == 1:
            kill_once()
        return sums(bucket, frames)

    assert cluster.exchange([1, 2, 3], scatter, 4, gather, silent) == SUMS_OF_1_2_3
    assert marker.exists()


# what needs no cluster


def test_a_part_that_is_lost_again_and_again_is_an_error(tmp_path: Path) -> None:
    with new_call(tmp_path) as call:
        for _ in range(6):
            with call.watched(7):
                """And then its process was gone."""
        with pytest.raises(ResourceError, match="Part 7 was begun 6 times"), call.watched(7):
            pass
        assert isinstance(call.failure(), ResourceError)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (LogError("a log"), LogError),
        (RecipeError("mine.toml", ["one", "two"]), RecipeError),
        (FileNotFoundError(2, "No such file", "a.csv"), FileNotFoundError),
        (MissingPackage("This", "that", "those"), RecmillError),  # which is not made of what it says
        (type("Local", (Exception,), {})("of its own"), RuntimeError),
    ],
)
def test_an_error_that_cannot_be_sent_is_told(
    tmp_path: Path, error: Exception, kind: type[Exception]
) -> None:
    with new_call(tmp_path) as call:
        with pytest.raises(type(error)), call.watched(0):
            raise error
        found = call.failure()
    assert type(found) is kind
    assert str(error) in str(found)


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)

    def __init__(self, marker: Path) -> None:
        self.marker = marker


def test_a_record_that_others_wrote_is_never_run(tmp_path: Path) -> None:
    with new_call(tmp_path) as call:
        (call.folder / "failed" / "0-planted").write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
        assert "what it wrote about it is damaged" in str(call.failure())
    assert not (tmp_path / "harm").exists()


def test_functions_that_others_changed_are_never_run(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    from recmill.engines.spark import _SparkCall

    with new_call(tmp_path) as call:
        tasks = _SparkCall.shipping("a function", call)
        assert tasks.shipped() == "a function"
        other = _SparkCall.shipping("another", call)
        (call.folder / "shipped").write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
        with pytest.raises(ArtifactError, match="is not what this call wrote"):
            other.shipped()
    assert not (tmp_path / "harm").exists()


def test_rows_are_cut_by_bucket_and_keep_their_order() -> None:
    rows = pl.DataFrame({"letter": list("abcdef")})
    found = {
        bucket: frame["letter"].to_list()
        for bucket, frame in cut(rows, pl.Series([2, 0, -1, 2, 0, 2]).to_numpy())
    }
    assert found == {0: ["b", "e"], 2: ["a", "d", "f"]}


@pytest.mark.parametrize(
    "rows",
    [
        pl.DataFrame({"text": ["a", None], "list": [[1, 2], None], "number": [0.5, float("nan")]}),
        pl.DataFrame(schema={"text": pl.String, "list": pl.List(pl.Int64)}),
    ],
    ids=["some", "none"],
)
def test_rows_travel_as_they_are(rows: pl.DataFrame) -> None:
    assert decode(encode(rows)).equals(rows, null_equal=True)
    assert decode(encode(rows)).schema == rows.schema
