"""Splits: which rows train and which are held out, and where to cut."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import polars as pl

from recmill.dataset.positions import file_of, is_among, position
from recmill.errors import LogError
from recmill.features.kernels import hash64, hash_positions
from recmill.logs.base import COMPRESSIONS, LogFiles, LogRange
from recmill.recipe.recipe import POSITION, SPLIT, Holdout

SplitFunction = Callable[[pl.DataFrame], pl.DataFrame]
CountRows = Callable[
    [list[LogRange]], list[int]
]  # rows of units, good and bad, counted by an engine or by threads


def split_function(
    source: LogFiles, units: list[LogRange], split: Holdout | None, count_rows: CountRows
) -> SplitFunction | None:
    """A function that adds SPLIT to rows: 0 train, 1 eval, 2 test. None when it depends on the values of all rows."""
    if split is None:
        return all_train
    if split.by == "tail":
        return partial(by_position, tail_cuts(source, units, split, count_rows))
    if split.by == "files":
        return partial(by_files, held_out_files(source, split), file_cut(source, units, split, count_rows))
    if split.by == "hash":
        return partial(by_hash, split)
    if split.by == "time" and split.eval_from is not None:
        cuts = (split.eval_from, split.test_from if split.test_from is not None else float("inf"))
        return partial(by_time, str(split.column), cuts)
    return None


def needs_counts(split: Holdout | None) -> bool:
    """Whether `split_function` needs row counts."""
    return split is not None and (split.by == "tail" or (split.by == "files" and split.halve))


def rows_of_splits(function: SplitFunction, first: int, last: int, num_rows: int) -> list[int] | None:
    """Rows of each split between two positions, if positions alone decide."""
    if function is all_train:
        return [num_rows, 0, 0]
    assert isinstance(function, partial)
    if function.func is by_positions:
        held = [np.searchsorted(some, last, "right") - np.searchsorted(some, first) for some in function.args]
        return [num_rows - int(held[0]) - int(held[1]), int(held[0]), int(held[1])]
    if function.func not in (by_position, by_files):
        return None
    ends = function(pl.DataFrame({POSITION: [first, last]}))[SPLIT].to_list()
    return [num_rows * (split == ends[0]) for split in range(3)] if ends[0] == ends[1] else None


def all_train(frame: pl.DataFrame) -> pl.DataFrame:
    return _with_split(frame, np.zeros(frame.height, dtype=np.int8))


def by_position(cuts: tuple[int, int], frame: pl.DataFrame) -> pl.DataFrame:
    positions = frame[POSITION].to_numpy()
    return _with_split(frame, (positions >= cuts[0]).astype(np.int8) + (positions >= cuts[1]))


def by_files(held_out: frozenset[int], cut: int, frame: pl.DataFrame) -> pl.DataFrame:
    positions = frame[POSITION].to_numpy()
    held = np.isin(file_of(positions), list(held_out))
    return _with_split(frame, np.where(held, 1 + (positions >= cut), 0))


def by_time(column: str, cuts: tuple[float, float], frame: pl.DataFrame) -> pl.DataFrame:
    times = frame[column].cast(pl.Float64).fill_null(float("-inf")).to_numpy()
    return _with_split(frame, (times >= cuts[0]).astype(np.int8) + (times >= cuts[1]))


def by_hash(split: Holdout, frame: pl.DataFrame) -> pl.DataFrame:
    """A value is held out everywhere or nowhere; rows without a value train."""
    column = frame[str(split.column)]
    key = column if column.dtype == pl.String else column.cast(pl.Int64)
    share = hash64(key, split.seed).astype(np.float64) / 2.0**64
    held_out = split.held_out or 0.0
    first_test = held_out / 2 if split.halve else held_out
    where = np.where(share < first_test, 1, np.where(share < held_out, 2, 0))
    return _with_split(frame, np.where(column.is_null().to_numpy(), 0, where))


def last_rows(by: str, order: str, frame: pl.DataFrame) -> pl.DataFrame:
    """The last row of each group is test, the one before it eval; every group keeps at least one training row."""
    keys = frame.select(by, order, POSITION).with_row_index("__row").sort(order, POSITION, nulls_last=False)
    ranked = keys.select(
        "__row",
        pl.int_range(pl.len(), 0, -1).over(by).alias("from_end"),
        pl.len().over(by).alias("size"),
        pl.col(by).is_not_null().alias("has_group"),
    ).sort("__row")
    test = pl.col("has_group") & (pl.col("from_end") == 1) & (pl.col("size") >= 2)
    evaluation = pl.col("has_group") & (pl.col("from_end") == 2) & (pl.col("size") >= 3)
    return frame.with_columns(
        ranked.select(pl.when(test).then(2).when(evaluation).then(1).otherwise(0).cast(pl.Int8).alias(SPLIT))
    )


def random_rows(split: Holdout, frame: pl.DataFrame) -> pl.DataFrame:
    """A fraction of each group's rows, drawn by their positions in the log; rows without a value of `column` train.

    Counts are rounded down, but a group of few rows still gives one to test, then one to eval, and keeps at least one
    for training.
    """
    held_out = split.held_out or 0.0
    share = held_out / 2 if split.halve else held_out
    drawn = pl.Series("__drawn", hash_positions(frame[POSITION], split.seed))
    by = pl.col(str(split.column))
    ranked = frame.select(by.alias("by"), POSITION).with_columns(drawn).with_row_index("__row")
    ranked = ranked.sort("__drawn", POSITION).select(
        "__row",
        pl.int_range(pl.len()).over("by").alias("rank"),
        pl.when(pl.col("by").is_not_null()).then(pl.len().over("by")).otherwise(0).alias("size"),
    )
    size = pl.col("size")
    num_test = _share_of(size, share, left=size) if split.halve else pl.lit(0)
    num_eval = _share_of(size, share, left=size - num_test)
    is_test, is_held_out = pl.col("rank") < num_test, pl.col("rank") < num_test + num_eval
    where = pl.when(is_test).then(2).when(is_held_out).then(1).otherwise(0)
    return frame.with_columns(ranked.sort("__row").select(where.cast(pl.Int8).alias(SPLIT)))


def _share_of(size: pl.Expr, share: float, left: pl.Expr) -> pl.Expr:
    """The number of a group's rows for a fraction: at least one if two rows are left."""
    wanted = (size * share).floor().cast(pl.Int64)
    return pl.when((wanted == 0) & (left >= 2)).then(1).otherwise(wanted)


