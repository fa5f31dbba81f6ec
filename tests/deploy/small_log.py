"""A log of a few hundred rows and a recipe of one's own that trains on it in a moment."""

from __future__ import annotations

from pathlib import Path

from recmill.recipe.load import recipe_from_dict
from recmill.recipe.recipe import Recipe

NUM_ROWS = 600


def small_recipe() -> Recipe:
    """Users of even number click items of even number."""
    return recipe_from_dict(
        {
            "name": "small",
            "log": {
                "files": ["events*.tsv"],
                "columns": [
                    {"name": "user", "type": "int"},
                    {"name": "item", "type": "int"},
                    {"name": "click", "type": "int", "allowed": [0, 1], "required": True},
                ],
            },
            "split": {"by": "tail", "held_out": 0.2},
            "labels": [{"name": "click", "columns": "click"}],
            "features": [
                {"columns": "user", "steps": [{"vocabulary": {}}]},
                {"columns": "item", "steps": [{"vocabulary": {}}]},
            ],
            "ranking": {
                "model": "wide_deep",
                "label": "click",
                "embedding_dim": 4,
                "hidden": [8],
                "train": {"batch_size": 64, "epochs": 2, "evaluations": 1},
            },
        }
    )


def write_log(folder: Path) -> None:
    """Two files, so that there is work for more than one task."""
    for number in range(2):
        rows = range(number * NUM_ROWS // 2, (number + 1) * NUM_ROWS // 2)
        lines = [f"{row % 20}\t{row % 7}\t{int(row % 20 % 2 == row % 7 % 2)}\n" for row in rows]
        (folder / f"events{number}.tsv").write_text("".join(lines))
