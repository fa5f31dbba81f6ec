"""prepare: log -> Table. Reads the log in pieces, fits the Plan on the training rows, writes features as shards."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from recmill.artifact import is_published, publish, write_whole
from recmill.engines.base import Engine
from recmill.engines.local import LocalEngine
from recmill.errors import ArtifactError, LogError, ResourceError
from recmill.features.plan import Plan
from recmill.kernels import Measured
from recmill.logs.base import Source, Unit, open_source
from recmill.logs.rows import check_conditions
from recmill.logs.tally import DEFAULT_MAX_BAD, Tally
from recmill.machine import available_cores
from recmill.prepare import rows as row_operations
from recmill.prepare.binary import as_int32_rows, concatenate
from recmill.prepare.rejected import WatchedSource
from recmill.prepare.split import assign_splits
from recmill.progress import Progress
from recmill.spec.load import recipe_to_dict
from recmill.spec.recipe import SPLIT, Recipe
from recmill.table import Table, table_digest

DEFAULT_MEMORY = 2 << 30
_WORK = "_work"
_NOTHING_TO_TRAIN_ON = (
    "No rows are left to train on: the split or the row operations take them all. See [split] and [[rows]]."
)
_UNIT_BYTES = 64 << 20
_MIN_UNIT_BYTES = 4 << 20


@dataclass(frozen=True)
class Options:
    """Where and how prepare runs; none of it changes the rows of the Table."""

    workers: int | None = None
    memory: int = DEFAULT_MEMORY
    max_bad: float = DEFAULT_MAX_BAD
    partitions: int | None = None
    binary: bool = False


@dataclass(frozen=True)
class Prepared:
    """A published Table, and what it took."""

    table: Table
    tally: Tally
    seconds_fit: float
    seconds_write: float
    was_there: bool = False
    went_on: bool = False  # with work that an earlier run had begun


def prepare(
    recipe: Recipe, data: str, into: Path, options: Options | None = None, progress: Progress | None = None
) -> Prepared:
    """Publish the Table of a log at `into`. Killed and run again, it keeps what was finished."""
    options = options or Options()
    _check_against_reality(recipe)
    source = open_source(recipe.log, data)
    job = _fingerprint(recipe, source, options)
    if is_published(into):
        return _already_there(into, job)
    work = _open_work(into, job)
    went_on = (work / "plan").exists()
    units = _units(source, options, work)
    started = time.monotonic()
    with _full_disk_is_an_error(into):
        chunk_bytes = max(1 << 20, min(8 << 20, options.memory // 128))
        watched = WatchedSource(source, units, into / "rejected", options.max_bad, chunk_bytes)
        engine = LocalEngine(work, options.workers, options.memory, progress)
        frame = _rows(engine, watched, recipe, data, options.memory)
        plan = _fitted_plan(engine, frame, watched, recipe, work)
        seconds_fit = time.monotonic() - started
        features = engine.map(frame, plan.apply)
        shards = [
            asdict(shard) for shard in engine.write(features, into, recipe.table.order, recipe.table.seed)
        ]
        tally = watched.check()
        if options.binary:
            ints = engine.map(frame, as_int32_rows(plan))
            pieces = engine.write(ints, work / "binary", recipe.table.order, recipe.table.seed, "int32")
            concatenate(pieces, work / "binary", into / "binary")
        seconds = {"fit": round(seconds_fit, 3), "write": round(time.monotonic() - started - seconds_fit, 3)}
        _publish(into, plan, shards, tally, job, _where(data), seconds)
    return Prepared(Table.open(into), tally, seconds["fit"], seconds["write"], went_on=went_on)


def preview(recipe: Recipe, data: str, num_rows: int, work: Path) -> tuple[Plan, pl.DataFrame]:
    """Fit and apply the recipe to the first rows of the log, all as training rows; writes no Table."""
    _check_against_reality(recipe)
    source = open_source(recipe.log, data)
    first = _FirstRows(source, num_rows)
    engine = LocalEngine(work, workers=1)
    frame = row_operations.before_split(engine, engine.read(first), recipe, data, DEFAULT_MEMORY)
    frame = assign_splits(engine, frame, WatchedSource(source, [], work / "rejected", 1.0, 1 << 20), None)
    frame = row_operations.after_split(engine, frame, recipe)
    plan = fit(engine, frame, recipe)
    return plan, engine.collect(engine.map(frame, plan.apply)).drop(SPLIT)


def fit(engine: Engine, frame: Any, recipe: Recipe, check: Callable[[], object] = lambda: None) -> Plan:
    """Learn a plan from the training rows, in as many passes as its longest chain of fitted steps.

    `check` is called after each pass, before its result is used.
    """
    training = engine.map(frame, training_rows)
    plan = Plan(recipe)
    while pending := plan.pending():
        groups = {
            name: engine.collect(
                engine.group(engine.map(training, _GroupRows(plan, name)), ["key"], need.aggregate, "fit")
            )
            for name, need in pending.groups.items()
        }
        measured = (
            engine.measure(training, plan.extract, pending.counts, "fit")
            if pending.moments or pending.counts
            else None
        )
        check()
        if (measured is not None and not measured.rows) or any(group.is_empty() for group in groups.values()):
            raise LogError(_NOTHING_TO_TRAIN_ON)
        plan.learn(measured or Measured(), groups)
    return plan


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

    def __init__(self, source: Source, num_rows: int) -> None:
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
        for piece in self.source.units():
            for batch in self.source.read(piece, 1 << 18):
                yield batch.frame.head(left)
                left -= min(left, batch.frame.height)
                if not left:
                    return
        if left == self.num_rows:
            raise LogError("The log holds no good rows to preview. Run `recmill check RECIPE --data DIR`.")


def _check_against_reality(recipe: Recipe) -> None:
    """Fail before the work, not after an hour of it: SQL that does not run, functions that cannot be imported."""
    check_conditions(recipe)
    Plan(recipe)


def _units(source: Source, options: Options, work: Path) -> list[Unit]:
    """The pieces of the log; unfinished work goes on with the pieces that it began with."""
    saved = work / "units.json"
    if saved.exists():
        return [Unit(*unit) for unit in json.loads(saved.read_text())]
    if options.partitions is not None:
        units = source.units(parts=options.partitions)
    else:
        # Several pieces for each worker, so that none waits long for the last one.
        total = sum(file.size for file in source.files)
        fair = total // (8 * (options.workers or available_cores()))
        units = source.units(target_bytes=max(_MIN_UNIT_BYTES, min(_UNIT_BYTES, options.memory // 8, fair)))
    write_whole(saved, json.dumps([astuple(unit) for unit in units]))
    return units


def _rows(engine: Engine, watched: WatchedSource, recipe: Recipe, data: str, memory: int) -> Any:
    frame = row_operations.before_split(engine, engine.read(watched), recipe, data, memory)
    frame = assign_splits(engine, frame, watched, recipe.split)
    return row_operations.after_split(engine, frame, recipe)


def _fitted_plan(engine: Engine, frame: Any, watched: WatchedSource, recipe: Recipe, work: Path) -> Plan:
    """The plan that an earlier, interrupted run fitted, or a new one."""
    saved = work / "plan"
    if (saved / "plan.json").exists():
        return Plan.read(saved)
    plan = fit(engine, frame, recipe, watched.check)
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
) -> None:
    if not any(shard["split"] == "train" for shard in shards):
        raise LogError(_NOTHING_TO_TRAIN_ON)
    shutil.rmtree(into / "plan", ignore_errors=True)
    os.replace(into / _WORK / "plan", into / "plan")
    for record in (into / "rejected").glob("*.json"):
        record.unlink()
    if not any((into / "rejected").iterdir()):
        (into / "rejected").rmdir()
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
    shutil.rmtree(into / _WORK, ignore_errors=True)


def _fingerprint(recipe: Recipe, source: Source, options: Options) -> str:
    """What the rows depend on: recipe, files, and what else was asked for. A rerun with another one starts over."""
    files = [(file.name, file.size, _modified(file.path)) for file in source.files]
    content = [recipe_to_dict(recipe), files, options.binary]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _where(data: str) -> str | None:
    """Where the log is, for those who read it again later. A URL with a password in it is not written down."""
    if "://" in data:
        return None if "@" in data else data
    return os.path.abspath(data)


def _modified(path: str) -> int | None:
    return os.stat(path).st_mtime_ns if os.path.exists(path) else None  # a URL has no such time


def _already_there(into: Path, job: str) -> Prepared:
    table = Table.open(into)
    if table.manifest["job"] != job:
        raise ArtifactError(
            f"{into} already holds a Table of another recipe or log. Choose another --into, or delete it first."
        )
    seconds = table.manifest["seconds"]
    return Prepared(
        table, Tally(rows=table.manifest["rows_read"]), seconds["fit"], seconds["write"], was_there=True
    )


def _open_work(into: Path, job: str) -> Path:
    """The folder of unfinished work: kept if it is of the same job, cleared if not."""
    if into.exists() and not into.is_dir():
        raise ArtifactError(f"{into} is a file; --into needs a directory.")
    work = into / _WORK
    if into.exists() and not work.exists() and any(into.iterdir()):
        raise ArtifactError(
            f"{into} is not empty and holds no Table. Choose another --into, or empty it first."
        )
    if work.exists() and (not (work / "job").exists() or (work / "job").read_text() != job):
        shutil.rmtree(into)
    work.mkdir(parents=True, exist_ok=True)
    write_whole(work / "job", job)
    return work


@contextmanager
def _full_disk_is_an_error(into: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pl.exceptions.PolarsError) as error:
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            raise ResourceError(
                f"The disk of {into} is full. Free some space and run `recmill prepare` again; it resumes."
            ) from None
        raise
