"""Assigns rows to splits on an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import polars as pl

from recmill.engines.engine import Engine, Frame
from recmill.features.kernels import CountOptions, ExtractedValues
from recmill.logs.base import LogRange
from recmill.logs.scan import LogScan
from recmill.logs.splits import (
    by_time,
    last_rows,
    random_rows,
    split_function,
    time_cuts,
)
from recmill.recipe.recipe import POSITION, Holdout


def assign_splits(engine: Engine, frame: Frame, source: LogScan, split: Holdout | None) -> Frame:
    """The same rows with a SPLIT column: 0 train, 1 eval, 2 test."""
    function = split_function(source.source, source.units(), split, partial(_count_rows, engine, source))
    if function is not None:
        return engine.map(frame, function)
    assert split is not None
    by = str(split.column)
    if split.by == "time":
        return engine.map(frame, partial(by_time, by, _time_cuts(engine, frame, split)))
    if split.by == "random":
        return engine.group(frame, [by], partial(random_rows, split), "split")
    return engine.group(frame, [by], partial(last_rows, by, str(split.order)), "split")


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


def _count_rows(engine: Engine, source: LogScan, units: list[LogRange]) -> list[int]:
    counts = engine.collect(engine.read(_RowCounts(source, units)))
    return counts.sort("unit")["rows"].to_list()


@dataclass(frozen=True)
class _RowCounts:
    """A source of one row for each unit: its number, and how many rows it has."""

    source: LogScan
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
