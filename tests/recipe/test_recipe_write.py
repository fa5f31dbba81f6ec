"""Recipes written as TOML load as they were."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from small_recipe import feature, load

from recmill.recipe.load import load_recipe, recipe_from_dict, shipped_recipes
from recmill.recipe.recipe import Recipe
from recmill.recipe.write import toml_of


def again(recipe: Recipe) -> Recipe:
    return recipe_from_dict(tomllib.loads(toml_of(recipe)))


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_a_shipped_recipe_loads_as_it_was(name: str) -> None:
    recipe = load_recipe(name)
    assert again(recipe) == recipe
    assert again(recipe).tune == recipe.tune


@pytest.mark.parametrize(
    "features",
    [
        # Each is its own feature; together they would be one.
        feature({"expression": "n1 + 1"}, columns="n1")
        + feature({"expression": "n1 + 1"}, columns="n1", name="x"),
        feature("pack", columns="n1") + feature("pack", columns="n2"),
        feature({"cross": "\x1f\x7f\"'\\\n é"}, {"hash": 10}, columns="user, item", name="pair"),
        feature({"map": {"ids": {"a b": 1, "": 2, "é.": 3}}}, columns="user"),
        feature("log", columns="n1..n3", name="{column}_log"),
        feature({"vocabulary": {"named": "item"}}, columns="item", of="context", dim=8),
        feature({"fill": 1e-9}, {"clip": {"max": 1e300}}, columns="n3, n1"),
    ],
)
def test_odd_features_load_as_they_were(features: list[dict[str, Any]]) -> None:
    recipe = load(features=features)
    assert again(recipe) == recipe


def test_neighbours_that_are_alike_share_an_entry_and_defaults_are_left_out() -> None:
    text = toml_of(load_recipe("criteo-deeprec"))
    assert '{ name = "i1..i13", type = "int" }' in text
    assert 'columns = "c1..c26"\nsteps = ["key"]' in text
    assert "micro_batches" not in text


def test_names_with_leading_zeros_and_gaps_are_kept() -> None:
    names = ["c08", "c09", "c10", "c11", "c13", "x", "y2", "y1"]
    columns = [{"name": name, "type": "int"} for name in names]
    features = [{"columns": name, "steps": [{"hash": 10}]} for name in names]
    recipe = load(
        log={"files": ["a.tsv"], "columns": [*columns, {"name": "click", "type": "int"}]},
        features=features,
    )
    assert again(recipe) == recipe
    assert [made.name for made in again(recipe).features] == names
