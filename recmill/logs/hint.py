"""A hint when hardly any row parses: how the file differs from the recipe's description."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from recmill.errors import LogError
from recmill.logs.base import LogFile
from recmill.logs.sniff import FileFormat, form_line, sniff
from recmill.recipe.names import plain_name
from recmill.recipe.recipe import Log, SideTable

_KEYS = ("format", "separator", "header", "quote", "escape", "encoding")
_NUM_SHOWN = 3


def format_hint(spec: Log | SideTable, file: LogFile) -> str | None:
    """The keys of a recipe that should have other values for this file; None when they fit, or it is unclear."""
    names = [column.name_in_file for column in spec.columns]
    try:
        found = sniff(file, known=[plain_name(name) for name in names])
    except LogError:
        return None
    keys = _different_keys(spec, found)
    words = [*_columns(names, found)]
    if not keys and not words:
        return None
    change = f"set {', '.join(keys)}" if keys else ""
    return f"{file.name} does not match the recipe: " + "; ".join(filter(None, [change, *words])) + "."


def _different_keys(spec: Log | SideTable, found: FileFormat) -> list[str]:
    """The keys as in a recipe. Parquet and JSON lines have no separator, header or quotes."""
    keys = _KEYS if found.format == "delimited" else _KEYS[:1]
    return [
        f"{key} = {json.dumps(getattr(found, key))}"
        for key in keys
        if getattr(found, key) != getattr(spec if key == "format" else spec.text, key)
    ]


def _columns(names: list[str], found: FileFormat) -> Iterator[str]:
    if found.format != "delimited":
        return
    if not found.header:
        if len(found.names) != len(names):
            yield f"its rows have {len(found.names)} fields, the recipe has {len(names)} columns"
    elif missing := [name for name in names if name not in found.names]:
        more = ", ..." if len(missing) > _NUM_SHOWN else ""
        yield f"its header has no column {', '.join(missing[:_NUM_SHOWN])}{more}, but has {form_line(found.names)}"
        yield from _other_names(missing[0], found.names)


def _other_names(name: str, names: Sequence[str]) -> Iterator[str]:
    """The correction when the header spells a column's name differently, such as Label for label."""
    alike = [one for one in names if plain_name(one) == plain_name(name)]
    if len(alike) == 1:
        yield f'name what the file calls it, as in {{ name = "{name}", in_file = "{alike[0]}" }}'
