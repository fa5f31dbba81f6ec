"""Learners by name: new ones from a recipe, or saved ones from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.artifacts.checkpoint.step import StepCheckpoint
from recmill.embeddings.table import DiskTier
from recmill.errors import RecmillError
from recmill.features.chain import ColumnInfo
from recmill.learner.ranking import Ranker
from recmill.learner.retrieval import Retriever
from recmill.learner.sequences import SequenceRetriever
from recmill.recipe.recipe import Recipe


@dataclass(frozen=True)
class SavedLearner:
    """A learner restored from one checkpoint."""

    learner: Ranker | Retriever
    checkpoint: StepCheckpoint


def models_of(recipe: Recipe) -> list[str]:
    """The models of a recipe, in the order in which they are trained."""
    return [name for name in ("retrieval", "ranking") if getattr(recipe, name) is not None]


def new_learner(
    recipe: Recipe,
    model: str,
    columns: Sequence[ColumnInfo],
    num_threads: int,
    disk: DiskTier | None = None,
) -> Ranker | Retriever:
    """An untrained learner."""
    if model == "ranking" and recipe.ranking is not None:
        return Ranker(recipe.ranking, columns, num_threads, disk)
    if model == "retrieval" and recipe.retrieval is not None:
        make = SequenceRetriever if recipe.retrieval.model == "sasrec" else Retriever
        return make(recipe, columns, num_threads, disk)
    models = ", ".join(models_of(recipe)) or "none"
    raise RecmillError(f'Recipe "{recipe.name}" has no [{model}]; its models: {models}.')


def open_learner(folder: Checkpoint, model: str, which: str = "best", num_threads: int = 1) -> SavedLearner:
    """The model of a `best` or `last` checkpoint, or of a step; every file is verified against its digest."""
    checkpoints = folder.of(model)
    checkpoint = checkpoints.find(which)
    learner = new_learner(folder.recipe, model, folder.columns, num_threads)
    learner.load_arrays(checkpoints.restore(checkpoint, learner.tables))
    learner.steps = checkpoint.step
    return SavedLearner(learner, checkpoint)
