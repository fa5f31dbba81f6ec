"""Which trials nothing beats, which one is taken, and which is behind: literal numbers."""

from __future__ import annotations

import math

import pytest

from recmill.stages.tune.front import TrialResult, choose, front, why_behind

BOTH = ("auc", "seconds")


def tried(number: int, auc: float, seconds: float, **more: float) -> TrialResult:
    return TrialResult(number, "complete", {}, {"auc": auc, "seconds": seconds, **more})


TRIALS = [
    tried(0, 0.80, 10.0),
    tried(1, 0.79, 4.0),
    tried(2, 0.78, 6.0),  # beaten by 1
    tried(3, 0.70, 1.0),
    tried(4, 0.80, 12.0),  # as good as 0, but slower
    tried(5, 0.79, 4.0),  # a twin of 1
    tried(6, math.nan, 0.1),
    TrialResult(7, "pruned", {}, {"auc": 0.9, "seconds": 0.1}),
    TrialResult(8, "failed", {}),
]


def numbers(trials: list[TrialResult]) -> list[int]:
    return [one.number for one in trials]


def test_the_front_holds_what_nothing_beats_best_quality_first() -> None:
    assert numbers(front(TRIALS, BOTH)) == [0, 1, 3]


def test_with_quality_alone_the_front_is_the_best_trial() -> None:
    assert numbers(front(TRIALS, ("auc",))) == [0]


def test_a_third_objective_saves_what_is_best_in_it() -> None:
    trials = [
        tried(0, 0.8, 10.0, bytes=100),
        tried(1, 0.7, 12.0, bytes=50),
        tried(2, 0.7, 12.0, bytes=60),
    ]
    assert numbers(front(trials, (*BOTH, "bytes"))) == [0, 1]


def test_of_losses_the_lower_is_the_better() -> None:
    trials = [
        TrialResult(n, "complete", {}, {"log_loss": loss, "seconds": 1.0})
        for n, loss in enumerate([0.5, 0.4, 0.6])
    ]
    assert numbers(front(trials, ("log_loss", "seconds"))) == [1]
    best = choose(trials, ("log_loss", "seconds"))
    assert best is not None
    assert best.number == 1


@pytest.mark.parametrize(("within", "number"), [(0.0, 0), (0.005, 0), (0.011, 1), (0.5, 3)])
def test_the_cheapest_is_taken_of_those_that_are_good_enough(within: float, number: int) -> None:
    best = choose(TRIALS, BOTH, within)
    assert best is not None
    assert best.number == number


def test_nothing_is_taken_when_nothing_came_to_its_end() -> None:
    assert choose(TRIALS[6:], BOTH) is None
    assert front(TRIALS[6:], BOTH) == []


def earlier(*pairs: tuple[float, float]) -> list[TrialResult]:
    """Trials with one evaluation each: quality and seconds until then."""
    return [
        TrialResult(n, "complete", {}, {}, "", ({"auc": auc, "seconds": seconds},))
        for n, (auc, seconds) in enumerate(pairs)
    ]


def test_a_trial_below_the_median_of_its_peers_is_behind() -> None:
    others = earlier((0.6, 1), (0.7, 1), (0.8, 1), (0.9, 1), (0.7, 1))
    assert why_behind([{"auc": 0.70, "seconds": 1}], others, BOTH) is None
    reason = why_behind([{"auc": 0.69, "seconds": 1}], others, BOTH)
    assert reason == "auc was 0.6900 at evaluation 1; the median of 5 trials that had cost no more is 0.7000"


def test_a_cheaper_trial_is_not_compared_with_dearer_ones() -> None:
    others = earlier((0.9, 2), (0.9, 2), (0.9, 2), (0.9, 2))
    assert why_behind([{"auc": 0.5, "seconds": 1}], others, BOTH) is None
    assert why_behind([{"auc": 0.5, "seconds": 1}], others, ("auc",)) is not None
    assert why_behind([{"auc": 0.5, "seconds": 3}], others, BOTH) is not None


def test_nobody_is_behind_before_there_are_enough_to_compare_with() -> None:
    others = earlier((0.9, 1), (0.9, 1), (0.9, 1))
    assert why_behind([{"auc": 0.1, "seconds": 1}], others, BOTH) is None
    # None of them came to a second evaluation.
    two = [{"auc": 0.1, "seconds": 1}, {"auc": 0.1, "seconds": 2}]
    assert why_behind(two, earlier(*[(0.9, 1)] * 9), BOTH) is None
