"""The score of a ranker with several tasks, by which rows are ordered."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import polars as pl

from recmill.features.expressions import compiled
from recmill.recipe.expressions import parse_score

Array = np.ndarray[Any, np.dtype[Any]]
_MAX = float(np.finfo(np.float32).max)


class TaskScores:
    """The probabilities of a ranker [B], or [B, K] of several tasks, as one score per row.

    `order` is an expression over the tasks. Rows where it is not a number, such as 0 / 0, come last.
    """

    def __init__(self, tasks: Sequence[str] = (), order: str = "") -> None:
        self.tasks = tuple(tasks)
        self.order = order

    def scores(self, probabilities: Array, order: str | None = None) -> Array:
        """Float32 [B]; `order` replaces the expression. Raises ExpressionError when it is invalid."""
        if not self.tasks:
            return probabilities
        frame = pl.DataFrame(probabilities.astype(np.float64), schema=list(self.tasks))
        found = frame.select(_compiled(order or self.order, self.tasks).cast(pl.Float64))
        scores = found.to_series().fill_null(float("nan")).to_numpy()
        finite = np.nan_to_num(scores, nan=-_MAX, posinf=_MAX, neginf=-_MAX)
        return np.asarray(finite.clip(-_MAX, _MAX), np.float32)

    def by_task(self, probabilities: Array) -> dict[str, Array]:
        """Probabilities of each task; empty for a single task."""
        return {name: probabilities[:, index] for index, name in enumerate(self.tasks)}


@lru_cache(256)
def _compiled(order: str, tasks: tuple[str, ...]) -> pl.Expr:
    return compiled(parse_score(order, tasks))
