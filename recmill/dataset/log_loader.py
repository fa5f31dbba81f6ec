"""Batches of a raw log: features are computed on the fly, with a Plan that was fitted before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

from recmill.dataset.batch import Batch, Layout, collate
from recmill.dataset.loader import UnitReader
from recmill.errors import FeatureError, LogError
from recmill.features.plan import Plan
from recmill.logs.config import DEFAULT_MAX_BAD
from recmill.logs.counted import CountedLog, Each, Piece
from recmill.logs.tally import Tally
from recmill.recipe.kinds import kinds_of_columns
from recmill.recipe.recipe import SPLIT, SPLITS, Feature, Label, Recipe


@dataclass(frozen=True)
class LogUnit:
    """A unit of the log: a range of bytes, a whole unsplittable file, or the same range of several files."""

    piece: Piece
    rows: int


class LogBatches(UnitReader):
    """The rows of a log's split, like `Batches`, but without a Table.

    Rows are those that `prepare` would put into the split, in log order, or interleaved over files when the recipe
    asks for it. Opening counts the log on `num_workers` threads, or with the map function `each`; reading takes one
    thread. `where` names a label: only rows with label 1 exist and count. `memory` bounds side tables.
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

    def of_split(
        self, split: str, batch_size: int | None = None, features: Sequence[str] | None = None
    ) -> LogBatches:
        """Batches of another split, size or set of features of the same log, which is not counted again."""
        other = copy(self)
        other.layout = self.layout if features is None else Layout.of(self.plan.columns(), features)
        other._choose(split, batch_size or self.batch_size)
        return other

    def _choose(self, split: str, batch_size: int) -> None:
        if split not in SPLITS:
            raise LogError(f'A log has no split "{split}"; known: {", ".join(SPLITS)}.')
        self.split = split
        self.batch_size = batch_size
        rows = self.log.rows[:, SPLITS.index(split)].tolist()
        self._units = [
            LogUnit(piece, num_rows)
            for piece, num_rows in zip(self.log.pieces, rows, strict=True)
            if num_rows
        ]
        self.num_rows = sum(unit.rows for unit in self._units)
        if not self.num_rows:
            raise LogError(
                f"The log in {self.data} has no {split} rows. See [split] and [[rows]] of the recipe."
            )

    @property
    def units(self) -> list[LogUnit]:
        return self._units

    @property
    def tally(self) -> Tally:
        """Number of rows of the whole log, and bad rows by reason."""
        return self.log.tally

    @property
    def bad(self) -> int:
        """Number of rows of the whole log that cannot be parsed and are left out."""
        return self.log.tally.bad

    def chunks(self, unit: int, epoch: int) -> Iterator[Batch]:
        """All rows of a unit with their features, one frame at a time because raw rows are large."""
        num_rows = 0
        for frame in self.log.read(self.units[unit].piece):
            chosen = frame[SPLIT].to_numpy() == SPLITS.index(self.split)
            rows = frame if chosen.all() else frame.filter(chosen)
            num_rows += rows.height
            if rows.height:
                yield collate(self.plan.apply(rows, only=self.layout.features), self.layout)
        self._check_unit(unit, num_rows)

    def _check_unit(self, unit: int, num_rows: int) -> None:
        if num_rows != self.units[unit].rows:
            part = self.units[unit].piece[0]
            raise LogError(
                f"{self.log.source.files[part.file_index].path}: has {num_rows:,} {self.split} rows from "
                f"{part.start:,} to {part.end:,}, but had {self.units[unit].rows:,} when they were counted. "
                "A log must not change while it is trained on."
            )


def _check_plan(plan: Plan, recipe: Recipe, features: Sequence[str] | None) -> None:
    """Check that the plan is fitted, and that the log has every column that it reads."""
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
    """The plan without the raw columns that a Table keeps in addition to features."""
    result = copy(plan)
    result.recipe = replace(plan.recipe, table=replace(plan.recipe.table, keep=()))
    return result
