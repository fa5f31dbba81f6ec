"""Metrics of the best possible model: those of the true probabilities on the drawn labels."""

from __future__ import annotations

import numpy as np

from recmill.synthetic.draw import F64, I64, Bools, sigmoid

NUM_BINS = 1 << 18
LOGIT_RANGE = 16.0
PILOT_ROWS = 20_000


class BestScores:
    """AUC and log loss of the true logits, added in chunks; memory does not grow with rows."""

    def __init__(self) -> None:
        self.counts = np.zeros((2, NUM_BINS), dtype=np.int64)
        self.total_loss = 0.0

    def add(self, logits: F64, labels: Bools) -> None:
        bins = ((logits + LOGIT_RANGE) * (NUM_BINS / (2 * LOGIT_RANGE))).astype(np.int64)
        bins = np.clip(bins, 0, NUM_BINS - 1)
        for label in (0, 1):
            self.counts[label] += np.bincount(bins[labels == label], minlength=NUM_BINS)
        self.total_loss += float(np.sum(np.logaddexp(0.0, logits) - labels * logits))

    def auc(self) -> float | None:
        """Probability that a positive outranks a negative, ties counting half; None without both labels."""
        negatives, positives = self.counts
        num_pairs = float(negatives.sum()) * float(positives.sum())
        if num_pairs == 0:
            return None
        negatives_below = np.cumsum(negatives) - negatives
        wins = np.dot(positives.astype(np.float64), negatives_below + 0.5 * negatives)
        return float(wins / num_pairs)

    def best(self, suffix: str = "") -> dict[str, float]:
        """`auc` and `logloss`; empty if the rows do not have both labels."""
        auc = self.auc()
        if auc is None:
            return {}
        logloss = self.total_loss / int(self.counts.sum())
        return {f"auc{suffix}": round(auc, 6), f"logloss{suffix}": round(logloss, 6)}


def calibrate(raw_logits: F64, rate: float, spread: float) -> tuple[float, float]:
    """The (scale, bias) that give these logits the wanted standard deviation and mean probability."""
    deviation = float(raw_logits.std())
    scale = spread / deviation if deviation > 0 else 1.0
    low, high = -30.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2
        if sigmoid(raw_logits * scale + middle).mean() < rate:
            low = middle
        else:
            high = middle
    # Rounded, so that the last digit of a sum cannot change a drawn label on another machine.
    return round(scale, 6), round((low + high) / 2, 6)


def ranks_of_targets(scores: F64, targets: I64, seen: Bools) -> I64:
    """How many unseen items outscore each user's target; 0 is the best. Rows are users, columns items."""
    target_score = np.take_along_axis(scores, targets[:, None], axis=1)
    ranks: I64 = np.sum((scores > target_score) & ~seen, axis=1)
    return ranks


def recall(ranks: I64, cutoffs: tuple[int, ...]) -> dict[str, float]:
    """The fraction of users whose target is among the first k, for each k; empty without users."""
    if len(ranks) == 0:
        return {}
    return {f"recall@{cutoff}": round(float(np.mean(ranks < cutoff)), 6) for cutoff in cutoffs}
