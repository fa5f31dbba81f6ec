"""File names that are missing from a sequence, such as day_7 between day_6 and day_8."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import date, timedelta

from recmill.logs.base import COMPRESSIONS
from recmill.logs.files import natural_key

# a shorter sequence always counts, even with few of its names; in a longer one, most must exist
_ALWAYS = 100


def missing_names(names: Iterable[str]) -> list[str]:
    """Missing names between names that differ only in one number, or one date written as YYYYMMDD or YYYY-MM-DD."""
    plain = [
        root if suffix in COMPRESSIONS else root + suffix for root, suffix in map(os.path.splitext, names)
    ]
    groups: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name in plain:
        for number in re.finditer(r"[0-9]{4}-[0-9]{2}-[0-9]{2}|[0-9]+", name):
            groups[name[: number.start()], name[number.end() :]].add(number[0])
    missing = {
        before + number + after
        for (before, after), numbers in groups.items()
        for number in _between(sorted(numbers, key=natural_key))
    }
    return sorted(missing - set(plain), key=natural_key)


def _between(numbers: list[str]) -> list[str]:
    dates = [_date(number) for number in numbers]
    known = [day for day in dates if day is not None]
    if len(known) == len(numbers):
        style = "%Y-%m-%d" if "-" in numbers[0] else "%Y%m%d"
        wanted = (day.strftime(style) for day in _days(min(known), max(known)))
        return _gaps(numbers, wanted, (max(known) - min(known)).days + 1)
    if any("-" in number for number in numbers):
        return []
    first, last = int(numbers[0]), int(numbers[-1])
    width = len(numbers[0]) if any(number[0] == "0" != number for number in numbers) else 0
    return _gaps(numbers, (f"{number:0{width}d}" for number in range(first, last + 1)), last - first + 1)


def _gaps(numbers: list[str], wanted: Iterable[str], num_wanted: int) -> list[str]:
    is_sequence = num_wanted <= max(_ALWAYS, 2 * len(numbers))
    return sorted(set(wanted) - set(numbers)) if is_sequence else []


def _date(number: str) -> date | None:
    if len(number) in (8, 10):
        with suppress(ValueError):
            return date.fromisoformat(number)
    return None


def _days(first: date, last: date) -> Iterator[date]:
    return (first + timedelta(days) for days in range((last - first).days + 1))
