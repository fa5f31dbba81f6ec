"""The rows to score: those of a log, with features by the model's own Plan, or those of a Table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import polars as pl

from recmill.dataset.batch import Array, collate
from recmill.dataset.table import Table
from recmill.engines.engine import Engine, Frame
from recmill.errors import ArtifactError, FeatureError
from recmill.features.chain import run_chains
from recmill.features.plan import Plan
from recmill.logs.config import DEFAULT_MAX_BAD
from recmill.logs.inputs import open_inputs
from recmill.logs.rows import row_functions
from recmill.logs.scan import LogScan
from recmill.logs.tally import Tally
from recmill.recipe.kinds import kinds_of_columns
from recmill.recipe.recipe import POSITION, SPLIT, Recipe
from recmill.stages.score.models import ModelRef, Models, RankScorer, open_models
from recmill.stages.score.raw import RawColumn, raw_columns
from recmill.stages.score.sources import ROWS_AT_ONCE, TableRows, file_and_offset

_INSTEAD = (
    "Run `recmill prepare --plan` with the model's directory, and score its Table instead: --table DIR."
)
_OURS = ("file", "offset", "score", "label")


class Input(Protocol):
    """Rows that can be scored by an engine."""

    def facts(self) -> dict[str, Any]:
        """What tells these rows from others."""

    def scores(self, engine: Engine, model: ModelRef, work: Path, rejected: Path) -> Frame:
        """A frame with a row for each good row, in order: file, offset, score, label and raw columns."""

    def finish(self) -> Tally | None:
        """After all rows were read: how many, and how many were bad; raises when these are too many."""


# a log


class LogInput:
    """All good rows of a log. Only operations of `[[rows]]` that see each row alone can run here."""

    def __init__(
        self,
        models: Models,
        data: str,
        keep: Sequence[str] | None = None,
        with_labels: bool = True,
        max_bad: float = DEFAULT_MAX_BAD,
        memory: int = 2 << 30,
        partitions: int | None = None,
    ) -> None:
        self.recipe = scoring_recipe(models.recipe, with_labels)
        data = data if "://" in data else os.path.abspath(data)  # tasks run in other directories
        self.data = data
        self.inputs = open_inputs(self.recipe, data)
        self.functions = row_functions(self.recipe, data, memory, _INSTEAD, max_bad)
        self.keep = _kept(self.recipe, keep)
        self.with_labels = with_labels
        self.max_bad = max_bad
        self.memory = memory
        self.partitions = partitions
        self._scan: LogScan | None = None

    def facts(self) -> dict[str, Any]:
        return {**self.inputs.fingerprint(), "keep": list(self.keep), "labels": self.with_labels}

    def scores(self, engine: Engine, model: ModelRef, work: Path, rejected: Path) -> Frame:
        self._scan = LogScan.resume(
            self.inputs.log, work, rejected, self.max_bad, self.memory, self.partitions, engine.tasks_at_once
        )
        frame = engine.read(self._scan)
        for function in self.functions:
            frame = engine.map(frame, function)
        files = tuple(file.name for file in self.inputs.log.files)
        return engine.map(frame, ScoreLog(model, files, self.keep, self.with_labels))

    def finish(self) -> Tally:
        assert self._scan is not None, "scores come before the end"
        self.inputs.check_unchanged()
        return self._scan.check()


def scoring_recipe(recipe: Recipe, with_labels: bool) -> Recipe:
    """The recipe for rows whose labels may be missing, or whose log does not have the columns of labels at all."""
    of_labels = {name for label in recipe.labels for name in label.columns}
    of_labels -= {name for feature in recipe.features for name in feature.columns}
    columns = [
        replace(column, required=False) if column.name in of_labels else column
        for column in recipe.log.columns
        if with_labels or column.name not in of_labels
    ]
    return replace(recipe, log=replace(recipe.log, columns=tuple(columns)))


def _kept(recipe: Recipe, names: Sequence[str] | None) -> tuple[str, ...]:
    log = recipe.log
    if names is None:
        return tuple(name for name in (log.user, log.item) if name is not None and name not in _OURS)
    known = kinds_of_columns(recipe)
    for name in names:
        if name not in known:
            raise FeatureError(f'There is no column "{name}" to keep; the log has: {", ".join(known)}.')
    return _checked_names(names)


def _checked_names(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name in _OURS:
            raise FeatureError(f'"{name}" cannot be kept: scores have a column of that name. Leave it out.')
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class ScoreLog:
    """Raw rows to scores."""

    model: ModelRef
    files: tuple[str, ...]
    keep: tuple[str, ...]
    with_labels: bool

    def __call__(self, rows: pl.DataFrame) -> pl.DataFrame:
        models = open_models(self.model)
        ranking = models.ranking()
        features = models.plan.apply(rows, labels=False, only=ranking.layout.features)
        named = ranking.labels if self.with_labels else ()
        labels = [label_of(models.plan, name, rows) for name in named]
        kept = [rows[name] for name in self.keep]
        return _scored(rows[POSITION], self.files, score_columns(ranking, features, labels), kept)


def label_of(plan: Plan, name: str, rows: pl.DataFrame) -> pl.Series:
    """A label of raw rows, missing where the log does not tell it."""
    chain = next(chain for chain in plan.labels if chain.feature.name == name)
    (value,) = run_chains(rows, [(chain, len(chain.transforms))])
    (label,) = run_chains(rows, [(chain, len(chain.all_steps))])
    return label.set(value.is_null(), None) if value.null_count() else label


# a Table


class TableInput:
    """All rows of a split of a Table that the model's Plan made."""

    def __init__(
        self, models: Models, table: Table, split: str | None = None, keep: Sequence[str] | None = None
    ) -> None:
        check_features(models, table)
        self.split = split or next((name for name in ("test", "eval") if table.num_rows(name)), "")
        if not self.split:
            raise ArtifactError(
                f"Table {table.path} holds no rows out. Score the rows it was trained on with --split train."
            )
        table.check_split(self.split)
        self.table = table
        self.kept = raw_columns(table, keep)
        _checked_names([column.name for column in self.kept])

    def facts(self) -> dict[str, Any]:
        keep = [column.name for column in self.kept]
        return {"table": self.table.digest, "split": self.split, "keep": keep}

    def scores(self, engine: Engine, model: ModelRef, work: Path, rejected: Path) -> Frame:
        ranking = open_models(model).ranking()
        stored = [column.stored for column in self.kept]
        rows = TableRows.of(self.table, [self.split], [*ranking.layout.features, *ranking.labels, *stored])
        files = tuple(shard.file for shard in rows.shards)
        return engine.map(engine.read(rows), ScoreTable(model, files, self.kept))

    def finish(self) -> None:
        """What a Table holds was read before."""


