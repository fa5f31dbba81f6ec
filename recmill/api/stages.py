"""The stages as functions: their arguments are the fields of the stages' config dataclasses."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from recmill.api.arguments import (
    Data,
    PathLike,
    RecipeLike,
    as_address,
    bundle_of,
    checkpoint_of,
    data_of,
    new_folder,
    progress_of,
    recipe_of,
    table_of,
    target_of,
)
from recmill.engines.config import DEFAULT_MEMORY
from recmill.errors import RecmillError, check_installed
from recmill.logs.config import DEFAULT_MAX_BAD

if TYPE_CHECKING:
    import polars as pl

    from recmill.api.results import EvaluationReport
    from recmill.artifacts.bundle.bundle import Bundle
    from recmill.artifacts.checkpoint.checkpoint import Checkpoint
    from recmill.dataset.table import Table
    from recmill.recipe.recipe import Recipe
    from recmill.stages.score.config import ScoreConfig
    from recmill.stages.score.inputs import Input
    from recmill.stages.score.models import ModelRef
    from recmill.stages.score.score import ScoreResult
    from recmill.stages.serve.recommender import Recommender
    from recmill.stages.train.config import TrainConfig
    from recmill.stages.train.launch import MakeSource
    from recmill.stages.train.train import TrainContext
    from recmill.stages.train.trainer import TrainProgress

Engine = Literal["local", "ray", "spark"]
Split = Literal["train", "eval", "test"]
Model = Literal["ranking", "retrieval"]


def prepare(
    recipe: RecipeLike,
    data: Data,
    *,
    into: PathLike | None = None,
    plan: Table | Checkpoint | Bundle | PathLike | None = None,
    engine: Engine = "local",
    address: str | None = None,
    spark_conf: Mapping[str, str] | None = None,
    workers: int | None = None,
    memory: int = DEFAULT_MEMORY,
    max_bad: float = DEFAULT_MAX_BAD,
    partitions: int | None = None,
    binary: bool = False,
    quiet: bool = False,
) -> Table:
    """Turn a raw log into a Table: fit the features on the training rows and apply them to all.

    `data` is the log's directory or URL, a file, a frame (also a Ray Dataset or Spark DataFrame), a list of them, or a
    dict of them: `log` for the log itself and the names of the recipe's side tables. With `plan`, an artifact,
    nothing is fitted: its features are applied.
    """
    from recmill.features.plan_artifact import plan_at
    from recmill.stages.prepare.config import PrepareConfig
    from recmill.stages.prepare.prepare import prepare_at as run

    recipe = recipe_of(recipe)
    config = PrepareConfig(
        workers=workers,
        memory=memory,
        max_bad=max_bad,
        partitions=partitions,
        binary=binary,
        engine=engine,
        address=address,
        spark_conf=dict(spark_conf or {}),
    )
    fitted = None if plan is None else plan_at(_path_of(plan))
    where = data_of(recipe, data, into)
    return run(recipe, where, target_of(into, "table"), config, progress_of(quiet), fitted).table


def preview(recipe: RecipeLike, data: Data, num_rows: int = 5) -> pl.DataFrame:
    """The first rows of a log with their features, fitted on the first 100,000; writes no Table."""
    from recmill.stages.prepare.prepare import preview as run

    recipe = recipe_of(recipe)
    rows = run(recipe, data_of(recipe, data), num_rows, new_folder("preview")).rows
    return rows.select([name for name in rows.columns if not name.startswith("__")])


def train(
    recipe: RecipeLike,
    table: Table | PathLike | None = None,
    *,
    from_log: Data | None = None,
    plan: Table | Checkpoint | PathLike | None = None,
    max_bad: float = DEFAULT_MAX_BAD,
    into: PathLike | None = None,
    resume: bool = False,
    only: Model | None = None,
    threads: int | None = None,
    track: Sequence[Literal["tensorboard", "mllog", "mlflow"]] = (),
    profile: int | None = None,
    table_memory: int | None = None,
    engine: Literal["local", "ray"] = "local",
    workers: int | tuple[int, int] = 1,
    address: str | None = None,
    wire: Literal["float32", "float16", "bfloat16"] = "float32",
    balance: bool = True,
    on_step: Callable[[str, TrainProgress], None] | None = None,
    on_evaluation: Callable[[str, TrainProgress], None] | None = None,
    quiet: bool = False,
) -> Checkpoint:
    """Train the recipe's models on a Table, or directly on a raw log with `from_log`.

    `on_step` and `on_evaluation` are called with the model's name and its progress; raise `StopTraining` in one to
    end the model's run with a checkpoint. With `resume`, a run continues from the last checkpoint in `into`. With
    engine "ray", `workers` (or a range of two numbers) train together, and callbacks run in the first one.
    """
    if (table is None) == (from_log is None):
        raise RecmillError(
            "train: give a Table or from_log, one of them. recmill.prepare(recipe, data) makes a Table."
        )
    if plan is not None and from_log is None:
        raise RecmillError("train: plan is for from_log; a Table has its own. Remove it.")
    # OpenMP reads it once, when torch is first imported. Spinning threads would slow down the rest of a notebook.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from recmill.artifacts.checkpoint.checkpoint import Checkpoint
    from recmill.stages.train.config import TrainConfig
    from recmill.stages.train.source import open_log_data, open_table_data
    from recmill.stages.train.train import TrainContext
    from recmill.stages.train.train import train_at as run

    recipe = recipe_of(recipe)
    config = TrainConfig(
        threads=threads,
        resume=resume,
        only=only,
        track=tuple(track),
        profile=profile,
        table_memory=table_memory,
        wire=wire,
        balance=balance,
        max_bad=max_bad,
    )
    context = TrainContext(on_step=on_step, on_evaluation=on_evaluation, warn=_warn)
    make_source: MakeSource
    if from_log is not None:
        where, fitted = data_of(recipe, from_log, into), None if plan is None else str(_path_of(plan))
        make_source = partial(open_log_data, recipe, where, fitted, max_bad)
    else:
        assert table is not None
        make_source = partial(open_table_data, str(table_of(table).path.absolute()))
    folder = target_of(into, "checkpoint")
    if engine == "ray":
        _train_on_ray(recipe, make_source, folder, config, workers, address, quiet, context)
    elif workers != 1 or address is not None:
        raise RecmillError('train: workers and address are for engine="ray". Add it, or remove them.')
    else:
        run(recipe, make_source(_warn), folder, config, progress_of(quiet), context=context)
    return Checkpoint.open(folder)


def _train_on_ray(
    recipe: Recipe,
    make_source: MakeSource,
    address: str | Path,
    config: TrainConfig,
    workers: int | tuple[int, int],
    cluster: str | None,
    quiet: bool,
    context: TrainContext,
) -> None:
    check_installed('Engine "ray"', "ray")
    from recmill.stages.train.config import RayTrainConfig
    from recmill.stages.train.launch import launch
    from recmill.stages.train.train import check_can_publish

    ray = RayTrainConfig((workers, workers) if isinstance(workers, int) else workers, cluster)
    check_can_publish(address, config, ray.workers[1], is_on_cluster=True)
    launch(recipe, make_source, Path(address), config, ray, progress_of(quiet), _warn, context)


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def evaluate(
    checkpoint: Checkpoint | PathLike,
    table: Table | PathLike,
    *,
    split: Split | None = None,
    which: str | int = "best",
    only: Model | None = None,
    by: Sequence[str] = (),
    gate: str | None = None,
    live: Checkpoint | Bundle | PathLike | None = None,
    allow_no_live: bool = False,
    threads: int | None = None,
    served: bool = False,
    served_users: int = 2_000,
    served_bundle: PathLike | None = None,
    data: Data | None = None,
    report: PathLike | None = None,
    quiet: bool = False,
) -> EvaluationReport:
    """Measure a checkpoint on held-out rows of a Table, and write a report with plots next to it.

    `which` is best, last or a step. `gate` has conditions such as "auc>=0.80,ne<=live"; `passed` of the result tells
    whether they hold, and `export` refuses a model that failed. With `served`, recall is fitted on eval and the list
    that users will get is measured too, next to baselines; this reads the log again, the Table's unless `data` names
    another.
    """
    from recmill.api.results import EvaluationReport
    from recmill.artifacts.checkpoint.checkpoint import Checkpoint
    from recmill.stages.evaluate.config import EvaluateConfig
    from recmill.stages.evaluate.evaluate import evaluate as run
    from recmill.stages.evaluate.write import write_evaluation
    from recmill.stages.export.find_log import find_log
    from recmill.stages.replay.config import ReplayConfig
    from recmill.stages.replay.write import replay_and_write, served_json
    from recmill.storage.objects import is_url
    from recmill.storage.workspace import written

    config = EvaluateConfig(
        split=split,
        which=str(which),
        only=only,
        by=tuple(by),
        gate=gate,
        live=None if live is None else str(_path_of(live)),
        allow_no_live=allow_no_live,
        threads=threads,
    )
    result = None
    at_url = isinstance(checkpoint, str) and is_url(checkpoint)
    with written(str(checkpoint) if at_url else checkpoint_of(checkpoint).path) as target:
        folder = Checkpoint.open(target.path)
        folder = folder if split in ("train", "eval") else folder.to_serve(str(which))
        path = Path(report) if report is not None else folder.path / "report.html"
        if served:
            options = ReplayConfig(
                served_users, None if served_bundle is None else Path(served_bundle), str(which), threads
            )
            where = find_log(folder) if data is None else data_of(folder.recipe, data, path)
            result = replay_and_write(folder, where, options, gate, progress_of(quiet))
        evaluated = run(folder, table_of(table), config, progress_of(quiet))
        write_evaluation(folder, evaluated, path, None if result is None else served_json(result))
        target.push()
    return EvaluationReport({one.model: one for one in evaluated}, path, result)


def score(
    model: Checkpoint | Bundle | PathLike,
    rows: Table | Data | None = None,
    *,
    into: PathLike | None = None,
    split: Split | None = None,
    which: str | int = "best",
    keep: Sequence[str] | None = None,
    without_labels: bool = False,
    scores: bool = False,
    embeddings: Sequence[Literal["user", "item"]] = (),
    recall: int | None = None,
    without_seen: bool = False,
    max_bad: float = DEFAULT_MAX_BAD,
    partitions: int | None = None,
    engine: Engine = "local",
    address: str | None = None,
    spark_conf: Mapping[str, str] | None = None,
    workers: int | None = None,
    memory: int = DEFAULT_MEMORY,
    trust_code: Sequence[str] = (),
    quiet: bool = False,
) -> ScoreResult:
    """Score all rows of a log or Table with a checkpoint or a bundle; write vectors and the best items of users.

    `rows` is a Table, or a log as for `prepare`. With `embeddings` or `recall`, vectors of users or items and the
    best items of every user are written instead, or in addition with `scores`; those of a checkpoint come from a
    Table, which `rows` must be, and a bundle has its own. `ScoreResult.to_polars()` reads the output.
    """
    from recmill.dataset.table import Table
    from recmill.stages.score.config import ScoreConfig
    from recmill.stages.score.score import score as run
    from recmill.storage.workspace import written

    config = ScoreConfig(
        which=str(which),
        split=split,
        keep=None if keep is None else tuple(keep),
        without_labels=without_labels,
        scores=scores,
        embeddings=tuple(embeddings),
        recall=recall,
        without_seen=without_seen,
        max_bad=max_bad,
        partitions=partitions,
        engine=engine,
        address=address,
        spark_conf=dict(spark_conf or {}),
        workers=workers,
        memory=memory,
    )
    reference = _model_to_score(model, config, trust_code)
    if isinstance(rows, (str, os.PathLike)) and _is_of_kind(as_address(rows), "table"):
        rows = Table.open(as_address(rows))
    is_of_bundle, of_sides = reference.kind == "bundle", bool(embeddings or recall)
    if is_of_bundle and rows is not None and not config.wants_scores:
        raise RecmillError("score: a bundle has its own users and items. Remove rows, or add scores=True.")
    if not is_of_bundle and of_sides and not isinstance(rows, Table):
        raise RecmillError(
            "score: embeddings and recall of a checkpoint are those of a Table: give one as rows."
        )
    scored = _rows_to_score(reference, rows, config, into) if config.wants_scores else None
    table = rows if isinstance(rows, Table) and of_sides and not is_of_bundle else None
    with written(target_of(into, "scores")) as target:
        result = run(reference, scored, table, target.path, config, progress_of(quiet))
        target.push()
    return result


def _model_to_score(
    model: Checkpoint | Bundle | PathLike, config: ScoreConfig, trust_code: Sequence[str]
) -> ModelRef:
    from recmill.stages.score.models import bundle_ref, checkpoint_ref

    path = _path_of(model)
    models = ["retrieval"] if config.embeddings or config.recall else []
    models += ["ranking"] if config.wants_scores else []
    if _is_of_kind(path, "checkpoint"):
        return checkpoint_ref(str(path), config.which, models)
    trusted = tuple(trust_code or getattr(model, "trust_code", ()))
    return bundle_ref(str(path), models, trusted)


def _is_of_kind(address: str | Path, kind: str) -> bool:
    """Whether an artifact of this kind is at this address, by its manifest; a log's URL is none."""
    from recmill.artifacts.manifest import is_of_kind
    from recmill.errors import ArtifactError
    from recmill.storage.cache import SHARDS
    from recmill.storage.view import opened

    try:
        return is_of_kind(opened(address, kind, streamed=SHARDS), kind)
    except ArtifactError:
        return False


