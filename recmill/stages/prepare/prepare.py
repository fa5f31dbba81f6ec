"""prepare: log -> Table. Reads the log in pieces, fits the Plan on the training rows, writes features as shards."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import polars as pl

from recmill.artifacts.lock import lock_folder
from recmill.artifacts.manifest import (
    WORK,
    full_disk_is_an_error,
    is_published,
    link_or_copy,
    open_work,
    publish,
)
from recmill.artifacts.work import damage_is_of_work, read_record, resume_or_start_over, write_record
from recmill.dataset.table import Table, table_digest
from recmill.engines import check_engine, open_engine
from recmill.engines.engine import Engine, Frame, MapFunction
from recmill.engines.local import LocalEngine
from recmill.errors import ArtifactError, LogError
from recmill.features.kernels import Measurements
from recmill.features.plan import Plan
from recmill.features.plan_artifact import check_plan
from recmill.logs.base import LogFiles, open_source
from recmill.logs.inputs import Inputs, open_inputs
from recmill.logs.scan import LogScan, forget_records, scan
from recmill.logs.splits import all_train
from recmill.logs.tally import Tally
from recmill.recipe.crosses import is_open
from recmill.recipe.defaults import as_prepared
from recmill.recipe.expressions import columns_of, parse_filter
from recmill.recipe.kinds import kinds_of_columns
from recmill.recipe.load import recipe_to_dict
from recmill.recipe.recipe import POSITION, SPLIT, Filter, Recipe
from recmill.reporting.progress import Progress
from recmill.stages.prepare import rows as row_operations
from recmill.stages.prepare.binary import as_int32_rows, concatenate
from recmill.stages.prepare.config import PrepareConfig
from recmill.stages.prepare.crosses import find_crosses
from recmill.stages.prepare.split import assign_splits
from recmill.storage.cache import SHARDS
from recmill.storage.index import read_index
from recmill.storage.objects import ObjectStore, is_url
from recmill.storage.view import opened
from recmill.storage.workspace import written

_NUM_FITTED = 100_000  # rows that a preview reads, so that what it shows is close to what a Table gets
_NOTHING_TO_TRAIN_ON = (
    "No rows are left to train on: the split or the row operations take them all. See [split] and [[rows]]."
)


@dataclass(frozen=True)
class PrepareResult:
    """A published Table, and what it took."""

    table: Table
    tally: Tally
    seconds_fit: float
    seconds_write: float
    was_complete: bool = False
    went_on: bool = False  # with work that an earlier run had begun
    crosses: tuple[str, ...] | None = None  # features that a search found; None when it was not asked for


def prepare(
    recipe: Recipe,
    data: str,
    into: Path,
    options: PrepareConfig | None = None,
    progress: Progress | None = None,
    plan: Plan | None = None,
) -> PrepareResult:
    """Publish the Table of a log at `into`. Killed and run again, it keeps what was finished.

    With a `plan`, nothing is fitted: rows get the features that it was fitted for, on another log or on this one.
    """
    options = options or PrepareConfig()
    if plan is not None:
        recipe = as_prepared(recipe, plan.recipe)
        check_plan(plan, recipe)
    check_engine(options)
    if options.engine != "local":  # tasks have working directories of their own
        into, data = into.absolute(), data if "://" in data else os.path.abspath(data)
    _check_against_reality(recipe)
    inputs = open_inputs(recipe, data)
    job = _fingerprint(inputs, options, plan)

    def prepare_or_resume() -> PrepareResult:
        if is_published(into) and not (into / WORK).exists():
            return _already_there(into, job)
        with lock_folder(into):
            if is_published(
                into
            ):  # by the one that had the lock before, or that was killed when all was done
                _remove_work(into)
                return _already_there(into, job)
            return resume_or_start_over(
                into, lambda: _prepare(inputs, data, into, job, options, progress, plan)
            )

    result = prepare_or_resume()
    if not is_open(recipe):
        return result
    found = result.table.recipe.features[len(recipe.features) :]
    return replace(result, crosses=tuple(feature.name for feature in found))


def prepare_at(
    recipe: Recipe,
    data: str,
    address: str | Path,
    options: PrepareConfig | None = None,
    progress: Progress | None = None,
    plan: Plan | None = None,
) -> PrepareResult:
    """The same for an address that may be a URL: work happens in a local folder, which is published when it is done."""
    if is_url(address) and read_index(ObjectStore(str(address))) is not None:
        published = opened(address, "table", streamed=SHARDS)
        return prepare(recipe, data, published, options, progress, plan)
    with written(address) as target:
        prepared = prepare(recipe, data, target.path, options, progress, plan)
        target.push()
        target.give_to_cache()
    return replace(prepared, table=Table.open(address))


def _prepare(
    inputs: Inputs,
    data: str,
    into: Path,
    job: str,
    options: PrepareConfig,
    progress: Progress | None,
    plan: Plan | None,
) -> PrepareResult:
    recipe = inputs.recipe
    work = open_work(into, job, "table")
    went_on = (work / "plan").exists()
    started = time.monotonic()
    with full_disk_is_an_error(into, "table"), open_engine(options, work, progress) as engine:
        log = LogScan.resume(
            inputs.log,
            work,
            into / "rejected",
            options.max_bad,
            options.memory,
            options.partitions,
            engine.tasks_at_once,
        )
        frame = _rows(engine, log, recipe, data, options.memory)
        fitted = _fitted_plan(engine, frame, log, recipe, work, plan)
        seconds_fit = time.monotonic() - started
        features = _applied(engine, frame, fitted, attrgetter("apply"))
        shards = engine.write(
            features, into, recipe.table.order, recipe.table.seed, held_out_first=recipe.split is not None
        )
        tally = log.check()
        if options.binary:
            ints = _applied(engine, frame, fitted, as_int32_rows)
            pieces = engine.write(ints, work / "binary", recipe.table.order, recipe.table.seed, "int32")
            concatenate(pieces, work / "binary", into / "binary")
        seconds = {"fit": round(seconds_fit, 3), "write": round(time.monotonic() - started - seconds_fit, 3)}
        found = [asdict(shard) for shard in shards]
        inputs.check_unchanged()
        _publish(into, fitted, found, tally, job, _where(data), seconds, was_fitted=plan is None)
    return PrepareResult(Table.open(into), tally, seconds["fit"], seconds["write"], went_on=went_on)


@dataclass(frozen=True)
class PreviewResult:
    """The first rows, raw and prepared, in the same order; and the plan, fitted on as many rows as were read."""

    plan: Plan
    raw: pl.DataFrame
    rows: pl.DataFrame
    num_fitted: int


def preview(
    recipe: Recipe, data: str, num_rows: int, work: Path, num_fitted: int = _NUM_FITTED
) -> PreviewResult:
    """Fit the recipe to the first rows of the log, all as training rows, and apply it; writes no Table."""
    _check_against_reality(recipe)
    source, limits = open_source(recipe.log, data), PrepareConfig()
    first = _FirstRows(source, max(num_rows, num_fitted))
    engine = LocalEngine(work, workers=1)
    frame = row_operations.before_split(
        engine, engine.read(first), recipe, data, limits.memory, limits.max_bad
    )
    frame = row_operations.after_split(engine, engine.map(frame, all_train), recipe)
    plan, all_rows = fit(engine, frame, recipe), engine.collect(frame)
    raw = all_rows.sort(POSITION).head(num_rows)
    return PreviewResult(plan, raw, plan.apply(raw).drop(SPLIT), all_rows.height)


def check_first_labels(recipe: Recipe, data: str, num_rows: int, work: Path) -> None:
    """FeatureError when the first rows have labels that no model could learn.

    Labels of columns that only a side table has are left out: joining it may take long.
    """
    kinds, own = kinds_of_columns(recipe), {column.name for column in recipe.log.columns}
    filters = tuple(operation for operation in recipe.rows if isinstance(operation, Filter))
    labels = tuple(label for label in recipe.labels if own.issuperset(label.columns))
    if labels and all(own.issuperset(columns_of(parse_filter(one.sql, kinds))) for one in filters):
        layout = replace(recipe.table, keep=())
        labelled = replace(recipe, rows=filters, labels=labels, features=(), table=layout)
        preview(labelled, data, num_rows, work, num_fitted=num_rows)


def fit(engine: Engine, frame: Frame, recipe: Recipe, check: Callable[[], object] = lambda: None) -> Plan:
    """Learn a plan from the training rows, in as many passes as its longest chain of fitted steps.

    `check` is called after each pass, before its result is used.
    """
    training = engine.map(frame, training_rows)
    plan = Plan(recipe)
    while pending := plan.pending():
        rows = _reaching(engine, training, plan)
        groups = {
            name: engine.collect(
                engine.group(engine.map(rows, _GroupRows(plan, name)), ["key"], need.aggregate, "fit")
            )
            for name, need in pending.groups.items()
        }
        measured = (
            engine.measure(rows, plan.extract, pending.counts, "fit")
            if pending.moments or pending.counts
            else None
        )
        check()
        if (measured is not None and not measured.rows) or any(group.is_empty() for group in groups.values()):
            raise LogError(_NOTHING_TO_TRAIN_ON)
        plan.learn(measured or Measurements(), groups)
    return plan


def _reaching(engine: Engine, frame: Frame, plan: Plan) -> Frame:
    """Rows with what reaches the steps that learn next, where that takes a vocabulary too large to hold."""
    if not plan.joins():
        return frame
    num_learned = sum(chain.num_ready for chain in plan.features)
    return _joined(engine, frame, plan, attrgetter("reach"), f"reach-{num_learned}")


def _applied(engine: Engine, frame: Frame, plan: Plan, function: Callable[[Plan], MapFunction]) -> Frame:
    """Rows that went through what `function` makes of the plan."""
    if not plan.joins():
        return engine.map(frame, function(plan))
    return _joined(engine, frame, plan, function, "answers")


def _joined(
    engine: Engine, frame: Frame, plan: Plan, function: Callable[[Plan], MapFunction], stage: str
) -> Frame:
    """The same, with each part's values looked up in vocabularies that stay on disk."""
    return engine.join(frame, plan.stored, plan.joins(), plan.joined(function), stage)


