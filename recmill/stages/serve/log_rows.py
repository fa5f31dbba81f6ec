"""Events of requests as rows of the log: missing columns are filled from what the server has stored."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from recmill.artifacts.event_stream import Entry
from recmill.errors import BadRequest
from recmill.logs.entries import parse_entries
from recmill.recipe import recipe as r
from recmill.stages.serve import messages as m
from recmill.stages.serve.live_bundle import LiveBundle

_LARGEST_SECONDS = 1e11  # a larger number since 1970 is in milliseconds, microseconds or nanoseconds


def log_row(bundle: LiveBundle, event: m.Event) -> dict[str, str]:
    """The row's columns as text; raises BadRequest when it is not a valid row of the log."""
    recipe = bundle.bundle.recipe
    values = _completed(bundle, event)
    cells = {
        column.name: _cell(column, value)
        for column in recipe.log.columns
        if (value := values.get(column.name)) is not None
    }
    _, problems = parse_entries(
        recipe.log.columns, [Entry(0, {name: text.encode() for name, text in cells.items()})]
    )
    for reason, column in problems.values():
        raise BadRequest(
            f'The event is not a valid row of the log: {reason} (column "{column}"). Send it in values.'
        )
    return cells


def _completed(bundle: LiveBundle, event: m.Event) -> m.Values:
    """The completed row: the event's own values, columns of the item and the user, a click, now."""
    log, lookup = bundle.bundle.recipe.log, bundle.lookup
    assert log.user is not None
    assert log.item is not None
    assert log.time is not None
    item, user = lookup.raw_items([event.item])[0], lookup.raw_user(event.user, in_store=False)
    owners = lookup.raw_columns.owners
    known = {name: value for name, value in item.items() if owners.get(name) == "item"}
    known |= {name: value for name, value in user.items() if owners.get(name) == "user"}
    known |= _click(bundle.bundle.recipe)
    known[log.time] = _now(bundle, log.time)
    ids = lookup.raw_columns.typed(
        {log.user: event.user, log.item: event.item}, lookup.raw_columns.kinds, "The event"
    )
    return {**known, **bundle.event_values(event), **ids}


def _click(recipe: r.Recipe) -> dict[str, Any]:
    """The label column, where the label is one: clients send clicks."""
    labels = [label for label in recipe.labels if label.name == recipe.click_label and not label.steps]
    return {column: 1 for label in labels for column in label.columns[:1]}


def _now(bundle: LiveBundle, column: str) -> float | int | None:
    """The time in the log's format; numbers get the unit of the log's last time. None for a text column."""
    kind, now, unit = bundle.lookup.raw_columns.kinds[column], time.time(), 1
    is_time = any(one.name == column and one.type == "time" for one in bundle.bundle.recipe.log.columns)
    end = float(bundle.log_end or 0)
    while not is_time and end >= _LARGEST_SECONDS * unit:
        unit *= 1_000
    return {"int": int(now * unit), "float": now * unit}.get(kind)


def _cell(column: r.Column, value: Any) -> str:
    if column.type == "time":
        return (
            datetime.fromtimestamp(value, UTC).strftime(column.format)
            if column.format
            else repr(float(value))
        )
    if column.type == "hex":
        return format(int(value) % (1 << 64), "x")
    if column.type == "bool":
        return str(int(value))
    return str(value)
