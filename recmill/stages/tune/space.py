"""From the recipe's `[tune]` to what a search draws from, and from what it drew back to recipes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from recmill.recipe import recipe as r
from recmill.recipe.load import recipe_to_dict
from recmill.recipe.tuning import kind_at, number_kind

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Values = Mapping[str, Any]  # by key path, as TOML has them
Drawn = Mapping[
    str, Any
]  # the same as the search knows them: choices as their JSON text, numbers as they are
_MOST_LISTED = 10_000


def distributions(space: Mapping[str, r.Dimension]) -> dict[str, BaseDistribution]:
    """What each key is drawn from."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found: dict[str, BaseDistribution] = {}
    for key, dimension in space.items():
        if isinstance(dimension, r.Choices):
            found[key] = CategoricalDistribution([json.dumps(value) for value in dimension.values])
        elif isinstance(dimension, r.Range) and number_kind(kind_at(key)) is int:
            step = int(dimension.step or 1)
            found[key] = IntDistribution(int(dimension.low), int(dimension.high), dimension.log, step)
        elif isinstance(dimension, r.Range):
            found[key] = FloatDistribution(dimension.low, dimension.high, dimension.log, dimension.step)
    return found


def values_of(space: Mapping[str, r.Dimension], drawn: Drawn) -> dict[str, Any]:
    """What was drawn, as a recipe has it."""
    return {
        key: json.loads(drawn[key]) if isinstance(dimension, r.Choices) else drawn[key]
        for key, dimension in space.items()
    }


def own_values(recipe: r.Recipe, space: Mapping[str, r.Dimension]) -> dict[str, Any] | None:
    """What the search would have drawn to get the recipe as it is; None when it is outside of the space."""
    tree = recipe_to_dict(recipe)
    drawn: dict[str, Any] = {}
    for key, dimension in space.items():
        own: Any = tree
        for name in key.split("."):
            own = own.get(name) if isinstance(own, dict) else None
        if isinstance(dimension, r.Choices):
            fitting = [json.dumps(value) for value in dimension.values if _holds(own, value)]
            drawn[key] = next(iter(fitting), None)
        elif isinstance(dimension, r.Range) and own is not None and dimension.low <= own <= dimension.high:
            drawn[key] = own
    return drawn if all(drawn.get(key) is not None for key in space) else None


def _holds(own: Any, value: Any) -> bool:
    """Whether a choice would change nothing."""
    if isinstance(value, dict) and isinstance(own, dict):
        return all(name in own and _holds(own[name], part) for name, part in value.items())
    return bool(own == value)


def all_drawn(space: Mapping[str, r.Dimension]) -> Iterator[dict[str, Any]] | None:
    """Every combination, when there are only choices and few enough to list; else None."""
    choices = [dimension.values for dimension in space.values() if isinstance(dimension, r.Choices)]
    if len(choices) < len(space) or prod(map(len, choices)) > _MOST_LISTED:
        return None
    texts = ([json.dumps(value) for value in values] for values in choices)
    return (dict(zip(space, one, strict=True)) for one in product(*texts))
