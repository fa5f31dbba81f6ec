"""The other commands as functions: logs, recipes, searches, whole runs, deployment and versions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from recmill.api.arguments import (
    Data,
    PathLike,
    RecipeLike,
    as_address,
    bundle_of,
    data_of,
    folder_of,
    progress_of,
    recipe_of,
    table_of,
    target_of,
)
from recmill.engines.config import DEFAULT_MEMORY
from recmill.logs.config import DEFAULT_MAX_BAD

if TYPE_CHECKING:
    from recmill.artifacts.bundle.bundle import Bundle
    from recmill.artifacts.feature_store.load import LoadResult
    from recmill.dataset.table import Table
    from recmill.stages.check.check import CheckResult
    from recmill.stages.deploy.sizing import Sizing
    from recmill.stages.run.run import RunResult
    from recmill.stages.tune.front import TrialResult
    from recmill.stages.tune.tune import TuneResult
    from recmill.synthetic.generate import GeneratedLog


def recipes() -> dict[str, str]:
    """Name and description of every shipped recipe."""
    from recmill.recipe.load import load_recipe, shipped_recipes

    return {name: load_recipe(name).description for name in shipped_recipes()}


def generate(
    shape: Literal["criteo", "recsys2021", "movielens", "shop"],
    rows: int,
    *,
    seed: int = 0,
    into: PathLike | None = None,
    days: Sequence[int] | None = None,
    format: Literal["csv", "parquet"] | None = None,
    compress: bool = False,
    quiet: bool = False,
) -> GeneratedLog:
    """Write a synthetic log with a planted truth; the result can be passed wherever a log's directory can.

    `days` are for criteo, `format` is for recsys2021, `compress` for both. `best` of the result has the best metrics
    that any model can reach.
    """
    from recmill.synthetic.generate import generate as run

    options = {} if format is None else {"format": format}
    with progress_of(quiet).stage("generate", rows) as bar:
        return run(
            shape,
            rows,
            seed,
            folder_of(into, "log"),
            progress=lambda done: bar.advance(done - bar.done, done - bar.rows),
            days=days,
            compress=compress,
            **options,
        )


def check(recipe: RecipeLike, data: Data | None = None) -> CheckResult:
    """Check a recipe and the resources it names and, with `data`, whether the first rows of its files parse.

    Raises RecipeError with all problems of the recipe; `good` and `files` describe the files.
    """
    from recmill.stages.check.check import check as run

    recipe = recipe_of(recipe)
    return run(recipe, None if data is None else data_of(recipe, data))


def tune(
    recipe: RecipeLike,
    table: Table | PathLike,
    *,
    into: PathLike | None = None,
    trials: int | None = None,
    minutes: float | None = None,
    jobs: int | None = None,
    threads: int | None = None,
    seed: int | None = None,
    within: float = 0.0,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    on_trial: Callable[[TrialResult], None] | None = None,
    quiet: bool = False,
) -> TuneResult:
    """Search the recipe's [tune] space, quality against cost. A second call with the same `into` resumes the search.

    `recipe` of the result is the best one found, ready for `train`.
    """
    from recmill.stages.tune.config import TuneConfig
    from recmill.stages.tune.tune import tune as run

    config = TuneConfig(
        trials=trials,
        minutes=minutes,
        jobs=jobs,
        threads=threads,
        seed=seed,
        within=within,
        engine=engine,
        address=address,
    )
    report = on_trial or (lambda trial: None)
    folder = folder_of(into, "study")
    return run(recipe_of(recipe), table_of(table), folder, config, progress_of(quiet), report)


def run(
    recipe: RecipeLike,
    data: Data | None = None,
    *,
    into: PathLike | None = None,
    rows: int = 100_000,
    gate: str | None = None,
    only: Literal["ranking", "retrieval"] | None = None,
    threads: int | None = None,
    memory: int = DEFAULT_MEMORY,
    max_bad: float = DEFAULT_MAX_BAD,
    served: bool = True,
    at_once: bool = False,
    quiet: bool = False,
) -> RunResult:
    """Prepare, train, evaluate and export, in order; finished stages in `into` are skipped.

    Without `data`, a log of `rows` events in the recipe's format is generated. A model that fails the `gate` is not
    exported: `bundle` of the result is None then. `served` also measures the list that users will get. With
    `at_once`, training begins while the Table is still being written.
    """
    from recmill.stages.prepare.config import PrepareConfig
    from recmill.stages.run.config import RunConfig
    from recmill.stages.run.run import run as run_stages
    from recmill.stages.train.config import TrainConfig

    recipe = recipe_of(recipe)
    config = RunConfig(
        rows=rows,
        prepare=PrepareConfig(memory=memory, max_bad=max_bad),
        train=TrainConfig(threads=threads, only=only, resume=True),
        at_once=at_once,
        served=served,
        gate=gate,
    )
    where = None if data is None else data_of(recipe, data, into)
    return run_stages(recipe, where, target_of(into, "run"), config, progress_of(quiet))


def deploy(
    recipe: RecipeLike,
    target: str,
    into: PathLike,
    *,
    settings: Mapping[str, Any] | Sequence[str] = (),
    force: bool = False,
) -> list[Path]:
    """Render a recipe's manifests for Kubernetes, Argo, Helm, Ray, Spark or Docker; returns the written files.

    `settings` are those of `recmill deploy --set`, such as `{"serve.replicas": 3}`.
    """
    from recmill.stages.deploy.deploy import deploy as run
    from recmill.stages.deploy.settings import DeployConfig

    if isinstance(settings, Mapping):
        settings = [f"{key}={_as_text(value)}" for key, value in settings.items()]
    return run(recipe_of(recipe), target, Path(into), DeployConfig.of(settings), force)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def size(
    recipe: RecipeLike,
    rows: int | None = None,
    items: int | None = None,
    users: int | None = None,
    rate: float | None = None,
) -> Sizing:
    """Memory, disk and cores that each stage needs; `lines()` of the result show the arithmetic."""
    from recmill.stages.deploy.sizing import size as run

    return run(recipe_of(recipe), rows, items, users, rate)


def load(
    bundle: Bundle | PathLike,
    features: str,
    *,
    side: Literal["user", "item", "both"] = "both",
    parquet: PathLike | None = None,
    rate: float | None = None,
    ttl: int | None = None,
    prefix: str = "recmill",
    resume: bool = False,
    trust_code: Sequence[str] = (),
    quiet: bool = False,
) -> list[LoadResult]:
    """Fill a feature store, such as redis://host:6379, with the rows of a bundle, or of a Parquet file of one side."""
    from recmill.artifacts.feature_store.config import LoadConfig
    from recmill.artifacts.feature_store.load import load_at

    file = Path(parquet) if parquet is not None else None
    config = LoadConfig(side, file, rate, ttl, prefix, resume)
    return load_at(features, bundle_of(bundle, trust_code), config, progress_of(quiet))[1]


def rollback(bundles: PathLike, version: str | None = None) -> Bundle:
    """Make another version in a folder of bundles current, by default the previous one; servers switch at once."""
    from recmill.artifacts.bundle.bundle import Bundle
    from recmill.stages.export.rollback import rollback as run

    run(as_address(bundles), version)
    return Bundle.open(as_address(bundles))