def check_features(models: Models, table: Table) -> None:
    """The features must mean the same: the model's Plan made the Table's rows."""
    if list(models.columns) != table.columns or models.plan.digest() != table.plan.digest():
        raise ArtifactError(
            f"Table {table.path} was prepared with another Plan than the model was trained with. "
            "Prepare the log with the model's: `recmill prepare --plan`, with the checkpoint or bundle."
        )


@dataclass(frozen=True)
class ScoreTable:
    """Rows of a Table to scores."""

    model: ModelRef
    files: tuple[str, ...]
    keep: tuple[RawColumn, ...]

    def __call__(self, rows: pl.DataFrame) -> pl.DataFrame:
        models = open_models(self.model)
        ranking = models.ranking()
        kept = [column.of(rows, models.plan) for column in self.keep]
        labels = [rows[name] for name in ranking.labels]
        return _scored(rows[POSITION], self.files, score_columns(ranking, rows, labels), kept)


# both


def score_columns(
    ranking: RankScorer, features: pl.DataFrame, labels: Sequence[pl.Series]
) -> list[pl.Series]:
    """`score` and `label`; of several tasks also `score_<task>` and `label_<task>`, and no `label`."""
    probabilities = predict(ranking, features)
    scores = {"score": ranking.tasks.scores(probabilities)}
    scores |= {f"score_{task}": found for task, found in ranking.tasks.by_task(probabilities).items()}
    columns = [pl.Series(name, values, dtype=pl.Float32) for name, values in scores.items()]
    names = [f"label_{task}" for task in ranking.tasks.tasks] or ["label"]
    return [*columns, *(one.cast(pl.Float32).alias(name) for one, name in zip(labels, names, strict=False))]


def predict(ranking: RankScorer, features: pl.DataFrame) -> Array:
    """Probabilities or numbers of rows, some rows at a time."""
    found = [
        ranking.predict(collate(rows, ranking.layout, with_labels=False))
        for rows in features.iter_slices(ROWS_AT_ONCE)
        if rows.height
    ]
    shape = (0, len(ranking.tasks.tasks)) if ranking.tasks.tasks else (0,)
    return np.concatenate(found) if found else np.empty(shape, np.float32)


def _scored(
    positions: pl.Series, files: Sequence[str], scored: Sequence[pl.Series], kept: Sequence[pl.Series]
) -> pl.DataFrame:
    columns = [*file_and_offset(positions, files), *kept, *scored]
    everything = pl.lit(0, dtype=pl.Int8).alias(SPLIT)
    return pl.DataFrame([*columns, positions.alias(POSITION)]).with_columns(everything)
