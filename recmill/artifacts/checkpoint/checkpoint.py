"""Checkpoints: models as of one step, on disk, in open formats that any number of workers and a plain script can read.

    manifest.json  plan/          the recipe, the columns and the fitted features that the models were trained with
    ranking/                      the checkpoints of one model
      step-00001000/              full
        manifest.json             step, metrics, state of the run, and size and SHA-256 of every file
        dense.safetensors         model.<weight>, optimizer.<weight>.<slot>, random.<source>
        tables/deep/c1.arrow      Arrow IPC: key, row, state, count, step; one line for each key
        admission.safetensors     <table>.<what>: keys that have no row yet, and keys removed since the last checkpoint
      step-00002000/              a delta: only the keys that changed since the checkpoint that its manifest names

Of several workers each writes the keys that it holds: c1.0-2.arrow and admission.0-2.safetensors are those of worker 0
of 2. The manifest names all files of a table; what is in which of them means nothing, so that any number of workers can
go on. A checkpoint is written aside and renamed when all of it is on the disk: what has its name is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors.numpy import load_file, save_file

from recmill.artifacts.checkpoint.records import read_records, write_records
from recmill.artifacts.manifest import (
    MANIFEST,
    is_published,
    publish,
    read_manifest,
    sync_all,
    write_manifest,
)
from recmill.embeddings.peers import Peers
from recmill.embeddings.table import Array, EmbeddingTable, KeyRecords, Snapshot, Waiting
from recmill.errors import ArtifactError, ResourceError
from recmill.features.chain import ColumnInfo
from recmill.features.plan import Plan
from recmill.features.plan_artifact import PlanArtifact
from recmill.recipe.load import recipe_to_dict
from recmill.recipe.recipe import Recipe, Saving

T = TypeVar("T")

# What tells the best checkpoint of a model.
METRICS = {"ranking": "auc", "retrieval": "ndcg@10"}
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, repr=False)
class Checkpoint(PlanArtifact):
    """What `recmill train` writes: the models of one recipe, and the Plan and columns they were trained with."""

    path: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        return cls(Path(path), read_manifest(Path(path), "checkpoint"))

    @classmethod
    def create(
        cls,
        path: Path,
        recipe: Recipe,
        columns: Sequence[ColumnInfo],
        plan: Plan,
        source: str,
        data: str | None = None,
    ) -> Checkpoint:
        """A folder for checkpoints; those that are there stay.

        `source` tells the rows that they learn from from others, `data` is where the log of these rows is.
        """
        path.mkdir(parents=True, exist_ok=True)
        if not is_published(
            path
        ):  # a plan that is there may be of a run that was killed, with another recipe
            _remove(path / "plan")
            _remove(path / "plan.partial")
            plan.save(path / "plan.partial")
            sync_all(path / "plan.partial")
            os.rename(path / "plan.partial", path / "plan")
        manifest = {
            "recipe": recipe_to_dict(recipe),
            "columns": [asdict(column) for column in columns],
            "source": source,
            "data": data,
        }
        write_manifest(path, "checkpoint", manifest)
        return cls.open(path)

    @property
    def models(self) -> list[str]:
        """The models that have checkpoints: retrieval, ranking or both."""
        return [name for name in ("retrieval", "ranking") if Checkpoints(self.path / name).paths()]

    def summary(self) -> dict[str, str]:
        best = {model: self.of(model).find("best") for model in self.models}
        return {
            "recipe": str(self.manifest["recipe"]["name"]),
            **{model: _step_and_metric(model, found) for model, found in best.items()},
        }

    def of(self, model: str, saving: Saving | None = None, peers: Peers | None = None) -> Checkpoints:
        return Checkpoints(self.path / model, METRICS[model], saving or Saving(), peers)


@dataclass(frozen=True)
class StepCheckpoint:
    """One model as of one step, published."""

    path: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> StepCheckpoint:
        manifest = read_manifest(path, "step")
        if manifest.pop("digest", None) != _manifest_digest(manifest):
            raise ArtifactError(f"Checkpoint {path} is damaged: manifest.json does not have its own digest.")
        return cls(path, manifest)

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.manifest["metrics"])

    @property
    def state(self) -> dict[str, Any]:
        """What the run needs to go on: where it reads, what it found so far."""
        return dict(self.manifest["state"])

    @property
    def delta_of(self) -> str | None:
        """The name of the checkpoint that this one adds to; None when it is full."""
        return self.manifest["delta_of"]  # type: ignore[no-any-return]

    @property
    def num_bytes(self) -> int:
        return sum(int(file["num_bytes"]) for file in self.manifest["files"].values())

    def verify(self) -> None:
        """Read every file and compare it with its digest."""
        for name, file in self.manifest["files"].items():
            if digest_of(self.path / name) != file["sha256"]:
                raise ArtifactError(
                    f"Checkpoint {self.path} is damaged: {name} does not have the digest of its record."
                )

    def arrays(self) -> dict[str, Array]:
        """Dense weights, optimizer state and random state."""
        return load_file(self.path / "dense.safetensors")

    def records(self, table: str) -> Iterator[KeyRecords]:
        """The keys of a table that this checkpoint holds, piece by piece."""
        for name in self.manifest["tables"][table]["files"]:
            yield from read_records(self.path / name)

    def restore_into(self, tables: Mapping[str, EmbeddingTable]) -> None:
        """Apply this checkpoint alone; `Checkpoints.restore` applies all that it stands on before."""
        expected = self.manifest["tables"]
        if set(expected) != set(tables):
            raise ArtifactError(
                f"Checkpoint {self.path} has tables {', '.join(sorted(expected))}; "
                f"the model has {', '.join(sorted(tables))}. Is it a checkpoint of this recipe?"
            )
        admission = self.admission()
        for name, table in tables.items():
            _check_fits(self.path, name, expected[name], table)
            table.remove(admission[f"{name}.removed"])
            for records in self.records(name):
                table.load(records)
            table.load_waiting(Waiting(**{part: admission[f"{name}.{part}"] for part in _WAITING}))

    def admission(self) -> dict[str, Array]:
        """`<table>.removed`, and `<table>.<what>` of keys that have no row yet."""
        names = [name for name in self.manifest["files"] if name.startswith("admission.")]
        parts = [load_file(self.path / name) for name in names]
        every = {key: [part[key] for part in parts if key in part] for part in parts for key in part}
        return {
            key: values[0] if len(values) == 1 else np.concatenate(values) for key, values in every.items()
        }


def _step_and_metric(model: str, checkpoint: StepCheckpoint) -> str:
    metric = METRICS[model]
    value = checkpoint.metrics.get(metric)
    return f"step {checkpoint.step:,}" + (f" {metric} {value:.4f}" if value is not None else "")


_WAITING = tuple(field.name for field in fields(Waiting))


class Checkpoints:
    """All checkpoints of one model: saves in the background, finds the last and the best, forgets the old."""

    def __init__(
        self,
        folder: Path,
        metric: str = "",
        saving: Saving = Saving(),  # noqa: B008, frozen
        peers: Peers | None = None,
    ) -> None:
        """With `peers`, every worker calls `save`, `wait` and `restore`; worker 0 alone looks after the folder."""
        self.folder = folder
        self.metric = metric
        self.saving = saving
        self.peers = peers
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._saved: str | None = None  # the checkpoint that tables count their changes from

    def paths(self) -> list[Path]:
        """Where published checkpoints are, damaged ones too, oldest first."""
        return [path for path in self._folders() if (path / MANIFEST).is_file()]

    def _folders(self) -> list[Path]:
        found = (path for path in self.folder.glob("step-*") if _NAME.fullmatch(path.name))
        return sorted(found, key=_step_of)

    def all(self) -> list[StepCheckpoint]:
        """Every whole checkpoint, oldest first; a damaged manifest is an error."""
        return [StepCheckpoint.open(path) for path in self.paths()]

    def readable(self) -> list[StepCheckpoint]:
        """Those of them whose manifest is not damaged."""
        found = []
        for path in self.paths():
            with suppress(ArtifactError):
                found.append(StepCheckpoint.open(path))
        return found

    def find(self, which: str) -> StepCheckpoint:
        """`last`, `best` (by the metric; the last when there is none) or a step. No other needs to be whole."""
        paths = self.paths()
        if not paths:
            raise ArtifactError(f"{self.folder} has no checkpoint. Run `recmill train` first.")
        if which == "best":
            return best_of(known := self.all(), self.metric) or known[-1]
        steps = {str(_step_of(path)): path for path in paths}
        if which != "last" and which not in steps:
            raise ArtifactError(
                f"{self.folder} has no checkpoint of step {which}; it has: {', '.join(steps)}, last, best."
            )
        return StepCheckpoint.open(paths[-1] if which == "last" else steps[which])

    def chain(self, checkpoint: StepCheckpoint) -> list[StepCheckpoint]:
        """The full checkpoint that this one stands on, the deltas after it, and itself; all verified, by one worker."""
        chain = self._bases(checkpoint)
        if self.is_first:
            for part in chain:
                part.verify()
        return chain

    def _bases(self, checkpoint: StepCheckpoint) -> list[StepCheckpoint]:
        """What the chain is, as far as manifests tell."""
        chain = [checkpoint]
        while (name := chain[0].delta_of) is not None:
            path = self.folder / name
            if not (_NAME.fullmatch(name) and path.is_dir() and _step_of(path) < chain[0].step):
                raise ArtifactError(
                    f"Checkpoint {checkpoint.path} is damaged: it stands on {name}, which is not there."
                )
            chain.insert(0, StepCheckpoint.open(path))
        return chain

    @property
    def is_first(self) -> bool:
        """Whether this worker looks after the folder."""
        return self.peers is None or self.peers.rank == 0

    def last_good(self, warn: Callable[[str], None]) -> StepCheckpoint | None:
        """The newest checkpoint that can be restored. Damaged ones are named, set aside and passed over."""
        good = None
        for path in reversed(self._folders()):
            try:
                checkpoint = StepCheckpoint.open(path)
                if good is None:
                    self.chain(checkpoint)
                else:  # nobody needs it now: its payload is compared when somebody does
                    self._bases(checkpoint)
                good = good or checkpoint
            except (ArtifactError, OSError, KeyError, TypeError, ValueError) as error:
                instead = "Going back to the checkpoint before it" if good is None else "It is not needed"
                warn(f"{error} {instead}; this one is now {path.name}.damaged.")
                _remove(path.with_name(f"{path.name}.damaged"))
                os.rename(path, path.with_name(f"{path.name}.damaged"))
        return good

    def restore(self, checkpoint: StepCheckpoint, tables: Mapping[str, EmbeddingTable]) -> dict[str, Array]:
        """Fill empty tables; the dense arrays are returned. The next delta stands on this checkpoint."""
        for part in self.chain(checkpoint):
            part.restore_into(tables)
        for table in tables.values():
            table.mark_saved()
        self._saved = checkpoint.path.name
        return checkpoint.arrays()

    def save(
        self,
        step: int,
        arrays: Mapping[str, Array],
        tables: Mapping[str, EmbeddingTable],
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> Path:
        """Fix this moment and write it on another thread while training goes on; where it will be.

        `arrays` must be a copy.
        """
        self.wait()
        base = self._base_for_all()
        mine = {name: table for name, table in tables.items() if self._writes(table)}
        snapshots = {name: table.begin_snapshot(delta=base is not None) for name, table in mine.items()}
        manifest = {
            "step": step,
            "delta_of": base,
            "metrics": dict(metrics),
            "state": dict(state),
            "tables": {name: _describe(name, table) for name, table in tables.items()},
        }
        suffix = "" if self.peers is None else f".{self.peers.rank}-{self.peers.size}"
        saving = _Saving(self.folder / f"step-{step:08}.partial", mine, snapshots, dict(arrays), suffix)

        def write() -> None:
            try:
                self._write(saving, manifest)
            except BaseException as error:  # raised by `wait`, on the thread that trains
                self._failure = error

        self._writing = threading.Thread(target=write, name="checkpoint")
        self._writing.start()
        return saving.aside.with_suffix("")

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is under way, as far as this worker is concerned."""
        return self._writing is not None and self._writing.is_alive()

    def _writes(self, table: EmbeddingTable) -> bool:
        return table.shard is not None or self.is_first

    def _base_for_all(self) -> str | None:
        base = self._base() if self.is_first else None
        name = base.path.name if base is not None else None
        return name if self.peers is None else self.peers.steps.all_gather(name)[0]

    def wait(self) -> None:
        """Until the checkpoint under way is published; what went wrong with it is raised here."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        failure, self._failure = self._failure, None
        if isinstance(failure, OSError):
            raise ResourceError(
                f"A checkpoint could not be written to {self.folder}: {failure.strerror or failure}. "
                "The checkpoints before it are whole; make room and resume."
            ) from failure
        if failure is not None:
            raise failure

    def settle(self) -> None:
        """Until nothing is written any more, after a run that failed. Of several workers, others may be gone."""
        if self._writing is not None and self.peers is None:
            self._writing.join()

    def forget_after(self, step: int) -> None:
        """Drop what a run that goes on from `step` will write again, and what an interrupted write or prune left."""
        if not self.is_first:
            return
        for path in self.paths():
            if _step_of(path) > step:
                _remove(path)
        for path in self.folder.glob("*.partial"):
            _remove(path)
        self.prune()

    def prune(self, keep: int | None = None) -> list[StepCheckpoint]:
        """Keep the last ones, the best one and what they stand on; returns what went."""
        known = self.readable()
        best = best_of(known, self.metric)
        wanted = {checkpoint.path.name for checkpoint in known[-(keep or self.saving.keep) :]}
        wanted |= {best.path.name} if best else set()
        for checkpoint in reversed(known):  # bases are older than their deltas
            if checkpoint.path.name in wanted and checkpoint.delta_of is not None:
                wanted.add(checkpoint.delta_of)
        gone = [checkpoint for checkpoint in known if checkpoint.path.name not in wanted]
        for checkpoint in reversed(gone):
            _remove(checkpoint.path)
        return gone

    def _base(self) -> StepCheckpoint | None:
        """What the next delta stands on; None when the next checkpoint is to be full."""
        known = self.readable()
        if not known or known[-1].path.name != self._saved:  # a delta holds what changed since that one
            return None
        since_full = 1 + next(
            (number for number, found in enumerate(reversed(known)) if found.delta_of is None), len(known)
        )
        return known[-1] if since_full < self.saving.full_every else None

    def _write(self, saving: _Saving, manifest: dict[str, Any]) -> None:
        """Each worker its part; the first one publishes when all are on the disk."""

        def make_room() -> None:
            _remove(saving.aside)
            saving.aside.mkdir(parents=True)

        if self.peers is None:
            make_room()
            parts: list[_Written | OSError] = [saving.write(dense=True)]
        else:
            group = self.peers.saving
            _done(group.all_gather(_tried(make_room) if self.is_first else None)[0])
            parts = group.all_gather(_tried(lambda: saving.write(dense=self.is_first)))
        try:
            if self.is_first:
                self._publish(saving.aside, [_done(part) for part in parts], manifest)
        finally:
            if self.peers is not None:
                self.peers.saving.all_gather(None)  # it is published, or never will be
        for part in parts:
            _done(part)

    def _publish(self, aside: Path, parts: Sequence[_Written], manifest: dict[str, Any]) -> None:
        for name, table in manifest["tables"].items():
            written = [part for part in parts if name in part.keys]
            table["files"] = [part.tables[name] for part in written]
            table["keys"] = sum(part.keys[name] for part in written)
        files = {name: facts for part in parts for name, facts in part.files.items()}
        manifest["files"] = dict(sorted(files.items()))
        content = {"kind": "step", "format": 1, **manifest}
        publish(aside, "step", {**manifest, "digest": _manifest_digest(content)})
        final = aside.with_suffix("")
        _remove(final)
        os.rename(aside, final)
        _sync_folder(self.folder)
        self._saved = final.name
        self.prune()


@dataclass(frozen=True)
class _Written:
    """What one worker wrote: the file and number of keys of each table, and facts of every file."""

    tables: Mapping[str, str]
    keys: Mapping[str, int]
    files: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class _Saving:
    """One worker's part of a checkpoint under way."""

    aside: Path
    tables: Mapping[str, EmbeddingTable]
    snapshots: Mapping[str, Snapshot]
    arrays: Mapping[str, Array]
    suffix: str  # of files that are not the only ones of their kind

    def write(self, dense: bool) -> _Written:
        admission: dict[str, Array] = {}
        tables, keys = {}, {}
        for name, snapshot in self.snapshots.items():
            table = self.tables[name]
            tables[name] = f"tables/{name}{self.suffix if table.shard is not None else ''}.arrow"
            keys[name] = write_records(self.aside / tables[name], snapshot, _describe(name, table))
            parts = {part: getattr(snapshot.waiting, part) for part in _WAITING}
            admission |= {
                f"{name}.{part}": value for part, value in {"removed": snapshot.removed, **parts}.items()
            }
        names = [*tables.values(), f"admission{self.suffix}.safetensors"]
        save_file(admission, self.aside / names[-1])
        if dense:
            names.append("dense.safetensors")
            save_file(dict(self.arrays), self.aside / names[-1])
        return _Written(tables, keys, {name: _facts(self.aside / name) for name in names})


