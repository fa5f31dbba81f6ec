"""The gate: conditions that a model must meet before anything of it is published."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recmill.errors import RecmillError

SHORT = {"ne": "normalised_entropy"}
SERVED = "served."  # metrics of the list that users are served begin with it
_BASELINES = ("live", "constant", "popular")
_CONDITION = re.compile(
    rf"((?:\w+\.)?[a-z_][a-z_0-9]*(?:@\d+)?)\s*(>=|<=)\s*({'|'.join(_BASELINES)}|[-+]?[\d.]+(?:[eE][-+]?\d+)?)"
)

Metrics = Mapping[str, float]


class GateError(RecmillError):
    """The gate cannot be read, or asks for what is not known."""

    exit_code = 2


@dataclass(frozen=True)
class Condition:
    """`auc >= 0.80`; the bound may also be that of the live model, the constant predictor or the most popular items."""

    metric: str
    operator: str
    bound: float | str

    def __str__(self) -> str:
        return f"{self.metric} {self.operator} {self.bound}"


@dataclass(frozen=True)
class Verdict:
    """One condition and what was found. Without a bound, nothing is live yet, and the condition is left out."""

    condition: Condition
    found: float
    bound: float | None

    @property
    def passed(self) -> bool:
        if self.bound is None:
            return True
        if self.condition.bound == "constant" and self.found == self.bound:
            return False  # it is to be beaten: a model that always predicts the same meets it
        return is_better(self.condition.operator, self.found, self.bound) or self.found == self.bound

    def __str__(self) -> str:
        if self.bound is None:
            return f"skip   {self.condition}   found {self.found:.5f}, nothing is live yet"
        return f"{'pass' if self.passed else 'FAIL'}   {self.condition}   found {self.found:.5f}" + (
            f", bound {self.bound:.5f}" if isinstance(self.condition.bound, str) else ""
        )


def is_better(operator: str, found: float, other: float) -> bool:
    """Whether a value is beyond another one, in the direction that a condition asks for."""
    return bool(found > other if operator == ">=" else found < other)


def parse_gate(text: str) -> list[Condition]:
    """Conditions from `auc>=0.80,ne<=live`; none from an empty text."""
    conditions = []
    for part in text.split(",") if text else ():
        match = _CONDITION.fullmatch(part.strip())
        if match is None:
            raise GateError(
                f'Gate "{text}": "{part.strip()}" must look like auc>=0.80, ne<=live, accuracy>=constant or '
                "served.recall@10>=popular."
            )
        bound = match[3] if match[3] in _BASELINES else float(match[3])
        if (bound == "popular") != match[1].startswith(SERVED) and isinstance(bound, str):
            raise GateError(
                f'Gate "{part.strip()}": popular is a bound of served lists, live and constant are bounds of models.'
            )
        prefix, dot, name = match[1].rpartition(".")
        conditions.append(Condition(prefix + dot + SHORT.get(name, name), match[2], bound))
    return conditions


def judge_served(conditions: Sequence[Condition], metrics: Metrics, popular: Metrics) -> list[Verdict]:
    """Conditions on the served list, whose bound may be what the most popular items reach for the same users."""
    verdicts = []
    for condition in (one for one in conditions if one.metric.startswith(SERVED)):
        name = condition.metric.removeprefix(SERVED)
        if name not in metrics:
            raise GateError(f'Gate: served lists have no metric "{name}"; there are: {", ".join(metrics)}.')
        bound = condition.bound if not isinstance(condition.bound, str) else popular[name]
        verdicts.append(Verdict(condition, metrics[name], bound))
    return verdicts


def judge(
    conditions: Sequence[Condition], metrics: Metrics, live: Metrics | None, allow_no_live: bool = False
) -> list[Verdict]:
    """Each condition with what was found. A ranker must also beat the constant predictor, whatever the gate says.

    Conditions on one of several tasks are written as `like.auc >= 0.7`, and each task must beat its constant; of labels
    that are numbers, the constant is their mean.
    Without a live model, conditions on it are an error, or left out with `allow_no_live`.
    """
    operators = {"normalised_entropy": "<=", "r2": ">="}
    beaten = [
        Condition(name, operators[name.rpartition(".")[2]], "constant")
        for name in metrics
        if name.rpartition(".")[2] in operators
    ]
    conditions = [*conditions, *beaten]
    return [_judge(condition, metrics, live, allow_no_live) for condition in dict.fromkeys(conditions)]


def _judge(condition: Condition, metrics: Metrics, live: Metrics | None, allow_no_live: bool) -> Verdict:
    if condition.metric not in metrics:
        raise GateError(f'Gate: there is no metric "{condition.metric}"; there are: {", ".join(metrics)}.')
    return Verdict(condition, metrics[condition.metric], _bound(condition, metrics, live, allow_no_live))


def _bound(condition: Condition, metrics: Metrics, live: Metrics | None, allow_no_live: bool) -> float | None:
    if not isinstance(condition.bound, str):
        return condition.bound
    if condition.bound == "live":
        if live is None and allow_no_live:
            return None
        if live is None:
            raise GateError(f'Gate "{condition}" needs the live model: add --live DIR, its checkpoint.')
        return live[condition.metric]
    prefix, dot, name = condition.metric.rpartition(".")
    constant = constant_predictor(metrics, prefix + dot)
    if name not in constant:
        raise GateError(
            f'Gate "{condition}": the constant predictor has {", ".join(constant) or "no metrics here"}.'
        )
    return constant[name]


def constant_predictor(metrics: Metrics, prefix: str = "") -> dict[str, float]:
    """What predicting the mean label for every row would give on the same rows; `prefix` is that of a task."""
    found: dict[str, float] = {}
    if f"{prefix}r2" in metrics:
        found = {"r2": 0.0, "rank_correlation": 0.0}
    if f"{prefix}constant_rmse" in metrics:
        found["rmse"] = metrics[f"{prefix}constant_rmse"]
    if f"{prefix}constant_accuracy" not in metrics:
        return found
    return found | {
        "auc": 0.5,
        "accuracy": metrics[f"{prefix}constant_accuracy"],
        "normalised_entropy": 1.0,
        "rce": 0.0,
        "log_loss": metrics[f"{prefix}log_loss"] / metrics[f"{prefix}normalised_entropy"],
    }
