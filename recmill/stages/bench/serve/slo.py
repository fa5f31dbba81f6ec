"""Service level objectives such as p99=30ms, and the search for the highest rate that meets one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from recmill.errors import RecmillError
from recmill.reporting.latency import PERCENTILES
from recmill.stages.bench.contest import Result

MIN_ACHIEVED = 0.98  # of the requests that were due
_PRECISION = 1.04  # ratio of the lowest violating rate to the highest passing one
_MAX_PROBES = 24
_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


@dataclass(frozen=True)
class Slo:
    """A bound on one percentile of latency."""

    percentile: str
    milliseconds: float

    @staticmethod
    def parse(text: str) -> Slo:
        match = re.fullmatch(r"(p[\d.]+|max)\s*(?:=|<=?)\s*([\d.]+)\s*(us|ms|s)", text.strip())
        if match is None or match[1] not in (*PERCENTILES, "max") or not _is_positive(match[2]):
            names = ", ".join([*PERCENTILES, "max"])
            raise RecmillError(f'--slo must look like p99=30ms, with one of {names}; got "{text}".')
        return Slo(match[1], float(match[2]) * _UNITS[match[3]])

    def violation(self, probe: Result) -> str:
        """Why a probe violates the objective; empty when it does not."""
        latency = probe["latency"][f"{self.percentile}_ms"]
        if probe["failed"]:
            return f"{probe['failed']} requests not answered"
        # Requests in flight when time is up are not late: by Little's law so many may be.
        in_flight = probe["target_rate"] * self.milliseconds / 1e3
        if probe["answered"] + in_flight < MIN_ACHIEVED * probe["requests"]:
            return f"answered {probe['answered']} of {probe['requests']}"
        if latency is None or latency > self.milliseconds:
            return f"{self.percentile} {latency} ms"
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
    """The highest rate that passed with its probe (0 and None if none did), and all probes."""

    rate: float
    best: Result | None
    probes: list[Result]


def highest_rate(probe: Callable[[float], Result], slo: Slo, start: float = 50.0) -> SloResult:
    """Double the rate until a probe fails, or halve it until one passes; then bisect.

    A rate fails only when a second probe of it fails too: one hiccup of the machine is not a limit.
    """
    probes: list[Result] = []

    def passes(rate: float) -> bool:
        return any(_passes(probe, rate, slo, probes) for _ in range(2))

    low, high = 0.0, 0.0
    rate = start
    while len(probes) < _MAX_PROBES and not (low and high and high / low <= _PRECISION):
        if passes(rate):
            low = rate
        else:
            high = rate
        if high and high < 0.5:
            break
        rate = low * 2 if not high else high / 2 if not low else (low * high) ** 0.5
    good = [one for one in probes if not one["violation"] and one["target_rate"] == low]
    return SloResult(low, good[-1] if good else None, probes)


def _passes(probe: Callable[[float], Result], rate: float, slo: Slo, probes: list[Result]) -> bool:
    if len(probes) >= _MAX_PROBES:
        return False
    result = probe(rate)
    result["violation"] = slo.violation(result)
    probes.append(result)
    return not result["violation"]
