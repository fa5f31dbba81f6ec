"""Quality of scores and rankings. All sums are mergeable, so shards may be measured anywhere."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from recmill.errors import RecmillError
from recmill.number_metrics import NumberMetrics, NumberSums

Array = np.ndarray[Any, np.dtype[Any]]

# Scores are binned by their logit: equal steps between -LIMIT and LIMIT, so that rare clicks near 0 stay apart.
NUM_BINS = 1 << 16
_LIMIT = 20.0
_LEAST = 1e-7  # float32 cannot tell a probability from 0 or 1 much closer than this


def exact_auc(labels: Array, scores: Array) -> float:
    """Probability that a positive scores above a negative, ties counting half; 0.5 when one class is missing."""
    order = np.argsort(scores, kind="stable")
    positive = labels[order] > 0.5
    _, starts, counts = np.unique(scores[order], return_index=True, return_counts=True)
    rank = np.repeat(starts + (counts + 1) / 2, counts)  # from 1; equal scores share their mean rank
    num_positive = int(positive.sum())
    num_negative = len(positive) - num_positive
    if not num_positive or not num_negative:
        return 0.5
    return float(
        (rank[positive].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)
    )


@dataclass
class ScoreSums:
    """Sums over (label, probability) pairs from which every metric of a binary model follows."""

    positives: Array = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))
    negatives: Array = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))
    probability: float = 0.0
    log_loss: float = 0.0
    correct: int = 0

    def add(self, labels: Array, probabilities: Array) -> None:
        """Count one batch; labels are 0 or 1, probabilities within [0, 1]."""
        chances = np.asarray(probabilities, dtype=np.float64)
        _check(labels, chances)
        chances = np.clip(chances, _LEAST, 1 - _LEAST)
        positive = np.asarray(labels) > 0.5
        bins = bins_of(chances)
        self.positives += np.bincount(bins[positive], minlength=NUM_BINS)
        self.negatives += np.bincount(bins[~positive], minlength=NUM_BINS)
        self.probability += float(chances.sum())
        self.log_loss -= float(np.log(np.where(positive, chances, 1 - chances)).sum())
        self.correct += int(((chances >= 0.5) == positive).sum())

    def __add__(self, other: ScoreSums) -> ScoreSums:
        return ScoreSums(
            self.positives + other.positives,
            self.negatives + other.negatives,
            self.probability + other.probability,
            self.log_loss + other.log_loss,
            self.correct + other.correct,
        )

    @property
    def num_positive(self) -> int:
        return int(self.positives.sum())

    @property
    def num_rows(self) -> int:
        return self.num_positive + int(self.negatives.sum())

    def metrics(self) -> BinaryMetrics:
        """The final metrics; an empty sum is an error."""
        if not self.num_rows:
            raise ValueError("no rows were measured")
        rate = self.num_positive / self.num_rows
        loss = self.log_loss / self.num_rows
        entropy = -sum(share * math.log(share) for share in (rate, 1 - rate) if share > 0)
        auc = self.auc()
        return BinaryMetrics(
            rows=self.num_rows,
            positive_rate=rate,
            auc=auc,
            auc_margin=self._auc_margin(auc),
            pr_auc=self.pr_auc(),
            log_loss=loss,
            normalised_entropy=loss / entropy if entropy else math.inf,
            rce=100 * (1 - loss / entropy) if entropy else -math.inf,
            accuracy=self.correct / self.num_rows,
            constant_accuracy=max(rate, 1 - rate),
            calibration=self.probability / self.num_positive if self.num_positive else math.inf,
        )

    def auc(self) -> float:
        """AUC with scores of one bin taken as equal: within 1e-4 of `exact_auc`, mergeable, in bounded memory."""
        num_positive, num_negative = self.num_positive, int(self.negatives.sum())
        if not num_positive or not num_negative:
            return 0.5
        below = np.cumsum(self.negatives) - self.negatives
        won = (self.positives * (below + self.negatives / 2)).sum()
        return float(won / (num_positive * num_negative))

    def pr_auc(self) -> float:
        """Average precision: mean over positives of the precision at their score."""
        if not self.num_positive:
            return 0.0
        true = np.cumsum(self.positives[::-1])
        shown = np.cumsum((self.positives + self.negatives)[::-1])
        precision = np.divide(true, shown, out=np.zeros(NUM_BINS), where=shown > 0)
        return float((precision * self.positives[::-1]).sum() / self.num_positive)

    def roc(self, points: int = 200) -> tuple[Array, Array]:
        """False and true positive rates from (0, 0) to (1, 1), thinned to about `points`."""
        true = np.concatenate([[0], np.cumsum(self.positives[::-1])]) / max(1, self.num_positive)
        false = np.concatenate([[0], np.cumsum(self.negatives[::-1])]) / max(1, int(self.negatives.sum()))
        chosen = np.searchsorted(false + true, np.linspace(0, 2, points))
        chosen = np.unique(np.minimum(chosen, NUM_BINS))
        return false[chosen], true[chosen]

    def calibration_curve(self, buckets: int = 20) -> list[tuple[float, float, int]]:
        """Mean predicted and observed rate, and number of rows, of buckets with about equally many rows."""
        rows = self.positives + self.negatives
        cut = np.searchsorted(np.cumsum(rows), np.linspace(0, self.num_rows, buckets + 1)[1:-1])
        curve = []
        for part in np.split(np.arange(NUM_BINS), np.unique(cut) + 1):
            count = int(rows[part].sum())
            if count:
                predicted = float((rows[part] * bin_middles()[part]).sum() / count)
                curve.append((predicted, float(self.positives[part].sum() / count), count))
        return curve

    def _auc_margin(self, auc: float) -> float:
        """Half of the 95% interval of the AUC, after Hanley and McNeil."""
        num_positive, num_negative = self.num_positive, int(self.negatives.sum())
        if not num_positive or not num_negative:
            return math.inf
        both_above = auc / (2 - auc) - auc * auc
        both_below = 2 * auc * auc / (1 + auc) - auc * auc
        spread = auc * (1 - auc) + (num_positive - 1) * both_above + (num_negative - 1) * both_below
        return 1.96 * math.sqrt(max(0.0, spread) / (num_positive * num_negative))


@dataclass(frozen=True)
class BinaryMetrics:
    """A binary model on one set of rows. Normalised entropy below 1 beats the constant predictor.

    `rce` is relative cross entropy, the same in percent: above 0, the model beats the constant predictor.
    """

    rows: int
    positive_rate: float
    auc: float
    auc_margin: float
    pr_auc: float
    log_loss: float
    normalised_entropy: float
    rce: float
    accuracy: float
    constant_accuracy: float
    calibration: float

    def as_dict(self) -> dict[str, float]:
        return dict(vars(self))


@dataclass
class TaskSums:
    """Sums of a ranker with several labels, one set for each label."""

    tasks: dict[str, ScoreSums | NumberSums]

    def add(self, labels: Array, predictions: Array) -> None:
        """Count one batch; both are [B, number of tasks]."""
        for index, sums in enumerate(self.tasks.values()):
            sums.add(labels[:, index], predictions[:, index])

    def __add__(self, other: TaskSums) -> TaskSums:
        return TaskSums({label: sums + other.tasks[label] for label, sums in self.tasks.items()})  # type: ignore[operator]

    @property
    def num_rows(self) -> int:
        return next(iter(self.tasks.values())).num_rows

    def metrics(self) -> TaskMetrics:
        return TaskMetrics({label: sums.metrics() for label, sums in self.tasks.items()})


@dataclass(frozen=True)
class TaskMetrics:
    """Metrics of each task, and over all tasks."""

    tasks: dict[str, BinaryMetrics | NumberMetrics]

    def as_dict(self) -> dict[str, float]:
        """Means over tasks by name, then those of each task as `label.name`."""
        return (
            self._means_of_binary()
            | self._means_of_numbers()
            | {
                f"{label}.{name}": value
                for label, metrics in self.tasks.items()
                for name, value in metrics.as_dict().items()
            }
        )

    def _means_of_binary(self) -> dict[str, float]:
        """Means of binary metrics. Entropies are averaged first, so that a rare label does not outweigh the others."""
        found = [one.as_dict() for one in self.tasks.values() if isinstance(one, BinaryMetrics)]
        if not found:
            return {}
        means = _means(found)
        constant = sum(one["log_loss"] / one["normalised_entropy"] for one in found) / len(found)
        means["normalised_entropy"] = means["log_loss"] / constant if constant else math.inf
        means["rce"] = 100 * (1 - means["normalised_entropy"])
        return means

    def _means_of_numbers(self) -> dict[str, float]:
        """Means of the metrics that do not depend on a label's unit."""
        found = [one for one in self.tasks.values() if isinstance(one, NumberMetrics)]
        return _means(
            [{"rows": one.rows, "r2": one.r2, "rank_correlation": one.rank_correlation} for one in found]
        )


