"""Counting by one exchange: the same counts as in one process, and a driver that does not grow with them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from small_cluster import SizedEngine

from recmill.engines.local import LocalEngine
from recmill.errors import ResourceError
from recmill.features.kernels import (
    CountOptions,
    ExtractedValues,
    Measurements,
    StoredCounts,
    ValueCounts,
)

COUNTS = {
    "text": CountOptions(is_text=True, min_count=2),
    "int": CountOptions(is_text=False, track_first=True),
    "list": CountOptions(is_text=False),
}
SCHEMA = {"text": pl.String, "int": pl.Int64, "number": pl.Float64, "place": pl.Int64}


@dataclass(frozen=True)
class Log:
    """Frames as a source, one unit each. What they say they weigh decides into how many runs they are counted."""

    frames: Sequence[pl.DataFrame]
    weight: int = 1 << 20

    def units(self) -> range:
        return range(len(self.frames))

    def unit_bytes(self, unit: int) -> int:
        return self.weight

    def first_position(self, unit: int) -> int:
        return unit

    def max_offset(self) -> int:
        return len(self.frames)

    def read(self, unit: int) -> Iterator[pl.DataFrame]:
        for start in range(0, self.frames[unit].height, 2):
            yield self.frames[unit][start : start + 2]


def extract(rows: pl.DataFrame) -> ExtractedValues:
    counts = {
        "text": [(rows["text"], rows["place"])],
        "int": [(rows["int"], rows["place"])],
        "list": [(rows["int"], rows["place"]), (rows["place"], rows["place"])],
    }
    return ExtractedValues(rows.height, {"number": rows["number"]}, counts)


def log_of(rows: Sequence[tuple[Any, ...]], num_units: int, weight: int = 1 << 20) -> Log:
    placed = [(*row, place) for place, row in enumerate(rows)]
    frames = [pl.DataFrame(placed[unit::num_units], SCHEMA, orient="row") for unit in range(num_units)]
    return Log(frames, weight)


def measured(log: Log, work: Path, small_bytes: int = 0, task_memory: int = 64 << 20) -> Measurements:
    engine = SizedEngine(work, small_bytes, task_memory=task_memory)
    return engine.measure(engine.read(log), extract, COUNTS, "count")


def sorted_counts(counts: ValueCounts | StoredCounts) -> tuple[Any, ...]:
    counts = counts.load("x")
    columns: Mapping[str, Any] = {"value": counts.values, "count": counts.counts, "first": counts.firsts}
    frame = pl.DataFrame({name: column for name, column in columns.items() if column is not None})
    return frame.sort("value").rows(), counts.num_values, counts.num_missing, counts.num_distinct


@examples(12)
@given(
    rows=st.lists(
        st.tuples(
            st.one_of(st.none(), st.sampled_from(["", "a", "é", "🎉"]), st.text(max_size=3)),
            st.one_of(st.none(), st.integers(-3, 3), st.integers(-(1 << 63), (1 << 63) - 1)),
            st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)),
        ),
        max_size=12,
    ),
    num_units=st.integers(1, 4),
    weight=st.sampled_from([1 << 10, 50 << 20]),
)
def test_counts_and_moments_equal_those_of_one_process(
    rows: list[tuple[Any, ...]], num_units: int, weight: int
) -> None:
    log = log_of(rows, num_units, weight)
    with tempfile.TemporaryDirectory() as work:
        local = LocalEngine(Path(work) / "local", workers=1)
        expected = local.measure(local.read(log), extract, COUNTS, "count")
        for small_bytes in (0, 1 << 40):
            found = measured(log, Path(work) / "cluster", small_bytes)
            assert found.rows == expected.rows
            assert found.moments == expected.moments
            for name in COUNTS:
                assert sorted_counts(found.counts[name]) == sorted_counts(expected.counts[name])


def test_a_counter_beyond_its_memory_is_sent_in_pieces(tmp_path: Path) -> None:
    log = log_of([(f"value {number % 70}", number, 0.5) for number in range(200)], 2)
    roomy = measured(log, tmp_path / "roomy")
    tight = measured(log, tmp_path / "tight", task_memory=1 << 18)
    for name in COUNTS:
        assert sorted_counts(tight.counts[name]) == sorted_counts(roomy.counts[name])


def test_the_smallest_counts_come_to_the_driver_as_long_as_they_fit_together(tmp_path: Path) -> None:
    rows = [(str(number % 4), number % 40, 0.0) for number in range(1000)]
    found = measured(log_of(rows, 3), tmp_path, small_bytes=2000).counts
    assert isinstance(found["text"], ValueCounts)
    assert isinstance(found["int"], ValueCounts)
    assert isinstance(found["list"], StoredCounts)
    assert found["list"].num_distinct == 1000


def test_rare_values_are_not_kept_but_counted(tmp_path: Path) -> None:
    rows = [("rare", 0, 0.0), ("often", 0, 0.0), ("often", 0, 0.0), (None, 0, 0.0)]
    counts = measured(log_of(rows, 2), tmp_path).counts["text"].load("text")
    assert counts.values.to_list() == ["often"]
    assert (counts.num_values, counts.num_missing, counts.num_distinct) == (3, 1, 2)


def test_a_log_without_rows_has_no_counts(tmp_path: Path) -> None:
    found = measured(log_of([], 1), tmp_path)
    assert found.rows == 0
    assert found.counts["text"].load("text").values.to_list() == []


def test_counts_that_do_not_fit_into_memory_say_what_to_do(tmp_path: Path) -> None:
    counts = StoredCounts(tmp_path, 1, CountOptions(is_text=True), 9, 0, 9, num_bytes=1 << 30, memory=1 << 31)
    with pytest.raises(ResourceError) as raised:
        counts.load("user")
    assert str(raised.value) == (
        'The values of "user" need 4,096 MB in one process, more than --memory (2,048 MB). '
        "Raise --memory, raise min_count or set max_size, or use hash or key instead."
    )


@pytest.mark.processes
def test_the_driver_does_not_grow_with_the_vocabulary(tmp_path: Path) -> None:
    small, large = (peak_of_driver(tmp_path, num_values) for num_values in (50_000, 500_000))
    assert (small["known"], large["known"]) == (50_000, 500_000)
    # Some tens of MB are noise: 32 MB were measured. With the values in memory it grows by 182 MB.
    assert large["peak_mb"] - small["peak_mb"] < 50


def peak_of_driver(work: Path, num_values: int) -> dict[str, Any]:
    script = Path(__file__).with_name("count_many_values.py")
    command = [sys.executable, str(script), str(num_values), str(work / str(num_values)), "0"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)  # type: ignore[no-any-return]
