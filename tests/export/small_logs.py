"""Tiny logs with literal rows, and recipes that read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.features.plan import Plan
from recmill.recipe.load import recipe_from_dict
from recmill.recipe.recipe import Recipe
from recmill.stages.export.snapshot import EntitySnapshot, read_snapshot
from recmill.stages.train.source import LogData
from recmill.stages.train.train import TrainConfig, train


def clicks_recipe(**changes: Any) -> Recipe:
    """user, item, time, page and click; nothing that has to be fitted."""
    tree: dict[str, Any] = {
        "name": "clicks",
        "log": {
            "files": ["events*.csv"],
            "separator": ",",
            "user": "user",
            "item": "item",
            "time": "time",
            "columns": [
                {"name": "user", "type": "text"},
                {"name": "item", "type": "int"},
                {"name": "time", "type": "int"},
                {"name": "page", "type": "text"},
                {"name": "click", "type": "int"},
                {"name": "price", "type": "float", "of": "item"},
                {"name": "country", "type": "text", "of": "user"},
            ],
        },
        "labels": [{"name": "clicked", "columns": "click"}],
        "features": [{"columns": ["user", "item", "page"], "steps": ["key"]}],
        "retrieval": {"label": "clicked", "user": "user", "item": "item"},
    }
    return recipe_from_dict({**tree, **changes})


SIDE_TABLES = {
    "goods": {
        "files": ["goods.csv"],
        "separator": ",",
        "columns": [{"name": "item", "type": "int"}, {"name": "title", "type": "text"}],
    },
    "people": {
        "files": ["people.csv"],
        "separator": ",",
        "columns": [{"name": "user", "type": "text"}, {"name": "age", "type": "int"}],
    },
}


def history(**changes: Any) -> dict[str, Any]:
    return {"history": {"columns": ["item"], "by": "user", "order": "time", **changes}}


def entity_snapshot(recipe: Recipe, folder: Path, *files: str, **others: str) -> EntitySnapshot:
    """What these files of events say; `others` are side tables."""
    log = folder / "log"
    log.mkdir()
    for number, rows in enumerate(files):
        (log / f"events{number}.csv").write_text(_lines(rows))
    for name, rows in others.items():
        (log / f"{name}.csv").write_text(_lines(rows))
    return read_snapshot(recipe, Plan(recipe), str(log), folder / "work")


def _lines(rows: str) -> str:
    return "".join(f"{row.strip()}\n" for row in rows.strip().splitlines())


def trained_clicks(folder: Path) -> Checkpoint:
    """A small ranker of the recipe above, trained from its log: quick to export."""
    ranking = {"model": "dlrm", "label": "clicked", "embedding_dim": 4, "bottom": [4], "top": [4]}
    features = [
        {"columns": ["user", "item", "page"], "steps": ["key"]},
        {"columns": "price", "steps": [{"fill": 0}]},
    ]
    recipe = clicks_recipe(ranking=ranking, retrieval=None, features=features)
    (folder / "log").mkdir()
    rows = [f"u{n % 7},{n * n % 11},{n},p{n % 3},{n % 5 % 2},{n % 4}.5,DE" for n in range(500)]
    (folder / "log" / "events0.csv").write_text(_lines("\n".join(rows)))
    source = LogData(recipe, str(folder / "log"))
    train(recipe, source, folder / "checkpoint", TrainConfig(threads=1))
    return Checkpoint.open(folder / "checkpoint")
