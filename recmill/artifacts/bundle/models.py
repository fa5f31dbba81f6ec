"""The models of a bundle: the ranker and the towers, over its graphs and embedding rows. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recmill.artifacts.bundle.bundle import Bundle, dims_of
from recmill.artifacts.bundle.features import FeatureRows
from recmill.artifacts.bundle.rows import RowCollection
from recmill.artifacts.bundle.sessions import Graph
from recmill.dataset.batch import Array, Batch, Layout
from recmill.errors import NotFound
from recmill.features.task_scores import TaskScores
from recmill.recipe.kinds import parts_of_features


class RankModel:
    """The ranking model of a bundle. The part of the user and the context is computed once per request."""

    def __init__(self, bundle: Bundle) -> None:
        parts = parts_of_features(bundle.recipe)
        model = bundle.manifest["models"].get("ranking")
        if model is None:
            raise NotFound(f"Bundle {bundle.version} has no ranking model.")
        self.labels: tuple[str, ...] = tuple(model.get("labels") or [model["label"]])
        self.tasks = TaskScores(model.get("labels") or (), model.get("serve_score") or "")
        self.numbers, self.keys, self.wide = (tuple(model[name]) for name in ("numbers", "keys", "wide"))
        self.sequences = tuple(model.get("sequences", ()))
        self.features = [*self.numbers, *dict.fromkeys([*self.keys, *self.sequences, *self.wide])]
        self.layout = Layout.of(bundle.columns, self.features)
        self._of = {
            part: [
                [name for name in names if (parts[name] in ("item", "crossed")) == (part == "item")]
                for names in (self.numbers, self.keys, self.wide)
            ]
            for part in ("user", "item")
        }
        self._inputs = _pooled_inputs(bundle, "deep", model)
        self.collections = {
            name: bundle.collection(name) for name in (*self._inputs, *(["wide"] if self.wide else []))
        }
        self._graphs: dict[str, Graph] = {}
        graphs = {name: bundle.graph(name) for name in ("rank", "rank_split")}
        self.swap({name: Graph(path) for name, path in graphs.items() if path is not None})

    def swap(self, graphs: Mapping[str, Graph]) -> None:
        """Replace dense weights."""
        self._graphs |= graphs

    def score(self, batch: Batch) -> Array:
        """Probabilities for rows that have all features of the layout, [B] or, with several tasks, [B, K]."""
        if not batch.size:
            return self.no_rows()
        inputs = {"numbers": batch.numbers, **_pooled(self.collections, self._inputs, batch, self.keys)}
        inputs |= _lists(self.collections.get("deep"), batch, self.sequences)
        if self.wide:
            inputs["wide"] = _pooled_rows(self.collections["wide"], batch, self.wide)[:, :, 0]
        return sigmoid(self._graphs["rank"].run(**inputs))

    def rank(self, user: FeatureRows, items: FeatureRows) -> Array:
        """Probabilities for one user, with the context, and many items; of the shape that `score` gives."""
        if not items.size:
            return self.no_rows()
        inputs = _lists(self.collections.get("deep"), user, self.sequences, "user_")
        for part, rows in (("user", user), ("item", items)):
            numbers, keys, wide = self._of[part]
            inputs[f"{part}_numbers"] = rows.matrix(numbers)
            inputs |= _pooled(self.collections, self._inputs, rows, keys, f"{part}_")
            if self.wide:
                inputs[f"{part}_wide"] = _pooled_rows(self.collections["wide"], rows, wide)[:, :, 0]
        return sigmoid(self._graphs["rank_split"].run(**inputs))

    def no_rows(self) -> Array:
        """Probabilities of none."""
        return np.empty((0, len(self.tasks.tasks)) if self.tasks.tasks else 0, np.float32)


class TowerModel:
    """One tower of the retrieval model: features to unit vectors."""

    def __init__(self, bundle: Bundle, side: str) -> None:
        model = bundle.manifest["models"]["retrieval"]
        self.sequences: tuple[str, ...] = tuple(model.get("sequences", ())) if side == "user" else ()
        self.features: tuple[str, ...] = (*model[side], *self.sequences)
        self.layout = Layout.of(bundle.columns, self.features)
        self.dim: int = model["dim"]
        # A history has the rows of its items.
        self._inputs = _pooled_inputs(bundle, "item" if self.sequences else side, model)
        self.collections = {name: bundle.collection(name) for name in self._inputs}
        path = bundle.graph(side)
        assert path is not None, "a retrieval model has a graph for each tower"
        self._graph = Graph(path)

    def vectors(self, batch: Batch) -> Array:
        """Unit vectors, float32 [rows, dim], of rows that have all features of the layout."""
        inputs = _lists(self.collections.get("item"), batch, self.sequences)
        if not self.sequences:
            inputs = _pooled(self.collections, self._inputs, batch, self.layout.keys)
        return self._graph.run(numbers=batch.numbers, **inputs)


def pooled_input(dim: int, model_dim: int) -> str:
    """The input of a graph for embeddings of a dim."""
    return "pooled" if dim == model_dim else f"pooled_{dim}"


PooledInputs = Mapping[str, tuple[str, set[str]]]  # collection -> input of the graph, and its features


def _pooled_inputs(bundle: Bundle, name: str, model: Mapping[str, Any]) -> PooledInputs:
    """Those of a collection and, if features have dims of their own, of the collections beside it."""
    inputs = {name: "pooled", **{other: f"pooled_{dim}" for other, dim in dims_of(model, name).items()}}
    return {
        collection: (graph_input, {feature.name for feature in bundle.collection(collection).features})
        for collection, graph_input in inputs.items()
        if collection in bundle.collections
    }


def _pooled(
    collections: Mapping[str, RowCollection],
    inputs: PooledInputs,
    rows: Batch | FeatureRows,
    names: Sequence[str],
    prefix: str = "",
) -> dict[str, Array]:
    """The embeddings of features as inputs of a graph, one for each dim."""
    return {
        prefix + graph_input: _pooled_rows(
            collections[collection], rows, [name for name in names if name in features]
        )
        for collection, (graph_input, features) in inputs.items()
    }


def _pooled_rows(tables: RowCollection, rows: Batch | FeatureRows, names: Sequence[str]) -> Array:
    return tables.pooled(rows.keys, names) if names else np.empty((rows.size, 0, tables.dim), np.float32)


def _lists(
    tables: RowCollection | None, rows: Batch | FeatureRows, names: Sequence[str], prefix: str = ""
) -> dict[str, Array]:
    """The inputs of a graph that are lists which are not pooled."""
    inputs = {}
    for index, name in enumerate(names):
        assert tables is not None, "what is not pooled has the dim of the model"
        inputs[f"{prefix}list{index}"], inputs[f"{prefix}mask{index}"] = tables.padded(name, rows.keys[name])
    return inputs


def sigmoid(logits: Array) -> Array:
    """In float32, as torch computes it, and without overflow."""
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1 / (1 + small), small / (1 + small)).astype(np.float32)
