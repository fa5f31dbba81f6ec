"""A small recipe as a plain tree, to be changed by tests."""

from __future__ import annotations

import copy
from typing import Any

from recmill.errors import RecipeError
from recmill.recipe.load import recipe_from_dict
from recmill.recipe.recipe import Recipe

TREE: dict[str, Any] = {
    "name": "small",
    "log": {
        "files": ["events.tsv"],
        "user": "user",
        "item": "item",
        "time": "time",
        "columns": [
            {"name": "time", "type": "int"},
            {"name": "user, item", "type": "text"},
            {"name": "n1..n3", "type": "float"},
            {"name": "words", "type": "text"},
            {"name": "click", "type": "int", "allowed": [0, 1], "required": True},
        ],
    },
    "split": {"by": "tail", "held_out": 0.1},
    "labels": [{"name": "clicked", "columns": "click"}],
    "features": [
        {"columns": "user", "steps": ["vocabulary"]},
        {"columns": "item", "steps": [{"vocabulary": {"named": "item"}}]},
        {"columns": "n1..n3", "steps": [{"fill": 0}, "log"]},
        {"columns": "words", "steps": [{"split": " "}, {"hash": 100}]},
    ],
}


def small(**sections: Any) -> dict[str, Any]:
    """The tree with sections replaced; None removes one."""
    tree = {**copy.deepcopy(TREE), **sections}
    return {name: section for name, section in tree.items() if section is not None}


def load(**sections: Any) -> Recipe:
    return recipe_from_dict(small(**sections), "small.toml")


def problems(**sections: Any) -> list[str]:
    """What the loader says about the changed tree; an empty list when it is right."""
    try:
        load(**sections)
    except RecipeError as error:
        return list(error.problems)
    return []


def feature(*steps: Any, columns: Any = "n1", **keys: Any) -> list[dict[str, Any]]:
    return [{"columns": columns, "steps": list(steps), **keys}]
