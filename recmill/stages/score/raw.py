"""Raw columns of a Table: as it keeps them, or as the ids of a vocabulary say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from recmill.dataset.table import Table
from recmill.errors import FeatureError
from recmill.features.plan import Plan
from recmill.recipe import steps


@dataclass(frozen=True)
class RawColumn:
    """How a raw column is read from rows of a Table. Values that a vocabulary does not know are missing."""

    name: str
    stored: str  # the Table's column
    is_id: bool  # of a vocabulary, whose values are raw

    def of(self, rows: pl.DataFrame, plan: Plan) -> pl.Series:
        column = rows[self.stored]
        if not self.is_id:
            return column.alias(self.name)
        values = plan.values_of(self.stored)
        assert values is not None
        indices = pl.select(pl.when(column > 0).then(column - 1)).to_series()
        return values.gather(indices).alias(self.name)


def raw_column(table: Table, name: str) -> RawColumn:
    """An error that says what to do when the Table cannot tell the column's values."""
    found = find_raw(table, name)
    if found is None:
        known = [column.name for column in table.recipe.log.columns if find_raw(table, column.name)]
        raise FeatureError(
            f'Table {table.path} does not hold raw values of "{name}"; it has those of: '
            f"{', '.join(known) or 'no column'}. Name it in keep of the recipe's [table] and prepare again."
        )
    return found


def find_raw(table: Table, name: str) -> RawColumn | None:
    recipe = table.recipe
    if name in recipe.table.keep:
        return RawColumn(name, f"raw_{name}", is_id=False)
    for feature in recipe.features:
        is_plain = len(feature.steps) == 1 and isinstance(feature.steps[0], steps.Vocabulary)
        if feature.columns == (name,) and is_plain:
            return RawColumn(name, feature.name, is_id=True)
    return None


def raw_columns(table: Table, names: Sequence[str] | None) -> tuple[RawColumn, ...]:
    """The columns asked for; user and item, where the Table can tell them, when nothing is."""
    if names is not None:
        return tuple(raw_column(table, name) for name in names)
    log = table.recipe.log
    found = [find_raw(table, name) for name in (log.user, log.item) if name is not None]
    return tuple(column for column in found if column is not None)
