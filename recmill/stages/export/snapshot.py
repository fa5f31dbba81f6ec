"""Users and items as of the log's end, or as of the rows before a split: their last values, histories, clicks.

The log is read in pieces and each piece is reduced at once, so that memory follows from the number of users and items,
not of events. Rows that `filter`, `sample` and `dedupe` take out of the Table do not count. `min_length` and `last` of
a history only choose which rows teach: what they leave out happened all the same, so here it counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from recmill.dataset.positions import is_among
from recmill.dataset.prefetch import prefetch
from recmill.engines.config import DEFAULT_MEMORY
from recmill.features.expressions import columns_read, keep_where
from recmill.features.history import add_latest_histories, latest_events, meets_condition
from recmill.features.kernels import hash_positions
from recmill.features.numeric import dtype_of
from recmill.features.plan import Plan
from recmill.logs.base import LogFiles, LogRange, open_source
from recmill.logs.held_out import find_split
from recmill.logs.reduced import ReducedRows
from recmill.logs.rows import RowFunction, join_side, keep_one, keep_share, read_side_table
from recmill.logs.scan import scan
from recmill.logs.splits import SplitFunction
from recmill.logs.tally import Tally
from recmill.recipe import recipe as r
from recmill.recipe.kinds import kinds_of_columns, owners_of_columns
from recmill.recipe.recipe import POSITION
from recmill.reporting.progress import Progress
from recmill.stages.export.clicks import Clicks, ClickWriter

SAMPLED_ROWS = 1_000
_PIECE_BYTES = 8 << 20
_LOOKS = 8
_SIDES: tuple[r.Owner, ...] = ("item", "user")


@dataclass(frozen=True)
class EntitySnapshot:
    """Users and items by index: the row of their frame. The raw id is the first column; ids are unique."""

    items: pl.DataFrame | None  # most clicked first; None when the log does not say what its items are
    users: pl.DataFrame | None
    counts: np.ndarray[Any, np.dtype[np.float32]] | None  # clicks of each item
    clicks: Clicks | None
    sample: pl.DataFrame  # some raw rows, each with its user's history as of the end
    log_end: float | int | None
    num_rows: int
    num_bad: int
    # User and item of the positive rows of the split that it ends before.
    held_out: pl.DataFrame | None = None


def read_snapshot(
    recipe: r.Recipe,
    plan: Plan,
    data: str,
    work: Path,
    progress: Progress | None = None,
    memory: int = DEFAULT_MEMORY,
    before: str | None = None,
    sampled_rows: int = SAMPLED_ROWS,
) -> EntitySnapshot:
    """Read the whole log once (once more for each dedupe); clicks lie in `work` until they are asked for.

    `before`: a split, such as "test"; it and those after it have not happened yet. `sampled_rows` come along. Of a log
    that says neither who nor what nor when, a few pieces are enough.
    """
    log = LogRows(recipe, plan, data, memory, progress or Progress(quiet=True), before)
    reading = _LogPass(recipe, log, work, sampled_rows)
    all_of_it = (recipe.log.user, recipe.log.item, recipe.log.time) != (None, None, None)
    for frame in log.read() if all_of_it else log.look_into():
        reading.add(frame)
    log.tally.check(log.source, 1.0)
    return reading.result()


def columns_of_side(recipe: r.Recipe, side: r.Owner) -> list[str]:
    """The raw columns that a bundle keeps of users or items: the id, their own, and what their features read."""
    owned = [name for name, owner in owners_of_columns(recipe).items() if owner == side]
    read = [name for feature in recipe.features if feature.of == side for name in feature.columns]
    return list(dict.fromkeys([str(getattr(recipe.log, side)), *owned, *read]))


class LogRows:
    """The rows of a log that a Table would hold, without the columns that other rows are looked at for."""

    def __init__(
        self,
        recipe: r.Recipe,
        plan: Plan,
        data: str,
        memory: int,
        progress: Progress,
        before: str | None = None,
    ) -> None:
        self.recipe, self.plan = recipe, plan
        self.kinds = kinds_of_columns(recipe)
        self.source: LogFiles = open_source(recipe.log, data, may_grow=True)
        self.progress = progress
        self.tally = Tally()
        self.sides = {
            operation: read_side_table(recipe, operation, data, memory, max_bad=1.0)
            for operation in recipe.rows
            if isinstance(operation, r.Join)
        }
        self.histories: dict[r.History, ReducedRows] = {}  # the latest events of each user
        self._steps: list[RowFunction] = []
        self._changes: list[RowFunction] = []  # the same without histories: what a dedupe reads
        for operation in recipe.rows:
            self._add(operation)
        # User and item of positive rows of the split `before`.
        self.held_out = ReducedRows(pl.DataFrame.unique)
        if before is not None:
            assert recipe.split is not None
            assign = find_split(self.source, recipe.split, self._rows_of_table)
            # Before all else, so that what is held out is in no history.
            self._steps.insert(0, partial(self._hold_out, assign, r.SPLITS.index(before)))

    def read(self) -> Iterator[pl.DataFrame]:
        """Every row, some at a time, in log order; histories see them on their way."""
        return self._read("log", self.source.units(), self._steps)

    def look_into(self) -> Iterator[pl.DataFrame]:
        """Rows from the beginnings of some pieces, spread over the log."""
        units = self.source.units()
        for unit in units[:: -(-len(units) // _LOOKS)]:
            yield from islice(self._read("log", [unit], self._steps), 1)

    def positive(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Rows that teach what users want. Where the label's columns are not known, all of them are taken to."""
        label = self.recipe.click_label
        read = {name for known in self.recipe.labels if known.name == label for name in known.columns}
        if label is None or not read <= set(frame.columns):
            return frame
        return self.plan.keep_positive(label, frame)

    def cold(self, side: r.Owner) -> pl.DataFrame | None:
        """Users or items of side tables that are made for them, whether they occur in the log or not."""
        column = getattr(self.recipe.log, side)
        found = [table.select(column) for join, table in self.sides.items() if join.on == column]
        if not found:
            return None
        frame = pl.concat(found).drop_nulls().unique(maintain_order=True)
        for operation in self.recipe.rows:
            if isinstance(operation, r.Join) and operation.on in frame.columns:
                frame = join_side(self.sides[operation], operation.on, frame)
            elif isinstance(operation, r.Filter):
                frame = _keep_where_known(operation.sql, self.kinds, frame)
        return frame

    def _add(self, operation: r.RowOperation) -> None:
        if isinstance(operation, r.History):
            self.histories[operation] = ReducedRows(partial(latest_events, operation))
            self._steps.append(partial(self._note_events, operation))
            return
        change: RowFunction | None = None
        if isinstance(operation, r.Filter):
            change = partial(_keep_where_known, operation.sql, self.kinds)
        elif isinstance(operation, r.Sample):
            change = partial(keep_share, operation)
        elif isinstance(operation, r.Join):
            change = partial(join_side, self.sides[operation], operation.on)
        elif isinstance(operation, r.Dedupe):
            change = partial(_keep_positions, self._kept(operation))
        if change is not None:
            self._steps.append(change)
            self._changes.append(change)

    def _rows_of_table(self) -> Iterator[pl.DataFrame]:
        return self._read("split", self.source.units(), self._changes)

    def _hold_out(self, assign: SplitFunction, first: int, frame: pl.DataFrame) -> pl.DataFrame:
        """Rows before a split; of those in it, note what the users went on to click."""
        rows = assign(frame)
        user, item = str(self.recipe.log.user), str(self.recipe.log.item)
        later = rows.filter(pl.col(r.SPLIT) == first).drop(r.SPLIT)
        for change in self._changes:
            later = change(later)
        clicks = self.positive(later).select(pl.col(user).alias("user"), pl.col(item).alias("item"))
        self.held_out.add(clicks.drop_nulls())
        return rows.filter(pl.col(r.SPLIT) < first).drop(r.SPLIT)

    def _note_events(self, history: r.History, frame: pl.DataFrame) -> pl.DataFrame:
        """Note the events among rows, which go on as they are. Where a column is not known, histories stay missing."""
        needed = {history.by, history.order, *history.columns}
        needed |= set(columns_read(history.where, self.kinds)) if history.where else set()
        if needed <= set(frame.columns):
            self.histories[history].add(frame.filter(meets_condition(history, frame)))
        return frame

    def _kept(self, dedupe: r.Dedupe) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Positions of the rows that a dedupe keeps, sorted."""
        kept = ReducedRows(partial(keep_one, dedupe))
        for frame in self._read("dedupe", self.source.units(), self._changes):
            kept.add(frame.select(*dict.fromkeys([*dedupe.by, dedupe.order, POSITION])))
        rows = kept.result()
        return np.sort(rows[POSITION].to_numpy()) if rows is not None else np.empty(0, np.int64)

    def _read(
        self, stage: str, units: Sequence[LogRange], steps: Sequence[RowFunction]
    ) -> Iterator[pl.DataFrame]:
        self.tally = Tally()
        with self.progress.stage(stage, sum(self.source.text_bytes(unit) for unit in units)) as bar:
            for frame, num_bytes in prefetch(self._raw_frames(units)):
                bar.advance(num_bytes, frame.height)
                for step in steps:
                    frame = step(frame)
                if frame.height:
                    yield frame

    def _raw_frames(self, units: Sequence[LogRange]) -> Iterator[tuple[pl.DataFrame, int]]:
        """Good rows, and about how many bytes of the log they are."""
        for unit in units:
            left = self.source.text_bytes(unit)
            for frame in scan(self.source, [unit], self.tally, _PIECE_BYTES):
                read = min(left, _PIECE_BYTES)
                left -= read
                yield frame, read


class _LogPass:
    """Everything that one pass over the log collects."""

    def __init__(self, recipe: r.Recipe, log: LogRows, work: Path, sampled_rows: int) -> None:
        self.recipe, self.log = recipe, log
        spec = recipe.log
        order = [spec.time, POSITION] if spec.time else [POSITION]
        self.order = order
        self.last = {
            side: ReducedRows(partial(_last_of_each, getattr(spec, side), order))
            for side in _SIDES
            if getattr(spec, side) is not None
        }
        self.counts = ReducedRows(partial(_add_up, str(spec.item)))
        both = spec.item is not None and spec.user is not None
        self.clicks = ClickWriter(work, str(spec.user), str(spec.item), log.source.files) if both else None
        self.sample = ReducedRows(partial(_sampled, sampled_rows))
        self.log_end: float | int | None = None

    def add(self, frame: pl.DataFrame) -> None:
        spec = self.recipe.log
        for side, last in self.last.items():
            wanted = [name for name in columns_of_side(self.recipe, side) if name in frame.columns]
            last.add(frame.select(*dict.fromkeys([*wanted, *self.order])).drop_nulls(wanted[0]))
        if spec.item is not None:
            clicks = self.log.positive(frame).drop_nulls(spec.item)
            self.counts.add(clicks.select(spec.item, pl.lit(1, pl.Int64).alias("__count")))
            if self.clicks is not None:
                columns = [spec.user, spec.item, *self.order]
                self.clicks.add(clicks.select(*dict.fromkeys(columns)).drop_nulls(spec.user), self.order)
        self.sample.add(frame)
        end = frame[spec.time].max() if spec.time else None
        if end is not None and (self.log_end is None or end > self.log_end):  # type: ignore[operator]
            self.log_end = end  # type: ignore[assignment]

    def result(self) -> EntitySnapshot:
        users, items = self._side("user"), self._side("item")
        counts = None
        if items is not None:
            items, counts = self._by_popularity(items)
        clicks = None
        if self.clicks is not None and users is not None and items is not None:
            clicks = self.clicks.finish(users.to_series(0), items.to_series(0))
        tally = self.log.tally
        return EntitySnapshot(
            items,
            users,
            counts,
            clicks,
            self._rows(users),
            self.log_end,
            tally.rows,
            tally.bad,
            self.log.held_out.result(),
        )

    def _side(self, side: r.Owner) -> pl.DataFrame | None:
        """Last values of each id, those never seen in the log behind; columns that cannot be known are missing."""
        if side not in self.last:
            return None
        column = str(getattr(self.recipe.log, side))
        parts = [frame for frame in (self.last[side].result(), self.log.cold(side)) if frame is not None]
        names = columns_of_side(self.recipe, side)
        kinds = kinds_of_columns(self.recipe)
        rows = pl.concat([_typed(part, names, kinds) for part in parts])
        rows = rows.unique(column, keep="first", maintain_order=True).sort(column)
        for history, latest in self.log.histories.items() if side == "user" else ():
            events = latest.result()
            if events is not None and history.by in rows.columns:
                rows = add_latest_histories(history, events, rows.drop(history.list_columns.values()))
        return rows.select(names)

    def _by_popularity(
        self, items: pl.DataFrame
    ) -> tuple[pl.DataFrame, np.ndarray[Any, np.dtype[np.float32]]]:
        """The most clicked first, and the clicks of each."""
        column = str(self.recipe.log.item)
        counts = self.counts.result()
        assert counts is not None, "frames were added, so counts were"
        counted = items.join(counts, on=column, how="left", maintain_order="left")
        counted = counted.with_columns(pl.col("__count").fill_null(0))
        counted = counted.sort("__count", column, descending=[True, False])
        return counted.drop("__count"), counted["__count"].to_numpy().astype(np.float32)

    def _rows(self, users: pl.DataFrame | None) -> pl.DataFrame:
        """The sample, with histories as of the end: rows as a request would bring them."""
        rows = self.sample.result()
        assert rows is not None
        kinds = kinds_of_columns(self.recipe)
        if users is not None:
            lists = [name for name in users.columns if name not in rows.columns]
            user = users.columns[0]
            rows = rows.join(users.select(user, *lists), on=user, how="left", maintain_order="left")
        return _typed(rows, list(kinds), kinds)


def _typed(frame: pl.DataFrame, names: Sequence[str], kinds: Mapping[str, str]) -> pl.DataFrame:
    """These columns in this order; those that are not there are missing in every row."""
    return frame.select(
        pl.col(name) if name in frame.columns else pl.lit(None, dtype_of(kinds[name])).alias(name)
        for name in names
    )


def _keep_where_known(sql: str, kinds: Mapping[str, str], frame: pl.DataFrame) -> pl.DataFrame:
    """A condition over columns that are not there cannot tell, so it takes nothing out."""
    known = set(columns_read(sql, kinds)) <= set(frame.columns)
    return keep_where(sql, frame) if known else frame


def _keep_positions(kept: np.ndarray[Any, np.dtype[np.int64]], frame: pl.DataFrame) -> pl.DataFrame:
    return frame.filter(is_among(frame[POSITION].to_numpy(), kept))


def _last_of_each(column: str, order: Sequence[str], frame: pl.DataFrame) -> pl.DataFrame:
    return frame.sort(order, nulls_last=False).unique(column, keep="last", maintain_order=True)


def _add_up(item: str, counts: pl.DataFrame) -> pl.DataFrame:
    return counts.group_by(item).agg(pl.col("__count").sum())


def _sampled(number: int, frame: pl.DataFrame) -> pl.DataFrame:
    """Rows at random: those whose positions hash lowest, whatever pieces they come in."""
    hashes = hash_positions(frame[POSITION], 5)
    if len(hashes) <= number:
        return frame
    return frame[np.sort(np.argpartition(hashes, number)[:number])]