def _means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(one[name] for one in found) / len(found) for name in (found[0] if found else ())}


# for one label, or for several
RankerSums: TypeAlias = ScoreSums | NumberSums | TaskSums


def bins_of(probabilities: Array) -> Array:
    logits = np.log(probabilities) - np.log1p(-probabilities)
    share = (np.clip(logits, -_LIMIT, _LIMIT) + _LIMIT) / (2 * _LIMIT)
    bins: Array = np.minimum((share * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    return bins


def bin_middles() -> Array:
    """The probability in the middle of each bin."""
    logits = (np.arange(NUM_BINS) + 0.5) / NUM_BINS * 2 * _LIMIT - _LIMIT
    return np.asarray(1 / (1 + np.exp(-logits)))


def _check(labels: Array, probabilities: Array) -> None:
    if len(labels) != len(probabilities):
        raise ValueError(f"{len(labels)} labels for {len(probabilities)} probabilities")
    if len(probabilities) and not ((probabilities >= 0) & (probabilities <= 1)).all():
        bad = probabilities[~((probabilities >= 0) & (probabilities <= 1))][0]
        raise ValueError(f"a probability is {bad}; expected 0 to 1")
    if not np.isin(labels, (0, 1)).all():
        raise ValueError(f"a label is {np.asarray(labels)[~np.isin(labels, (0, 1))][0]}; expected 0 or 1")


@dataclass
class RankingSums:
    """Sums over users of ranking metrics at k; users without relevant items do not count."""

    cutoffs: tuple[int, ...]
    users: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    squares: dict[str, float] = field(default_factory=dict)

    def add(self, ranked: Array, relevant_offsets: Array, relevant_items: Array) -> None:
        """Add users: `ranked[u]` are item ids, best first, padded with -1; relevant items are in list layout."""
        lengths = np.diff(relevant_offsets)
        counted = lengths > 0
        hits = _hits(ranked, lengths, relevant_items)[counted]
        lengths = lengths[counted]
        self.users += len(lengths)
        for k in self.cutoffs:
            self._add_cutoff(k, hits[:, :k], lengths)

    def _add_cutoff(self, k: int, hits: Array, lengths: Array) -> None:
        places = np.arange(1, hits.shape[1] + 1)
        gains = 1 / np.log2(places + 1)
        best = np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(2, k + 2)))])
        first = np.where(hits.any(axis=1), hits.argmax(axis=1) + 1, 0)
        found = {
            f"recall@{k}": hits.sum(axis=1) / lengths,
            f"ndcg@{k}": (hits * gains).sum(axis=1) / best[np.minimum(lengths, k)],
            f"mrr@{k}": np.divide(1.0, first, out=np.zeros(len(first)), where=first > 0),
            f"hit@{k}": hits.any(axis=1).astype(np.float64),
        }
        for name, values in found.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(values.sum())
            self.squares[name] = self.squares.get(name, 0.0) + float((values * values).sum())

    def __add__(self, other: RankingSums) -> RankingSums:
        if self.cutoffs != other.cutoffs:
            raise ValueError(f"cutoffs differ: {self.cutoffs} and {other.cutoffs}")
        total = RankingSums(self.cutoffs, self.users + other.users)
        for name in {*self.sums, *other.sums}:
            total.sums[name] = self.sums.get(name, 0.0) + other.sums.get(name, 0.0)
            total.squares[name] = self.squares.get(name, 0.0) + other.squares.get(name, 0.0)
        return total

    def means(self) -> dict[str, float]:
        """Mean over users of each metric."""
        return {name: total / max(1, self.users) for name, total in self.sums.items()}

    def margins(self) -> dict[str, float]:
        """Half of the 95% interval of each mean."""
        users = max(1, self.users)
        variances = {
            name: max(0.0, self.squares[name] / users - mean**2) for name, mean in self.means().items()
        }
        return {name: 1.96 * math.sqrt(variance / users) for name, variance in variances.items()}


