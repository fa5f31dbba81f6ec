"""Small logs and recipes that the tests of prepare share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from recmill.dataset.table import Table
from recmill.recipe.load import recipe_from_dict
from recmill.recipe.recipe import Recipe
from recmill.stages.prepare.prepare import PrepareConfig, PrepareResult, prepare


def events_recipe(**changes: Any) -> Recipe:
    """user, item, time, price and click, tab-separated without header."""
    tree: dict[str, Any] = {
        "name": "events",
        "log": {
            "files": ["events*.tsv"],
            "user": "user",
            "item": "item",
            "time": "time",
            "columns": [
                {"name": "user", "type": "text"},
                {"name": "item", "type": "int"},
                {"name": "time", "type": "int"},
                {"name": "price", "type": "float"},
                {"name": "click", "type": "int", "allowed": [0, 1], "required": True},
            ],
        },
        "labels": [{"name": "clicked", "columns": "click"}],
        "features": [
            {"columns": "user", "steps": ["vocabulary"]},
            {"columns": "item", "steps": [{"vocabulary": {"min_count": 2}}]},
            {"columns": "price", "steps": [{"fill": {"statistic": "mean"}}, "standardise"]},
        ],
        "table": {"keep": ["time", "item"]},
    }
    return recipe_from_dict({**tree, **changes})


def write_events(folder: Path, num_rows: int, files: int = 1) -> Path:
    """Deterministic events: row n is at time n; user, item and price are simple functions of n."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        f"u{n % 7}\t{n * n % 11}\t{n}\t{'' if n % 5 == 0 else n % 13 / 4}\t{n % 3 % 2}\n"
        for n in range(num_rows)
    ]
    share = -(-num_rows // files)
    for number in range(files):
        text = "".join(rows[number * share : (number + 1) * share])
        (folder / f"events{number}.tsv").write_text(text)
    return folder


def prepared(recipe: Recipe, data: Path, into: Path, **options: Any) -> PrepareResult:
    return prepare(recipe, str(data), into, PrepareConfig(**options))


def rows_of(table: Table, split: str = "train") -> pl.DataFrame:
    return table.scan(split).collect()
