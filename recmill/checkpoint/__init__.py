"""Checkpoints: models as of one step, on disk, in open formats that any number of workers and a plain script can read.

    manifest.json  plan/          the recipe, the columns and the fitted features that the models were trained with
    ranking/                      the checkpoints of one model
      step-00001000/              full
        manifest.json             step, metrics, state of the run, and size and SHA-256 of every file
        dense.safetensors         model.<weight>, optimizer.<weight>.<slot>, random.<source>
        tables/deep/c1.arrow      Arrow IPC: key, row, state, count, step; one line for each key
        admission.safetensors     <table>.<what>: keys that have no row yet, and keys removed since the last checkpoint
      step-00002000/              a delta: only the keys that changed since the checkpoint that its manifest names

A checkpoint is written aside and renamed when all of it is on the disk: what has its name is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from recmill.artifact import MANIFEST, publish, read_manifest, write_manifest
from recmill.checkpoint.records import read_records, write_records
from recmill.embeddings.table import Array, EmbeddingTable, Records, Snapshot, Waiting
from recmill.errors import ArtifactError, ResourceError
from recmill.features.chain import ColumnInfo
from recmill.features.plan import Plan
from recmill.features.planned import Planned
from recmill.spec.load import recipe_to_dict
from recmill.spec.recipe import Recipe, Saving

# What tells the best checkpoint of a model.
METRICS = {"ranking": "auc", "retrieval": "ndcg@10"}
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class CheckpointFolder(Planned):
    """What `recmill train` writes: the models of one recipe, and the Plan and columns they were trained with."""

    path: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> CheckpointFolder:
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
    ) -> CheckpointFolder:
        """A folder for checkpoints; those that are there stay.

        `source` tells the rows that they learn from from others, `data` is where the log of these rows is.
        """
        path.mkdir(parents=True, exist_ok=True)
        if not (path / "plan").exists():
            plan.save(path / "plan.partial")
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
        return [name for name in ("retrieval", "ranking") if Checkpoints(self.path / name).all()]

    def of(self, model: str, saving: Saving | None = None) -> Checkpoints:
        return Checkpoints(self.path / model, METRICS[model], saving or Saving())


@dataclass(frozen=True)
class Checkpoint:
    """One published checkpoint."""

    path: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
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

    def records(self, table: str) -> Iterator[Records]:
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
        admission = load_file(self.path / "admission.safetensors")
        for name, table in tables.items():
            _check_fits(self.path, name, expected[name], table)
            table.remove(admission[f"{name}.removed"])
            for records in self.records(name):
                table.load(records)
            table.load_waiting(Waiting(**{part: admission[f"{name}.{part}"] for part in _WAITING}))


_WAITING = tuple(field.name for field in fields(Waiting))


class Checkpoints:
    """All checkpoints of one model: saves in the background, finds the last and the best, forgets the old."""

    def __init__(self, folder: Path, metric: str = "", saving: Saving = Saving()) -> None:  # noqa: B008, frozen
        self.folder = folder
        self.metric = metric
        self.saving = saving
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None

    def all(self) -> list[Checkpoint]:
        """Every whole checkpoint, oldest first."""
        names = sorted(path.name for path in self.folder.glob("step-*") if _NAME.fullmatch(path.name))
        found = [self.folder / name for name in names if (self.folder / name / MANIFEST).is_file()]
        return [Checkpoint.open(path) for path in found]

    def find(self, which: str) -> Checkpoint:
        """`last`, `best` (by the metric; the last when there is none) or a step."""
        known = self.all()
        if not known:
            raise ArtifactError(f"{self.folder} has no checkpoint. Run `recmill train` first.")
        if which == "last":
            return known[-1]
        if which == "best":
            return best_of(known, self.metric) or known[-1]
        for checkpoint in known:
            if str(checkpoint.step) == which:
                return checkpoint
        steps = ", ".join(str(checkpoint.step) for checkpoint in known)
        raise ArtifactError(f"{self.folder} has no checkpoint of step {which}; it has: {steps}, last, best.")

    def chain(self, checkpoint: Checkpoint) -> list[Checkpoint]:
        """The full checkpoint that this one stands on, the deltas after it, and itself; all verified."""
        chain = [checkpoint]
        while chain[0].delta_of is not None:
            path = self.folder / chain[0].delta_of
            chain.insert(0, Checkpoint.open(path))
        for part in chain:
            part.verify()
        return chain

    def last_good(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that can be restored. Damaged ones are named, set aside and passed over."""
        names = sorted(
            (path.name for path in self.folder.glob("step-*") if _NAME.fullmatch(path.name)), reverse=True
        )
        for name in names:
            path = self.folder / name
            try:
                checkpoint = Checkpoint.open(path)
                self.chain(checkpoint)
                return checkpoint
            except (ArtifactError, OSError, KeyError, TypeError, ValueError) as error:
                warn(f"{error} Going back to the checkpoint before it; this one is now {name}.damaged.")
                _remove(path.with_name(f"{name}.damaged"))
                os.rename(path, path.with_name(f"{name}.damaged"))
        return None

    def restore(self, checkpoint: Checkpoint, tables: Mapping[str, EmbeddingTable]) -> dict[str, Array]:
        """Fill empty tables; the dense arrays are returned. The next delta stands on this checkpoint."""
        for part in self.chain(checkpoint):
            part.restore_into(tables)
        for table in tables.values():
            table.mark_saved()
        return checkpoint.arrays()

    def save(
        self,
        step: int,
        arrays: Mapping[str, Array],
        tables: Mapping[str, EmbeddingTable],
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> None:
        """Fix this moment and write it on another thread while training goes on. `arrays` must be a copy."""
        self.wait()
        base = self._base()
        snapshots = {name: table.begin_snapshot(delta=base is not None) for name, table in tables.items()}
        manifest = {
            "step": step,
            "delta_of": base.path.name if base else None,
            "metrics": dict(metrics),
            "state": dict(state),
            "tables": {name: _describe(name, table) for name, table in tables.items()},
        }

        def write() -> None:
            try:
                self._write(step, dict(arrays), snapshots, manifest)
            except BaseException as error:  # raised by `wait`, on the thread that trains
                self._failure = error

        self._writing = threading.Thread(target=write, name="checkpoint")
        self._writing.start()

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

    def forget_after(self, step: int) -> None:
        """Drop what a run that goes on from `step` will write again, and what an interrupted write left."""
        for checkpoint in self.all():
            if checkpoint.step > step:
                _remove(checkpoint.path)
        for path in self.folder.glob("*.partial"):
            _remove(path)

    def prune(self, keep: int | None = None) -> list[Checkpoint]:
        """Keep the last ones, the best one and what they stand on; returns what went."""
        known = self.all()
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

    def _base(self) -> Checkpoint | None:
        """What the next delta stands on; None when the next checkpoint is to be full."""
        since_full = 0
        for checkpoint in reversed(known := self.all()):
            since_full += 1
            if checkpoint.delta_of is None:
                break
        return known[-1] if known and since_full < self.saving.full_every else None

    def _write(
        self, step: int, arrays: dict[str, Array], snapshots: Mapping[str, Snapshot], manifest: dict[str, Any]
    ) -> None:
        aside = self.folder / f"step-{step:08}.partial"
        _remove(aside)
        aside.mkdir(parents=True)
        save_file(arrays, aside / "dense.safetensors")
        admission: dict[str, Array] = {}
        for name, snapshot in snapshots.items():
            manifest["tables"][name]["keys"] = write_records(
                aside / _table_file(name), snapshot, manifest["tables"][name]
            )
            parts = {part: getattr(snapshot.waiting, part) for part in _WAITING}
            admission |= {
                f"{name}.{part}": value for part, value in {"removed": snapshot.removed, **parts}.items()
            }
        save_file(admission, aside / "admission.safetensors")
        manifest["files"] = {
            str(path.relative_to(aside)): {"num_bytes": path.stat().st_size, "sha256": digest_of(path)}
            for path in sorted(aside.rglob("*"))
            if path.is_file()
        }
        content = {"kind": "step", "format": 1, **manifest}
        publish(aside, "step", {**manifest, "digest": _manifest_digest(content)})
        final = self.folder / f"step-{step:08}"
        _remove(final)
        os.rename(aside, final)
        _sync_folder(self.folder)
        self.prune()


def best_of(checkpoints: Sequence[Checkpoint], metric: str) -> Checkpoint | None:
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
        "files": [_table_file(name)],
        "dim": spec.dim,
        "optimizer": spec.optimizer,
        "num_states": table.num_states,
        "num_rows": spec.num_rows,
    }


def _table_file(name: str) -> str:
    return f"tables/{name}.arrow"


def _check_fits(path: Path, name: str, found: Mapping[str, Any], table: EmbeddingTable) -> None:
    wanted = _describe(name, table)
    for key in ("dim", "optimizer", "num_states", "num_rows"):
        if found[key] != wanted[key]:
            raise ArtifactError(
                f'Checkpoint {path}: table "{name}" has {key} {found[key]}, the model wants {wanted[key]}. '
                "Is it a checkpoint of this recipe?"
            )


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
