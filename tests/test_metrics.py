"""Metrics against hand-computed numbers and slow definitions; parts add up in any order."""

from __future__ import annotations

import math

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from recmill.metrics import RankingSums, ScoreSums, exact_auc, top_items

pairs = st.lists(st.tuples(st.integers(0, 1), st.floats(0, 1)), min_size=1, max_size=60)


def slow_auc(labels, scores):
    wins = [
        1.0 if positive > negative else 0.5 if positive == negative else 0.0
        for positive, label in zip(scores, labels, strict=True)
        if label
        for negative, other in zip(scores, labels, strict=True)
        if not other
    ]
    return sum(wins) / len(wins) if wins else 0.5


def sums_of(labels, scores):
    sums = ScoreSums()
    sums.add(np.array(labels), np.array(scores))
    return sums


@examples(24)
@given(pairs)
def test_exact_auc_equals_its_definition(rows):
    labels, scores = map(np.array, zip(*rows, strict=True))
    assert exact_auc(labels, scores) == pytest.approx(slow_auc(labels.tolist(), scores.tolist()))


def test_binned_auc_is_close_to_the_exact_one():
    random = np.random.default_rng(1)
    logits = random.normal(-2, 1.5, 50_000)
    chances = 1 / (1 + np.exp(-logits))
    labels = (random.random(50_000) < chances).astype(int)
    assert sums_of(labels, chances).auc() == pytest.approx(exact_auc(labels, chances), abs=1e-4)


@examples(12)
@given(st.lists(pairs, min_size=2, max_size=5), st.randoms())
def test_parts_add_up_in_any_order(parts, random):
    whole = sums_of(*zip(*[row for part in parts for row in part], strict=True)).metrics()
    random.shuffle(parts)
    total = ScoreSums()
    for part in parts:
        total = total + sums_of(*zip(*part, strict=True))
    merged = total.metrics()
    assert (merged.rows, merged.auc, merged.pr_auc) == (whole.rows, whole.auc, whole.pr_auc)
    assert merged.log_loss == pytest.approx(whole.log_loss)


def test_numbers_of_a_small_example():
    metrics = sums_of([1, 0, 1, 0], [0.8, 0.4, 0.6, 0.2]).metrics()
    assert metrics.auc == 1.0
    assert metrics.pr_auc == 1.0
    assert metrics.accuracy == 1.0
    assert metrics.constant_accuracy == 0.5
    expected = -(math.log(0.8) + math.log(0.6) + math.log(0.6) + math.log(0.8)) / 4
    assert metrics.log_loss == pytest.approx(expected)
    assert metrics.normalised_entropy == pytest.approx(expected / math.log(2))
    assert metrics.calibration == pytest.approx(1.0)


def test_a_constant_predictor_has_no_skill():
    labels = [1] * 25 + [0] * 75
    metrics = sums_of(labels, [0.25] * 100).metrics()
    assert metrics.auc == 0.5
    assert metrics.normalised_entropy == pytest.approx(1.0)
    assert metrics.accuracy == metrics.constant_accuracy == 0.75


def test_average_precision_equals_its_definition():
    labels, scores = [1, 0, 1, 1, 0], [0.9, 0.8, 0.7, 0.3, 0.1]
    assert sums_of(labels, scores).pr_auc() == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)


def test_the_interval_of_the_auc_covers_the_truth_about_19_times_in_20():
    random = np.random.default_rng(3)
    covered = 0
    for _ in range(200):
        scores = np.concatenate([random.normal(1, 1, 60), random.normal(0, 1, 140)])
        labels = np.repeat([1, 0], [60, 140])
        metrics = sums_of(labels, 1 / (1 + np.exp(-scores))).metrics()
        truth = 0.5 * (1 + math.erf(1 / math.sqrt(2) / math.sqrt(2)))  # P(N(1, 2) > 0)
        covered += abs(metrics.auc - truth) <= metrics.auc_margin
    assert 180 <= covered <= 200


