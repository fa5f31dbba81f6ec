"""Models by name: what travels to tasks is a path and a digest; what it names is opened once in each process."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
import polars as pl

from recmill.artifacts.bundle.bundle import Bundle
from recmill.artifacts.bundle.entities import Entities
from recmill.artifacts.bundle.features import FeatureRows
from recmill.artifacts.bundle.models import RankModel, TowerModel
from recmill.artifacts.vector_index import Index, open_index
from recmill.dataset.batch import Array, Batch, Layout
from recmill.errors import ArtifactError, MissingPackage
from recmill.features.chain import ColumnInfo
from recmill.features.numeric import dtype_of
from recmill.features.plan import Plan
from recmill.features.plan_artifact import PlanArtifact
from recmill.features.task_scores import TaskScores
from recmill.recipe.kinds import kinds_of_columns
from recmill.recipe.recipe import Recipe

if TYPE_CHECKING:  # these need torch, which scoring with a bundle does not
    from recmill.learner.ranking import Ranker
    from recmill.learner.retrieval import Retriever

T = TypeVar("T")
Side = Literal["user", "item"]
_MOST_KEPT = 4  # models and catalogues that a process holds, the latest ones


@dataclass(frozen=True)
class ModelRef:
    """A checkpoint's models as of some steps, or a bundle. Small: it is sent to every task."""

    kind: Literal["checkpoint", "bundle"]
    path: str
    steps: tuple[tuple[str, int], ...]  # of a checkpoint: model -> step
    digest: str
    trust_code: tuple[str, ...] = ()  # of a bundle: modules and packages of functions that it may call


class RankScorer(Protocol):
    """Probabilities of rows; may be asked by many threads at once."""

    layout: Layout
    labels: tuple[str, ...]
    tasks: TaskScores

    def predict(self, batch: Batch) -> Array:
        """Float32 [B], with several tasks [B, K], of a batch of the layout."""


class TowerScorer(Protocol):
    """Unit vectors of users or items; may be asked by many threads at once."""

    layout: Layout

    def vectors(self, batch: Batch) -> Array:
        """Float32 [B, V], of a batch of the layout."""


@dataclass(frozen=True)
class ItemSearch:
    """The items that can be recommended, by index: how they are found by vector, and what their ids are."""

    index: Index
    ids: pl.Series


class Models(ABC):
    """What a ModelRef names, opened. Parts are loaded when they are first asked for, once."""

    def __init__(self, planned: PlanArtifact) -> None:
        self._planned = planned
        self._parts: dict[str, Any] = {}
        self._lock = threading.RLock()

    @property
    def recipe(self) -> Recipe:
        return self._planned.recipe

    @property
    def columns(self) -> Sequence[ColumnInfo]:
        return self._planned.columns

    @property
    def plan(self) -> Plan:
        return self._part("plan", lambda: self._planned.plan)

    def ranking(self) -> RankScorer:
        return self._part("ranking", self._open_ranking)

    def tower(self, side: Side) -> TowerScorer:
        return self._part(f"tower of the {side}", lambda: self._open_tower(side))

    @abstractmethod
    def _open_ranking(self) -> RankScorer: ...

    @abstractmethod
    def _open_tower(self, side: Side) -> TowerScorer: ...

    def _part(self, name: str, open_part: Callable[[], T]) -> T:
        with self._lock:
            if name not in self._parts:
                self._parts[name] = open_part()
            found: T = self._parts[name]
            return found


# naming them


def checkpoint_ref(path: str | Path, which: str, models: Sequence[str]) -> ModelRef:
    """These models of a checkpoint, as of `best`, `last` or a step; an error when one is not there."""
    _check_torch()
    from recmill.artifacts.checkpoint.checkpoint import Checkpoint

    folder = Checkpoint.open(path).to_serve(which)
    for model in models:
        if model not in folder.models:
            known = ", ".join(folder.models) or "none yet; run `recmill train` first"
            raise ArtifactError(f"Checkpoint {folder.path} has no {model} model; it has: {known}.")
    found = {model: folder.of(model).find(which) for model in models}
    steps = tuple((model, checkpoint.step) for model, checkpoint in found.items())
    content = [folder.manifest, *(checkpoint.manifest for checkpoint in found.values())]
    return ModelRef("checkpoint", str(folder.path.absolute()), steps, _digest(content))


def bundle_ref(path: str | Path, models: Sequence[str], trust_code: tuple[str, ...] = ()) -> ModelRef:
    """A version of a bundle, the current one of a folder of versions; an error when it lacks one of the models."""
    bundle = Bundle.open(path, trust_code)
    bundle.plan  # noqa: B018, what is not trusted is refused before the work
    for model in models:
        if model not in bundle.models:
            known = ", ".join(bundle.models)
            raise ArtifactError(f"Bundle {bundle.path} has no {model} model; it has: {known}.")
    return ModelRef("bundle", str(bundle.path.absolute()), (), _digest(bundle.manifest), trust_code)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


_kept: dict[Hashable, Any] = {}
_lock = threading.RLock()


def once_in_process(key: Hashable, open_it: Callable[[], T]) -> T:
    """What `open_it` opens, the same object for all callers of this process; the latest few are kept."""
    with _lock:
        if key not in _kept:
            while len(_kept) >= _MOST_KEPT:
                del _kept[next(iter(_kept))]
            _kept[key] = open_it()
        found: T = _kept[key]
        return found


