"""The best that retrieval can reach on a generated shop, measured like held-out clicks, from the planted truth."""

from __future__ import annotations

from math import ceil

import numpy as np

from recmill.metrics import RankingSums
from recmill.synthetic import files
from recmill.synthetic.draw import sigmoid
from recmill.synthetic.shop import (
    BLOCK_VISITS,
    NUM_FACTORS,
    SLATE,
    ClickHistory,
    Impressions,
    ShopTruth,
    make_truth,
)


def best_reachable(rows: int, seed: int, cutoffs: tuple[int, ...]) -> dict[str, float]:
    """Each visit of the last twentieth that has clicks is a question; items clicked before that part are masked.

    Items are ranked by the true probability of being shown to that user and clicked, as of that visit.
    """
    truth = make_truth(seed, rows)
    history = ClickHistory(np.zeros((len(truth.mixture), NUM_FACTORS)))
    num_visits = ceil(rows / SLATE)
    first_held_out = num_visits - num_visits // 20
    seen = np.zeros((len(truth.mixture), len(truth.item_cluster)), dtype=bool)
    sums = RankingSums(cutoffs)
    for first, last in files.chunks(0, num_visits, BLOCK_VISITS):
        events = truth.visits(np.arange(first, last), history.shift).cut(rows - first * SLATE)
        before = events.clicked & (events.visits < first_held_out)
        seen[events.users[before], events.items[before]] = True
        _ask(truth, history, events, events.clicked & ~before, seen, sums)
        history.add_clicks(events, truth.item_factors)
    return sums.means()


def _ask(
    truth: ShopTruth, history: ClickHistory, events: Impressions, held_out, seen, sums: RankingSums
) -> None:
    asked = held_out & ~seen[events.users, events.items]
    if not asked.any():
        return
    _, rows, lengths = np.unique(events.visits[asked], return_index=True, return_counts=True)
    users = events.users[asked][rows]
    scores = np.where(seen[users], -np.inf, _true_probabilities(truth, users, history))
    k = max(sums.cutoffs)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    sums.add(best, np.concatenate([[0], np.cumsum(lengths)]), events.items[asked])


def _true_probabilities(truth: ShopTruth, users, history: ClickHistory):
    num_items = len(truth.item_cluster)
    of_user, of_item = np.repeat(users, num_items), np.tile(np.arange(num_items), len(users))
    middle, plain = np.full(len(of_user), SLATE // 2), np.zeros(len(of_user), dtype=np.int64)
    raw = truth.raw_logits(of_user, of_item, middle, plain, plain, history.shift)
    clicked = sigmoid(raw * truth.fit[0] + truth.fit[1]).reshape(len(users), num_items)
    return clicked * truth.probability_shown(users)
