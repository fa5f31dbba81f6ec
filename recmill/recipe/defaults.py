"""Values that a recipe leaves open and the data decides. Artifacts store the resolved recipe."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

from recmill.recipe.crosses import with_crosses_of
from recmill.recipe.recipe import TREES, Ranking, Recipe, Retrieval, Training

DEFAULT_BATCH_SIZE = 2048
# Measured on real clicks: with fewer steps per epoch a ranker is under-trained, however large its learning rate.
_STEPS_IN_EPOCH = 450
_SMALLEST_BATCH = 64
# A larger batch has more negatives for two towers; a row of sasrec is a whole history.
_RETRIEVAL_BATCH = {"two_tower": DEFAULT_BATCH_SIZE, "sasrec": 64}

Model = TypeVar("Model", Ranking, Retrieval)


def resolve(recipe: Recipe, num_rows: int) -> Recipe:
    """The recipe with the values that follow from `num_rows`, the number of training rows."""
    ranking = recipe.ranking and _resolved(recipe.ranking, ranking_batch_size(num_rows), decay_from=0.5)
    retrieval = recipe.retrieval and _resolved(
        recipe.retrieval, _RETRIEVAL_BATCH.get(recipe.retrieval.model, DEFAULT_BATCH_SIZE), decay_from=1.0
    )
    return replace(recipe, ranking=ranking, retrieval=retrieval)


def is_resolved(recipe: Recipe) -> bool:
    """Whether nothing is left open."""
    return resolve(recipe, 0) == recipe


def as_prepared(recipe: Recipe, prepared: Recipe) -> Recipe:
    """The recipe with the values from its Table's log: crosses, and the format of its files."""
    tables = {
        name: table.with_text(prepared.tables[name]) if name in prepared.tables else table
        for name, table in recipe.tables.items()
    }
    recipe = replace(recipe, log=recipe.log.with_text(prepared.log), tables=tables)
    return with_crosses_of(recipe, prepared)


def is_resolution(stored: Recipe, recipe: Recipe) -> bool:
    """Whether a stored recipe is a resolution of this one."""
    recipe = as_prepared(recipe, stored)
    ranking, retrieval = recipe.ranking, recipe.retrieval
    if ranking is not None and stored.ranking is not None:
        ranking = _resolved_like(ranking, stored.ranking)
    if retrieval is not None and stored.retrieval is not None:
        retrieval = _resolved_like(retrieval, stored.retrieval)
    return stored == replace(recipe, ranking=ranking, retrieval=retrieval)


def _resolved_like(model: Model, stored: Model) -> Model:
    train = stored.train
    return _resolved(model, train.batch_size or DEFAULT_BATCH_SIZE, train.schedule.decay_from or 0.0)


def ranking_batch_size(num_rows: int) -> int:
    """The power of two nearest to the size that gives an epoch enough steps."""
    nearest = 1 << round(math.log2(max(1.0, num_rows / _STEPS_IN_EPOCH)))
    return min(max(nearest, _SMALLEST_BATCH), DEFAULT_BATCH_SIZE)


def _resolved(model: Model, batch_size: int, decay_from: float) -> Model:
    if model.model == TREES:  # no learning rate to decay
        return replace(model, train=replace(model.train, batch_size=model.train.batch_size or batch_size))
    return replace(model, train=_resolved_training(model.train, batch_size, decay_from))


def _resolved_training(train: Training, batch_size: int, decay_from: float) -> Training:
    schedule = train.schedule
    if schedule.decay_from is None:
        schedule = replace(schedule, decay_from=max(decay_from, schedule.warmup))
    return replace(train, batch_size=train.batch_size or batch_size, schedule=schedule)
