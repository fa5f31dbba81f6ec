"""recmill: from raw click logs to a served recommender.

    model = recmill.fit(events, user="user", item="item", time="time", items=items)
    model.recommend("u1", k=10)

or stage by stage:

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
from recmill.api.commands import check, deploy, generate, load, recipes, rollback, run, size, tune
from recmill.api.fit import fit
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
    from recmill.api.fitted import Explanation, FittedRecommender, Recommendations, RunningServer
    from recmill.api.results import EvaluationReport
    from recmill.artifacts.bundle.bundle import Bundle
    from recmill.artifacts.checkpoint.checkpoint import Checkpoint
    from recmill.artifacts.feature_store.load import LoadResult
    from recmill.dataset.table import Table
    from recmill.recipe.recipe import Recipe
    from recmill.stages.check.check import CheckResult
    from recmill.stages.deploy.sizing import Sizing
    from recmill.stages.evaluate.evaluate import EvaluateResult
    from recmill.stages.run.run import RunResult
    from recmill.stages.score.score import ScoreResult
    from recmill.stages.serve.messages import Answer
    from recmill.stages.serve.recommender import Recommender
    from recmill.stages.train.trainer import TrainProgress
    from recmill.stages.tune.front import TrialResult
    from recmill.stages.tune.tune import TuneResult
    from recmill.synthetic.generate import GeneratedLog

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "ArtifactError",
    "Bundle",
    "CheckResult",
    "Checkpoint",
    "EvaluateResult",
    "EvaluationReport",
    "Explanation",
    "FeatureError",
    "FittedRecommender",
    "GeneratedLog",
    "LoadResult",
    "LogError",
    "MissingPackage",
    "Recipe",
    "RecipeError",
    "RecmillError",
    "Recommendations",
    "Recommender",
    "ResourceError",
    "RunResult",
    "RunningServer",
    "ScoreResult",
    "ServingError",
    "Sizing",
    "StopTraining",
    "Table",
    "TrainProgress",
    "TrainingError",
    "TrialResult",
    "TuneResult",
    "check",
    "deploy",
    "evaluate",
    "export",
    "fit",
    "generate",
    "load",
    "load_recipe",
    "open_bundle",
    "prepare",
    "preview",
    "recipes",
    "rollback",
    "run",
    "score",
    "size",
    "train",
    "tune",
]

# Classes whose modules import heavy packages: loaded on first access.
_MODULES = {
    "Answer": "stages.serve.messages",
    "Bundle": "artifacts.bundle.bundle",
    "CheckResult": "stages.check.check",
    "Checkpoint": "artifacts.checkpoint.checkpoint",
    "EvaluateResult": "stages.evaluate.evaluate",
    "EvaluationReport": "api.results",
    "Explanation": "api.fitted",
    "FittedRecommender": "api.fitted",
    "GeneratedLog": "synthetic.generate",
    "LoadResult": "artifacts.feature_store.load",
    "Recipe": "recipe.recipe",
    "Recommendations": "api.fitted",
    "Recommender": "stages.serve.recommender",
    "RunResult": "stages.run.run",
    "RunningServer": "api.fitted",
    "ScoreResult": "stages.score.score",
    "Sizing": "stages.deploy.sizing",
    "Table": "dataset.table",
    "TrainProgress": "stages.train.trainer",
    "TrialResult": "stages.tune.front",
    "TuneResult": "stages.tune.tune",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f'module "recmill" has no attribute "{name}"')
    from importlib import import_module

    return getattr(import_module(f"recmill.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
