"""All checkpoints of one model: the last, the best, and the bases of deltas; new ones are written in the background."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from recmill.artifacts.checkpoint.files import STEP_NAME, remove_folder, step_of
from recmill.artifacts.checkpoint.step import StepCheckpoint, describe_table
from recmill.artifacts.checkpoint.write import PendingCheckpoint, Writers
from recmill.artifacts.manifest import MANIFEST
from recmill.embeddings.table import Array, EmbeddingTable
from recmill.errors import ArtifactError, ResourceError
from recmill.recipe.recipe import Saving


class Checkpoints:
    """All checkpoints of one model: saves in the background, finds the last and the best, removes old ones."""

    def __init__(
        self,
        folder: Path,
        metric: str = "",
        saving: Saving = Saving(),  # noqa: B008, frozen
        writers: Writers | None = None,
    ) -> None:
        """With `writers`, every worker calls `save`, `wait` and `restore`; worker 0 alone manages the folder."""
        self.folder = folder
        self.metric = metric
        self.saving = saving
        self.writers = writers
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.on_published: Callable[[], None] | None = None  # called on the writing thread
        self._saved: str | None = None  # the checkpoint since which tables track their changes

    def paths(self) -> list[Path]:
        """Paths of published checkpoints, including damaged ones, oldest first."""
        return [path for path in self._folders() if (path / MANIFEST).is_file()]

    def _folders(self) -> list[Path]:
        paths = (path for path in self.folder.glob("step-*") if STEP_NAME.fullmatch(path.name))
        return sorted(paths, key=step_of)

    def all(self) -> list[StepCheckpoint]:
        """All intact checkpoints, oldest first; a damaged manifest is an error."""
        return [StepCheckpoint.open(path) for path in self.paths()]

    def readable(self) -> list[StepCheckpoint]:
        """Those whose manifest is intact."""
        checkpoints = []
        for path in self.paths():
            with suppress(ArtifactError):
                checkpoints.append(StepCheckpoint.open(path))
        return checkpoints

    def find(self, which: str) -> StepCheckpoint:
        """Find `last`, `best` (by the metric; the last when there is none) or a step. Others may be damaged."""
        paths = self.paths()
        if not paths:
            raise ArtifactError(f"{self.folder} has no checkpoint. Run `recmill train` first.")
        if which == "best":
            return best_of(known := self.all(), self.metric) or known[-1]
        steps = {str(step_of(path)): path for path in paths}
        if which != "last" and which not in steps:
            raise ArtifactError(
                f"{self.folder} has no checkpoint of step {which}; it has: {', '.join(steps)}, last, best."
            )
        return StepCheckpoint.open(paths[-1] if which == "last" else steps[which])

    def chain(self, checkpoint: StepCheckpoint) -> list[StepCheckpoint]:
        """The full checkpoint that this one is based on, the deltas after it, and itself; verified by one worker."""
        chain = self._bases(checkpoint)
        if self.is_first:
            for part in chain:
                part.verify()
        return chain

    def _bases(self, checkpoint: StepCheckpoint) -> list[StepCheckpoint]:
        """The chain according to manifests."""
        chain = [checkpoint]
        while (name := chain[0].delta_of) is not None:
            path = self.folder / name
            if not (STEP_NAME.fullmatch(name) and path.is_dir() and step_of(path) < chain[0].step):
                raise ArtifactError(
                    f"Checkpoint {checkpoint.path} is damaged: its base {name} does not exist."
                )
            chain.insert(0, StepCheckpoint.open(path))
        return chain

    @property
    def is_first(self) -> bool:
        """Whether this worker manages the folder."""
        return self.writers is None or self.writers.rank == 0

    def last_good(self, warn: Callable[[str], None]) -> StepCheckpoint | None:
        """The newest checkpoint that can be restored. Damaged ones are reported, set aside and skipped."""
        good = None
        for path in reversed(self._folders()):
            try:
                checkpoint = StepCheckpoint.open(path)
                if good is None:
                    self.chain(checkpoint)
                else:  # only its manifest: other files are verified when they are read
                    self._bases(checkpoint)
                good = good or checkpoint
            except (ArtifactError, OSError, KeyError, TypeError, ValueError) as error:
                instead = "Going back to the checkpoint before it" if good is None else "It is not needed"
                warn(f"{error} {instead}; this one is now {path.name}.damaged.")
                remove_folder(path.with_name(f"{path.name}.damaged"))
                os.rename(path, path.with_name(f"{path.name}.damaged"))
        return good

    def restore(self, checkpoint: StepCheckpoint, tables: Mapping[str, EmbeddingTable]) -> dict[str, Array]:
        """Fill empty tables; returns the dense arrays. The next delta is based on this checkpoint."""
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
        """Snapshot this moment and write it on another thread while training continues; returns its path.

        `arrays` must be a copy.
        """
        self.wait()
        base = self._base_for_all()
        mine = {name: table for name, table in tables.items() if table.shard is not None or self.is_first}
        manifest = {
            "step": step,
            "delta_of": base,
            "metrics": dict(metrics),
            "state": dict(state),
            "tables": {name: describe_table(name, table) for name, table in tables.items()},
        }
        snapshots = {name: table.begin_snapshot(delta=base is not None) for name, table in mine.items()}
        path = self.folder / f"step-{step:08}"
        pending = PendingCheckpoint(path, manifest, mine, snapshots, dict(arrays), self.writers)

        def write() -> None:
            try:
                self._write(pending)
            except BaseException as error:  # raised by `wait`, on the training thread
                self._failure = error

        self._writing = threading.Thread(target=write, name="checkpoint")
        self._writing.start()
        return path

    def _write(self, pending: PendingCheckpoint) -> None:
        pending.write()
        if self.is_first:
            self._saved = pending.path.name
            self.prune()
            if self.on_published is not None:
                self.on_published()

    @property
    def is_writing(self) -> bool:
        """Whether this worker is writing a checkpoint."""
        return self._writing is not None and self._writing.is_alive()

    def _base_for_all(self) -> str | None:
        base = self._base() if self.is_first else None
        name = base.path.name if base is not None else None
        return name if self.writers is None else self.writers.steps.all_gather(name)[0]

    def wait(self) -> None:
        """Wait until the pending checkpoint is published; its errors are raised here."""
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
        """Wait until nothing is written any more, after a failed run. Other workers may be gone."""
        if self._writing is not None and self.writers is None:
            self._writing.join()

    def forget_after(self, step: int) -> None:
        """Remove what a run that resumes from `step` will rewrite, and the remains of an interrupted write or prune."""
        if not self.is_first:
            return
        for path in self.paths():
            if step_of(path) > step:
                remove_folder(path)
        for path in self.folder.glob("*.partial"):
            remove_folder(path)
        self.prune()

    def prune(self, keep: int | None = None) -> list[StepCheckpoint]:
        """Keep the last ones, the best one and their bases; returns what was removed."""
        known = self.readable()
        best = best_of(known, self.metric)
        wanted = {checkpoint.path.name for checkpoint in known[-(keep or self.saving.keep) :]}
        wanted |= {best.path.name} if best else set()
        for checkpoint in reversed(known):  # bases are older than their deltas
            if checkpoint.path.name in wanted and checkpoint.delta_of is not None:
                wanted.add(checkpoint.delta_of)
        gone = [checkpoint for checkpoint in known if checkpoint.path.name not in wanted]
        for checkpoint in reversed(gone):
            remove_folder(checkpoint.path)
        return gone

    def _base(self) -> StepCheckpoint | None:
        """The base of the next delta; None when the next checkpoint is to be full."""
        known = self.readable()
        if not known or known[-1].path.name != self._saved:  # a delta holds what changed since that one
            return None
        since_full = 1 + next(
            (index for index, one in enumerate(reversed(known)) if one.delta_of is None), len(known)
        )
        return known[-1] if since_full < self.saving.full_every else None


def best_of(checkpoints: Sequence[StepCheckpoint], metric: str) -> StepCheckpoint | None:
    """The one with the highest value of the metric; the earliest of equals."""
    measured = [checkpoint for checkpoint in checkpoints if metric in checkpoint.metrics]
    return max(measured, key=lambda checkpoint: checkpoint.metrics[metric], default=None)
