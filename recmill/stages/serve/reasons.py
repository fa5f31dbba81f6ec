"""Why an item is recommended: the items of the user's history that led to it, and a sentence that names them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from recmill.artifacts.bundle.entities import Entities
from recmill.dataset.batch import Array
from recmill.recipe.names import plain_name
from recmill.recipe.recipe import Recipe
from recmill.recipe.titles import title_column
from recmill.stages.serve import messages as m
from recmill.stages.serve.recall import Recaller

_RELATED = ("co_clicks", "ease", "transitions", "content")
_BY_LIKENESS = ("similar", "content")  # channels that compare vectors, whoever clicked
_MAX_REASONS = 3
_MAX_NAMED = 2  # items named in the sentence
_MAX_COMPARED = 50  # latest items of the user that are compared by vectors
_LEAST_COSINE = 0.5
# What users do to an item, by words in the name of the label.
_VERBS = {
    "click": "clicked",
    "view": "viewed",
    "watch": "watched",
    "buy": "bought",
    "bought": "bought",
    "purchase": "bought",
    "order": "ordered",
    "read": "read",
    "play": "played",
}
_BY_CHANNEL = {"popular": "popular with other users", "two_tower": "chosen by users like you"}


class Relation(NamedTuple):
    """An item of the history that led to a recommended one, by which channel, and its weight."""

    before: int
    channel: str
    weight: float


def relations(recaller: Recaller, profile: Array, items: Array) -> list[list[Relation]]:
    """For each item, the items of a profile that led to it, strongest first: by item-item models, else by vectors."""
    strongest: list[dict[int, Relation]] = [{} for _ in items]
    for number, relation in _by_models(recaller, profile, items):
        known = strongest[number].get(relation.before)
        if known is None or relation.weight > known.weight:
            strongest[number][relation.before] = relation
    for number, relation in _by_vectors(recaller, profile, items):
        if not strongest[number]:
            strongest[number][relation.before] = relation
    return [sorted(one.values(), key=lambda relation: -relation.weight)[:_MAX_REASONS] for one in strongest]


def _by_models(recaller: Recaller, profile: Array, items: Array) -> Iterator[tuple[int, Relation]]:
    """Weights as fractions of the largest weight of the profile's item."""
    number_of = {item: number for number, item in enumerate(items.tolist())}
    for channel in _RELATED:
        if (model := recaller.neighbours.get(channel)) is None:
            continue
        rows = model.rows_of(np.unique(profile))
        rows = rows[rows >= 0]
        before, (neighbours, weights) = model.items_of(rows), model.padded(rows)
        neighbours = model.items_of(neighbours)
        fractions = weights / np.maximum(np.abs(weights).max(axis=1, initial=0, keepdims=True), 1e-9)
        for row, column in np.argwhere(np.isin(neighbours, items) & (fractions > 0)).tolist():
            relation = Relation(int(before[row]), channel, float(fractions[row, column]))
            yield number_of[int(neighbours[row, column])], relation


def _by_vectors(recaller: Recaller, profile: Array, items: Array) -> Iterator[tuple[int, Relation]]:
    if recaller.tower is None or not len(profile) or not len(items):
        return
    before = np.unique(profile[-_MAX_COMPARED:])
    cosines = recaller.vectors.take(items) @ recaller.vectors.take(before).T
    for number, nearest in enumerate(cosines.argmax(axis=1).tolist()):
        cosine = float(cosines[number, nearest])
        if cosine >= _LEAST_COSINE and items[number] not in (-1, before[nearest]):
            yield number, Relation(int(before[nearest]), "similar", cosine)


def reasons(entities: Entities, recipe: Recipe, found: Sequence[Sequence[Relation]]) -> list[list[m.Reason]]:
    """Relations with ids and titles."""
    indices = np.unique([relation.before for one in found for relation in one]).astype(np.int64)
    names = dict(
        zip(
            indices.tolist(),
            zip(entities.ids(indices), titles(entities, recipe, indices), strict=True),
            strict=True,
        )
    )
    return [
        [
            m.Reason(
                id=names[before][0],
                title=names[before][1],
                channel=channel,
                weight=min(1.0, round(weight, 4)),
            )
            for before, channel, weight in one
        ]
        for one in found
    ]


def titles(entities: Entities, recipe: Recipe, indices: Array) -> list[str | None]:
    """Titles of items; None where the log has none."""
    column = title_column(recipe)
    if column is None or column not in entities.raw_schema:
        return [None] * len(indices)
    return entities.raw(indices, [column]).to_series(0).to_list()


def sentence(recipe: Recipe, because: Sequence[m.Reason], channel: str) -> str:
    """The reason as a sentence: what led to the item, or else what its channel finds."""
    if not because:
        return _BY_CHANNEL.get(channel, "related to what you chose before")
    named = " and ".join(str(reason.title or reason.id) for reason in because[:_MAX_NAMED])
    return (
        f"similar to {named}"
        if because[0].channel in _BY_LIKENESS
        else f"because you {_verb(recipe)} {named}"
    )


def _verb(recipe: Recipe) -> str:
    label = recipe.click_label
    if label is None:
        return "chose"
    return next((verb for part, verb in _VERBS.items() if part in plain_name(label)), "liked")
