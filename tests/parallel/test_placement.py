"""Small tables that a batch reads all over are replicated, others spread; the plan says what that costs."""

from __future__ import annotations

import pytest

from recmill.distributed.placement import explain, plan_placement
from recmill.embeddings.table import TableSpec

SPECS = {
    "deep/weekday": TableSpec("weekday", 16, num_rows=8),
    "deep/city": TableSpec("city", 16, num_rows=100_000),
    "deep/user": TableSpec("user", 16),
    "deep/rare": TableSpec("rare", 16, num_rows=8, admit_after=2),
}
ONCE = dict.fromkeys(SPECS, 1.0)


def test_small_tables_are_replicated_and_others_spread():
    placed = {table.name: table for table in plan_placement(SPECS, ONCE, 2048, 4)}
    assert {name: table.placement for name, table in placed.items()} == {
        "deep/weekday": "replicated",
        "deep/city": "sharded",
        "deep/user": "sharded",
        "deep/rare": "sharded",  # counting sightings needs one place
    }
    weekday, city = placed["deep/weekday"], placed["deep/city"]
    assert weekday.wire_bytes < weekday.wire_bytes_otherwise
    assert city.wire_bytes < city.wire_bytes_otherwise
    assert weekday.memory_bytes == 8 * (20 + 4 * 17)
    assert city.memory_bytes == 100_000 * (20 + 4 * 17) // 4
    assert placed["deep/user"].memory_bytes is None


def test_bytes_are_those_of_asks_rows_and_gradients():
    (placed,) = plan_placement({"t": TableSpec("t", 16)}, {"t": 1.0}, 1000, 2)
    assert placed.wire_bytes == pytest.approx(500 / 2 * (12 + 16 * 4 + 16 * 4))
    (narrow,) = plan_placement({"t": TableSpec("t", 16)}, {"t": 1.0}, 1000, 2, "float16")
    assert narrow.wire_bytes == pytest.approx(500 / 2 * (12 + 16 * 2 + 16 * 2))


def test_the_plan_is_told_in_lines():
    lines = explain(plan_placement(SPECS, ONCE, 2048, 4), 4, 2048, 1_000_000)
    assert lines[0].startswith("4 workers, batches of 2,048 rows")
    assert "deep/weekday" in lines[2]
    assert "replicated" in lines[2]
    assert "dense weights" in lines[6]
    assert lines[-1].endswith("bytes on the wire for each row")
