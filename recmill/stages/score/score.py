"""score: a checkpoint or bundle over a log or Table -> scores, vectors of users and items, best items of every user.

DIR/manifest.json   what was scored, metrics, and all files; DIR is whole once it is there
DIR/scores/         file, offset, raw columns, score and label: one row for each good row, in their order
DIR/users/ items/   raw id and vector, one row each
DIR/recall/         user, items and scores, one row for each user
DIR/rejected/       rows of the log that could not be read
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from recmill.artifacts.lock import lock_folder
from recmill.artifacts.manifest import (
    WORK,
    full_disk_is_an_error,
    is_published,
    open_work,
    publish,
    read_manifest,
)
from recmill.artifacts.work import resume_or_start_over
from recmill.dataset.table import Table
from recmill.engines import check_engine, open_engine
from recmill.engines.engine import Engine, Frame
from recmill.engines.shards import ShardRecord
from recmill.errors import ArtifactError
from recmill.logs.scan import forget_records
from recmill.logs.tally import Tally
from recmill.reporting.progress import Progress
from recmill.stages.score.config import ScoreConfig
from recmill.stages.score.inputs import Input, check_features
from recmill.stages.score.measure import measure
from recmill.stages.score.models import ModelRef, Side, facts_of, open_models
from recmill.stages.score.recall import recall, write_catalogue
from recmill.stages.score.sides import vectors

KIND = "scores"
_FOLDERS: Mapping[Side, str] = {"user": "users", "item": "items"}


@dataclass(frozen=True)
class ScoreResult:
    """What was written, as its manifest has it."""

    path: Path
    manifest: Mapping[str, Any]
    was_complete: bool = False
    went_on: bool = False  # with work that an earlier run had begun

    @classmethod
    def open(cls, path: str | Path) -> ScoreResult:
        return cls(Path(path), read_manifest(Path(path), KIND))

    @property
    def outputs(self) -> Mapping[str, Mapping[str, Any]]:
        """scores, users, items, recall -> rows, seconds and files."""
        return self.manifest["outputs"]  # type: ignore[no-any-return]

    @property
    def metrics(self) -> Mapping[str, float] | None:
        return self.manifest["metrics"]  # type: ignore[no-any-return]

    def to_polars(self, output: str | None = None) -> pl.DataFrame:
        """The rows of an output; of the first one without a name, which is scores where there are any."""
        return pl.read_parquet(self.files(output or next(iter(self.outputs))))

    def files(self, output: str) -> list[Path]:
        """Parquet files in the order of their rows."""
        return [self.path / shard["file"] for shard in self.outputs[output]["files"]]


def score(
    model: ModelRef,
    rows: Input | None,
    table: Table | None,
    into: Path,
    options: ScoreConfig = ScoreConfig(),  # noqa: B008, frozen
    progress: Progress | None = None,
) -> ScoreResult:
    """Write scores of `rows`, and vectors and recall of the Table's users and items (a bundle has its own).

    Killed and run again, it keeps what was finished.
    """
    check_engine(options)
    into = into.absolute()
    asked = _asked(model, rows, table, options)
    job = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:32]
    if is_published(into) and not (into / WORK).exists():
        return _already_there(into, job)
    if table is not None:
        check_features(open_models(model), table)
    with lock_folder(into):
        if is_published(into):  # by the one that had the lock before, or that was killed when all was done
            _remove_work(into)
            return _already_there(into, job)
        return resume_or_start_over(
            into, lambda: _score(model, rows, table, into, options, progress, asked, job)
        )


def _score(
    model: ModelRef,
    rows: Input | None,
    table: Table | None,
    into: Path,
    options: ScoreConfig,
    progress: Progress | None,
    asked: dict[str, Any],
    job: str,
) -> ScoreResult:
    work = open_work(into, job, KIND)
    went_on = any(path.is_dir() for path in work.iterdir())
    with full_disk_is_an_error(into, KIND), open_engine(options, work, progress) as engine:
        writer = _Writer(engine, model, into, work)
        if rows is not None:
            writer.write_scores(rows)
        for side in options.embeddings:
            writer.write_vectors(side, table)
        if options.recall is not None:
            writer.write_recall(options.recall, table, options.without_seen)
        publish(into, KIND, {"job": job, "asked": asked, **writer.facts()})
    _remove_work(into)
    found = ScoreResult.open(into)
    return ScoreResult(into, found.manifest, went_on=went_on)


def _remove_work(into: Path) -> None:
    """What published scores do not need; the work goes last, so that a kill in between is noticed."""
    forget_records(into / "rejected")
    shutil.rmtree(into / WORK, ignore_errors=True)


def _asked(model: ModelRef, rows: Input | None, table: Table | None, options: ScoreConfig) -> dict[str, Any]:
    """What the result depends on. A rerun that asks for something else starts over."""
    return {
        "model": model.digest,
        "rows": rows.facts() if rows is not None else None,
        "table": table.digest if table is not None else None,
        "embeddings": sorted(options.embeddings),
        "recall": options.recall,
        "without_seen": options.without_seen,
    }


def _already_there(into: Path, job: str) -> ScoreResult:
    found = ScoreResult.open(into)
    if found.manifest["job"] != job:
        raise ArtifactError(
            f"{into} already holds scores of another model, other rows or other options. "
            "Choose another --into, or delete it first."
        )
    return ScoreResult(into, found.manifest, was_complete=True)


class _Writer:
    """Writes one output after the other."""

    def __init__(self, engine: Engine, model: ModelRef, into: Path, work: Path) -> None:
        self.engine = engine
        self.model = model
        self.into = into
        self.work = work
        self.outputs: dict[str, dict[str, Any]] = {}
        self.tally: Tally | None = None
        self.metrics: dict[str, float] | None = None

    def write_scores(self, rows: Input) -> None:
        work, rejected = self.work / "scores", self.into / "rejected"
        files = self._write("scores", lambda engine: rows.scores(engine, self.model, work, rejected))
        self.tally = rows.finish()
        ranking = open_models(self.model).recipe.ranking
        self.metrics = measure(files, is_number=ranking is not None and bool(ranking.number_losses))

    def write_vectors(self, side: Side, table: Table | None) -> None:
        self._write(_FOLDERS[side], lambda engine: vectors(engine, self.model, table, side))

    def write_recall(self, k: int, table: Table | None, new_only: bool) -> None:
        items = None
        if table is not None:
            items = self.work / "catalogue"
            write_catalogue(self._items(table), items)
        self._write("recall", lambda engine: recall(engine, self.model, table, items, k, new_only))

    def _items(self, table: Table) -> list[Path]:
        """Items with their vectors, written for recall alone if nobody asked for them."""
        if "items" in self.outputs:
            return [self.into / shard["file"] for shard in self.outputs["items"]["files"]]
        shards = self._run("items", lambda engine: vectors(engine, self.model, table, "item"), self.work)
        return [self.work / shard.file for shard in shards]

    def _write(self, name: str, frame_of: Callable[[Engine], Frame]) -> list[Path]:
        started = time.monotonic()
        shards = self._run(name, frame_of, self.into)
        self.outputs[name] = {
            "rows": sum(shard.rows for shard in shards),
            "seconds": round(time.monotonic() - started, 3),
            "files": [asdict(shard) for shard in shards],
        }
        return [self.into / shard.file for shard in shards]

    def _run(self, name: str, frame_of: Callable[[Engine], Frame], into: Path) -> list[ShardRecord]:
        # Records of what is done are kept by part and format: each output needs a folder of its own.
        self.engine.work = self.work / name
        self.engine.work.mkdir(parents=True, exist_ok=True)
        return self.engine.write(frame_of(self.engine), into, "log", 0, folders=(name,))

    def facts(self) -> dict[str, Any]:
        """What the manifest holds of all that was written."""
        tally, written = self.tally, self.outputs.get("scores", {}).get("rows", 0)
        return {
            "model": facts_of(open_models(self.model), self.model),
            "rows_read": tally.rows if tally is not None else written,
            "rows_rejected": dict(tally.reasons) if tally is not None else {},
            "rows_left_out": tally.rows - tally.bad - written if tally is not None else 0,  # by [[rows]]
            "metrics": self.metrics,
            "outputs": self.outputs,
        }
