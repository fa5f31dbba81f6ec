"""The columns of Criteo's Kaggle log: numbers of ids, skew, missing rates, and correlations between columns.

Ids form trees: an advertiser belongs to a vertical, its products to the advertiser, a placement to a site. A column
shows one level of a tree, so columns are nearly functions of each other. Numbers are near those of a sample of the
log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from recmill.synthetic.draw import F64, I64, U64, Bools, bits, key_of, normal, uniform, vectors, zipf


@dataclass(frozen=True)
class Gap:
    """Fields that are missing together, where the sum of these factors and noise is high."""

    rate: float
    factors: Mapping[str, float] = field(default_factory=dict)
    # Added to the logit where the fields are missing.
    effect: float = 0.0


@dataclass(frozen=True)
class Integer:
    """One integer column: exp of a normal, rounded down. Factors that it shares with others make them correlated."""

    log_mean: float
    log_spread: float
    top: int
    factors: Mapping[str, float]
    gap: str | None = None
    # Standard deviation of its effect on the logit, and its sign; `bend` is that of the square.
    pull: float = 0.0
    bend: float = 0.0
    lowest: int = 0


@dataclass(frozen=True)
class Category:
    """One categorical column. `pull` is the standard deviation of the effect of its ids on the logit.

    With `under`, ids are children of those columns' ids, which are then functions of this column. With `trait_of`, that
    column's id decides this one. Both hold for the fraction `tied` of the rows.
    """

    num_ids: int  # with `under`: for each parent
    exponent: float  # of the Zipf law of their frequencies
    under: tuple[str, ...] = ()
    trait_of: str | None = None
    tied: float = 1.0
    first: float = 0.0  # fraction of rows that have the first id, besides those the Zipf law gives it
    renewals: float = 0.0  # how often each id is replaced by a new one during the log
    gap: str | None = None
    pull: float = 0.0


# Common factors of the counts and gaps of a row: user activity, impressions of the ad, its owner and site. Each with
# the column whose ids explain a fraction of its variance; the rest differs from row to row.
FACTORS: Mapping[str, tuple[str, float]] = {
    "activity": ("c11", 0.25),
    "frequency": ("c18", 0.1),
    "site": ("c11", 0.5),
    "advertiser": ("c18", 0.6),
    "vertical": ("c2", 0.8),
}

GAPS: Mapping[str, Gap] = {
    "user": Gap(0.4524, {"activity": -0.85}, effect=0.1),
    "visits": Gap(0.2230, {"activity": -0.85, "site": -0.3}, effect=-0.5),
    "site": Gap(0.0425, {"activity": -0.5, "site": -0.6}, effect=0.2),
    "age": Gap(0.0261, {"activity": -0.6}, effect=-0.6),
    "frequency": Gap(0.2140, {"frequency": -0.85}, effect=0.25),
    "advertiser": Gap(0.2120, {"frequency": -0.7, "advertiser": 0.4}, effect=0.35),
    "seldom": Gap(0.7667, {"activity": -0.4}),
    "never": Gap(0.0006),
    "product": Gap(0.0347, {"vertical": 0.3}, effect=0.1),
    "context": Gap(0.1227),
    "vertical": Gap(0.4415, {"vertical": 0.93}, effect=0.05),
    "rare": Gap(0.7608),
}

INTEGERS: Mapping[str, Integer] = {
    "i1": Integer(-0.4, 1.6, 5_775, {"activity": 0.85, "site": 0.2}, "user", pull=0.2),
    "i2": Integer(2.0, 2.4, 257_675, {"advertiser": 0.45}, bend=0.1, lowest=-2),
    "i3": Integer(1.9, 1.3, 65_535, {"frequency": 0.4, "advertiser": -0.5}, "advertiser", pull=-0.1),
    "i4": Integer(1.3, 1.1, 969, {"frequency": 0.9}, "frequency"),
    "i5": Integer(7.3, 3.0, 23_159_456, {"activity": -0.8, "site": -0.1}, "age", pull=-0.2),
    "i6": Integer(3.7, 1.9, 431_037, {"activity": -0.75, "frequency": 0.3}, "visits", pull=-0.25),
    "i7": Integer(1.2, 1.8, 56_311, {"site": 0.9, "activity": 0.3}, "site", pull=0.25),
    "i8": Integer(1.9, 1.3, 6_047, {"frequency": 0.7, "site": 0.2}, "never"),
    "i9": Integer(3.4, 1.7, 29_019, {"site": 0.5, "frequency": 0.45}, "site", bend=0.1),
    "i10": Integer(-0.3, 0.5, 11, {"activity": 0.92}, "user", pull=0.15),
    "i11": Integer(0.55, 1.0, 231, {"site": 0.93, "activity": 0.25}, "site", pull=0.15),
    "i12": Integer(-1.2, 1.6, 4_008, {"site": 0.6, "activity": 0.2}, "seldom", pull=0.1),
    "i13": Integer(1.3, 1.2, 7_393, {"frequency": 0.88, "activity": -0.15}, "frequency", pull=-0.2),
}

CATEGORIES: Mapping[str, Category] = {
    "c1": Category(1_460, 2.0),
    "c2": Category(583, 1.08, trait_of="c13", tied=0.25, pull=0.5),
    "c3": Category(100_000, 1.0, under=("c12",), first=0.94, gap="product", pull=0.1),
    "c4": Category(5_000, 1.1, under=("c24",), first=0.75, gap="product", pull=0.15),
    "c5": Category(305, 2.6),
    "c6": Category(24, 2.0, gap="context", pull=0.12),
    "c7": Category(3, 3.0, under=("c9", "c11"), renewals=0.05, pull=0.35),
    "c8": Category(633, 2.3),
    "c9": Category(3, 4.2, trait_of="c13", tied=0.5, pull=0.15),
    "c10": Category(60, 2.4, under=("c13",), tied=0.7, pull=0.1),
    "c11": Category(3, 1.0, under=("c13",), first=0.9, pull=0.2),
    "c12": Category(100_000, 1.0, under=("c21",), first=0.96, gap="product"),
    "c13": Category(3_194, 0.85, pull=0.7),
    "c14": Category(27, 2.0, trait_of="c18", tied=0.8, pull=0.35),
    "c15": Category(1, 1.0, under=("c14", "c18"), pull=0.4),
    "c16": Category(100_000, 1.0, under=("c4",), first=0.87, gap="product"),
    "c17": Category(10, 1.5, trait_of="c7", tied=0.6, pull=0.5),
    "c18": Category(8, 1.8, under=("c2",), pull=0.5),
    "c19": Category(2_172, 2.2, trait_of="c26", tied=0.85, gap="vertical", pull=0.05),
    "c20": Category(3, 0.5, trait_of="c18", tied=0.8, gap="vertical", pull=0.12),
    "c21": Category(100_000, 1.0, under=("c16",), first=0.95, gap="product"),
    "c22": Category(18, 2.6, gap="rare", pull=0.07),
    "c23": Category(15, 1.8, trait_of="c13", tied=0.65, pull=0.3),
    "c24": Category(120, 2.0, under=("c18",), tied=0.8, renewals=0.2, gap="product", pull=0.3),
    "c25": Category(105, 1.5, trait_of="c2", tied=0.95, gap="vertical", pull=0.12),
    "c26": Category(60, 2.8, under=("c24", "c25"), tied=0.85, gap="vertical", pull=0.12),
}


class Columns:
    """The columns of some rows; every value is a function of (seed, total rows, index of the row)."""

    def __init__(self, seed: int, num_rows: int, index: I64) -> None:
        self.seed = seed
        self.index = index
        self.time = index / max(num_rows, 1)
        self.ids: dict[str, U64] = {}
        for name in CATEGORIES:
            self._draw_ids(name)
        self.factors = {name: self._factor(name) for name in FACTORS}
        self.integers = {name: self._integers(name) for name in INTEGERS}
        self.gaps: dict[str, Bools] = {}

    def key(self, *names: object) -> int:
        return key_of(self.seed, "criteo", *names)

    def threshold(self, gap: str) -> float:
        """What the factors of a row must exceed, so that these rows have the gap at its rate."""
        # Rounded, so that the last digit of a sum cannot change a field on another machine.
        return round(float(np.quantile(self._combine(GAPS[gap].factors, gap), 1 - GAPS[gap].rate)), 6)

    def open_gaps(self, thresholds: Mapping[str, float]) -> None:
        self.gaps = {name: self._combine(gap.factors, name) > thresholds[name] for name, gap in GAPS.items()}

    def missing(self, name: str) -> Bools | None:
        gap = (INTEGERS.get(name) or CATEGORIES[name]).gap
        return None if gap is None else self.gaps[gap]

    def present(self, name: str) -> Bools | None:
        missing = self.missing(name)
        return None if missing is None else ~missing

    def gap_effects(self) -> F64:
        total = np.zeros(len(self.index))
        for name, gap in GAPS.items():
            total += gap.effect * self.gaps[name]
        return total

    def level(self, name: str) -> F64:
        """How large a count is, between -1 and 1; 0 where it is missing."""
        column = INTEGERS[name]
        logs = np.log1p(np.maximum(self.integers[name], 0))
        levels = np.tanh(0.7 * (logs - column.log_mean) / column.log_spread)
        present = self.present(name)
        return levels if present is None else levels * present

    def id_effect(self, name: str) -> F64:
        """One number for each row's id, 0 where it is missing."""
        effect = normal(self.key("effect", name), self.ids[name])
        present = self.present(name)
        return effect if present is None else effect * present

    def tastes(self, name: str) -> F64:
        """A vector for each row's id, 0 where it is missing; the dot product of two is how well they fit."""
        tastes = vectors(self.key("taste", name), self.ids[name])
        present = self.present(name)
        return tastes if present is None else tastes * present[:, None]

    def _integers(self, name: str) -> I64:
        column = INTEGERS[name]
        levels = self._combine(column.factors, name) * column.log_spread + column.log_mean
        values: I64 = np.minimum(np.exp(levels), column.top).astype(np.int64) + column.lowest
        return values

    def _combine(self, weights: Mapping[str, float], name: str) -> F64:
        """The weighted factors plus noise, so that the variance is 1."""
        total = normal(self.key("noise", name), self.index)
        total *= np.sqrt(1 - sum(weight**2 for weight in weights.values()))
        for factor, weight in weights.items():
            total += weight * self.factors[factor]
        return total

    def _factor(self, name: str) -> F64:
        column, explained = FACTORS[name]
        row = normal(self.key("factor of row", name), self.index)
        of_id = normal(self.key("factor", name), self.ids[column])
        factor: F64 = np.sqrt(explained) * of_id + np.sqrt(1 - explained) * row
        return factor

    def _draw_ids(self, name: str) -> U64:
        if name not in self.ids:
            column = CATEGORIES[name]
            draws = uniform(self.key("category", name), self.index)
            tied = self._is_tied(name)
            if column.trait_of is not None:
                decided = uniform(self.key("trait", name), self._draw_ids(column.trait_of))
                draws = np.where(tied, decided, draws)
            slots = _ranks(draws, column).astype(np.uint64)
            for parent in column.under:
                slots += self._draw_ids(parent) * tied
            self.ids[name] = self._renewed(name, bits(self.key("id", name), slots))
        return self.ids[name]

    def _is_tied(self, name: str) -> Bools:
        fraction = CATEGORIES[name].tied
        if fraction == 1.0:
            return np.ones(len(self.index), dtype=np.bool_)
        return uniform(self.key("tie", name), self.index) < fraction

    def _renewed(self, name: str, ids: U64) -> U64:
        renewals = CATEGORIES[name].renewals
        if renewals == 0.0:
            return ids
        moments = uniform(self.key("renewal", name), ids)
        generations = (moments + self.time * renewals).astype(np.uint64)
        return bits(self.key("renewed id", name), ids + generations)


def _ranks(draws: F64, column: Category) -> I64:
    if column.first == 0.0:
        return zipf(draws, column.num_ids, column.exponent)
    ranks = np.zeros(len(draws), dtype=np.int64)
    others = draws >= column.first
    ranks[others] = zipf((draws[others] - column.first) / (1 - column.first), column.num_ids, column.exponent)
    return ranks
