"""Assigns rows to splits on an engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import polars as pl

from recmill.engines.base import Engine
from recmill.kernels import CountOptions, Extracted
from recmill.logs.splits import by_time, last_rows, random_rows, split_function, time_cuts
from recmill.machine import available_cores
from recmill.prepare.rejected import WatchedSource
from recmill.spec.recipe import POSITION, Holdout


def assign_splits(engine: Engine, frame: Any, source: WatchedSource, split: Holdout | None) -> Any:
    """The same rows with a SPLIT column: 0 train, 1 eval, 2 test."""
    function = split_function(source.source, source.units(), split, available_cores())
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

    def __call__(self, frame: pl.DataFrame) -> Extracted:
        times = frame[self.column].cast(pl.Int64)
        return Extracted(frame.height, {}, {"time": [(times, frame[POSITION])]})


def _time_cuts(engine: Engine, frame: Any, split: Holdout) -> tuple[float, float]:
    found = engine.measure(frame, _Times(str(split.column)), {"time": CountOptions(is_text=False)}, "times")
    return time_cuts(found.counts["time"].values, found.counts["time"].counts, split)