def training_rows(frame: pl.DataFrame) -> pl.DataFrame:
    training = frame[SPLIT].to_numpy() == 0
    return frame if training.all() else frame.filter(training)


@dataclass(frozen=True)
class _GroupRows:
    plan: Plan
    name: str

    def __call__(self, frame: pl.DataFrame) -> pl.DataFrame:
        return self.plan.extract_group(self.name, frame)


class _FirstRows:
    """The first rows of a log as a source of its own."""

    def __init__(self, source: LogFiles, num_rows: int) -> None:
        self.source = source
        self.num_rows = num_rows

    def units(self) -> list[int]:
        return [0]

    def unit_bytes(self, unit: int) -> int:
        return 1

    def first_position(self, unit: int) -> int:
        return 0

    def max_offset(self) -> int:
        return self.source.max_offset()

    def read(self, unit: int) -> Iterator[pl.DataFrame]:
        left = self.num_rows
        for frame in scan(self.source, self.source.units(), Tally(), 1 << 18):
            yield frame.head(left)
            left -= min(left, frame.height)
            if not left:
                return
        if left == self.num_rows:
            raise LogError("The log holds no good rows to preview. Run `recmill check RECIPE --data DIR`.")


def _check_against_reality(recipe: Recipe) -> None:
    """Fail before the work, not after an hour of it: steps that cannot be made."""
    Plan(recipe)


