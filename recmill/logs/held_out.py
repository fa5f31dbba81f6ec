"""The split of a log's rows, computed in one process: as `prepare` assigns it, for stages that read the log again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import polars as pl

from recmill.features.kernels import Counter, CountOptions
from recmill.logs.base import LogFiles
from recmill.logs.reduced import ReducedRows
from recmill.logs.rows import RowFunction
from recmill.logs.splits import (
    SplitFunction,
    all_train,
    by_positions,
    by_time,
    held_out_positions,
    last_rows,
    last_rows_of_each,
    random_rows,
    split_function,
    time_cuts,
)
from recmill.recipe.recipe import POSITION, Holdout

ReadRows = Callable[[], Iterator[pl.DataFrame]]


def find_split(source: LogFiles, split: Holdout, read: ReadRows) -> SplitFunction:
    """A function that adds SPLIT to rows of this log. `read` gives all rows of a Table, if their values are needed."""
    function = split_function(source, source.units(), split, lambda units: [*map(source.count_rows, units)])
    if function is not None:
        return function
    by, order = str(split.column), str(split.order)
    if split.by == "time":
        return partial(by_time, by, _time_cuts(by, split, read))
    if split.by == "random":
        return _by_groups(read, lambda rows: rows.select(by, POSITION), partial(random_rows, split))
    return _by_groups(read, partial(last_rows_of_each, by, order), partial(last_rows, by, order))


def _time_cuts(column: str, split: Holdout, read: ReadRows) -> tuple[float, float]:
    counter = Counter(CountOptions(is_text=False))
    for frame in read():
        counter.add(frame[column].cast(pl.Int64))
    counts = counter.drain()
    return time_cuts(counts["value"], counts["count"], split)


def _by_groups(read: ReadRows, keys_of: RowFunction, assign: SplitFunction) -> SplitFunction:
    keys = ReducedRows(keys_of)
    for frame in read():
        keys.add(frame)
    rows = keys.result()
    return all_train if rows is None else partial(by_positions, *held_out_positions(assign(rows)))