def _facts(path: Path) -> dict[str, Any]:
    return {"num_bytes": path.stat().st_size, "sha256": digest_of(path)}


def _tried(function: Callable[[], T]) -> T | OSError:
    """An error of the disk as a value, which can be told to others."""
    try:
        return function()
    except OSError as error:
        return error


def _done(part: T | OSError) -> T:
    if isinstance(part, OSError):
        raise part
    return part


def best_of(checkpoints: Sequence[StepCheckpoint], metric: str) -> StepCheckpoint | None:
    """The one with the highest value of the metric; the earliest of equals."""
    measured = [checkpoint for checkpoint in checkpoints if metric in checkpoint.metrics]
    return max(measured, key=lambda checkpoint: checkpoint.metrics[metric], default=None)


def digest_of(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise ArtifactError(f"Checkpoint {path.parent} is damaged: {path.name} is missing.") from None


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _describe(name: str, table: EmbeddingTable) -> dict[str, Any]:
    spec = table.spec
    return {
        "files": [f"tables/{name}.arrow"],
        "dim": spec.dim,
        "optimizer": spec.optimizer,
        "num_states": table.num_states,
        "num_rows": spec.num_rows,
    }


def _check_fits(path: Path, name: str, found: Mapping[str, Any], table: EmbeddingTable) -> None:
    wanted = _describe(name, table)
    for key in ("dim", "optimizer", "num_states", "num_rows"):
        if found[key] != wanted[key]:
            raise ArtifactError(
                f'Checkpoint {path}: table "{name}" has {key} {found[key]}, the model wants {wanted[key]}. '
                "Is it a checkpoint of this recipe?"
            )


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _remove(path: Path) -> None:
    """Gone as a whole: it loses its name first."""
    if path.exists():
        aside = path if path.name.endswith(".partial") else path.with_name(path.name + ".gone.partial")
        if aside != path:
            os.rename(path, aside)
        shutil.rmtree(aside)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