def _rows(engine: Engine, log: LogScan, recipe: Recipe, data: str, memory: int) -> Frame:
    frame = row_operations.before_split(engine, engine.read(log), recipe, data, memory, log.max_bad)
    frame = assign_splits(engine, frame, log, recipe.split)
    return row_operations.after_split(engine, frame, recipe)


def _fitted_plan(
    engine: Engine, frame: Frame, log: LogScan, recipe: Recipe, work: Path, given: Plan | None
) -> Plan:
    """The plan that an earlier, interrupted run fitted, the one that was given, or a new one."""
    saved, on_disk = work / "plan", work / "stored.json"
    if (saved / "plan.json").exists():
        folders = read_record(on_disk) if engine.leaves_tables_on_disk else {}
        with damage_is_of_work():
            return Plan.read(saved, {name: Path(folder) for name, folder in folders.items()})
    if given is not None:
        plan = given.for_recipe(recipe)
    else:
        if is_open(recipe):
            recipe = find_crosses(engine, engine.map(frame, training_rows), recipe)
        plan = fit(engine, frame, recipe, log.check)
    folders = {name: keyed.folder for name, keyed in plan.stored.items()}
    files = [file for folder in folders.values() for file in sorted(folder.rglob("*")) if file.is_file()]
    write_record(on_disk, {name: str(folder) for name, folder in folders.items()}, files)
    aside = work / "plan.partial"
    shutil.rmtree(aside, ignore_errors=True)
    plan.save(aside)
    aside.rename(saved)
    return plan