def last_rows_of_each(by: str, order: str, frame: pl.DataFrame) -> pl.DataFrame:
    """The latest rows of each group that `last_rows` needs to decide; none of rows without a group."""
    keys = frame.select(by, order, POSITION).filter(pl.col(by).is_not_null())
    ordered = keys.sort(order, POSITION, nulls_last=False)
    return ordered.group_by(by, maintain_order=True).tail(3).select(by, order, POSITION)


def held_out_positions(frame: pl.DataFrame) -> tuple[Any, Any]:
    """Sorted positions of the eval rows, and of the test rows."""
    ordered = frame.sort(POSITION)
    evaluation, test = (ordered.filter(pl.col(SPLIT) == split)[POSITION].to_numpy() for split in (1, 2))
    return evaluation, test


def by_positions(evaluation: Any, test: Any, frame: pl.DataFrame) -> pl.DataFrame:
    """Hold out the rows at these sorted positions."""
    positions = frame[POSITION].to_numpy()
    return _with_split(frame, is_among(positions, evaluation) + 2 * is_among(positions, test))


def _with_split(frame: pl.DataFrame, split: Any) -> pl.DataFrame:
    return frame.with_columns(pl.Series(SPLIT, split.astype(np.int8)))


# where to cut


_AFTER_ALL_ROWS = 1 << 62


def tail_cuts(
    source: LogFiles, units: list[LogRange], split: Holdout, count_rows: CountRows
) -> tuple[int, int]:
    """Positions in the log where eval and test begin, by number of rows."""
    counts = _CountedUnits(source, units, count_rows)
    held_out = round(counts.total * (split.held_out or 0.0))
    eval_from = counts.total - held_out
    test_from = eval_from + held_out // 2 if split.halve else counts.total
    eval_position, test_position = counts.positions_of(eval_from, test_from)
    return eval_position, test_position


def held_out_files(source: LogFiles, split: Holdout) -> frozenset[int]:
    """Indices of the matching files; a pattern that matches nothing is an error."""
    names = [file.name for file in source.files]
    found: set[int] = set()
    for pattern in split.held_out_files:
        matches = {number for number, name in enumerate(names) if _matches(name, pattern)}
        if not matches:
            raise LogError(f'split.held_out_files has "{pattern}", but the log has: {", ".join(names)}.')
        found |= matches
    if len(found) == len(names):
        raise LogError(
            f"split.held_out_files holds out every file ({', '.join(names)}); nothing is left to train on."
        )
    return frozenset(found)


def _matches(name: str, pattern: str) -> bool:
    path = PurePosixPath(name)
    plain = path.with_suffix("").name if path.suffix in COMPRESSIONS else path.name
    return any(fnmatch(candidate, pattern) for candidate in (name, path.name, plain))


def file_cut(source: LogFiles, units: list[LogRange], split: Holdout, count_rows: CountRows) -> int:
    """The position where the second half of the held-out rows begins."""
    if not split.halve:
        return _AFTER_ALL_ROWS
    held_out = held_out_files(source, split)
    counts = _CountedUnits(source, [unit for unit in units if unit.file_index in held_out], count_rows)
    return counts.positions_of(counts.total // 2)[0]


def time_cuts(times: pl.Series, counts: pl.Series, split: Holdout) -> tuple[float, float]:
    """Times at which eval and test begin, for the last fraction of rows; rows of equal time stay together."""
    order = times.arg_sort()
    times, totals = times.gather(order), counts.gather(order).cum_sum()
    held_out = split.held_out or 0.0
    shares = (held_out, held_out / 2 if split.halve else 0.0)
    eval_from, test_from = (_first_time(times, totals, share) for share in shares)
    return eval_from, test_from


def _first_time(times: pl.Series, totals: pl.Series, share: float) -> float:
    """The earliest time such that at most `share` of the rows are at or after it."""
    keep = round(int(totals[-1]) * (1 - share)) if len(totals) else 0
    index = int(totals.search_sorted(keep, side="left")) + 1 if len(totals) else 0
    return float(times[index]) if index < len(times) else float("inf")


class _CountedUnits:
    """Units with their row counts, to find the position of the n-th row."""

    def __init__(self, source: LogFiles, units: list[LogRange], count_rows: CountRows) -> None:
        self.source = source
        self.units = units
        self.rows = count_rows(units)
        self.total = sum(self.rows)

    def positions_of(self, *numbers: int) -> tuple[int, ...]:
        """Positions of these rows (from 0, good and bad, increasing); past the end, one after all rows."""
        positions: list[int] = []
        first = 0
        for unit, rows in zip(self.units, self.rows, strict=True):
            wanted = [number - first for number in numbers[len(positions) :] if number - first < rows]
            if wanted:
                offsets = self.source.row_offsets(unit, wanted)
                positions += [position(unit.file_index, offset) for offset in offsets]
            first += rows
        return (*positions, *[_AFTER_ALL_ROWS] * (len(numbers) - len(positions)))