def open_models(ref: ModelRef) -> Models:
    """The models of a name."""
    return once_in_process(
        ref, lambda: CheckpointModels(ref) if ref.kind == "checkpoint" else BundleModels(ref)
    )


# checkpoints


def _check_torch() -> None:
    if any(importlib.util.find_spec(package) is None for package in ("torch", "safetensors")):
        raise MissingPackage("Scoring with a checkpoint", "torch", "train")


class CheckpointModels(Models):
    """The models of a checkpoint, in torch."""

    def __init__(self, ref: ModelRef) -> None:
        _check_torch()
        import torch

        from recmill.artifacts.checkpoint.checkpoint import Checkpoint

        torch.set_num_threads(1)  # an engine runs a task on each core, and each asks on its own
        self._steps = dict(ref.steps)
        self._folder = Checkpoint.open(ref.path)
        super().__init__(self._folder)

    def _open_ranking(self) -> RankScorer:
        return _TorchRanking(self._learner("ranking"))

    def _open_tower(self, side: Side) -> TowerScorer:
        retriever: Retriever = self._part("retrieval", lambda: self._learner("retrieval"))
        return _TorchTower(retriever, side)

    def _learner(self, model: str) -> Any:
        from recmill.learner.saved import open_learner

        return open_learner(self._folder, model, str(self._steps[model])).learner


class _TorchRanking:
    def __init__(self, ranker: Ranker) -> None:
        self.layout = ranker.layout
        self.labels = ranker.spec.labels
        tasks = ranker.spec.tasks
        self.tasks = TaskScores() if tasks is None else TaskScores(tasks.labels, tasks.order)
        self.predict = ranker.predict


class _TorchTower:
    def __init__(self, retriever: Retriever, side: Side) -> None:
        self.layout = retriever.layouts[side]
        self.vectors = retriever.user_vectors if side == "user" else retriever.item_vectors


# bundles


class BundleModels(Models):
    """The models of a bundle, in ONNX Runtime, with its users and items; torch is not needed."""

    def __init__(self, ref: ModelRef) -> None:
        self.bundle = Bundle.open(ref.path, ref.trust_code)
        super().__init__(self.bundle)

    def _open_ranking(self) -> RankScorer:
        return _BundleRanking(self.bundle)

    def _open_tower(self, side: Side) -> TowerScorer:
        return TowerModel(self.bundle, side)

    def entities(self, side: Side) -> Entities:
        found = self.bundle.users if side == "user" else self.bundle.items
        if found is None:
            raise ArtifactError(f"Bundle {self.bundle.path} has no {side}s; its recipe names none.")
        return found

    def ids(self, side: Side) -> pl.Series:
        """Raw ids of all users or items, by index."""
        entities = self.entities(side)
        return self._part(f"ids of {side}s", lambda: entities.column(entities.id_column))

    def vectors(self, side: Side, indices: Array) -> Array:
        """Unit vectors of users or items of the bundle."""
        return self._item_vectors[indices] if side == "item" else self._user_vectors(indices)

    @cached_property
    def _item_vectors(self) -> Array:
        found = self.bundle.array("items/vectors.npy")
        assert found is not None, "a retrieval model has item vectors"
        return found

    def _user_vectors(self, indices: Array) -> Array:
        users = self.entities("user")
        tower = self.tower("user")
        rows = FeatureRows.of(users.features(indices), users.layout)
        others = [name for name in tower.layout.features if name not in users.layout.features]
        if others:
            rows |= self._without_context(others, len(indices))
        return tower.vectors(rows.batch(tower.layout))

    def _without_context(self, names: Sequence[str], num_rows: int) -> FeatureRows:
        """What the Plan makes of a context of which nothing is known, as the server does."""
        layout = Layout.of(self.columns, names)
        kinds = kinds_of_columns(self.recipe)
        nothing = pl.DataFrame(
            {name: pl.Series([None] * num_rows, dtype=dtype_of(kind)) for name, kind in kinds.items()}
        )
        rows = self.plan.apply(nothing, labels=False, only=names)
        return FeatureRows.of_frame(rows, layout)

    def seen(self, indices: Array) -> list[Array]:
        """Indices of the items that each of these users clicked."""
        offsets, items = self.bundle.array("users/seen.offsets.npy"), self.bundle.array("users/seen.npy")
        if offsets is None or items is None:
            raise ArtifactError(
                f"Bundle {self.bundle.path} does not know what its users clicked; leave out --without-seen."
            )
        return [items[offsets[user] : offsets[user + 1]].astype(np.int64) for user in indices.tolist()]

    def catalogue(self) -> ItemSearch:
        folder = self.bundle.path / "items" / "index"
        index = self._part("index", lambda: open_index(folder, self._item_vectors))
        return ItemSearch(index, self.ids("item"))


class _BundleRanking:
    def __init__(self, bundle: Bundle) -> None:
        model = RankModel(bundle)
        self.layout = model.layout
        self.labels, self.tasks = model.labels, model.tasks
        self.predict = model.score


def facts_of(models: Models, ref: ModelRef) -> Mapping[str, Any]:
    """What a manifest holds about the model."""
    return {
        "kind": ref.kind,
        "path": ref.path,
        "steps": dict(ref.steps),
        "digest": ref.digest,
        "recipe": models.recipe.name,
    }
