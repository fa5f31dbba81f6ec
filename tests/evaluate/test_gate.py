"""The gate: conditions are read, judged, and cannot be passed by predicting a constant."""

from __future__ import annotations

import numpy as np
import pytest

from recmill.metrics import ScoreSums
from recmill.number_metrics import NumberSums
from recmill.stages.evaluate.gate import GateError, judge, parse_gate

GOOD = {
    "auc": 0.81,
    "normalised_entropy": 0.8,
    "accuracy": 0.79,
    "constant_accuracy": 0.744,
    "log_loss": 0.45,
}


def verdicts(gate: str, metrics: dict[str, float], live: dict[str, float] | None = None) -> list[str]:
    return [str(verdict) for verdict in judge(parse_gate(gate), metrics, live)]


def test_conditions_are_judged_one_by_one():
    assert verdicts("auc>=0.80, ne<=live,accuracy>=constant", GOOD, {**GOOD, "normalised_entropy": 0.79}) == [
        "pass   auc >= 0.8   found 0.81000",
        "FAIL   normalised_entropy <= live   found 0.80000, bound 0.79000",
        "pass   accuracy >= constant   found 0.79000, bound 0.74400",
        "pass   normalised_entropy <= constant   found 0.80000, bound 1.00000",
    ]


def test_a_model_that_never_predicts_a_click_does_not_pass_an_accuracy_gate():
    """The constant predictor has accuracy 0.744 on this data, and the gate asks for 0.74."""
    labels = np.zeros(1000)
    labels[:256] = 1
    sums = ScoreSums()
    sums.add(labels, np.full(1000, 0.01))
    metrics = sums.metrics().as_dict()
    assert metrics["accuracy"] == 0.744
    passed = {str(v.condition): v.passed for v in judge(parse_gate("accuracy>=0.74"), metrics, None)}
    assert passed == {"accuracy >= 0.74": True, "normalised_entropy <= constant": False}


def test_a_predicted_number_must_beat_the_mean_as_the_answer_for_all():
    sums = NumberSums()
    sums.add(np.array([1.0, 2.0, 3.0]), np.array([3.0, 3.0, 3.0]))
    assert verdicts("rmse<=constant", sums.metrics().as_dict()) == [
        "FAIL   rmse <= constant   found 1.29099, bound 0.81650",
        "FAIL   r2 >= constant   found -1.50000, bound 0.00000",
    ]
    sums.add(np.array([-10.0, 14.0]), np.array([-9.0, 13.0]))
    assert [one.passed for one in judge(parse_gate("r2>=0.5"), sums.metrics().as_dict(), None)] == [
        True,
        True,
    ]


def test_a_metric_that_is_not_a_number_does_not_pass():
    assert not judge(parse_gate("auc>=0.5"), {"auc": float("nan")}, None)[0].passed


@pytest.mark.parametrize(
    ("gate", "problem"),
    [
        ("auc>0.8", r'Gate "auc>0.8": "auc>0.8" must look like auc>=0.80'),
        ("auc>=0.8,", 'Gate "auc>=0.8,": "" must look like'),
        ("auc>=live", "needs the live model: add --live DIR"),
        ("beauty>=1", 'no metric "beauty"; there are: auc'),
        (
            "constant_accuracy>=constant",
            "the constant predictor has auc, accuracy, normalised_entropy, rce, log_loss",
        ),
    ],
)
def test_a_gate_that_cannot_be_judged_is_an_error(gate, problem):
    with pytest.raises(GateError, match=problem):
        judge(parse_gate(gate), GOOD, None)