def _rows_to_score(reference: ModelRef, rows: Any, config: ScoreConfig, into: PathLike | None) -> Input:
    from recmill.dataset.table import Table
    from recmill.stages.score.inputs import LogInput, TableInput, scoring_recipe
    from recmill.stages.score.models import open_models

    if rows is None:
        raise RecmillError("score: which rows? Give a Table, or a log as prepare takes it.")
    models = open_models(reference)
    if isinstance(rows, Table):
        return TableInput(models, rows, config.split, config.keep)
    if config.split is not None:
        raise RecmillError("score: split is for the rows of a Table. Remove it.")
    with_labels = not config.without_labels
    where = data_of(scoring_recipe(models.recipe, with_labels), rows, into)
    return LogInput(models, where, config.keep, with_labels, config.max_bad, config.memory, config.partitions)


def export(
    checkpoint: Checkpoint | PathLike,
    data: Data | None = None,
    *,
    into: PathLike | None = None,
    rows: Literal["float32", "float16", "int8"] = "float32",
    products: Literal["float32", "int8"] = "float32",
    which: str | int = "best",
    index: Literal["auto", "exact", "clustered"] = "auto",
    keep: int | None = None,
    memory: int = DEFAULT_MEMORY,
    threads: int | None = None,
    despite_gate: bool = False,
    publish: bool = True,
    quiet: bool = False,
) -> Bundle:
    """Make a bundle of a checkpoint: everything that a server needs, with users and items as of the log's end.

    The log is the one that the Table was prepared from, unless `data` names another.
    """
    from recmill.artifacts.bundle.bundle import Bundle
    from recmill.recipe.trust import modules_of
    from recmill.stages.export.config import ExportConfig
    from recmill.stages.export.export import export_at as run
    from recmill.stages.export.find_log import find_log

    folder = checkpoint_of(checkpoint).to_serve(str(which))
    where = find_log(folder) if data is None else data_of(folder.recipe, data, into)
    config = ExportConfig(
        rows=rows,
        products=products,
        which=str(which),
        index=index,
        keep=keep,
        memory=memory,
        threads=threads,
        despite_gate=despite_gate,
        publish=publish,
    )
    exported = run(folder, where, target_of(into, "bundle"), config, progress_of(quiet))
    # The recipe is the caller's own, so the functions that its features call are trusted.
    return Bundle(exported.bundle.path, exported.bundle.manifest, tuple(modules_of(folder.recipe)))


def open_bundle(
    path: Bundle | PathLike, features: str | None = None, trust_code: Sequence[str] = ()
) -> Recommender:
    """A recommender from a bundle or its directory; `features` is the URL of a store, such as redis://host:6379.

    Functions that its features call are imported only from modules and packages in `trust_code`.
    """
    from recmill.artifacts.feature_store.redis import RedisStore
    from recmill.stages.serve.recommender import Recommender

    bundle = bundle_of(path, trust_code)
    return Recommender(bundle, RedisStore(features, bundle) if features else None)


def _path_of(artifact: Table | Checkpoint | Bundle | PathLike) -> str | Path:
    """The address of an artifact; a given path or URL is returned as it is."""
    path = getattr(artifact, "path", artifact)
    if not isinstance(path, (str, os.PathLike)):
        raise RecmillError(
            f"Expected a Table, a Checkpoint, a Bundle or a directory, got {type(artifact).__name__}."
        )
    return as_address(path)
