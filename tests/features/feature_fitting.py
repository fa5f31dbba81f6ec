"""Fitting and applying small recipes in memory, through the real engine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from recmill.engines.local import LocalEngine
from recmill.features.numeric import dtype_of
from recmill.features.plan import Plan
from recmill.recipe.kinds import kinds_of_columns
from recmill.recipe.load import recipe_from_dict
from recmill.recipe.recipe import POSITION, SPLIT, Recipe
from recmill.stages.prepare.prepare import fit

Rows = Mapping[str, Sequence[Any]]


class MemorySource:
    """Frames as a source: a unit is a list of batches. A large `unit_bytes` makes the engine use many buckets."""

    def __init__(self, units: Sequence[Sequence[pl.DataFrame]], unit_bytes: int = 1 << 10) -> None:
        self.batches = units
        self.bytes = unit_bytes

    def units(self) -> Sequence[int]:
        return range(len(self.batches))

    def unit_bytes(self, unit: int) -> int:
        return self.bytes

    def first_position(self, unit: int) -> int:
        return int(self.batches[unit][0][POSITION].min() or 0)  # type: ignore[arg-type]

    def max_offset(self) -> int:
        return 1 << 20

    def read(self, unit: int) -> Iterator[pl.DataFrame]:
        yield from self.batches[unit]


def recipe_of(
    types: Mapping[str, str],
    features: Sequence[Mapping[str, Any]],
    labels: Sequence[Mapping[str, Any]] = (),
) -> Recipe:
    """A recipe over columns of these types. A "list of <type>" column is declared as a history."""
    lists = [name.removesuffix("_history") for name, kind in types.items() if kind.startswith("list of ")]
    columns = [
        {"name": name.removesuffix("_history"), "type": kind.removeprefix("list of ")}
        for name, kind in types.items()
    ]
    if lists:
        columns.append({"name": "who", "type": "int"})
    history = {"history": {"columns": lists, "by": "who", "order": "who"}}
    return recipe_from_dict(
        {
            "name": "test",
            "log": {"files": ["log.tsv"], "columns": columns},
            "rows": [history] if lists else [],
            "features": list(features),
            "labels": list(labels),
        }
    )


def rows_of(
    recipe: Recipe, columns: Rows, splits: Sequence[int] | None = None, first: int = 0
) -> pl.DataFrame:
    """Raw rows with the types that the recipe gives them, and their places in the log."""
    kinds = kinds_of_columns(recipe)
    series = [pl.Series(name, values, dtype=dtype_of(kinds[name])) for name, values in columns.items()]
    height = len(series[0])
    places = pl.Series(POSITION, range(first, first + height), dtype=pl.Int64)
    return pl.DataFrame([*series, places, pl.Series(SPLIT, splits or [0] * height, dtype=pl.Int8)])


def fit_units(
    recipe: Recipe, units: Sequence[Sequence[pl.DataFrame]], workers: int = 1, unit_bytes: int = 1 << 10
) -> Plan:
    with tempfile.TemporaryDirectory() as work:
        engine = LocalEngine(Path(work), workers, memory=256 << 20)
        return fit(engine, engine.read(MemorySource(units, unit_bytes)), recipe)


def fitted(types: Mapping[str, str], steps: Sequence[Any], columns: Rows, **feature: Any) -> Plan:
    """A plan with one feature "f" over all columns, fitted on these rows."""
    recipe = recipe_of(types, [{"name": "f", "columns": list(types), "steps": list(steps), **feature}])
    return fit_units(recipe, [[rows_of(recipe, columns)]])


def outputs(plan: Plan, columns: Rows, feature: str = "f") -> list[Any]:
    """The feature of new rows, as the server computes it: without places and splits."""
    rows = rows_of(plan.recipe, columns).drop(POSITION, SPLIT)
    return plan.apply(rows, labels=False)[feature].to_list()


def transformed(kind: str, steps: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Fit steps on one column and apply them to it."""
    name = "x_history" if kind.startswith("list of ") else "x"
    plan = fitted({name: kind}, steps, {name: values})
    return outputs(plan, {name: values})
