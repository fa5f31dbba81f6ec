"""Row operations: what adds, drops or orders rows, or looks at other rows. They run before features.

Those that look at one row at a time are in `recmill.logs.rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import polars as pl

from recmill.engines.engine import Engine, Frame
from recmill.errors import LogError
from recmill.features.base import ValueTable, to_lists
from recmill.features.history import add_history
from recmill.features.kernels import Array, CountOptions, ExtractedValues, hash_positions
from recmill.logs.rows import keep_one, row_function
from recmill.recipe import recipe as r
from recmill.recipe.kinds import owners_of_columns
from recmill.recipe.recipe import COPY, POSITION, SPLIT


def before_split(
    engine: Engine, frame: Frame, recipe: r.Recipe, data: str, memory: int, max_bad: float
) -> Frame:
    """Apply the operations that need no split, in recipe order."""
    for operation in (operation for operation in recipe.rows if not r.runs_after_split(operation)):
        function = row_function(recipe, operation, data, memory, max_bad)
        if function is not None:
            frame = engine.map(frame, function)
        elif isinstance(operation, r.Dedupe):
            frame = engine.group(frame, operation.by, partial(keep_one, operation), "dedupe")
        elif isinstance(operation, r.History):
            frame = engine.group(frame, [operation.by], partial(add_history, operation), "history")
        elif isinstance(operation, r.Lag):
            frame = engine.group(frame, [operation.by], partial(add_lag, operation), "lag")
    return frame


def after_split(engine: Engine, frame: Frame, recipe: r.Recipe) -> Frame:
    """Apply the operations that need to know which rows train; those that draw items draw what such rows have."""
    operations = [operation for operation in recipe.rows if r.runs_after_split(operation)]
    catalogue = None
    for operation in operations:
        if isinstance(operation, r.History):
            frame = engine.group(frame, [operation.by], partial(add_history, operation), "history")
            continue
        catalogue = catalogue or read_catalogue(engine, frame, recipe)
        function = add_negatives if isinstance(operation, r.Negatives) else add_history_negatives
        frame = engine.map(frame, partial(function, operation, catalogue))  # type: ignore[arg-type]
    return frame


# rows of a group together; groups arrive in log order


def add_lag(lag: r.Lag, frame: pl.DataFrame) -> pl.DataFrame:
    ordered = frame.sort(lag.by, lag.order, POSITION, nulls_last=False)
    somebody = pl.col(lag.by).is_not_null()  # nobody's rows have no past
    return ordered.with_columns(
        pl.when(somebody)
        .then(pl.col(name) - pl.col(name).shift(lag.shift).over(lag.by))
        .alias(f"{name}_lag{lag.shift}")
        for name in lag.columns
    )


# drawing items


class NegativeSampler:
    """The items of the training rows, most frequent first, with their columns."""

    def __init__(self, items: pl.DataFrame, item: str) -> None:
        self.items = items
        self.item = item
        self.known = ValueTable(items.select(pl.col(item).alias("value")))
        counts = items["__count"].to_numpy().astype(np.int64)
        self.ends = {"uniform": np.arange(1, items.height + 1), "popularity": np.cumsum(counts)}

    def draw_others(self, random: Array, by: str, avoid: pl.Series) -> Array:
        """Row numbers of items: each as likely as its weight says among all but the one to avoid."""
        ends = self.ends[by]
        weights = np.diff(ends, prepend=0)
        row = self.known.ids(avoid).to_numpy() - 1  # -1 for an item that cannot be drawn
        avoided = np.where(row < 0, 0, weights[row])
        ticket = (random % (ends[-1] - avoided).astype(np.uint64)).astype(np.int64)
        # Tickets of the avoided item are left out: those behind them move up.
        ticket += np.where(ticket >= ends[row] - avoided, avoided, 0)
        return np.asarray(np.searchsorted(ends, ticket, side="right"))


class _ItemCounts:
    def __init__(self, item: str) -> None:
        self.item = item

    def __call__(self, frame: pl.DataFrame) -> ExtractedValues:
        training = frame.filter(pl.col(SPLIT) == 0)
        return ExtractedValues(training.height, {}, {"items": [(training[self.item], training[POSITION])]})


def read_catalogue(engine: Engine, frame: Frame, recipe: r.Recipe) -> NegativeSampler:
    item = str(recipe.log.item)
    is_text = next(column.type == "text" for column in recipe.log.columns if column.name == item)
    found = engine.measure(frame, _ItemCounts(item), {"items": CountOptions(is_text)}, "items")
    counts = found.counts["items"].load(item)
    if len(counts.values) < 2:
        raise LogError(f"Negatives need at least two items, but the training rows have {len(counts.values)}.")
    columns = [name for name, owner in owners_of_columns(recipe).items() if owner == "item" and name != item]
    rows = pl.DataFrame([counts.values.alias(item), counts.counts.alias("__count")])
    rows = rows.sort("__count", item, descending=[True, False])
    if columns:
        last = engine.collect(engine.group(frame, [item], partial(last_of_each, item, columns), "catalogue"))
        rows = rows.join(last, on=item, how="left", maintain_order="left")
    return NegativeSampler(rows, item)


def last_of_each(item: str, columns: Sequence[str], frame: pl.DataFrame) -> pl.DataFrame:
    training = frame.filter((pl.col(SPLIT) == 0) & pl.col(item).is_not_null())
    return training.group_by(item, maintain_order=True).last().select(item, *columns)


def _random(positions: pl.Series, seed: int, number: Array | int) -> Array:
    """Random numbers that depend on the row's place, the seed and the number of the draw."""
    mixed = hash_positions(positions, seed) + np.asarray(number, dtype=np.uint64) * np.uint64(
        0x9E3779B185EBCA87
    )
    return hash_positions(pl.Series(mixed.view(np.int64)), seed + 1)


