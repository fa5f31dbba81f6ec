"""The rows of a raw log that two towers are evaluated on: held-out clicks, the catalogue, and earlier clicks."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import polars as pl

from recmill.features.chain import ColumnInfo
from recmill.features.labels import is_positive
from recmill.features.plan import Plan
from recmill.learner.eval_queries import id_feature, retrieval_of
from recmill.logs.counted import CountedLog, Each, Piece, on_threads
from recmill.logs.reduced import ReducedRows
from recmill.recipe.recipe import SPLIT, SPLITS, Recipe
from recmill.reporting.machine import available_cores

Reduce = Callable[[pl.DataFrame], pl.DataFrame]


class LogRows:
    """The train and eval rows of a log that `EvalQueries` are made of, with their features, in log order.

    Of the training rows, these are the last one of each item and the first click of each eval user on each item: as
    many as the queries hold themselves, however long the log is. Opening reads the log once.
    """

    def __init__(self, data: str, recipe: Recipe, plan: Plan, log: CountedLog, each: Each | None) -> None:
        self.path = Path(data)
        self.recipe = recipe
        self.columns: list[ColumnInfo] = plan.columns()
        self._log = log
        self._each = each or partial(on_threads, available_cores())
        retrieval = retrieval_of(recipe)
        kept = {getattr(recipe.log, side): side for side in ("user", "item")}
        raw = tuple(name for name in dict.fromkeys(kept) if name in recipe.table.keep)
        self._plan = copy(plan)
        self._plan.recipe = replace(plan.recipe, table=replace(plan.recipe.table, keep=raw))
        ids = {side: id_feature(recipe, self.columns, side) for side in ("user", "item")}
        user = f"raw_{recipe.log.user}" if recipe.log.user in raw else ids["user"]
        self._features = tuple(dict.fromkeys([*ids.values(), *retrieval.user, *retrieval.item]))
        self._names = (*self._features, retrieval.label, *(f"raw_{name}" for name in raw))
        clicks = self._read("eval", _clicks(retrieval.label))
        users = clicks[user].unique()
        rows = self._read("train", partial(_needed, retrieval.label, user, users, ids["item"]))
        self._rows = {"eval": clicks, "train": rows}

    def num_rows(self, split: str = "train") -> int:
        """The number of rows in the log."""
        return self._log.num_rows(split)

    def scan(self, split: str = "train") -> pl.LazyFrame:
        return self._rows[split].lazy()

    def _read(self, split: str, reduce: Reduce) -> pl.DataFrame:
        number = SPLITS.index(split)
        pieces = [piece for piece, rows in zip(self._log.pieces, self._log.rows, strict=True) if rows[number]]
        held = ReducedRows(reduce)
        reader = _Reader(self._log, self._plan, self._features, self._names, number, reduce)
        for rows in self._each(reader, pieces):
            held.add(rows)
        found = held.result()
        assert found is not None
        return found


@dataclass(frozen=True)
class _Reader:
    """Reads a unit of the log, on whichever machine."""

    log: CountedLog
    plan: Plan
    features: tuple[str, ...]
    names: tuple[str, ...]
    split: int
    reduce: Reduce

    def __call__(self, piece: Piece) -> pl.DataFrame:
        held = ReducedRows(self.reduce)
        for frame in self.log.read(piece):
            rows = frame.filter(pl.col(SPLIT) == self.split)
            if rows.height:
                held.add(self.plan.apply(rows, only=self.features).select(self.names))
        found = held.result()
        assert found is not None
        return found


def _clicks(label: str) -> Reduce:
    return partial(_filtered, is_positive(label))


def _filtered(condition: pl.Expr, rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(condition)


def _needed(label: str, user: str, users: pl.Series, item: str, rows: pl.DataFrame) -> pl.DataFrame:
    """The last row of each item, and the first click of each of these users on each item."""
    clicked = is_positive(label) & pl.col(user).is_in(users.implode())
    marked = rows.with_columns(clicked.fill_null(False).alias("__clicked"))
    is_first = pl.col("__clicked") & pl.struct("__clicked", user, item).is_first_distinct()
    return marked.filter(pl.col(item).is_last_distinct() | is_first).drop("__clicked")
