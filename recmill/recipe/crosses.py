"""`[ranking] cross = "auto"`: the columns that can be crossed, and the recipe with the chosen crosses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from recmill.recipe import steps as s
from recmill.recipe.kinds import is_list, kinds_of_columns, owner_of, owners_of_columns
from recmill.recipe.recipe import Feature, Ranking, Recipe

_MIN_COUNT = 5  # minimal rows per value of a cross: rarer values only memorise their rows
_OF_CATEGORIES = (s.Vocabulary, s.Hash, s.Key, s.Map)


@dataclass(frozen=True)
class CrossColumn:
    """A column of the wide part as input of a cross: its values, or its buckets.

    `num_quantiles`: the edges are quantiles of training rows, to be fitted.
    """

    name: str
    edges: tuple[float, ...] = ()
    num_quantiles: int = 0


def columns_to_cross(recipe: Recipe) -> list[CrossColumn]:
    """The columns of `ranking.wide` that a cross can use: categories as they are, and numbers in buckets."""
    kinds = kinds_of_columns(recipe)
    features = {feature.name: feature for feature in recipe.features}
    wide = recipe.ranking.wide if recipe.ranking is not None else ()
    found: dict[str, CrossColumn] = {}
    for feature in (features[name] for name in wide if name in features):
        if len(feature.columns) != 1 or len(feature.steps) != 1 or is_list(kinds.get(feature.columns[0], "")):
            continue
        column, step = feature.columns[0], feature.steps[0]
        if isinstance(step, s.Buckets):
            found[column] = CrossColumn(column, step.edges)
        elif isinstance(step, s.Quantiles):
            found[column] = CrossColumn(column, num_quantiles=step.buckets)
        elif isinstance(step, _OF_CATEGORIES):
            found[column] = CrossColumn(column)
    return list(found.values())


def is_open(recipe: Recipe) -> bool:
    """Whether the search for crosses is still to be done."""
    return recipe.ranking is not None and recipe.ranking.cross is not None


def with_crosses(recipe: Recipe, pairs: Sequence[tuple[CrossColumn, CrossColumn]]) -> Recipe:
    """The recipe with a feature for each pair, read by the wide part alone."""
    owners, names = owners_of_columns(recipe), {feature.name for feature in recipe.features}
    crosses = []
    for pair in pairs:
        columns = tuple(column.name for column in pair)
        edges = tuple(column.edges for column in pair)
        cross = s.Cross(edges=edges) if any(edges) else s.Cross()
        name = _free_name("_".join(columns), names)
        names.add(name)
        steps = (cross, s.Vocabulary(min_count=_MIN_COUNT))
        crosses.append(Feature(name, columns, steps, owner_of(columns, owners)))
    return _with_features(recipe, crosses)


def with_crosses_of(recipe: Recipe, prepared: Recipe) -> Recipe:
    """The recipe with the crosses that were chosen when its Table was prepared."""
    return _with_features(recipe, prepared.features[len(recipe.features) :]) if is_open(recipe) else recipe


def _with_features(recipe: Recipe, crosses: Sequence[Feature]) -> Recipe:
    ranking = recipe.ranking
    assert ranking is not None
    every = tuple(feature.name for feature in recipe.features)
    ranking = replace(
        ranking,
        cross=None,
        features=_named_features(ranking, every),
        wide=(*ranking.wide, *(feature.name for feature in crosses)),
    )
    return replace(recipe, features=(*recipe.features, *crosses), ranking=ranking)


def _named_features(ranking: Ranking, every: tuple[str, ...]) -> tuple[str, ...]:
    """The features that the model read without crosses: embedding the crosses too costs more than it gains."""
    return ranking.features or every


def _free_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_cross"
    return name
