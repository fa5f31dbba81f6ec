"""A log of users and items alone needs no label: every row is an interaction."""

from __future__ import annotations

from typing import Any

import pytest

from recmill.errors import RecipeError
from recmill.recipe.load import recipe_from_dict


def tree(**sections: Any) -> dict[str, Any]:
    columns = [{"name": "User-ID, ISBN", "type": "text"}]
    return {
        "name": "books",
        "log": {"files": ["log"], "user": "User-ID", "item": "ISBN", "columns": columns},
        "features": [{"columns": ["User-ID", "ISBN"], "steps": ["vocabulary"]}],
        "retrieval": {"user": "User-ID", "item": "ISBN"},
        **sections,
    }


def test_retrieval_without_a_label_learns_from_every_row() -> None:
    recipe = recipe_from_dict(tree())
    assert recipe.retrieval is not None
    assert recipe.click_label == recipe.retrieval.label == "interaction"
    assert recipe.labels[0].columns == ("ISBN",)


def test_where_there_are_labels_one_must_be_named() -> None:
    labels = [{"name": "read", "columns": "ISBN", "steps": [{"map": {"ids": {"x": 1}}}]}]
    with pytest.raises(RecipeError, match=r"retrieval\.label is missing"):
        recipe_from_dict(tree(labels=labels))
