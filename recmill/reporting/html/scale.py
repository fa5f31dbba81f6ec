"""Maps values to positions along an axis, and chooses round tick values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from recmill.reporting.html.content import Axis
from recmill.reporting.html.numbers import short

_LEAST, _MOST = 1e-250, 1e250  # beyond these, lengths cannot be divided any more
_LEAST_CHANCE = 1e-9
_CHANCES = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999)
_MORE_CHANCES = (0.02, 0.05, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.95, 0.98)


@dataclass(frozen=True)
class Tick:
    place: float  # from 0 to 1
    label: str


@dataclass(frozen=True)
class AxisScale:
    """An axis with fixed ends."""

    axis: Axis
    low: float
    high: float

    @classmethod
    def fitted(cls, axis: Axis, values: Iterable[float], is_tight: bool) -> AxisScale:
        """An axis for all values that it can show; unless tight, the ends are round."""
        shown = [value for value in values if _is_shown(axis, value)]
        low = min(shown, default=_default_ends(axis)[0]) if axis.low is None else axis.low
        high = max(shown, default=_default_ends(axis)[1]) if axis.high is None else axis.high
        low, high = _apart(axis, low, high)
        if not is_tight and axis.scale == "linear":
            step = _round_step(high - low)
            low = math.floor(low / step + 1e-9) * step if axis.low is None else low
            high = math.ceil(high / step - 1e-9) * step if axis.high is None else high
        return cls(axis, low, high)

    def place(self, value: float) -> float | None:
        """The position of a value, from 0 to 1 between the ends; None when it cannot be shown."""
        if not _is_shown(self.axis, value):
            return None
        low, high = _bent(self.axis, self.low), _bent(self.axis, self.high)
        return (_bent(self.axis, value) - low) / (high - low)

    def ticks(self) -> list[Tick]:
        places = [(self.place(value), short(value)) for value in self._round_values()]
        return [
            Tick(place, label) for place, label in places if place is not None and -1e-9 <= place <= 1 + 1e-9
        ]

    def _round_values(self) -> list[float]:
        powers = _round_powers(self.low, self.high) if self.axis.scale == "log" else []
        if len(powers) >= 2:
            return powers
        if self.axis.scale == "logit":
            few = [chance for chance in _CHANCES if self.low <= chance <= self.high]
            return few if len(few) >= 4 else sorted({*_CHANCES, *_MORE_CHANCES})
        step = _round_step(self.high - self.low)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def _is_shown(axis: Axis, value: float) -> bool:
    if not abs(value) <= _MOST:
        return False
    return value >= _LEAST if axis.scale == "log" else 0 <= value <= 1 if axis.scale == "logit" else True


def _bent(axis: Axis, value: float) -> float:
    if axis.scale == "log":
        return math.log10(value)
    if axis.scale == "logit":
        chance = min(max(value, _LEAST_CHANCE), 1 - _LEAST_CHANCE)
        return math.log(chance / (1 - chance))
    return value


def _default_ends(axis: Axis) -> tuple[float, float]:
    return {"linear": (0.0, 1.0), "log": (1.0, 10.0), "logit": (0.01, 0.99)}[axis.scale]


def _apart(axis: Axis, low: float, high: float) -> tuple[float, float]:
    """Ends that differ, also when all values are equal."""
    if axis.scale == "logit":
        low, high = max(low, _LEAST_CHANCE), min(high, 1 - _LEAST_CHANCE)
        return (low, high) if low < high else (low / 2, (1 + high) / 2)
    if high - low > max(abs(high) * 1e-12, _LEAST):
        return low, high
    if axis.scale == "log":
        return low / 2, high * 2
    room = abs(low) * 0.1 or 1.0
    return low - room, high + room


def _round_step(length: float) -> float:
    """1, 2 or 5 times a power of ten, so that four to eight steps cover the length."""
    power = 10.0 ** math.floor(math.log10(length / 4))
    # The logarithm rounds: four times the power may slightly exceed the length.
    return next(power * factor for factor in (10, 5, 2, 1) if length / (power * factor) >= 4 - 1e-9)


def _round_powers(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, (last - first) // 6)
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    powers = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
    return [value for value in powers if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
