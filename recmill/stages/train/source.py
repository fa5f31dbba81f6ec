"""The source of a run's rows: a Table, or a raw log with a Plan that was fitted before."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from recmill.artifacts.checkpoint.checkpoint import WITH_EVAL_ROWS
from recmill.dataset.loader import Batches
from recmill.dataset.log_loader import LogBatches
from recmill.dataset.table import Table
from recmill.distributed.evaluation import evaluate_ranker, evaluate_retriever
from recmill.distributed.workers import SINGLE_WORKER, Workers
from recmill.errors import ArtifactError, RecmillError
from recmill.features.chain import ColumnInfo
from recmill.features.plan import Plan
from recmill.features.plan_artifact import check_plan, plan_at
from recmill.learner.ranking import Ranker
from recmill.learner.retrieval import Retriever
from recmill.learner.trees import fit_trees
from recmill.logs.base import LogFiles
from recmill.logs.config import DEFAULT_MAX_BAD
from recmill.logs.counted import Each
from recmill.logs.inputs import open_inputs
from recmill.logs.text import TextSource
from recmill.models.trees import BlendedRanker, TreeRanker
from recmill.recipe import recipe as r
from recmill.recipe.crosses import is_open
from recmill.recipe.defaults import DEFAULT_BATCH_SIZE, as_prepared
from recmill.stages.train.log_rows import LogRows
from recmill.stages.train.trainer import BatchSource, Metrics

EVALUATION_BATCH = 8192

Learners = Ranker | Retriever
Evaluation = Callable[[], Metrics]


class TrainingData(Protocol):
    """Rows with their features, and the evaluation of a learner on the held-out rows."""

    @property
    def name(self) -> str:
        """Identifies the source: a run resumes only with the one that it started with."""

    @property
    def data(self) -> str | None:
        """The directory of the rows' log, if known."""

    @property
    def plan(self) -> Plan: ...
    @property
    def columns(self) -> list[ColumnInfo]: ...
    def check(self, recipe: r.Recipe) -> None:
        """Raise when the features do not match the recipe, or it needs something that this source lacks."""

    def batches(self, learner: Learners) -> BatchSource: ...
    def evaluation(self, learner: Learners, workers: Workers = SINGLE_WORKER) -> Evaluation | None:
        """Metrics of the eval rows, measured by all workers; None when the recipe has no eval split."""

    def num_rows(self, split: str) -> int: ...
    def with_eval_rows(self) -> TrainingData:
        """The source with the eval rows among the training rows: none is left for evaluation."""


class TableData:
    """Rows of a Table. A shuffled Table is reordered in each epoch; a log's order is kept."""

    def __init__(self, table: Table, learns_eval: bool = False) -> None:
        self.table = table
        self.splits = ("train", "eval") if learns_eval else ("train",)
        self.name = f"table {table.digest}" + WITH_EVAL_ROWS * learns_eval
        self.data: str | None = table.manifest.get("data")
        self.columns = table.columns

    @property
    def plan(self) -> Plan:
        return self.table.plan

    def check(self, recipe: r.Recipe) -> None:
        check_prepared(recipe, self.table.recipe, self.table.path)

    def batches(self, learner: Learners) -> BatchSource:
        return Batches(
            self.table,
            learner.batch_size,
            self.splits,
            learner.layout.features,
            seed_of(self.table.recipe, learner),
            learner.trains_on,
            learner.trains_on_list,
        )

    def evaluation(self, learner: Learners, workers: Workers = SINGLE_WORKER) -> Evaluation | None:
        if "eval" in self.splits or not self.table.num_rows("eval"):
            return None
        if isinstance(learner, Retriever):
            return lambda: evaluate_retriever(learner, self.table, workers).means()
        return partial(evaluate_on, self.table, learner, workers)

    def num_rows(self, split: str) -> int:
        """Number of training rows, or of held-out rows."""
        if split == "train":
            return sum(map(self.table.num_rows, self.splits))
        return 0 if split in self.splits else self.table.num_rows(split)

    def with_eval_rows(self) -> TableData:
        return TableData(self.table, learns_eval=True)


def seed_of(recipe: r.Recipe, learner: Learners) -> int | None:
    """Seed of the row order in each epoch, if the Table's rows were shuffled."""
    return learner.train_spec.seed if recipe.table.order == "shuffle" else None


def evaluate_on(table: Table, ranker: Ranker, workers: Workers) -> Metrics:
    """Metrics of a Table's eval rows."""
    batches = Batches(table, EVALUATION_BATCH, "eval", ranker.layout.features)
    if isinstance(ranker.model, BlendedRanker):
        ranker.fit_blend(batches.read())
    return evaluate_ranker(ranker, batches.read(), workers).metrics().as_dict()


def fit_ranker_trees(
    source: TrainingData, learner: Learners, workers: Workers, report: Callable[[int], None]
) -> None:
    """Fit the trees of a ranker that has them, before its model is trained."""
    if not isinstance(learner, Ranker) or learner.spec.trees is None:
        return
    if not isinstance(source, TableData) or workers.size > 1:
        raise RecmillError(
            "[ranking.trees] is fitted on all rows at once: train it from a Table (--table), in one process."
        )
    spec, train = learner.spec, learner.train_spec
    assert spec.trees is not None
    assert isinstance(learner.model, BlendedRanker | TreeRanker)
    fit_trees(
        spec.trees,
        learner.model.trees,
        source.table,
        learner.layout.number_columns,
        spec.label,
        train.seed,
        learner.num_threads,
        report,
    )


