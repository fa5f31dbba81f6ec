"""Checkpoints: models as of one step, in open formats that any number of workers and a plain script can read.

    manifest.json  plan/          the recipe, the columns and the fitted features of the models
    ranking/                      the checkpoints of one model
      step-00001000/              full
        manifest.json             step, metrics, state of the run, and size and SHA-256 of every file
        dense.safetensors         model.<weight>, optimizer.<weight>.<slot>, random.<source>
        tables/deep/c1.arrow      Arrow IPC: key, row, state, count, step; one line for each key
        admission.safetensors     <table>.<what>: keys without a row, and keys removed since the last checkpoint
      step-00002000/              a delta: only the keys that changed since the checkpoint that its manifest names

Of several workers each writes the keys that it owns: c1.0-2.arrow and admission.0-2.safetensors are those of worker 0
of 2. The manifest names all files of a table; how keys are distributed over them has no meaning, so that any number
of workers can resume. A checkpoint is written aside and renamed when it is completely on disk: whatever has its name
is complete.

A recipe with `refit = true` has a second folder of checkpoints inside the first one: refit/ has the models that were
trained on the eval rows too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recmill.artifacts.checkpoint.checkpoints import Checkpoints
from recmill.artifacts.checkpoint.files import remove_folder
from recmill.artifacts.checkpoint.step import StepCheckpoint
from recmill.artifacts.checkpoint.write import Writers
from recmill.artifacts.manifest import is_published, read_manifest, sync_all, write_manifest
from recmill.errors import ArtifactError
from recmill.features.chain import ColumnInfo
from recmill.features.plan import Plan
from recmill.features.plan_artifact import PlanArtifact
from recmill.recipe.load import recipe_to_dict
from recmill.recipe.recipe import Recipe, Saving
from recmill.recipe.tuning import quality_of
from recmill.storage.view import opened

REFIT = "refit"
WITH_EVAL_ROWS = ", train and eval rows"  # suffix of the source of a refit


@dataclass(frozen=True, repr=False)
class Checkpoint(PlanArtifact):
    """The output of `recmill train`: the models of one recipe, with their Plan and columns."""

    path: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        folder = opened(path, "checkpoint")
        return cls(folder, read_manifest(folder, "checkpoint"))

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
        """Create a folder for checkpoints, or open an existing one.

        `source` names the training rows, `data` is the directory of their log.
        """
        path.mkdir(parents=True, exist_ok=True)
        if not is_published(path):
            # An existing plan may be of a killed run with another recipe.
            remove_folder(path / "plan")
            remove_folder(path / "plan.partial")
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
    def is_refit(self) -> bool:
        """Whether these models were trained on the eval rows too."""
        return str(self.manifest["source"]).endswith(WITH_EVAL_ROWS)

    def to_serve(self, which: str = "best") -> Checkpoint:
        """The checkpoints that are measured on test and exported: those of the refit, if the recipe has one.

        `last` and steps are those of the run that eval chose from.
        """
        if not self.recipe.refit or self.is_refit or which != "best":
            return self
        if not is_published(self.path / REFIT):
            raise self._unfinished_refit()
        refit = Checkpoint.open(self.path / REFIT)
        last = [refit.of(model).find("last") for model in refit.models]
        if refit.models != self.models or any(checkpoint.state["stopped_by"] is None for checkpoint in last):
            raise self._unfinished_refit()
        return refit

    def selection(self) -> Checkpoint:
        """The checkpoints that were not trained on the eval rows: of a refit, those of the run before it."""
        return Checkpoint.open(self.path.parent) if self.is_refit else self

    def _unfinished_refit(self) -> ArtifactError:
        return ArtifactError(
            f"{self.path} is of a recipe with refit = true, but its models were not trained to the end with the eval "
            "rows. Run `recmill train --resume`, or name a step of the run before."
        )

    @property
    def models(self) -> list[str]:
        """The models that have checkpoints: retrieval, ranking or both."""
        return [name for name in ("retrieval", "ranking") if Checkpoints(self.path / name).paths()]

    def summary(self) -> dict[str, str]:
        best = {model: self.of(model).find("best") for model in self.models}
        return {
            "recipe": str(self.manifest["recipe"]["name"]),
            **{model: _step_and_metric(self.metric(model), checkpoint) for model, checkpoint in best.items()},
        }

    def of(self, model: str, saving: Saving | None = None, writers: Writers | None = None) -> Checkpoints:
        return Checkpoints(self.path / model, self.metric(model), saving or Saving(), writers)

    def metric(self, model: str) -> str:
        """The metric that chooses the best checkpoint of a model."""
        return quality_of(model, self.recipe.ranking)


def _step_and_metric(metric: str, checkpoint: StepCheckpoint) -> str:
    value = checkpoint.metrics.get(metric)
    return f"step {checkpoint.step:,}" + (f" {metric} {value:.4f}" if value is not None else "")
