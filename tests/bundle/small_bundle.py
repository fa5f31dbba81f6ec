"""A bundle of two items and two users, made by hand: no training is needed to know what is in it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from recmill.artifacts.bundle.arrays import file_name
from recmill.artifacts.bundle.bundle import Bundle, publish_bundle, side_layout
from recmill.artifacts.bundle.entities import write_entities
from recmill.artifacts.bundle.row_files import write_rows
from recmill.embeddings.table import EmbeddingTable, KeyRecords, TableSpec
from recmill.features.plan import Plan
from recmill.recipe.load import recipe_from_dict, recipe_to_dict

TREE: dict[str, Any] = {
    "name": "small",
    "log": {
        "files": ["events.tsv"],
        "user": "user",
        "item": "item",
        "columns": [
            {"name": "user", "type": "text"},
            {"name": "item", "type": "int"},
            {"name": "words", "type": "text", "of": "item"},
            {"name": "price", "type": "float", "of": "item"},
            {"name": "click", "type": "int", "allowed": [0, 1], "required": True},
        ],
    },
    "labels": [{"name": "clicked", "columns": "click"}],
    "features": [
        {"columns": "user", "steps": ["key"]},
        {"columns": "item", "steps": ["key"]},
        {"columns": "words", "steps": [{"split": " "}, {"hash": 5}]},
        {"columns": "price", "steps": [{"fill": 2.5}]},
    ],
}
MODELS = {
    "retrieval": {"user": ["user"], "item": ["item", "words"], "dim": 2},
    "ranking": {
        "numbers": ["price"],
        "keys": ["user", "item", "words"],
        "wide": [],
        "label": "clicked",
        "split": True,
    },
}


def write_bundle(
    into: Path,
    items: tuple[int, ...] = (1, 2),
    row: float = 1.0,
    tree: dict[str, Any] | None = None,
    evaluation: dict[str, Any] | None = None,
) -> Bundle:
    """Every row of the table of items is `row`; all else follows from the ids."""
    plan = Plan(recipe_from_dict(tree or TREE, "small"))
    plan.pending()
    plan.save(into / "plan")
    columns = plan.columns()
    for collection, tables in {
        "user": ["user"],
        "item": ["item", "words"],
        "deep": ["user", "item", "words"],
    }.items():
        for name in tables:
            folder = into / "tables" / collection / file_name(name)
            write_rows(folder, _table(name, plan, items, row))
    raw = {
        "item": pl.DataFrame(
            {"item": items, "words": ["red hat" for _ in items], "price": [float(item) for item in items]}
        ),
        "user": pl.DataFrame({"user": ["ann", "bob"]}),
    }
    for side, folder in (("user", into / "users"), ("item", into / "items")):
        layout = side_layout(columns, MODELS, side)
        features = plan.apply(raw[side], labels=False, only=layout.features)
        write_entities(folder, side, raw[side], features, layout, side)
    np.save(into / "items" / "popularity.npy", np.arange(len(items), dtype=np.float32))
    (into / "graphs").mkdir()
    (into / "graphs" / "rank.onnx").write_bytes(b"a graph")
    return publish_bundle(
        into,
        {
            "recipe": recipe_to_dict(plan.recipe),
            "columns": [asdict(column) for column in columns],
            "rows_dtype": "float32",
            "models": MODELS,
            "evaluation": evaluation,
        },
    )


def _table(name: str, plan: Plan, items: tuple[int, ...], row: float) -> EmbeddingTable:
    table = EmbeddingTable(TableSpec(name, 2, "sgd", num_rows=5 if name == "words" else None))
    if name == "item":
        keys = plan.apply(pl.DataFrame({"item": items}), labels=False, only=["item"])["item"].to_numpy()
        size = len(items)
        stamps = np.ones(size, np.uint32)
        rows = np.full((size, 2), row, np.float32)
        table.load(KeyRecords(keys, rows, np.empty((size, 0), np.float32), stamps, stamps))
    return table
