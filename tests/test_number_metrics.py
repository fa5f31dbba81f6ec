"""Metrics of predicted numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from recmill import number_metrics
from recmill.number_metrics import NumberSums, rank_correlation


def sums_of(labels: np.ndarray, predictions: np.ndarray) -> NumberSums:
    sums = NumberSums()
    sums.add(np.asarray(labels, np.float32), np.asarray(predictions, np.float32))
    return sums


def test_numbers_of_a_small_example():
    found = sums_of([0, 0, 60, 100], [10, 0, 40, 110]).metrics()
    assert found.rows == 4
    assert found.mean == 40
    assert found.mae == 10
    assert found.rmse == pytest.approx(math.sqrt(600 / 4))
    assert found.constant_rmse == pytest.approx(math.sqrt((40**2 + 40**2 + 20**2 + 60**2) / 4))
    assert found.r2 == pytest.approx(1 - 600 / 7200)
    assert found.calibration == 1.0
    # Ranks 1.5 1.5 3 4 and 2 1 3 4, whose covariance is 1.125 and whose variances are 1.125 and 1.25.
    assert found.rank_correlation == pytest.approx(1.125 / math.sqrt(1.125 * 1.25))


def test_the_mean_as_the_answer_for_all_has_no_skill():
    found = sums_of([1, 2, 6], [3, 3, 3]).metrics()
    assert found.rank_correlation == 0.0
    assert found.r2 == pytest.approx(0.0, abs=1e-12)
    assert found.rmse == pytest.approx(found.constant_rmse)


def test_rows_that_are_counted_are_rows():
    assert rank_correlation(np.array([1, 2, 3]), np.array([2, 1, 3]), np.array([2, 1, 3])) == pytest.approx(
        rank_correlation(np.array([1, 1, 2, 3, 3, 3]), np.array([2, 2, 1, 3, 3, 3]))
    )


def test_parts_add_up_in_any_order_also_when_pairs_are_sampled(monkeypatch):
    monkeypatch.setattr(number_metrics, "MAX_PAIRS", 2_000)
    draw = np.random.default_rng(0)
    labels = draw.exponential(60, 10_000).astype(np.float32)
    predictions = (0.5 * labels + draw.normal(0, 30, 10_000)).astype(np.float32)
    parts = [sums_of(labels[start::7], predictions[start::7]) for start in (3, 0, 6, 2, 5, 1, 4)]
    total = sum(parts[1:], start=parts[0])
    whole = sums_of(labels, predictions)
    assert len(total.pairs) == 2_000
    assert np.array_equal(total.pairs, whole.pairs)
    assert total.metrics().as_dict() == pytest.approx(whole.metrics().as_dict(), rel=1e-9)
    exact = rank_correlation(labels, predictions)
    assert whole.metrics().rank_correlation == pytest.approx(exact, abs=0.05)


def test_the_curve_of_true_means_lies_on_the_diagonal():
    draw = np.random.default_rng(0)
    means = draw.uniform(10, 100, 50_000)
    curve = sums_of(draw.exponential(means), means).curve()
    assert len(curve) == 10
    assert sum(rows for *_, rows in curve) == 50_000
    assert all(predicted == pytest.approx(observed, rel=0.06) for predicted, observed, _ in curve)


def test_nothing_measured_is_an_error():
    with pytest.raises(ValueError, match="no rows were measured"):
        NumberSums().metrics()
