"""evaluate: Checkpoint + Table -> numbers, plots, and the gate's verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.artifacts.checkpoint.step import StepCheckpoint
from recmill.dataset.batch import collate
from recmill.dataset.table import Table
from recmill.errors import ArtifactError
from recmill.learner.eval_queries import counts_of
from recmill.learner.ranking import Ranker
from recmill.learner.retrieval import Retriever
from recmill.learner.saved import open_learner
from recmill.metrics import BinaryMetrics, RankerSums, RankingSums, TaskMetrics, exact_auc
from recmill.number_metrics import NumberMetrics
from recmill.recipe.protocols import Protocol, protocol_for
from recmill.recipe.recipe import SPLITS
from recmill.reporting.machine import available_cores
from recmill.reporting.progress import Progress, ProgressBar
from recmill.stages.evaluate.baselines import Baselines, ranking_baselines
from recmill.stages.evaluate.config import EvaluateConfig
from recmill.stages.evaluate.gate import SERVED, Condition, GateError, Verdict, judge, parse_gate
from recmill.stages.evaluate.live import Live, as_planned, find_live, misses_counted
from recmill.stages.evaluate.segments import Segments

Metrics = TypeVar("Metrics", bound=BinaryMetrics | NumberMetrics)

ROWS_AT_ONCE = 1 << 14
MAX_EXACT_ROWS = 50_000_000  # 12 bytes each


@dataclass(frozen=True)
class EvaluateResult:
    """One model on one split."""

    model: str
    checkpoint: StepCheckpoint
    split: str
    metrics: dict[str, float]
    sums: RankerSums | RankingSums
    segments: list[Segments] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    tables: dict[str, Any] = field(default_factory=dict)
    protocol: Protocol | None = None
    baselines: Baselines = field(default_factory=dict)  # of a ranker: simple models on the same rows
    notes: list[str] = field(default_factory=list)  # why published numbers must not be compared with these

    @property
    def passed(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts)


def evaluate(
    folder: Checkpoint,
    table: Table,
    options: EvaluateConfig = EvaluateConfig(),  # noqa: B008, frozen
    progress: Progress | None = None,
) -> list[EvaluateResult]:
    """Every model of the checkpoint on held-out rows of the Table."""
    gate = [one for one in parse_gate(options.gate or "") if not one.metric.startswith(SERVED)]
    split = _split(table, options)
    _check_columns(folder, table)
    live = find_live(options.live, options.which, options.allow_no_live) if options.live is not None else None
    bars = progress or Progress(quiet=True)
    found = [
        _measure(folder, model, options.which, table, split, options, bars)
        for model in _models(folder, options)
    ]
    _check_gate(gate, found)
    for measured in found if gate else []:
        conditions = [one for one in gate if one.metric in measured.metrics]
        asks = live is not None and any(one.bound == "live" for one in conditions)
        other = _measure_live(live, measured, table, folder.path, options, bars) if live and asks else None
        measured.verdicts.extend(judge(conditions, measured.metrics, other, options.allow_no_live))
    return found


def _measure_live(
    live: Live, measured: EvaluateResult, table: Table, beside: Path, options: EvaluateConfig, bars: Progress
) -> dict[str, float] | None:
    """The live model on the same rows; None when it has no such model."""
    model, split = measured.model, measured.split
    if model not in live.folder.models:
        return None
    needed = (split,) if model == "ranking" else tuple(one for one in SPLITS if table.num_rows(one))
    with as_planned(live.folder, table, needed, beside) as own_table:
        which = live.which(model)
        found = _measure(live.folder, model, which, own_table, split, options, bars, baselines=False).metrics
    return misses_counted(found, measured.metrics)


def _split(table: Table, options: EvaluateConfig) -> str:
    if options.split is not None:
        table.check_split(options.split)
        return options.split
    for split in ("test", "eval"):
        if table.num_rows(split):
            return split
    raise ArtifactError(
        f"Table {table.path} holds no rows out: add [split] to the recipe and prepare again, "
        "or measure the rows it was trained on with --split train."
    )


def _models(folder: Checkpoint, options: EvaluateConfig) -> list[str]:
    known = folder.models
    if not known:
        raise ArtifactError(f"Checkpoint {folder.path} has no models yet. Run `recmill train` first.")
    if options.only is not None and options.only not in known:
        raise ArtifactError(
            f"Checkpoint {folder.path} has no {options.only} model; it has: {', '.join(known)}."
        )
    return [options.only] if options.only is not None else known


def _check_columns(folder: Checkpoint, table: Table) -> None:
    """The features must mean the same: the checkpoint's Plan made the Table's rows."""
    if folder.columns != table.columns or folder.plan.digest() != table.plan.digest():
        raise ArtifactError(
            f"Checkpoint {folder.path} was trained on other features than Table {table.path} has. "
            "Evaluate it on a Table prepared with its Plan."
        )


def _check_gate(gate: Sequence[Condition], found: Sequence[EvaluateResult]) -> None:
    known = {name for measured in found for name in measured.metrics}
    for condition in gate:
        if condition.metric not in known:
            raise GateError(
                f'Gate: there is no metric "{condition.metric}"; there are: {", ".join(sorted(known))}.'
            )


def _measure(
    folder: Checkpoint,
    model: str,
    which: str,
    table: Table,
    split: str,
    options: EvaluateConfig,
    bars: Progress,
    baselines: bool = True,
) -> EvaluateResult:
    saved = open_learner(folder, model, which, options.threads or available_cores())
    learner = saved.learner
    statistics = {name: tables.statistics() for name, tables in learner.tables.items()}
    if isinstance(learner, Retriever):
        ranked = learner.evaluate(table, split)
        metrics = {"users": float(ranked.users), **ranked.means()}
        metrics |= {f"{name}_margin": margin for name, margin in ranked.margins().items()}
        protocol = protocol_for(folder.recipe)
        notes = protocol.notes(folder.recipe, counts_of(table, folder.recipe))
        if folder.is_refit:
            notes.append("this model learned from the eval rows too (refit), published ones did not")
        if left_out := learner.eval_queries(table, split).num_left_out:
            notes.append(f"{left_out:,} more queries were not asked, for all items are ranked for each")
        return EvaluateResult(
            model, saved.checkpoint, split, metrics, ranked, tables=statistics, protocol=protocol, notes=notes
        )
    _check_segments(learner, options)
    segments = [Segments.of(table, column, split) for column in options.by]
    with bars.stage("evaluate", table.num_rows(split)) as stage:
        sums, exact = _score(learner, table, split, segments, stage)
    metrics = _with_exact(sums, exact)
    simple = (
        ranking_baselines(learner, table, split, options.threads or available_cores()) if baselines else {}
    )
    return EvaluateResult(
        model, saved.checkpoint, split, metrics, sums, segments, tables=statistics, baselines=simple
    )


def _check_segments(ranker: Ranker, options: EvaluateConfig) -> None:
    if options.by and ranker.spec.tasks is not None:
        raise ArtifactError(
            "--by is for rankers with one label, and this one has several tasks. Remove --by."
        )
    if options.by and ranker.spec.number_losses:
        raise ArtifactError(
            f'--by is for labels of 0 and 1, and "{ranker.spec.label}" is a number. Remove --by.'
        )


def _with_exact(sums: RankerSums, exact: dict[int, float]) -> dict[str, float]:
    """Metrics by name, with the exact AUC of each label by its index, where it is known."""
    metrics = sums.metrics()
    if not isinstance(metrics, TaskMetrics):
        return _exactly(metrics, exact.get(0)).as_dict()
    found = {
        label: _exactly(one, exact.get(index)) for index, (label, one) in enumerate(metrics.tasks.items())
    }
    return TaskMetrics(found).as_dict()


def _exactly(metrics: Metrics, auc: float | None) -> Metrics:
    return replace(metrics, auc=auc) if isinstance(metrics, BinaryMetrics) and auc is not None else metrics


def _score(
    ranker: Ranker, table: Table, split: str, segments: list[Segments], stage: ProgressBar
) -> tuple[RankerSums, dict[int, float]]:
    """Sums over all rows, and the exact AUC of each label of 0 and 1, by index, when the scores fit in memory."""
    sums = ranker.new_sums()
    kept: list[tuple[Any, Any]] = []
    for rows in _frames(table, split, [*ranker.layout.columns, *(part.column for part in segments)]):
        batch = collate(rows, ranker.layout)
        labels, scores = ranker.labels_of(batch), ranker.predict(batch)
        sums.add(labels, scores)
        for part in segments:
            part.add(rows[part.column], labels, scores)
        if sums.num_rows <= MAX_EXACT_ROWS:
            kept.append((labels, scores))
        stage.advance(rows.height, rows.height)
    if sums.num_rows > MAX_EXACT_ROWS:
        return sums, {}
    labels, scores = (np.concatenate(part).reshape(sums.num_rows, -1) for part in zip(*kept, strict=True))
    binary = [index for index, label in enumerate(ranker.spec.labels) if label in ranker.spec.binary_labels]
    return sums, {index: exact_auc(labels[:, index], scores[:, index]) for index in binary}


def _frames(table: Table, split: str, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
    for shard in table.files(split):
        for rows in shard.frames(list(dict.fromkeys(columns))):
            yield from rows.iter_slices(ROWS_AT_ONCE)
