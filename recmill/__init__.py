"""recmill: from raw click logs to a served recommender.

    recipe = recmill.load_recipe("quickstart")
    table = recmill.prepare(recipe, data)
    checkpoint = recmill.train(recipe, table)
    print(recmill.evaluate(checkpoint, table))
    bundle = recmill.export(checkpoint)
    recmill.open_bundle(bundle).recommend("u1", k=10)

What `__all__` names is covered by semantic versioning; modules below this one are private. See docs/python.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recmill.api.arguments import load_recipe
from recmill.api.stages import evaluate, export, open_bundle, prepare, preview, score, train
from recmill.errors import (
    ArtifactError,
    FeatureError,
    LogError,
    MissingPackage,
    RecipeError,
    RecmillError,
    ResourceError,
    ServingError,
    StopTraining,
    TrainingError,
)

if TYPE_CHECKING:
    from recmill.api.results import EvaluationReport
    from recmill.artifacts.bundle.bundle import Bundle
    from recmill.artifacts.checkpoint.checkpoint import Checkpoint
    from recmill.dataset.table import Table
    from recmill.recipe.recipe import Recipe
    from recmill.stages.score.score import ScoreResult
    from recmill.stages.serve.messages import Answer
    from recmill.stages.serve.recommender import Recommender
    from recmill.stages.train.trainer import TrainProgress

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "ArtifactError",
    "Bundle",
    "Checkpoint",
    "EvaluationReport",
    "FeatureError",
    "LogError",
    "MissingPackage",
    "Recipe",
    "RecipeError",
    "RecmillError",
    "Recommender",
    "ResourceError",
    "ScoreResult",
    "ServingError",
    "StopTraining",
    "Table",
    "TrainProgress",
    "TrainingError",
    "evaluate",
    "export",
    "load_recipe",
    "open_bundle",
    "prepare",
    "preview",
    "score",
    "train",
]

# Classes whose modules load packages that take seconds: they are imported when they are first asked for.
_MODULES = {
    "Answer": "recmill.stages.serve.messages",
    "Bundle": "recmill.artifacts.bundle.bundle",
    "Checkpoint": "recmill.artifacts.checkpoint.checkpoint",
    "EvaluationReport": "recmill.api.results",
    "Recipe": "recmill.recipe.recipe",
    "Recommender": "recmill.stages.serve.recommender",
    "ScoreResult": "recmill.stages.score.score",
    "Table": "recmill.dataset.table",
    "TrainProgress": "recmill.stages.train.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f'module "recmill" has no attribute "{name}"')
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
