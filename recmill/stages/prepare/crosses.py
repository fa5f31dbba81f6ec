"""Which pairs of columns add to a logistic regression over single ones: the search behind `[ranking] cross = "auto"`.

Each row of a sample gets the score of a regression that did not learn from it. Beside that score, a pair gets a weight
for each of its values, learned from some rows and measured on the others. The best pair is kept with its weights, so
that a pair which says the same gains nothing any more; then the next one is looked for.

Shapes: B rows of the sample.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import polars as pl

from recmill.engines.engine import Engine, Frame
from recmill.features.kernels import Array, hash64, hash_positions
from recmill.features.numeric import bucket_ids
from recmill.features.plan import Plan
from recmill.logistic import LogisticRegression, hashed
from recmill.recipe.crosses import CrossColumn, columns_to_cross, with_crosses
from recmill.recipe.recipe import POSITION, Recipe

_MOST_ROWS = 200_000
_MOST_PAIRS = 8  # beyond, more made held-out rows of Criteo worse
_TRIED_AGAIN = 40  # of the best pairs, when one was kept
_LEAST_GAIN = 2.0  # standard errors: of hundreds of pairs some gain by chance
_SLOT_BITS = 18  # of the values of a pair
_SLOTS = 1 << _SLOT_BITS
_RIDGE = 20.0  # as if 100 rows or so of each value said that there is no effect
_FOLDS = 2
_ONE, _OTHER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)

Pair = tuple[str, str]
Hashes = np.ndarray[Any, np.dtype[np.uint64]]


def find_crosses(engine: Engine, training: Frame, recipe: Recipe) -> Recipe:
    """The recipe with the pairs that gain most on its training rows, if any do."""
    ranking = recipe.ranking
    assert ranking is not None
    columns = columns_to_cross(recipe)
    labels = tuple(label for label in recipe.labels if label.name == ranking.label)
    plan = Plan(replace(recipe, features=(), labels=labels, table=replace(recipe.table, keep=())))
    num_rows = sum(engine.run(training, "count", _num_rows))
    names = [column.name for column in columns]
    sample = engine.collect(engine.map(training, _Sample(names, ranking.label, plan, num_rows)))
    sample = sample.sort(POSITION, maintain_order=True)
    columns = [_with_edges(column, sample[column.name]) for column in columns]
    values = {column.name: _hashes(column, sample[column.name]) for column in columns}
    by_name = {column.name: column for column in columns}
    known = {frozenset(feature.columns) for feature in recipe.features}
    pairs = best_pairs(values, sample[_LABEL].to_numpy(), known)
    return with_crosses(recipe, [(by_name[one], by_name[other]) for one, other in pairs])


_LABEL = "__label"


def _num_rows(number: int, batches: Iterator[pl.DataFrame]) -> int:
    return sum(batch.height for batch in batches)


@dataclass(frozen=True)
class _Sample:
    """Columns and the label of about so many rows, which their positions choose: all engines take the same."""

    columns: Sequence[str]
    label: str
    plan: Plan
    num_rows: int

    def __call__(self, frame: pl.DataFrame) -> pl.DataFrame:
        share = min(1.0, _MOST_ROWS / max(1, self.num_rows))
        chosen = frame.filter(pl.Series(hash_positions(frame[POSITION], 0) <= share * float(2**64 - 1)))
        labels = self.plan.apply(chosen)[self.label]
        return chosen.select(*self.columns, POSITION).with_columns(labels.alias(_LABEL))


def _with_edges(column: CrossColumn, values: pl.Series) -> CrossColumn:
    """A number's edges are those of the recipe, or quantiles of the sample."""
    if not column.num_quantiles:
        return column
    shares = np.linspace(0, 1, column.num_quantiles + 1)[1:-1]
    edges = np.unique(np.quantile(values.drop_nulls().cast(pl.Float64).to_numpy(), shares))
    return replace(column, edges=tuple(map(float, edges)), num_quantiles=0)


def _hashes(column: CrossColumn, values: pl.Series) -> Array:
    values = bucket_ids(values, np.asarray(column.edges)) if column.edges else values
    return hash64(values.cast(pl.String).fill_null(""), 0)


