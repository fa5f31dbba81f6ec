"""Which trials nothing beats, which of them to take, and which to stop on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from recmill.recipe.tuning import LOWER_IS_BETTER

Numbers = Mapping[str, float]
_FEWEST_PEERS = 4  # before this many, nobody is behind


@dataclass(frozen=True)
class TrialResult:
    """One trial as it ended: what it set and what came of it, at each of its evaluations and at its best."""

    number: int
    state: Literal["complete", "pruned", "failed", "interrupted"]
    values: dict[str, Any]
    found: Numbers = field(default_factory=dict)
    reason: str = ""
    evaluations: tuple[Numbers, ...] = ()


def signed(name: str, numbers: Numbers) -> float:
    """A number for which more is better, whatever it measures."""
    value = float(numbers.get(name, math.nan))
    return -value if name in LOWER_IS_BETTER else value


def measured(tried: Sequence[TrialResult], objectives: Sequence[str]) -> list[TrialResult]:
    """Those that came to their end with finite numbers."""
    return [
        one
        for one in tried
        if one.state == "complete" and all(math.isfinite(signed(name, one.found)) for name in objectives)
    ]


def front(tried: Sequence[TrialResult], objectives: Sequence[str]) -> list[TrialResult]:
    """The trials that no other one equals in all objectives and beats in one; of twins the first. Best ones first."""

    def beats(other: TrialResult, one: TrialResult) -> bool:
        pairs = [(signed(name, other.found), signed(name, one.found)) for name in objectives]
        is_better = any(theirs > ours for theirs, ours in pairs)
        is_twin = all(theirs == ours for theirs, ours in pairs) and other.number < one.number
        return all(theirs >= ours for theirs, ours in pairs) and (is_better or is_twin)

    ended = measured(tried, objectives)
    unbeaten = [one for one in ended if not any(beats(other, one) for other in ended)]
    return sorted(unbeaten, key=lambda one: -signed(objectives[0], one.found))


def choose(
    tried: Sequence[TrialResult], objectives: Sequence[str], within: float = 0.0
) -> TrialResult | None:
    """The trial of the highest quality; or the cheapest of those whose quality is at most `within` below it."""
    ended = measured(tried, objectives)
    if not ended:
        return None
    quality, cost = objectives[0], objectives[1] if len(objectives) > 1 else "seconds"
    best = max(signed(quality, one.found) for one in ended)
    good = [one for one in ended if signed(quality, one.found) >= best - within]
    return max(good, key=lambda one: (signed(cost, one.found), signed(quality, one.found), -one.number))


def why_behind(
    evaluations: Sequence[Numbers], others: Sequence[TrialResult], objectives: Sequence[str]
) -> str | None:
    """Why a trial may stop after these evaluations; None to go on.

    Its peers are the trials that came as far and had cost no more until then. It is behind when there are some, and its
    quality is below their median. With quality as the only objective, all that came as far are peers.
    """
    now, place = evaluations[-1], len(evaluations) - 1
    quality, costs = objectives[0], objectives[1:]
    peers = [
        other.evaluations[place]
        for other in others
        if len(other.evaluations) > place
        and all(signed(cost, other.evaluations[place]) >= signed(cost, now) for cost in costs)
    ]
    if len(peers) < _FEWEST_PEERS:
        return None
    middle = median(signed(quality, peer) for peer in peers)
    if signed(quality, now) >= middle:
        return None
    return (
        f"{quality} was {now[quality]:.4f} at evaluation {place + 1}; the median of {len(peers)} trials "
        f"that had cost no more is {abs(middle):.4f}"
    )