def _hits(ranked: Array, lengths: Array, relevant_items: Array) -> Array:
    """Which ranks of each user hold a relevant item."""
    highest = max(int(ranked.max(initial=0)), int(relevant_items.max(initial=0))) + 2
    users = np.repeat(np.arange(len(lengths)), lengths)
    wanted = users * highest + relevant_items
    asked = np.arange(len(ranked))[:, None] * highest + ranked
    return np.isin(asked, wanted) & (ranked >= 0)


def top_items(scores: Array, k: int, seen: Sequence[Array] | None = None) -> Array:
    """For each row of scores, the k best items, best first; ties go to the smaller id; seen ones are left out.

    Rows with fewer than k items left are padded with -1.
    """
    masked = np.array(scores, dtype=np.float64, copy=True)
    for user, items in enumerate(seen or ()):
        masked[user, items] = -np.inf
    order = np.argsort(-masked, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(masked, order, axis=1)
    return np.where(np.isfinite(best), order, -1)


_TARGET = re.compile(r"\s*((?:\w+\.)?[a-z_][a-z_0-9]*(?:@\d+)?)\s*(>=|<=)\s*([-+.\deE]+)\s*")


def meets(target: str, metrics: Mapping[str, float]) -> bool:
    """Whether a condition such as `auc >= 0.8025` holds."""
    match = _TARGET.fullmatch(target)
    if match is None or match[1] not in metrics:
        raise RecmillError(
            f'Target "{target}" must look like "auc >= 0.8025"; metrics are: {", ".join(metrics)}.'
        )
    value, bound = metrics[match[1]], float(match[3])
    return value >= bound if match[2] == ">=" else value <= bound
