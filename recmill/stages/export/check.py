"""A bundle against the learners it was made of: the same rows must get the same scores and vectors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from recmill.artifacts.bundle.arrays import map_array
from recmill.artifacts.bundle.bundle import Bundle
from recmill.artifacts.bundle.features import FeatureRows
from recmill.artifacts.bundle.models import RankModel, TowerModel
from recmill.dataset.batch import Array, Batch, Layout, between, collate
from recmill.errors import ArtifactError
from recmill.features.plan import Plan
from recmill.learner.ranking import Ranker
from recmill.learner.retrieval import Retriever

TOLERANCE = 1e-5
_BFLOAT16_TOLERANCE = 0.02  # a bfloat16 ranker is less precise than its float32 graph
_MAX_MEAN = 0.05  # of rows with fewer bits
_ITEMS = 1_000
_ROWS_ALONE = 50  # rank_split takes one user at a time

Numbers = dict[str, float]


def check_bundle(
    bundle: Bundle, learners: Mapping[str, Ranker | Retriever], plan: Plan, sample: pl.DataFrame
) -> dict[str, Numbers]:
    """How far scores and vectors of the bundle are from those of training; an error when that is too far."""
    found: dict[str, Numbers] = {}
    for learner in learners.values():
        check = _check_towers if isinstance(learner, Retriever) else _check_ranker
        found |= check(bundle, learner, plan, sample)  # type: ignore[arg-type]
    for name, numbers in found.items():
        _refuse_if_far(name, numbers, _tolerance(name, learners), bundle.rows_dtype == "float32")
    return found


def _check_ranker(bundle: Bundle, ranker: Ranker, plan: Plan, sample: pl.DataFrame) -> dict[str, Numbers]:
    model = RankModel(bundle)
    expected = ranker.predict(_batch(plan, sample, ranker.layout))
    batch = _batch(bundle.plan, sample, model.layout)
    found = {"rank": _difference(expected, model.score(batch))}
    if bundle.graph("rank_split") is not None:
        rows = [
            FeatureRows.of(between(batch, row, row + 1), model.layout)
            for row in range(min(_ROWS_ALONE, batch.size))
        ]
        alone = np.concatenate([model.rank(row, row) for row in rows])
        found["rank_split"] = _difference(expected[: len(alone)], alone)
    return found


def _check_towers(
    bundle: Bundle, retriever: Retriever, plan: Plan, sample: pl.DataFrame
) -> dict[str, Numbers]:
    items, towers = bundle.items, {side: TowerModel(bundle, side) for side in ("user", "item")}
    expected = retriever.user_vectors(_batch(plan, sample, retriever.layouts["user"]))
    users = _batch(bundle.plan, sample, towers["user"].layout)
    assert items is not None
    indices = np.unique(np.linspace(0, len(items) - 1, _ITEMS).astype(np.int64))
    stored = map_array(bundle.path / "items" / "vectors.npy")[indices]
    features = FeatureRows.of(items.features(indices), items.layout).batch(towers["item"].layout)
    return {
        "user": _difference(expected, towers["user"].vectors(users)),
        "item": _difference(stored, towers["item"].vectors(features)),
    }


def _batch(plan: Plan, rows: pl.DataFrame, layout: Layout) -> Batch:
    return collate(plan.apply(rows, labels=False, only=layout.features), layout, with_labels=False)


def _difference(expected: Array, found: Array) -> Numbers:
    """Of probabilities and of vectors as they are, of numbers as a part of the largest, if that is above 1."""
    scale = np.abs(expected).max(axis=0, initial=1)
    distance = np.abs(expected.astype(np.float64) - found) / scale
    numbers = {"rows": len(expected), "max": float(distance.max()), "mean": float(distance.mean())}
    if expected.ndim == 1:
        numbers["rank_correlation"] = rank_correlation(expected, found)
    return numbers


def rank_correlation(left: Array, right: Array) -> float:
    """Spearman's: 1 when both put the rows in the same order."""
    ranks = [pl.Series(values).rank().to_numpy() for values in (left, right)]
    if any(values.std() == 0 for values in ranks):
        return 1.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _tolerance(name: str, learners: Mapping[str, Ranker | Retriever]) -> float:
    ranker = learners.get("ranking")
    precise = ranker is None or ranker.train_spec.precision == "float32"
    return TOLERANCE if precise or not name.startswith("rank") else _BFLOAT16_TOLERANCE


def _refuse_if_far(name: str, numbers: Numbers, tolerance: float, is_exact: bool) -> None:
    if is_exact and not numbers["max"] <= tolerance:
        raise ArtifactError(
            f"The bundle does not give what training gives: {name} is off by up to {numbers['max']:.2e} over "
            f"{numbers['rows']:,} rows, more than {tolerance:g}. Nothing was published."
        )
    if not numbers["mean"] <= _MAX_MEAN:
        raise ArtifactError(
            f"Rows with fewer bits change {name} by {numbers['mean']:.3f} on average, more than {_MAX_MEAN}. "
            "Nothing was published. Export with --rows float32 or float16."
        )
