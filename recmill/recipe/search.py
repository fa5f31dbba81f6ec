"""Recipes with values from their `[tune]`, and whether these values are compatible."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from recmill.errors import RecipeError
from recmill.recipe import recipe as r
from recmill.recipe.check_models import settings_of_others
from recmill.recipe.convert import show
from recmill.recipe.load import recipe_from_dict, recipe_to_dict
from recmill.recipe.tuning import MODELS, merged, tuned_model


def changed(recipe: r.Recipe, values: Mapping[str, Any]) -> r.Recipe:
    """The recipe with values set by key path; RecipeError when they are incompatible.

    Where they set another model, settings that apply only to the recipe's own model are left out.
    """
    own = recipe_to_dict(recipe)
    tree = merged(own, values)
    for section in set(MODELS) & set(own):
        if tree[section].get("model") != own[section].get("model"):
            kept = _without(own[section], settings_of_others(section, tree[section]["model"]))
            tree = merged({**own, section: kept}, values)
    return recipe_from_dict(tree, f"recipe {recipe.name}")


def _without(section: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name not in names}


def searched(recipe: r.Recipe) -> r.Tune:
    """The recipe's [tune]; RecipeError when there is nothing to search, or a value that fits no other."""
    source = f"recipe {recipe.name}"
    if recipe.tune is None:
        example = '--set "tune.space.ranking.embedding_dim=[8, 16]"'
        raise RecipeError(source, [f"tune is missing; say what to search, such as {example}"])
    model = tuned_model(recipe.tune)
    if getattr(recipe, model) is None:
        raise RecipeError(source, [f"tune.space has keys of {model}, but the recipe has no [{model}]"])
    problems = list(_problems(recipe, recipe.tune.space))
    if problems:
        raise RecipeError(source, problems)
    return recipe.tune


def _problems(recipe: r.Recipe, space: Mapping[str, r.Dimension]) -> Iterator[str]:
    """Choices that are compatible neither with the recipe as it is, nor with any choice of one other key."""
    for key, dimension in space.items():
        for value in dimension.values if isinstance(dimension, r.Choices) else ():
            reason = _why_not(recipe, {key: value})
            if reason and all(_why_not(recipe, {key: value, **other}) for other in _others(space, key)):
                yield (
                    f"tune.space.{key} has {show(value)}, which goes with no value of the other keys: {reason}. "
                    "Keys that depend on each other can be set together, by choices that are tables"
                )


def _others(space: Mapping[str, r.Dimension], key: str) -> Iterator[dict[str, Any]]:
    for other, dimension in space.items():
        if other != key and isinstance(dimension, r.Choices):
            yield from ({other: value} for value in dimension.values)


def _why_not(recipe: r.Recipe, values: Mapping[str, Any]) -> str | None:
    try:
        changed(recipe, values)
    except RecipeError as error:
        return error.problems[0]
    return None
