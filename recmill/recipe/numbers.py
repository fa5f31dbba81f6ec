"""Bounds of numeric fields, which the loader checks and reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Bounds:
    """A test, and its description in messages: `must be <words>, got -8`."""

    words: str
    fits: Callable[[float], bool]


Positive = Annotated[int, Bounds("a positive integer", lambda number: number >= 1)]
Whole = Annotated[int, Bounds("a whole number from 0", lambda number: number >= 0)]
# Ids are 32-bit integers in Tables and models.
NumIds = Annotated[int, Bounds("a whole number from 1 to 2147483646", lambda number: 1 <= number < 2**31 - 1)]
Id = Annotated[int, Bounds("a whole number from 0 to 2147483646", lambda number: 0 <= number < 2**31 - 1)]
Several = Annotated[int, Bounds("a whole number from 2", lambda number: number >= 2)]
TreeDepth = Annotated[int, Bounds("a whole number from 1 to 10", lambda number: 1 <= number <= 10)]

AboveZero = Annotated[float, Bounds("a number above 0", lambda number: number > 0)]
NotNegative = Annotated[float, Bounds("a number from 0", lambda number: number >= 0)]
Share = Annotated[float, Bounds("a number above 0 and below 1", lambda number: 0 < number < 1)]
ShareOrAll = Annotated[float, Bounds("a number above 0 and at most 1", lambda number: 0 < number <= 1)]
Fraction = Annotated[float, Bounds("a number from 0 to 1", lambda number: 0 <= number <= 1)]
Dropout = Annotated[float, Bounds("a number from 0 and below 1", lambda number: 0 <= number < 1)]
