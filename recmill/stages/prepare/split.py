"""Assigns rows to splits on an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import polars as pl

from recmill.engines.engine import Engine, Frame
from recmill.features.kernels import CountOptions, ExtractedValues
from recmill.logs.base import LogFile, LogFiles, LogRange
from recmill.logs.splits import (
    by_time,
    held_out_files,
    last_rows,
    random_rows,
    split_function,
    time_cuts,
)
from recmill.logs.watched import StableLogFiles
from recmill.recipe.recipe import POSITION, Holdout


def assign_splits(engine: Engine, frame: Frame, source: StableLogFiles, split: Holdout | None) -> Frame:
    """The same rows with a SPLIT column: 0 train, 1 eval, 2 test."""
    counted = cast(LogFiles, _CountedUnits(engine, source, _units_to_count(source, split)))
    function = split_function(counted, source.units(), split, threads=1)
    if function is not None:
        return engine.map(frame, function)
    assert split is not None
    by = str(split.column)
    if split.by == "time":
        return engine.map(frame, partial(by_time, by, _time_cuts(engine, frame, split)))
    if split.by == "random":
        return engine.group(frame, [by], partial(random_rows, split), "split")
    return engine.group(frame, [by], partial(last_rows, by, str(split.order)), "split")


def _units_to_count(source: StableLogFiles, split: Holdout | None) -> list[LogRange]:
    if split is None or split.by != "files":
        return source.units()
    held_out = held_out_files(source.source, split)
    return [unit for unit in source.units() if unit.file_index in held_out]


@dataclass(frozen=True)
class _Times:
    column: str

    def __call__(self, frame: pl.DataFrame) -> ExtractedValues:
        times = frame[self.column].cast(pl.Int64)
        return ExtractedValues(frame.height, {}, {"time": [(times, frame[POSITION])]})


def _time_cuts(engine: Engine, frame: Frame, split: Holdout) -> tuple[float, float]:
    found = engine.measure(frame, _Times(str(split.column)), {"time": CountOptions(is_text=False)}, "times")
    counts = found.counts["time"].load(str(split.column))
    return time_cuts(counts.values, counts.counts, split)


class _CountedUnits:
    """A log some of whose units are counted by the engine, all at once, when the first is asked for."""

    def __init__(self, engine: Engine, source: StableLogFiles, units: list[LogRange]) -> None:
        self.engine = engine
        self.source = source
        self.units = units
        self._rows: dict[LogRange, int] = {}

    @property
    def files(self) -> tuple[LogFile, ...]:
        return self.source.files

    def count_rows(self, unit: LogRange) -> int:
        if not self._rows:
            counts = self.engine.collect(self.engine.read(_RowCounts(self.source, self.units)))
            self._rows = {self.units[number]: rows for number, rows in counts.iter_rows()}
        return self._rows[unit]

    def row_offsets(self, unit: LogRange, numbers: Sequence[int]) -> list[int]:
        return self.source.source.row_offsets(unit, numbers)


@dataclass(frozen=True)
class _RowCounts:
    """A source of one row for each unit: its number, and how many rows it has."""

    source: StableLogFiles
    of: list[LogRange]

    def units(self) -> range:
        return range(len(self.of))

    def unit_bytes(self, number: int) -> int:
        return self.source.unit_bytes(self.of[number])

    def first_position(self, number: int) -> int:
        return self.source.first_position(self.of[number])

    def max_offset(self) -> int:
        return self.source.max_offset()

    def read(self, number: int) -> Iterator[pl.DataFrame]:
        yield pl.DataFrame({"unit": [number], "rows": [self.source.source.count_rows(self.of[number])]})