def _publish(
    into: Path,
    plan: Plan,
    shards: list[dict[str, Any]],
    tally: Tally,
    job: str,
    data: str | None,
    seconds: dict[str, float],
    was_fitted: bool,
) -> None:
    if not shards:
        raise LogError("No rows are left: row operations take them all. See [[rows]].")
    if was_fitted and not any(shard["split"] == "train" for shard in shards):
        raise LogError(_NOTHING_TO_TRAIN_ON)
    # Work stays as it is until the manifest is there: a job that is killed before goes on with it.
    shutil.rmtree(into / "plan", ignore_errors=True)
    shutil.copytree(into / WORK / "plan", into / "plan", copy_function=link_or_copy)
    columns = [vars(column) for column in plan.columns()]
    names = [
        *(str(column["name"]) for column in columns),
        *(f"raw_{name}" for name in plan.recipe.table.keep),
    ]
    publish(
        into,
        "table",
        {
            "digest": table_digest(shards, names),
            "job": job,
            "data": data,
            "rows_read": tally.rows,
            "rows_rejected": dict(tally.reasons),
            "seconds": seconds,
            "plan_digest": plan.digest(),
            "columns": columns,
            "shards": shards,
            "recipe": recipe_to_dict(plan.recipe),
        },
    )
    _remove_work(into)


def _remove_work(into: Path) -> None:
    """What a published Table does not need; the work goes last, so that a kill in between is noticed."""
    forget_records(into / "rejected")
    shutil.rmtree(into / WORK, ignore_errors=True)


def _fingerprint(inputs: Inputs, options: PrepareConfig, plan: Plan | None) -> str:
    """What the rows depend on: recipe, inputs, and what else was asked for. A rerun with another one starts over."""
    content = [recipe_to_dict(inputs.recipe), inputs.fingerprint(), options.binary, plan and plan.digest()]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _where(data: str) -> str | None:
    """Where the log is, for those who read it again later. A URL with a password in it is not written down."""
    if "://" in data:
        return None if "@" in data else data
    return os.path.abspath(data)


def _already_there(into: Path, job: str) -> PrepareResult:
    table = Table.open(into)
    if table.manifest["job"] != job:
        raise ArtifactError(
            f"{into} already holds a Table of another recipe or log, or of other side tables or functions. "
            "Choose another --into, or delete it first."
        )
    seconds = table.manifest["seconds"]
    return PrepareResult(
        table, Tally(rows=table.manifest["rows_read"]), seconds["fit"], seconds["write"], was_complete=True
    )