def best_pairs(
    values: Mapping[str, Array], labels: Array, known: Collection[frozenset[str]] = ()
) -> list[Pair]:
    """Pairs that gain beyond chance, best first, each beside those before it."""
    logits = _logits_of_single_columns(values, labels)
    folds = [_Fold(number, logits, labels) for number in range(_FOLDS)]
    for column in [*values.values()] * 2:  # what single columns still have to say is no merit of a pair
        slots_B = _slots_of(column)
        if np.concatenate([fold.gains(slots_B) for fold in folds]).mean() > 0:
            folds = [fold.with_effects(slots_B) for fold in folds]
    pairs = [pair for pair in combinations(values, 2) if frozenset(pair) not in known]
    found: list[Pair] = []
    while pairs and len(found) < _MOST_PAIRS:
        trials = [_Trial.of(pair, values, folds) for pair in pairs]
        trials.sort(key=lambda trial: -trial.gain)
        best = trials[0]
        if not best.gain > _LEAST_GAIN * best.error:
            break
        found.append(best.pair)
        slots_B = _slots_of(*(values[name] for name in best.pair))
        folds = [fold.with_effects(slots_B) for fold in folds]
        pairs = [trial.pair for trial in trials[1 : _TRIED_AGAIN + 1]]
    return found


def _logits_of_single_columns(values: Mapping[str, Array], labels: Array) -> Array:
    """Of each row by a regression that did not learn from it."""
    slots = hashed([column.view(np.int64) for column in values.values()])
    halves = np.array_split(np.random.default_rng(0).permutation(len(labels)), 2)
    logits = np.empty(len(labels))
    for learned, others in (halves, halves[::-1]):
        logits[others] = LogisticRegression().fit(slots[learned], labels[learned]).sums(slots[others])
    return logits


class _Fold:
    """Some rows, on which effects are measured that were learned from the others."""

    def __init__(self, number: int, logits_B: Array, labels_B: Array) -> None:
        self.number, self.logits, self.labels = number, logits_B, labels_B
        self.held_out = np.arange(len(labels_B)) % _FOLDS == number
        probabilities = 1 / (1 + np.exp(-logits_B[~self.held_out]))
        self.errors = labels_B[~self.held_out] - probabilities
        self.curvatures = probabilities * (1 - probabilities)
        self.losses = _losses(logits_B[self.held_out], labels_B[self.held_out])

    def effects(self, slots_B: Array) -> Array:
        """What is to be added to a row's logit, by its slot: a step of Newton's method from 0."""
        at = slots_B[~self.held_out]
        curvatures = np.bincount(at, self.curvatures, _SLOTS)
        return np.asarray(np.bincount(at, self.errors, _SLOTS) / (curvatures + _RIDGE))

    def gains(self, slots_B: Array) -> Array:
        """By how much the log loss of each row that is held out becomes smaller."""
        effects = self.effects(slots_B)[slots_B[self.held_out]]
        return self.losses - _losses(self.logits[self.held_out] + effects, self.labels[self.held_out])

    def with_effects(self, slots_B: Array) -> _Fold:
        return _Fold(self.number, self.logits + self.effects(slots_B)[slots_B], self.labels)


@dataclass(frozen=True)
class _Trial:
    """By how much a pair lowers the log loss of a row, and the standard error of that."""

    pair: Pair
    gain: float
    error: float

    @classmethod
    def of(cls, pair: Pair, values: Mapping[str, Array], folds: Sequence[_Fold]) -> _Trial:
        slots_B = _slots_of(values[pair[0]], values[pair[1]])
        gains = np.concatenate([fold.gains(slots_B) for fold in folds])
        return cls(pair, float(gains.mean()), float(gains.std()) / len(gains) ** 0.5)


def _slots_of(one: Hashes, other: Hashes | None = None) -> Array:
    mixed: Hashes = one * _ONE
    if other is not None:
        mixed = mixed + other * _OTHER
    mixed = (mixed ^ (mixed >> np.uint64(31))) * _ONE
    return (mixed >> np.uint64(64 - _SLOT_BITS)).astype(np.int64)


def _losses(logits: Array, labels: Array) -> Array:
    """The log loss of each row."""
    return np.asarray(np.logaddexp(0, logits) - labels * logits)
