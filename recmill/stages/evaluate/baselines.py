"""What a ranker must beat: simple models over the same features, on the same rows.

A constant, a logistic or linear regression, and gradient-boosted trees where LightGBM is installed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from recmill.dataset.table import Table
from recmill.learner.ranking import Ranker
from recmill.logistic import Array, LinearRegression, LogisticRegression, bucket_edges, hashed
from recmill.metrics import ScoreSums, exact_auc
from recmill.number_metrics import NumberSums
from recmill.stages.evaluate.boosted import boosted_scores, has_lightgbm

MAX_ROWS = 200_000  # of each split: enough for a baseline, and a second or two of work

Baselines = dict[str, dict[str, float]]


def ranking_baselines(ranker: Ranker, table: Table, split: str, threads: int) -> Baselines:
    """Metrics by name, of the label or of each task. Lists and what only trees read are left out."""
    labels = ranker.spec.labels
    found = {label: _baselines(ranker, table, split, threads, label) for label in labels}
    if ranker.spec.tasks is None:
        return found[labels[0]]
    return {f"{label}: {name}": metrics for label in labels for name, metrics in found[label].items()}


def _baselines(ranker: Ranker, table: Table, split: str, threads: int, label: str) -> Baselines:
    """Empty without anything to learn."""
    features = _features(ranker, table)
    train = _last_rows(table, "train", [*features, label])
    if not features or train is None or train[label].n_unique() < 2:
        return {}
    held_out = _first_rows(table, split, [*features, label])
    edges = {name: bucket_edges(train[name].to_numpy()) for name in features if train[name].dtype.is_float()}
    is_number = label in ranker.spec.number_losses
    regression = LinearRegression() if is_number else LogisticRegression()
    regression.fit(_slots(train, features, edges), train[label].to_numpy())
    found = {regression.name: regression.predict(_slots(held_out, features, edges))}
    if has_lightgbm():
        columns = [[rows[name].to_numpy() for name in features] for rows in (train, held_out)]
        labels = train[label].to_numpy()
        found["boosted trees"] = boosted_scores(columns[0], labels, columns[1], threads, is_number)
    found["constant"] = np.full(held_out.height, train[label].mean())
    measured = _measured_numbers if is_number else _measured
    return {name: measured(held_out[label].to_numpy(), scores) for name, scores in found.items()}


def _features(ranker: Ranker, table: Table) -> list[str]:
    read = dict.fromkeys((*ranker.deep_features, *ranker.spec.wide))
    single = {column.name for column in table.columns if column.kind in ("number", "id", "key")}
    return [name for name in read if name in single]


def _slots(rows: pl.DataFrame, features: Sequence[str], edges: dict[str, Array]) -> Array:
    return hashed(
        [
            np.searchsorted(edges[name], rows[name].to_numpy(), side="right")
            if name in edges
            else rows[name].to_numpy()
            for name in features
        ]
    )


def _measured(labels: Array, scores: Array) -> dict[str, float]:
    sums = ScoreSums()
    sums.add(labels, scores)
    return {"auc": exact_auc(labels, scores), "log_loss": sums.metrics().log_loss}


def _measured_numbers(labels: Array, predictions: Array) -> dict[str, float]:
    sums = NumberSums()
    sums.add(labels, predictions)
    metrics = sums.metrics().as_dict()
    return {name: metrics[name] for name in ("r2", "rmse", "mae", "rank_correlation")}


def _first_rows(table: Table, split: str, columns: Sequence[str]) -> pl.DataFrame:
    frames: list[pl.DataFrame] = []
    for shard in table.files(split):
        frames += shard.frames(list(columns))
        if sum(frame.height for frame in frames) >= MAX_ROWS:
            break
    return pl.concat(frames).head(MAX_ROWS)


def _last_rows(table: Table, split: str, columns: Sequence[str]) -> pl.DataFrame | None:
    """The newest, where a Table keeps the log's order."""
    frames: list[pl.DataFrame] = []
    for shard in reversed(table.files(split)):
        frames = [*shard.frames(list(columns)), *frames]
        if sum(frame.height for frame in frames) >= MAX_ROWS:
            break
    return pl.concat(frames).tail(MAX_ROWS) if frames else None
