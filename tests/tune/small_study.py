"""A search so small that its trials take a moment."""

from __future__ import annotations

from recmill.recipe.load import load_recipe
from recmill.recipe.recipe import Recipe

FEW_STEPS = [
    "ranking.embedding_dim=4",
    "ranking.bottom=[8]",
    "ranking.top=[8]",
    "ranking.train.batch_size=256",
    "ranking.train.evaluations=2",
]
SPACE = 'tune.space={ "ranking.embedding_dim" = [4, 2], "ranking.train.dense.learning_rate" = [0.003, 1e30] }'


def small_recipe(*overrides: str) -> Recipe:
    """A ranker that is trained in a moment; of four combinations, the two with a huge rate fail."""
    return load_recipe("criteo-deeprec", [*FEW_STEPS, SPACE, *overrides])