def test_roc_runs_from_corner_to_corner_and_holds_the_auc():
    random = np.random.default_rng(2)
    chances = random.random(5000)
    sums = sums_of((random.random(5000) < chances).astype(int), chances)
    false, true = sums.roc(points=500)
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
    assert np.trapezoid(true, false) == pytest.approx(sums.auc(), abs=2e-3)


def test_calibration_curve_of_true_probabilities_lies_on_the_diagonal():
    random = np.random.default_rng(4)
    chances = random.random(100_000)
    curve = sums_of((random.random(100_000) < chances).astype(int), chances).calibration_curve(10)
    assert sum(rows for _, _, rows in curve) == 100_000
    assert len(curve) == 10
    assert all(abs(predicted - observed) < 0.02 for predicted, observed, _ in curve)


@pytest.mark.parametrize(
    ("labels", "scores", "message"),
    [
        ([1], [1.5], "a probability is 1.5"),
        ([1], [float("nan")], "a probability is nan"),
        ([2], [0.5], "a label is 2"),
        ([1, 0], [0.5], "2 labels for 1"),
    ],
)
def test_garbage_is_an_error(labels, scores, message):
    with pytest.raises(ValueError, match=message):
        sums_of(labels, scores)


def test_nothing_measured_is_an_error():
    with pytest.raises(ValueError, match="no rows"):
        ScoreSums().metrics()


# rankings


def ranking(ranked, relevant, cutoffs=(2, 3)):
    sums = RankingSums(cutoffs)
    offsets = np.cumsum([0, *map(len, relevant)])
    sums.add(
        np.array(ranked), offsets, np.array([item for items in relevant for item in items], dtype=np.int64)
    )
    return sums


def test_ranking_numbers_of_a_small_example():
    means = ranking([[5, 7, 9], [1, 2, 3]], [[7, 8], [3]]).means()
    assert means["recall@2"] == pytest.approx((1 / 2 + 0) / 2)
    assert means["recall@3"] == pytest.approx((1 / 2 + 1) / 2)
    assert means["hit@2"] == 0.5
    assert means["mrr@3"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    ideal = 1 + 1 / math.log2(3)
    assert means["ndcg@3"] == pytest.approx((1 / math.log2(3) / ideal + 1 / math.log2(4)) / 2)


def test_users_without_relevant_items_do_not_count():
    sums = ranking([[1, 2, 3], [4, 5, 6]], [[], [4]])
    assert sums.users == 1
    assert sums.means()["recall@2"] == 1.0


def test_an_item_of_another_user_is_no_hit():
    assert ranking([[1, 2, 3], [4, 5, 6]], [[4], [1]]).means()["recall@3"] == 0.0


def test_padding_is_never_a_hit():
    assert ranking([[1, -1, -1]], [[2]]).means()["hit@3"] == 0.0


def test_rankings_of_parts_add_up():
    whole = ranking([[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[3], [9], [7, 8]])
    parts = ranking([[1, 2, 3]], [[3]]) + ranking([[4, 5, 6], [7, 8, 9]], [[9], [7, 8]])
    assert parts.users == whole.users == 3
    assert parts.means() == pytest.approx(whole.means())
    assert parts.margins() == pytest.approx(whole.margins())


def test_other_cutoffs_cannot_be_added():
    with pytest.raises(ValueError, match="cutoffs differ"):
        ranking([[1]], [[1]], (1,)) + ranking([[1]], [[1]], (2,))


def test_top_items_leaves_out_what_was_seen_and_breaks_ties_by_id():
    scores = np.array([[0.5, 0.9, 0.5, 0.1], [1.0, 2.0, 3.0, 4.0]])
    assert top_items(scores, 3).tolist() == [[1, 0, 2], [3, 2, 1]]
    seen = [np.array([1]), np.array([0, 1, 3])]
    assert top_items(scores, 2, seen).tolist() == [[0, 2], [2, -1]]
