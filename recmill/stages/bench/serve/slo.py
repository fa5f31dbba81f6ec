"""The highest rate at which a promise about latency holds."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from recmill.errors import RecmillError
from recmill.reporting.latency import PERCENTILES

Result = dict[str, Any]
LEAST_ACHIEVED = 0.98  # of the requests that were due, as well answered as they came in
_PRECISION = 1.04  # between the last rate that held and the first that did not
_MOST_PROBES = 24
_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


@dataclass(frozen=True)
class Slo:
    """Such as p99=30ms."""

    percentile: str
    milliseconds: float

    @staticmethod
    def parse(text: str) -> Slo:
        match = re.fullmatch(r"(p[\d.]+|max)\s*(?:=|<=?)\s*([\d.]+)\s*(us|ms|s)", text.strip())
        if match is None or match[1] not in (*PERCENTILES, "max") or not _is_positive(match[2]):
            names = ", ".join([*PERCENTILES, "max"])
            raise RecmillError(f'--slo must look like p99=30ms, with one of {names}; got "{text}".')
        return Slo(match[1], float(match[2]) * _UNITS[match[3]])

    def broken_by(self, probe: Result) -> str:
        """Why a probe does not meet it; empty when it does."""
        found = probe["latency"][f"{self.percentile}_ms"]
        if probe["failed"]:
            return f"{probe['failed']} requests not answered"
        # Requests that are on their way when time is up are not behind: so many may be, if all keep the promise.
        on_their_way = probe["asked_rate"] * self.milliseconds / 1e3
        if probe["answered"] + on_their_way < LEAST_ACHIEVED * probe["requests"]:
            return f"answered {probe['answered']} of {probe['requests']}"
        if found is None or found > self.milliseconds:
            return f"{self.percentile} {found} ms"
        return ""

    def __str__(self) -> str:
        return f"{self.percentile} <= {self.milliseconds:g} ms"


def _is_positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


@dataclass(frozen=True)
class SloResult:
    """The highest rate that held, its probe, and every probe on the way. No rate held: 0 and None."""

    rate: float
    best: Result | None
    probes: list[Result]


def highest_rate(probe: Callable[[float], Result], slo: Slo, start: float = 50.0) -> SloResult:
    """Double the rate until the promise breaks, or halve it until it holds; then meet in the middle.

    A break counts only when a second probe of the same rate breaks too: one hiccup of the machine is not a limit.
    """
    probes: list[Result] = []

    def holds(rate: float) -> bool:
        return any(_tried(probe, rate, slo, probes) for _ in range(2))

    low, high = 0.0, 0.0
    rate = start
    while len(probes) < _MOST_PROBES and not (low and high and high / low <= _PRECISION):
        if holds(rate):
            low = rate
        else:
            high = rate
        if high and high < 0.5:
            break
        rate = low * 2 if not high else high / 2 if not low else (low * high) ** 0.5
    good = [one for one in probes if not one["broken"] and one["asked_rate"] == low]
    return SloResult(low, good[-1] if good else None, probes)


def _tried(probe: Callable[[float], Result], rate: float, slo: Slo, probes: list[Result]) -> bool:
    if len(probes) >= _MOST_PROBES:
        return False
    result = probe(rate)
    result["broken"] = slo.broken_by(result)
    probes.append(result)
    return not result["broken"]
