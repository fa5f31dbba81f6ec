"""Which rows of a log count as positive, in words and as a condition."""

from __future__ import annotations

import math
from dataclasses import dataclass

import polars as pl

from recmill.errors import ExpressionError, RecmillError
from recmill.features.expressions import columns_read, keep_where
from recmill.recipe.expressions.tokens import KEYWORDS
from recmill.recipe.kinds import kind_of
from recmill.recipe.recipe import Column
from recmill.stages.init.columns import ColumnProfile, FileProfile
from recmill.stages.init.names import (
    CLICK_EVENTS,
    CLICKS,
    EVENTS,
    LABELS,
    NEGATIVE_EVENTS,
    RATINGS,
    VIEW_EVENTS,
)
from recmill.stages.init.roles import Unclear

ALL = "all"
_HIGH = 0.75  # fraction of the rating scale: 4 of 1..5, 8 of 1..10
_UNRATED = 0.3  # fraction of zeros from which a zero means "not rated"


@dataclass(frozen=True)
class Positives:
    """A condition over the log's columns, or None when every row is positive; and the reason."""

    sql: str | None
    why: str
    share: float = 1.0
    has_impressions: bool = False  # whether the other rows are impressions without interest


def find_positives(events: FileProfile, given: str | None, taken: tuple[str, ...]) -> Positives:
    """Decide by --positive, a label, a rating, a kind of event, or take every row."""
    if given is not None:
        return _given(events, given)
    left = [column for column in events.columns if column.name not in taken and len(column.present)]
    clicks = [column for column in left if column.plain in CLICKS and is_binary(column)]
    labels = [column for column in left if column.plain in LABELS and is_binary(column)]
    ratings = [column for column in left if column.plain in RATINGS]
    kinds = [column for column in left if column.plain in EVENTS and column.num_unique <= 50]
    candidates = clicks if len(clicks) == 1 else [*clicks, *labels, *ratings]
    candidates = candidates or kinds
    if not candidates:
        return Positives(None, "every row is an interaction")
    if len(candidates) > 1:
        options = [f'"{_example(column)}"' for column in candidates]
        raise Unclear(f"{events.path}: which rows are positive?", "positive", [*options, ALL])
    column = candidates[0]
    if column in kinds:
        return _of_kinds(events, column)
    return _of_label(column) if is_binary(column) else _of_rating(events, column)


def is_like_rating(column: ColumnProfile) -> bool:
    """Whether numbers cover a usual rating scale, such as 1 to 5 or 0.5 to 10."""
    is_small = column.is_number and 4 <= column.num_unique <= 21
    return is_small and column.bounds[0] in (0, 0.5, 1) and column.bounds[1] in (5, 10)


def is_binary(column: ColumnProfile) -> bool:
    return column.type == "bool" or (column.is_number and set(column.present.unique().to_list()) <= {0, 1})


def quoted(name: str) -> str:
    """A column name as conditions quote it."""
    return name if name.isidentifier() and name.isascii() and name.lower() not in KEYWORDS else f'"{name}"'


def _example(column: ColumnProfile) -> str:
    name = quoted(column.name)
    if column.type == "bool":
        return f"{name} = true"
    if not column.is_number:
        return f"{name} = '{column.present[0]}'"
    return f"{name} = 1" if is_binary(column) else f"{name} >= {_threshold(column)}"


def _share(mask: pl.Series) -> float:
    return int(mask.sum()) / max(1, len(mask))


def _of_label(column: ColumnProfile) -> Positives:
    is_one = column.values if column.type == "bool" else column.values.cast(pl.Float64) == 1
    share = _share(is_one)
    if share in (0.0, 1.0):
        if share == 0.0:
            raise Unclear(f'"{column.name}" is never 1: which rows are positive?', "positive", [ALL])
        return Positives(None, f'every row is an interaction ("{column.name}" is always 1)')
    sql = _example(column)
    return Positives(sql, f"{sql}, {share:.0%} of rows", share, has_impressions=True)


def _threshold(column: ColumnProfile) -> str:
    low, high = column.bounds
    wanted = low + _HIGH * (high - low)
    values = column.present.unique().sort().cast(pl.Float64)
    at_least = values.filter(values >= wanted - 1e-9)
    number = float(at_least[0]) if len(at_least) else math.ceil(wanted)
    return f"{number:g}"


def _of_rating(events: FileProfile, column: ColumnProfile) -> Positives:
    if not column.is_number:
        raise Unclear(
            f'{events.path}: "{column.name}" is no number (such as {column.present[0]!r}): which rows are positive?',
            "positive",
            [_example(column), ALL],
        )
    if column.num_unique == 1:
        return Positives(None, f'every row is an interaction ("{column.name}" is always {column.present[0]})')
    zeros = _share(column.values.cast(pl.Float64) == 0)
    sql = _example(column)
    if zeros >= _UNRATED and column.bounds[0] == 0 and column.num_unique > 2:
        return Positives(
            None,
            f"every row is an interaction (\"{column.name}\" is 0, not rated, in {zeros:.0%}; or --positive '{sql}')",
        )
    share = _share(column.values.cast(pl.Float64) >= float(_threshold(column)))
    return Positives(sql, f"{sql}, {share:.0%} of rows", share)


def _of_kinds(events: FileProfile, column: ColumnProfile) -> Positives:
    """Kinds of events: all count, except impressions and dislikes."""
    counts = column.present.cast(pl.String).value_counts(sort=True)
    kinds = counts.to_series(0).to_list()
    plain = {str(kind).lower().replace("_", "").replace("-", ""): str(kind) for kind in kinds}
    negative = [kind for word, kind in plain.items() if word in NEGATIVE_EVENTS]
    if set(plain) & set(VIEW_EVENTS) and set(plain) & set(CLICK_EVENTS):
        options = [
            f"\"{quoted(column.name)} <> '{kind}'\"" for word, kind in plain.items() if word in VIEW_EVENTS
        ]
        raise Unclear(
            f'{events.path}: "{column.name}" has views and clicks; does a view count as positive?',
            "positive",
            [*options, ALL],
        )
    if not negative or len(negative) == len(kinds) or column.is_number:
        shown = ", ".join(str(kind) for kind in kinds[:4])
        return Positives(None, f'every row is an interaction (kinds in "{column.name}": {shown})')
    sql = f"{quoted(column.name)} not in ({', '.join(_text(kind) for kind in negative)})"
    share = 1 - _share(column.values.cast(pl.String).is_in(negative))
    return Positives(sql, f"{sql}, {share:.0%} of rows", share, has_impressions=True)


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _given(events: FileProfile, given: str) -> Positives:
    if given.strip().lower() == ALL:
        return Positives(None, "every row is an interaction, as given")
    kinds = {column.name: kind_of(Column(column.name, column.type)) for column in events.columns}
    frame = pl.DataFrame([column.values.alias(column.name) for column in events.columns])
    try:
        columns_read(given, kinds)
        share = keep_where(given, frame).height / max(1, frame.height)
    except ExpressionError as error:
        raise RecmillError(f"--positive {given!r}, {error}") from None
    if share == 0.0:
        raise RecmillError(f"--positive {given!r}: is true for no row of {events.path}.")
    read = [column for column in events.columns if column.name in columns_read(given, kinds)]
    has_impressions = share < 1.0 and all(is_binary(column) for column in read)
    return Positives(given, f"{given}, {share:.0%} of rows, as given", share, has_impressions)
