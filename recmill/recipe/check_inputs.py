"""Validation of the models' inputs: kinds, dims, and what evaluation needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from recmill.recipe import recipe as r
from recmill.recipe.check_features import ends_as
from recmill.recipe.check_models import vocabulary_of
from recmill.recipe.convert import Paths, default_of, paths_of
from recmill.recipe.kinds import describe, element_of, is_list, kinds_of_columns, width_of

_FIX_LENGTH = "models take those of one length: end it with pad, reduce it, or leave it out"


def check_inputs(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    """Check the features of each model. Unknown names and invalid steps are reported elsewhere."""
    columns = kinds_of_columns(recipe)
    found = {feature.name: ends_as(feature, columns) for feature in recipe.features}
    kinds = {name: kind for name, kind in found.items() if kind is not None}
    if recipe.ranking is not None:
        yield from _check_ranking(recipe, recipe.ranking, kinds, paths)
    if recipe.retrieval is not None:
        yield from _check_retrieval(recipe, recipe.retrieval, kinds, paths)


def _check_ranking(
    recipe: r.Recipe, ranking: r.Ranking, kinds: Mapping[str, str], paths: Paths
) -> Iterator[str]:
    names = ranking.features_among(feature.name for feature in recipe.features)
    path = "ranking.features" if ranking.features else "ranking.features is not given, so all are used; it"
    if ranking.model != r.TREES:
        yield from _check_kinds(recipe, path, names, kinds)
    yield from _check_dims(recipe, "ranking", names, kinds, paths)
    for name in ranking.wide:
        if name in kinds and not _has_rows(kinds[name]):
            yield f'ranking.wide has "{name}", which ends as {describe(kinds[name])}; only ids and keys have weights'
    for name in ranking.trees.features if ranking.trees is not None else ():
        if name in kinds and not _is_number(kinds[name]):
            yield f'ranking.trees.features has "{name}", which ends as {describe(kinds[name])}; trees take numbers'
    if ranking.model in r.OVER_DLRM and all(name in kinds for name in names):
        widths = {feature.name: width_of(feature) for feature in recipe.features}
        num_numbers = sum(widths[name] or 1 for name in names if not _has_rows(kinds[name]))
        yield from _check_vectors(ranking, num_numbers, sum(_has_rows(kinds[name]) for name in names))


def _check_vectors(ranking: r.Ranking, num_numbers: int, num_embedded: int) -> Iterator[str]:
    """Check the vectors that interact in a DLRM: one for each embedded feature, and one for all numbers."""
    if ranking.bottom and not num_numbers:
        yield "ranking.bottom has no meaning without features that are numbers; remove it"
    if ranking.interaction != "dot":
        return
    if num_embedded + bool(num_numbers) == 1:
        yield 'ranking.interaction is "dot", which needs two features or more; use "cat"'
    elif not ranking.bottom and num_numbers not in (0, ranking.embedding_dim):
        yield (
            f"ranking.bottom is missing: numbers come out of it as one more vector of embedding_dim = "
            f'{ranking.embedding_dim} for interaction = "dot", but there are {num_numbers} of them; '
            f"end it with {ranking.embedding_dim}"
        )


def _check_retrieval(
    recipe: r.Recipe, retrieval: r.Retrieval, kinds: Mapping[str, str], paths: Paths
) -> Iterator[str]:
    for side in ("user", "item"):
        names = getattr(retrieval, side)
        yield from _check_kinds(recipe, f"retrieval.{side}", names, kinds)
        yield from _check_dims(recipe, "retrieval", names, kinds, paths)
    user, item = recipe.log.user, recipe.log.item
    if user is None or item is None:
        return
    of_items = [feature for feature in recipe.features if feature.columns == (item,)]
    of_items = [feature for feature in of_items if feature.name in retrieval.item and feature.name in kinds]
    if of_items and not any(kinds[feature.name] in ("id", "key") for feature in of_items):
        yield (
            f'retrieval.item has no id or key made of "{item}" alone; it identifies items: '
            "add a feature of it that ends with vocabulary or key"
        )
    if recipe.split is not None and user not in recipe.table.keep and not _has_id(recipe, user, kinds):
        yield (
            f'retrieval is evaluated user by user, but nothing in the Table identifies them: add "{user}" to '
            f'table.keep, or a feature made of "{user}" alone that ends with vocabulary or key'
        )


def _has_id(recipe: r.Recipe, column: str, kinds: Mapping[str, str]) -> bool:
    made_of_it = [feature.name for feature in recipe.features if feature.columns == (column,)]
    return any(kinds.get(name, "id") in ("id", "key") for name in made_of_it)


def _check_kinds(
    recipe: r.Recipe, path: str, names: Sequence[str], kinds: Mapping[str, str]
) -> Iterator[str]:
    features = {feature.name: feature for feature in recipe.features}
    for name in names:
        if name in kinds and _is_ragged(features[name], kinds[name]):
            yield f'{path} has "{name}", which ends as {describe(kinds[name])} of any length; {_FIX_LENGTH}'
    if names and all(name in kinds and not _has_rows(kinds[name]) for name in names):
        yield f"{path} has only numbers; a model needs at least one feature of ids or keys"


def _check_dims(
    recipe: r.Recipe, section: str, names: Sequence[str], kinds: Mapping[str, str], paths: Paths
) -> Iterator[str]:
    """Check features with a dim of their own: some models allow none, and a vocabulary has one table."""
    model = getattr(recipe, section)
    where = zip(paths_of(paths, "features", recipe.features), recipe.features, strict=True)
    used = {path: feature for path, feature in where if feature.name in names}
    used = {path: feature for path, feature in used.items() if _has_rows(kinds.get(feature.name, ""))}
    unpooled = _unpooled(recipe, section)
    for path, feature in used.items():
        dim, vocabulary = feature.dim or model.embedding_dim, vocabulary_of(feature)
        sharing = [
            other for other in used.values() if vocabulary is not None and vocabulary_of(other) == vocabulary
        ]
        is_other = feature.dim is not None and feature.dim > 0 and dim != model.embedding_dim
        if is_other and (model.model in ("lr", "sasrec") or any(one.name in unpooled for one in sharing)):
            yield (
                f'{path}.dim is {dim}, but {section}.embedding_dim is {model.embedding_dim}, and "{model.model}" '
                "reads this feature with no other dim: remove it"
            )
        elif is_other and any((other.dim or model.embedding_dim) != dim for other in sharing):
            yield (
                f'{path}.dim is {dim}, but other features of vocabulary "{vocabulary}", which share its table, '
                "have another; give all of them the same"
            )


def _unpooled(recipe: r.Recipe, section: str) -> Sequence[str]:
    """Lists that a model reads unpooled."""
    return recipe.ranking.sequences if section == "ranking" and recipe.ranking is not None else ()


def _has_rows(kind: str) -> bool:
    """Whether values are looked up in an embedding table."""
    return element_of(kind) in ("id", "key")


def _is_ragged(feature: r.Feature, kind: str) -> bool:
    """Whether it ends as lists of numbers of different lengths."""
    return is_list(kind) and not _has_rows(kind) and width_of(feature) is None


def _is_number(kind: str) -> bool:
    return not is_list(kind) and not _has_rows(kind)


# labels


def check_binary_labels(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    """Check that labels are 0 or 1, or have a numeric loss.

    This checks the recipe; rows are checked as they are prepared.
    """
    columns = {column.name: column for column in recipe.log.columns}
    for path, label in zip(paths_of(paths, "labels", recipe.labels), recipe.labels, strict=True):
        column = columns.get(label.columns[0]) if label.columns else None
        if label.name not in binary_labels(recipe) or label.steps or column is None:
            continue
        others = [value for value in column.allowed or () if value not in (0, 1)]
        if others and not isinstance(others[0], str):
            yield f'{path} is column "{column.name}", which may be {others[0]}; {how_to_threshold(column.name)}'


def binary_labels(recipe: r.Recipe) -> set[str]:
    """The binary labels that models learn."""
    of_ranking = recipe.ranking.binary_labels if recipe.ranking is not None else ()
    return {*of_ranking, *([recipe.retrieval.label] if recipe.retrieval is not None else [])}


def how_to_threshold(column: str) -> str:
    """The advice for a rating, a count or a duration as a label."""
    step = f'{{ expression = {{ sql = "{column} >= 4", type = "int" }} }}'
    return (
        f"models learn labels of 0 and 1. Write down what counts as 1 in its steps, such as {step}, "
        'or learn the number itself by a loss such as "squared"'
    )


# evaluation


def check_refit(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    """Check that models that train on the eval rows are measured on others."""
    split = recipe.split
    if not recipe.refit:
        return
    if recipe.ranking is None and recipe.retrieval is None:
        yield "refit needs a model: [ranking] or [retrieval]; add one, or remove it"
    if split is None or not (split.by == "last" or split.halve or split.test_from is not None):
        yield (
            "refit learns from the eval rows, so that only test rows can measure it, and there are none; add "
            "split.halve = true, or remove refit"
        )
    if recipe.ranking is not None and recipe.ranking.trees is not None:
        yield "refit cannot be combined with ranking.trees, which stop and are blended by eval rows; remove one of them"


def check_held_out(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    """Check that held-out rows exist for everything that evaluations control.

    Without a split there are no evaluations.
    """
    if recipe.split is not None:
        return
    for name in ("ranking", "retrieval"):
        model = getattr(recipe, name)
        for key in ("target", "patience") if model is not None else ():
            if getattr(model.train, key) != default_of(r.Training, key):
                yield f"{name}.train.{key} needs held-out rows to measure; add [split], or remove it"
        if model is not None and model.train.schedule.drop_factor is not None:
            yield f"{name}.train.schedule.drop_factor needs held-out rows to measure; add [split], or remove it"