def add_negatives(negatives: r.Negatives, catalogue: NegativeSampler, frame: pl.DataFrame) -> pl.DataFrame:
    copies = [frame.with_columns(pl.lit(0, dtype=pl.Int32).alias(COPY))]
    replaced = [name for name in catalogue.items.columns if name != "__count"]
    for number in range(1, negatives.per_row + 1):
        random = _random(frame[POSITION], negatives.seed, number)
        rows = catalogue.draw_others(random, negatives.by, frame[catalogue.item])
        drawn = catalogue.items.select(replaced)[rows]
        label = pl.lit(negatives.label_value).cast(frame[negatives.label].dtype).alias(negatives.label)
        copies.append(frame.with_columns(*drawn, label, pl.lit(number, dtype=pl.Int32).alias(COPY)))
    together = pl.concat([copy.select(copies[0].columns) for copy in copies])
    # Each row is followed by its negatives, so that they train together.
    order = np.arange(together.height).reshape(len(copies), frame.height).T.reshape(-1)
    return together[order]


def add_history_negatives(
    negatives: r.HistoryNegatives, catalogue: NegativeSampler, frame: pl.DataFrame
) -> pl.DataFrame:
    history = frame[negatives.history]
    lengths = history.list.len().fill_null(0)
    elements = history.filter(lengths > 0).explode()
    places = pl.Series(np.repeat(frame[POSITION].to_numpy(), lengths.to_numpy()))
    starts = (
        np.concatenate([[0], np.cumsum(lengths.to_numpy())[:-1]]) if frame.height else np.zeros(0, np.int64)
    )
    index = np.arange(len(elements)) - np.repeat(starts, lengths.to_numpy())
    drawn = np.empty((len(elements), negatives.per_item), dtype=np.int64)
    for number in range(negatives.per_item):
        random = _random(places, negatives.seed, index * negatives.per_item + number)
        drawn[:, number] = catalogue.draw_others(random, negatives.by, elements)
    items = catalogue.items[catalogue.item].gather(pl.Series(drawn.reshape(-1), dtype=pl.UInt32))
    lists = to_lists(f"{negatives.history}_negatives", items, lengths * negatives.per_item)
    return frame.with_columns(lists)