class LogData:
    """Rows of a raw log, with features computed on the fly.

    Two towers are evaluated on what is kept of a pass over the log: see LogRows.
    """

    def __init__(
        self,
        recipe: r.Recipe,
        data: str,
        plan_from: str | Path | None = None,
        max_bad: float = DEFAULT_MAX_BAD,
        note: Callable[[str], None] = lambda line: None,
        each: Each | None = None,
    ) -> None:
        """`each` maps the function that counts units of the log; on threads by default."""
        self.each = each
        self.data = _absolute(data)
        self.max_bad = max_bad
        self.note = note
        self.plan = _plan(recipe, self.data, plan_from)
        self.recipe = recipe = as_prepared(recipe, self.plan.recipe)
        self.name = f"log {self.data} ({_digest(recipe, self.data)}), plan {self.plan.digest()}"
        self.columns = self.plan.columns()
        self._counted: dict[str | None, LogBatches] = {}
        self._kept: LogRows | None = None

    def check(self, recipe: r.Recipe) -> None:
        check_plan(self.plan, recipe)
        if recipe.refit:
            self.with_eval_rows()

    def batches(self, learner: Learners) -> BatchSource:
        if learner.trains_on_list is not None:
            raise RecmillError(
                f'retrieval.model = "{self.recipe.retrieval and self.recipe.retrieval.model}" trains on whole '
                "histories, which a Table holds. Train it with --table, or only the ranker with --only ranking."
            )
        return self._opened(learner.trains_on).of_split("train", learner.batch_size, learner.layout.features)

    def evaluation(self, learner: Learners, workers: Workers = SINGLE_WORKER) -> Evaluation | None:
        if not self.num_rows("eval"):
            return None
        if isinstance(learner, Retriever):
            return lambda: evaluate_retriever(learner, self._rows_kept(), workers).means()
        batches = self._opened().of_split("eval", EVALUATION_BATCH, learner.layout.features)
        return lambda: evaluate_ranker(learner, batches.read(), workers).metrics().as_dict()

    def num_rows(self, split: str) -> int:
        return self._opened().log.num_rows(split)

    def with_eval_rows(self) -> TrainingData:
        raise RecmillError(
            "refit = true learns from the eval rows of a Table: train with --table, or remove refit."
        )

    def _rows_kept(self) -> LogRows:
        """The rows that retrieval is evaluated on, read once."""
        if self._kept is None:
            self._kept = LogRows(self.data, self.recipe, self.plan, self._opened().log, self.each)
        return self._kept

    def _opened(self, where: str | None = None) -> LogBatches:
        """The log, counted once; of a label, its positive rows alone, counted apart."""
        if where not in self._counted:
            counted = LogBatches(
                self.recipe,
                self.plan,
                self.data,
                DEFAULT_BATCH_SIZE,
                max_bad=self.max_bad,
                where=where,
                each=self.each,
            )
            if not self._counted:
                self._describe(counted)
            self._counted[where] = counted
        return self._counted[where]

    def _describe(self, counted: LogBatches) -> None:
        for line in counted.notes:
            self.note(line)
        if counted.bad:
            self.note(f"{counted.bad:,} bad rows are left out")
            for line in counted.tally.describe():
                self.note(f"  {line}")


def open_table_data(path: str, note: Callable[[str], None]) -> TrainingData:
    """The rows of a Table, opened by the process that reads them."""
    return TableData(Table.open(path))


def open_log_data(
    recipe: r.Recipe, data: str, plan: str | None, max_bad: float, note: Callable[[str], None]
) -> TrainingData:
    """The rows of a raw log, with the features of an artifact."""
    return LogData(recipe, data, plan, max_bad, note)


def check_prepared(recipe: r.Recipe, prepared: r.Recipe, table: Path) -> None:
    """Check that the Table's rows are those that the recipe describes."""
    for part in ("log", "rows", "features", "labels", "split"):
        if getattr(recipe, part) != getattr(prepared, part):
            raise ArtifactError(
                f'Table {table} was prepared with another [{part}] than recipe "{recipe.name}" has. '
                "Run `recmill prepare` again."
            )


def _absolute(data: str) -> str:
    """An absolute directory of logs, so that a run can resume from anywhere; a URL stays as it is."""
    return data if "://" in data else os.path.abspath(data)


def _digest(recipe: r.Recipe, data: str) -> str:
    """Identifies the files of a log, its side tables and functions."""
    inputs = open_inputs(recipe, data)
    text = json.dumps({**inputs.fingerprint(), **_cutting(inputs.log)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _cutting(log: LogFiles) -> dict[str, int]:
    """The version of how unsplittable files are cut into units, which cursors depend on."""
    is_surveyed = isinstance(log, TextSource) and not all(map(log.can_cut, log.files))
    return {"cutting": 2} if is_surveyed else {}


def _plan(recipe: r.Recipe, data: str, path: str | Path | None) -> Plan:
    """The Plan of a Table or of a checkpoint; None when nothing needs fitting."""
    if path is not None:
        return plan_at(path)
    plan = Plan(open_inputs(recipe, data).recipe)
    if plan.pending() or is_open(recipe):
        raise RecmillError(
            f'Recipe "{recipe.name}" has features that are fitted. Fit them once with `recmill prepare` and add '
            "--plan DIR, the Table's directory."
        )
    return plan
