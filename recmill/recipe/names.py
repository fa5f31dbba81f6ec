"""Names in recipes: ranges, and suggestions for misspelled names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Annotated

EXPANDED = "names, ranges such as i1..i13, or both, separated by commas"
Names = Annotated[tuple[str, ...], EXPANDED]

MAX_RANGE = 10_000
_RANGE = re.compile(r"([A-Za-z_]\w*?)(\d{1,9})\.\.(?:([A-Za-z_]\w*?))?(\d{1,9})", re.ASCII)


def expand_names(names: str | Sequence[str]) -> list[str]:
    """Expand ranges: `i1..i3` -> i1, i2, i3; one text may hold several names or ranges, separated by commas.

    Raises ValueError with the reason for an invalid range.
    """
    parts = [part.strip() for part in names.split(",")] if isinstance(names, str) else names
    return [name for part in parts if part for name in _expand_range(part.strip())]


def _expand_range(name: str) -> list[str]:
    if ".." not in name:
        return [name]
    match = _RANGE.fullmatch(name)
    if match is None or match[3] not in (None, match[1]):
        raise ValueError(f'has "{name}", which is no range; write it as i1..i13')
    first, last = int(match[2]), int(match[4])
    if last < first:
        raise ValueError(f'has "{name}", which counts down; write the lower number first')
    if last - first >= MAX_RANGE:
        raise ValueError(f'has "{name}", which stands for more than {MAX_RANGE:,} names')
    width = len(match[2]) if match[2].startswith("0") else 0
    return [f"{match[1]}{number:0{width}d}" for number in range(first, last + 1)]


def plain_name(name: str) -> str:
    """A name in lower case without punctuation: `User-ID` -> userid."""
    return re.sub(r"[\W_]+", "", name.lower())


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean "x"?` for a similar name, else the list of known ones."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1)
    if close:
        return f'; did you mean "{close[0]}"?'
    return f"; known: {', '.join(options)}" if options else ""


def repeated(names: Iterable[str]) -> list[str]:
    """The distinct names that occur more than once."""
    seen: set[str] = set()
    twice: dict[str, None] = {}
    for name in names:
        if name in seen:
            twice[name] = None
        seen.add(name)
    return list(twice)
