"""Every reader writes the cursor behind a batch in one way: by the rows of its units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from growing_tables import Replay, plain, small_recipe, write_log

from recmill.dataset.loader import Batches
from recmill.dataset.log_loader import LogBatches
from recmill.dataset.partial_table import PartialTable, PartialTableBatches
from recmill.dataset.schedule import BatchSchedule, Cursor
from recmill.dataset.table import Table
from recmill.engines import shards
from recmill.logs import counted
from recmill.stages.prepare.prepare import PrepareConfig, prepare


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("readers") / "log")


@pytest.fixture(scope="module")
def table(data: Path) -> Table:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "ROWS_PER_GROUP", 30)
        return prepare(
            small_recipe(), str(data), data.parent / "table", PrepareConfig(partitions=3, workers=1)
        ).table


def _cursors(batches: Any, cursor: Cursor) -> list[Cursor]:
    return [after for _, after in batches.read(cursor)]


@pytest.mark.parametrize("batch_size", [1, 7, 30, 64, 5_000])
def test_table_partial_table_log_and_schedule_agree_on_cursors(
    table: Table, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int
):
    monkeypatch.setattr(counted, "PIECE_BYTES", 900)
    replay = Replay(table, tmp_path / "table")
    for number in sorted(replay.parts):
        replay.write_part(number)
    growing = PartialTableBatches(PartialTable(tmp_path / "table"), batch_size)
    whole, shuffled = Batches(table, batch_size), Batches(table, batch_size, seed=3)
    raw = LogBatches(small_recipe(), table.plan, str(data), batch_size)

    for reader in (whole, shuffled, raw):
        unit_rows = [reader.units[number].rows for number in reader.order(0)]
        assert len(unit_rows) > 1
        for cursor in (Cursor(), Cursor(0, 1, unit_rows[1] - 1)):
            schedule = BatchSchedule(unit_rows, batch_size, cursor)
            expected = [schedule.cursor_after(batch) for batch in range(schedule.num_batches)]
            assert _cursors(reader, cursor) == expected
    for cursor in (Cursor(), Cursor(0, 1, 3)):
        assert _cursors(growing, cursor) == _cursors(whole, cursor)


def test_table_partial_table_and_log_give_the_same_rows(table: Table, data: Path, tmp_path: Path):
    replay = Replay(table, tmp_path / "table")
    for number in sorted(replay.parts):
        replay.write_part(number)
    growing = PartialTableBatches(PartialTable(tmp_path / "table"), 41)
    raw = LogBatches(small_recipe(), table.plan, str(data), 41)

    expected = [plain(batch) for batch, _ in Batches(table, 41).read()]

    assert [plain(batch) for batch, _ in growing.read()] == expected
    assert [plain(batch) for batch, _ in raw.read()] == expected
