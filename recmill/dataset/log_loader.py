"""Log -> Batch: trains straight from raw rows. Features are applied on the fly, with a Plan that was fitted before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import polars as pl

from recmill.dataset.batch import Batch, Cursor, Keys, Layout, collate
from recmill.dataset.prefetch import prefetch
from recmill.errors import ArtifactError, FeatureError, LogError
from recmill.features.plan import Plan
from recmill.logs.counted import CountedLog, Each, Piece
from recmill.logs.tally import DEFAULT_MAX_BAD, Tally
from recmill.recipe.kinds import kinds_of_columns
from recmill.recipe.recipe import SPLIT, SPLITS, Feature, Label, Recipe


@dataclass(frozen=True)
class LogUnit:
    """A piece of the log: a range of bytes, a whole file that cannot be cut, or the same range of several files."""

    piece: Piece
    rows: int


class LogBatches:
    """The rows of a log's split, batch after batch, from any cursor on: like `Batches`, but without a Table.

    Rows are those that `prepare` would put into the split, in log order, or interleaved over files when the recipe
    says so. Opening counts the log on `num_workers` threads, or wherever `each` says; reading takes one. `where` names
    a label: only rows that have it 1 are there, and only they count. `memory` bounds side tables.
    """

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        data: str,
        batch_size: int,
        split: str = "train",
        features: Sequence[str] | None = None,
        num_workers: int | None = None,
        max_bad: float = DEFAULT_MAX_BAD,
        where: str | None = None,
        memory: int = 2 << 30,
        each: Each | None = None,
    ) -> None:
        self.layout = Layout.of(plan.columns(), features)
        _check_plan(plan, recipe, features)
        self.data = data
        self.plan = _without_raw_columns(plan)
        if where is not None and where not in self.layout.labels:
            raise FeatureError(f'No label "{where}"; the plan has: {", ".join(self.layout.labels)}.')
        keep = partial(self.plan.keep_positive, where) if where is not None else None
        self.log = CountedLog(recipe, data, max_bad, num_workers, keep, memory, each)
        self.notes = self.log.notes
        self._choose(split, batch_size)

    def of_split(self, split: str, batch_size: int | None = None) -> LogBatches:
        """Batches of another split of the same log, which is not counted again."""
        other = copy(self)
        other._choose(split, batch_size or self.batch_size)
        return other

    def _choose(self, split: str, batch_size: int) -> None:
        if split not in SPLITS:
            raise LogError(f'A log has no split "{split}"; known: {", ".join(SPLITS)}.')
        self.split = split
        self.batch_size = batch_size
        rows = self.log.rows[:, SPLITS.index(split)].tolist()
        self.units = [
            LogUnit(piece, num_rows)
            for piece, num_rows in zip(self.log.pieces, rows, strict=True)
            if num_rows
        ]
        self.num_rows = sum(unit.rows for unit in self.units)
        if not self.num_rows:
            raise LogError(
                f"The log in {self.data} has no {split} rows. See [split] and [[rows]] of the recipe."
            )

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.num_rows // self.batch_size)

    @property
    def tally(self) -> Tally:
        """Rows of the whole log, and its bad ones by reason."""
        return self.log.tally

    @property
    def bad(self) -> int:
        """Rows of the whole log that cannot be read, and are left out."""
        return self.log.tally.bad

    def read(self, cursor: Cursor = Cursor()) -> Iterator[tuple[Batch, Cursor]]:  # noqa: B008, frozen
        """One epoch from the cursor on: each batch with the cursor behind it. All work runs ahead on a thread."""
        self._check_cursor(cursor)
        held: list[Batch] = []
        missing = self.batch_size
        for rows, unit, first in prefetch(self._rows(cursor)):
            begin = 0
            while rows.size - begin >= missing:
                end = begin + missing
                yield (
                    joined([*held, between(rows, begin, end)]),
                    self._cursor(cursor.epoch, unit, first + end),
                )
                held, missing, begin = [], self.batch_size, end
            if begin < rows.size:
                held.append(between(rows, begin, rows.size))
                missing -= rows.size - begin
        if held:
            yield joined(held), Cursor(cursor.epoch + 1)

    def order(self, epoch: int) -> list[int]:
        """Numbers of the units as they come in an epoch: a log has one order."""
        return list(range(len(self.units)))

    def unit(self, number: int, epoch: int) -> Batch:
        """All rows of a unit, in order, with their features."""
        parts = []
        for frame in self.log.read(
            self.units[number].piece
        ):  # raw rows are large: one frame of them at a time
            rows = self._rows_of_split(frame)
            if rows.height:
                parts.append(self._collated(rows))
        self._check_unit(number, sum(part.size for part in parts))
        return joined(parts)

    def _rows(self, cursor: Cursor) -> Iterator[tuple[Batch, int, int]]:
        """Rows with their features from the cursor on, thousands at a time; the unit and row at which they begin."""
        for unit in range(cursor.unit, len(self.units)):
            row = 0
            skip = cursor.row if unit == cursor.unit else 0
            for frame in self.log.read(self.units[unit].piece):
                chosen = self._rows_of_split(frame)
                begin = min(max(0, skip - row), chosen.height)
                if begin < chosen.height:
                    yield self._collated(chosen[begin:]), unit, row + begin
                row += chosen.height
            self._check_unit(unit, row)

    def _rows_of_split(self, frame: pl.DataFrame) -> pl.DataFrame:
        chosen = frame[SPLIT].to_numpy() == SPLITS.index(self.split)
        return frame if chosen.all() else frame.filter(chosen)

    def _collated(self, frame: pl.DataFrame) -> Batch:
        return collate(self.plan.apply(frame, only=self.layout.features), self.layout)

    def _cursor(self, epoch: int, unit: int, row: int) -> Cursor:
        """The place of the next row, written in one way only: never as the end of a unit."""
        if row < self.units[unit].rows:
            return Cursor(epoch, unit, row)
        return Cursor(epoch, unit + 1) if unit + 1 < len(self.units) else Cursor(epoch + 1)

    def _check_cursor(self, cursor: Cursor) -> None:
        if cursor.unit >= len(self.units) or cursor.row >= self.units[cursor.unit].rows:
            raise ArtifactError(
                f"The run stopped at row {cursor.row:,} of unit {cursor.unit:,}, which the log in {self.data} does not "
                f"have ({len(self.units):,} units). Resume with the log that the run began with, or train anew."
            )

    def _check_unit(self, unit: int, num_rows: int) -> None:
        if num_rows != self.units[unit].rows:
            part = self.units[unit].piece[0]
            raise LogError(
                f"{self.log.source.files[part.file_index].path}: has {num_rows:,} {self.split} rows from "
                f"{part.start:,} to {part.end:,}, but had {self.units[unit].rows:,} when they were counted. "
                "A log must not change while it is trained on."
            )


def _check_plan(plan: Plan, recipe: Recipe, features: Sequence[str] | None) -> None:
    """The plan must be fitted, and the log must have every column that it reads."""
    if plan.pending():
        raise FeatureError(
            f'The plan of recipe "{plan.recipe.name}" is not fitted. Run `recmill prepare` first.'
        )
    expected, found = kinds_of_columns(plan.recipe), kinds_of_columns(recipe)
    applied = [f for f in plan.recipe.features if features is None or f.name in features]
    readers: list[Feature | Label] = [*applied, *plan.recipe.labels]
    for reader in readers:
        for column in reader.columns:
            if found.get(column) != expected[column]:
                raise FeatureError(
                    f'"{reader.name}" of the plan reads column "{column}" as {expected[column]}, but in recipe '
                    f'"{recipe.name}" it is {found.get(column, "missing")}. Run `recmill prepare` with this recipe.'
                )


def _without_raw_columns(plan: Plan) -> Plan:
    """The same plan, without the raw columns that a Table keeps beside features."""
    result = copy(plan)
    result.recipe = replace(plan.recipe, table=replace(plan.recipe.table, keep=()))
    return result


# cutting and joining batches: views where that is enough, for the GIL is held here


def between(batch: Batch, begin: int, end: int) -> Batch:
    """Some rows of a batch, without copying them."""
    return Batch(
        end - begin,
        batch.numbers[begin:end],
        {name: _keys_between(keys, begin, end) for name, keys in batch.keys.items()},
        {name: _keys_between(keys, begin, end) for name, keys in batch.lists.items()},
        {name: labels[begin:end] for name, labels in batch.labels.items()},
    )


def _keys_between(keys: Keys, begin: int, end: int) -> Keys:
    if keys.offsets is None:
        return Keys(keys.values[begin:end])
    offsets = keys.offsets[begin : end + 1]
    return Keys(keys.values[offsets[0] : offsets[-1]], offsets - offsets[0])


def joined(batches: Sequence[Batch]) -> Batch:
    """Batches of the same layout as one."""
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    return Batch(
        sum(batch.size for batch in batches),
        np.concatenate([batch.numbers for batch in batches]),
        {name: _joined_keys([batch.keys[name] for batch in batches]) for name in first.keys},
        {name: _joined_keys([batch.lists[name] for batch in batches]) for name in first.lists},
        {name: np.concatenate([batch.labels[name] for batch in batches]) for name in first.labels},
    )


def _joined_keys(parts: Sequence[Keys]) -> Keys:
    values = np.concatenate([keys.values for keys in parts])
    if parts[0].offsets is None:
        return Keys(values)
    lengths = [np.diff(keys.offsets) for keys in parts if keys.offsets is not None]
    return Keys(values, np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))]))
