"""A Table that is still written gives the batches that it will give when it is finished."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from growing_tables import Replay, plain, small_recipe, write_log

from recmill.dataset.loader import Batches
from recmill.dataset.partial_table import Heartbeat, PartialTable, PartialTableBatches, announced
from recmill.dataset.schedule import Cursor
from recmill.dataset.table import Table
from recmill.errors import ArtifactError
from recmill.stages.prepare.prepare import PrepareConfig, prepare

BATCH = 50


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Table:
    folder = tmp_path_factory.mktemp("growing")
    data = write_log(folder / "log")
    return prepare(small_recipe(), str(data), folder / "table", PrepareConfig(partitions=7)).table


def read_all(batches: Any, cursor: Cursor = Cursor()) -> list[Any]:  # noqa: B008, frozen
    return [(plain(batch), after) for batch, after in batches.read(cursor)]


def in_background(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_batches_and_cursors_are_those_of_the_finished_table(finished: Table, tmp_path: Path) -> None:
    replay = Replay(finished, tmp_path / "table")

    def write() -> None:
        for number in sorted(replay.parts):
            time.sleep(0.05)
            replay.write_part(number)
        replay.finish()

    growing = PartialTableBatches(PartialTable(tmp_path / "table"), BATCH)
    writer = in_background(write)
    expected = Batches(finished, BATCH)
    assert growing.batches_per_epoch == expected.batches_per_epoch
    assert read_all(growing) == read_all(expected)
    writer.join()
    assert read_all(growing, Cursor(1)) == read_all(expected, Cursor(1))


def test_batches_come_before_the_table_is_finished(finished: Table, tmp_path: Path) -> None:
    replay = Replay(finished, tmp_path / "table")
    replay.write_part(0)
    reading = PartialTableBatches(PartialTable(tmp_path / "table"), BATCH).read()
    (first, _), (expected, _) = next(reading), next(Batches(finished, BATCH).read())
    assert plain(first) == plain(expected)
    began = time.monotonic()
    reading.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 20, "nobody waits for rows that nobody wants"


def test_the_epoch_ends_with_its_last_row_and_does_not_wait_for_the_manifest(
    finished: Table, tmp_path: Path
) -> None:
    replay = Replay(finished, tmp_path / "table")
    for number in replay.parts:
        replay.write_part(number)
    growing = PartialTableBatches(PartialTable(tmp_path / "table"), BATCH)
    assert read_all(growing) == read_all(Batches(finished, BATCH))


def test_reading_goes_on_from_any_cursor(finished: Table, tmp_path: Path) -> None:
    replay = Replay(finished, tmp_path / "table")
    for number in replay.parts:
        replay.write_part(number)
    growing = PartialTableBatches(PartialTable(tmp_path / "table"), BATCH)
    expected = read_all(Batches(finished, BATCH))
    for place in (0, 3, 4, 9, len(expected) - 2):
        assert read_all(growing, expected[place][1]) == expected[place + 1 :]


@pytest.mark.parametrize("seed", [None, 3])
def test_a_shuffled_table_is_followed_in_the_order_of_the_first_epoch(
    tmp_path: Path, seed: int | None
) -> None:
    data = write_log(tmp_path / "log")
    table = prepare(
        small_recipe("shuffle"), str(data), tmp_path / "table", PrepareConfig(memory=256 << 20)
    ).table
    replay = Replay(table, tmp_path / "growing")
    for number in replay.parts:
        replay.write_part(number)
    growing = PartialTableBatches(PartialTable(tmp_path / "growing"), BATCH, seed=seed)
    expected = read_all(Batches(table, BATCH, seed=seed))
    assert read_all(growing) == expected
    assert read_all(growing, expected[3][1]) == expected[4:]


def test_a_writer_that_failed_ends_the_waiting_with_its_reason(finished: Table, tmp_path: Path) -> None:
    replay = Replay(finished, tmp_path / "table")
    growing = PartialTableBatches(PartialTable(tmp_path / "table"), BATCH)
    replay.write_part(0)
    with pytest.raises(ValueError, match="the disk is full"), announced(tmp_path / "table"):
        raise ValueError("the disk is full")
    with pytest.raises(ArtifactError, match="was not finished: the disk is full"):
        read_all(growing)


def test_a_writer_that_gives_no_sign_ends_the_waiting(finished: Table, tmp_path: Path) -> None:
    replay = Replay(finished, tmp_path / "table")
    replay.write_part(0)
    growing = PartialTableBatches(PartialTable(tmp_path / "table", patience_seconds=0.3), BATCH)
    with pytest.raises(ArtifactError, match=r"did not grow for .* s\. Is `recmill prepare` running\?"):
        read_all(growing)
    Heartbeat(tmp_path / "table").say("writing")
    with pytest.raises(ArtifactError, match="Its writer was killed"):
        read_all(growing)


def test_nothing_is_read_until_the_writer_has_opened_its_work(finished: Table, tmp_path: Path) -> None:
    Replay(finished, tmp_path / "table")  # left behind by an earlier writer
    Heartbeat(tmp_path / "table").say("starting")
    with pytest.raises(ArtifactError, match="did not grow"):
        PartialTable(tmp_path / "table", patience_seconds=0.3)


def test_what_an_earlier_writer_said_does_not_count(finished: Table, tmp_path: Path) -> None:
    Heartbeat(tmp_path / "table").say("failed", "the disk was full")
    replay = Replay(finished, tmp_path / "table")
    for number in replay.parts:
        replay.write_part(number)
    assert PartialTable(tmp_path / "table", patience_seconds=0.3).plan.num_rows == 960


def test_a_table_that_is_prepared_anew_is_noticed(finished: Table, tmp_path: Path) -> None:
    replay = Replay(finished, tmp_path / "table")
    growing = PartialTableBatches(PartialTable(tmp_path / "table"), BATCH)
    (replay.work / "job").write_text("another")
    with pytest.raises(ArtifactError, match="prepared anew, from another log or recipe"):
        read_all(growing)


def test_more_rows_than_were_fitted_on_are_noticed(finished: Table, tmp_path: Path) -> None:
    replay = Replay(finished, tmp_path / "table")
    table = PartialTable(tmp_path / "table")
    table.plan.num_rows -= 1
    for number in replay.parts:
        replay.write_part(number)
    with pytest.raises(ArtifactError, match="the log changed meanwhile"):
        read_all(PartialTableBatches(table, BATCH))
