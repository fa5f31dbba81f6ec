"""A sample of requests with their answers, as Parquet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import polars as pl
import pyarrow.parquet as pq
import pytest

from recmill.errors import RecmillError
from recmill.stages.serve.messages import Answer, Item, Recommend, Trace
from recmill.stages.serve.request_log import SCHEMA, RequestLog, RequestLogLimits

QUERY = Recommend(user=7, k=2, context={"device": "phone", "hour": 9}, recent=["i1"])
ANSWER = Answer(
    items=[
        Item(id="i4", score=0.5, channel="two_tower", recall_score=1.25),
        Item(id=17, score=0.25, channel="popular"),
    ],
    degraded=["rank: too late"],
    version="0000000002-bbbbbbbb",
    stages={"recall": 1.5, "rank": 3.0},
    trace=Trace(stages={"recall": 1.5}, counts={}, user={"country": "NL"}),
)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def test_a_row_holds_the_request_and_its_answer(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, share=1.0)
    log.add(QUERY, ANSWER, seconds=0.006)
    log.close()
    (file,) = tmp_path.glob("*.parquet")
    assert pq.read_schema(file).equals(SCHEMA)
    row = pq.read_table(file).to_pylist()[0]
    assert abs(row.pop("time").timestamp() - time.time()) < 60
    assert row.pop("milliseconds") == pytest.approx(6)
    assert msgspec.json.decode(row.pop("request"), type=Recommend) == QUERY
    assert row == {
        "user": "7",
        "context": '{"device":"phone","hour":9}',
        "items": ["i4", "17"],
        "scores": [0.5, 0.25],
        "recall_scores": [1.25, 0.0],
        "channels": ["two_tower", "popular"],
        "version": "0000000002-bbbbbbbb",
        "degraded": ["rank: too late"],
        "stages": [("recall", 1.5), ("rank", 3.0)],
    }


def test_the_metrics_page_lists_every_column() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    listed = page.partition("## The request log")[2]
    assert [name for name in SCHEMA.names if f"`{name}`" not in listed] == []


def test_an_unknown_user_and_an_empty_answer_have_rows_too(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, share=1.0)
    log.add(Recommend(), Answer(items=[]), seconds=0.001)
    log.close()
    rows = pl.read_parquet(tmp_path / "*.parquet")
    assert rows["user"].to_list() == [None]
    assert rows["items"].to_list() == [[]]


def test_about_the_asked_share_is_kept(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, share=0.2)
    for _ in range(5000):
        log.add(QUERY, ANSWER, seconds=0.001)
    log.close()
    assert 800 < log.num_written < 1200
    assert pl.read_parquet(tmp_path / "*.parquet").height == log.num_written


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5])
def test_a_share_that_is_none_is_refused(tmp_path: Path, share: float) -> None:
    with pytest.raises(RecmillError, match="above 0 and at most 1"):
        RequestLog(tmp_path, share)


def test_files_are_whole_and_rotate_by_rows(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, share=1.0, limits=RequestLogLimits(rows_per_file=10))
    for number in range(3):
        for _ in range(10):
            log.add(QUERY, ANSWER, seconds=0.001)
        wait_until(lambda: log.num_written == 10 * (number + 1))  # noqa: B023, called at once
    assert [pq.read_metadata(file).num_rows for file in sorted(tmp_path.glob("*.parquet"))] == [10, 10, 10]
    log.close()
    assert len(list(tmp_path.iterdir())) == 3, "nothing half-written, and no empty file at the end"


def test_files_rotate_by_time(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, share=1.0, limits=RequestLogLimits(seconds_per_file=0.1))
    log.add(QUERY, ANSWER, seconds=0.001)
    wait_until(lambda: log.num_written == 1)
    log.close()


def test_what_does_not_fit_in_memory_is_dropped_and_counted(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, share=1.0, limits=RequestLogLimits(max_waiting_items=30))  # three for each row
    for _ in range(5000):
        log.add(QUERY, ANSWER, seconds=0.001)
    log.close()
    assert log.num_dropped > 0
    assert log.num_written + log.num_dropped == 5000


def test_a_folder_that_is_gone_loses_rows_but_answers_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "log"
    log = RequestLog(folder, share=1.0, limits=RequestLogLimits(seconds_per_file=0.1))
    folder.rmdir()
    log.add(QUERY, ANSWER, seconds=0.001)
    wait_until(lambda: log.num_dropped == 1)
    assert "1 rows are lost" in caplog.text
    folder.mkdir()
    log.add(QUERY, ANSWER, seconds=0.001)
    log.close()
    assert log.num_written == 1


def test_many_threads_add_and_none_is_lost(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, share=1.0)
    threads = [
        threading.Thread(target=lambda: [log.add(QUERY, ANSWER, 0.001) for _ in range(500)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert (log.num_written, log.num_dropped) == (2000, 0)


def test_after_close_rows_are_dropped(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, share=1.0)
    log.close()
    log.add(QUERY, ANSWER, seconds=0.001)
    assert log.num_dropped == 1
