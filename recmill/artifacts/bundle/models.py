"""The models of a bundle, ranker and towers, over its graphs and embedding rows. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recmill import _native
from recmill.artifacts.bundle.bundle import Bundle, dims_of
from recmill.artifacts.bundle.entities import EntityRows
from recmill.artifacts.bundle.features import FeatureRows
from recmill.artifacts.bundle.layers import (
    FILE,
    RANGES_FILE,
    TOWER_FILE,
    ByteRanges,
    RankerLayers,
    TowerLayers,
)
from recmill.artifacts.bundle.native_ranker import NativeRanker, SideFeatures
from recmill.artifacts.bundle.rows import RowCollection
from recmill.artifacts.bundle.sessions import Graph
from recmill.dataset.batch import Array, Batch, Keys, Layout
from recmill.errors import NotFound
from recmill.features.predictions import predictions_of
from recmill.features.task_scores import TaskScores
from recmill.recipe.kinds import parts_of_features

# of native logits against the graph's, relative to the largest: another summation order differs by less
_TOLERANCE = 1e-4
_CHECKED_ITEMS = 8


@dataclass(frozen=True)
class DenseWeights:
    """Graphs, and the same layers for native products, or the reason why there are none."""

    graphs: Mapping[str, Graph]
    native: NativeRanker | None
    runs: str  # the runtime that ranks candidates, as shown in traces


class RankModel:
    """The ranking model of a bundle. The part of the user and the context is computed once per request."""

    def __init__(self, bundle: Bundle) -> None:
        parts = parts_of_features(bundle.recipe)
        model = bundle.manifest["models"].get("ranking")
        if model is None:
            raise NotFound(f"Bundle {bundle.version} has no ranking model.")
        self.labels: tuple[str, ...] = tuple(model.get("labels") or [model["label"]])
        ranking = bundle.recipe.ranking
        self._losses = ranking.number_losses if ranking is not None else {}
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
        self._facts = model
        self._path = bundle.path / "graphs"
        paths = {name: bundle.graph(name) for name in ("rank", "rank_split")}
        graphs = {name: path for name, path in paths.items() if path is not None}
        self._dense = DenseWeights({}, None, "")
        self._dense = self.opened(graphs, _content(self._path / FILE))

    @property
    def runs(self) -> str:
        """The runtime that ranks candidates: native products, or ONNX Runtime and why."""
        return self._dense.runs

    @property
    def native(self) -> NativeRanker | None:
        """The native products; None where ONNX Runtime ranks."""
        return self._dense.native

    def opened(self, graphs: Mapping[str, Path | bytes], layers: bytes | None) -> DenseWeights:
        """Dense weights for `swap`: graphs that are not given stay. Native layers are first compared with the graph."""
        opened = dict(self._dense.graphs)
        opened |= {name: Graph(source) for name, source in graphs.items() if name in ("rank", "rank_split")}
        native, reason = self._native(layers)
        if native is not None:
            reason = self._differs(native, opened["rank_split"])
        if native is None or reason:
            return DenseWeights(opened, None, f"onnxruntime: {reason}")
        ranges = _content(self._path / RANGES_FILE)
        if ranges is None:
            return DenseWeights(opened, native, "native float32")
        in_bytes = native.in_bytes(ByteRanges.from_bytes(ranges, str(self._path / RANGES_FILE)))
        return DenseWeights(opened, in_bytes, "native int8")

    def swap(self, dense: DenseWeights) -> None:
        """Replace dense weights."""
        self._dense = dense

    def _native(self, layers: bytes | None) -> tuple[NativeRanker | None, str]:
        """The ranker in native code; None and the reason when it does not support this model."""
        described = self._facts.get("layers")
        if described is None:
            return None, "native code does not cover the model"
        if layers is None:
            return None, "no layers came with the weights"
        if not any(self._of["item"][:2]) or not self._facts["split"]:
            return None, "the ranker reads nothing of items"
        found = RankerLayers.from_bytes(layers, described["interaction"], str(self._path / FILE))
        user, item = (SideFeatures(*self._of[part]) for part in ("user", "item"))
        return NativeRanker(found, self.layout, self.keys, user, item, self.collections), ""

    def _differs(self, native: NativeRanker, graph: Graph) -> str:
        """The difference between native layers and the graph over a few rows of the tables; empty when they agree."""
        user, items = (self._some_rows(part, size) for part, size in (("user", 1), ("item", _CHECKED_ITEMS)))
        expected = graph.run(**self._split_inputs(user, items))
        found, _ = native.rank(user, items)
        distance = float(np.abs(expected - found).max())
        if distance <= _TOLERANCE * (1 + float(np.abs(expected).max())):
            return ""
        return f"native logits differ by {distance:.2g}"

    def _some_rows(self, part: str, size: int) -> FeatureRows:
        numbers, keys, wide = self._of[part]
        random, slices = np.random.default_rng(0), self.layout.number_slices
        drawn = {
            name: random.random((size, slices[name].stop - slices[name].start), np.float32)
            for name in numbers
        }
        return FeatureRows(size, drawn, {name: self._some_keys(name, size) for name in {*keys, *wide}})

    def _some_keys(self, name: str, size: int) -> Keys:
        """Some keys with rows in the table; a list has one."""
        tables, feature = next(
            (tables, feature)
            for tables in self.collections.values()
            for feature in tables.features
            if feature.name == name
        )
        some = tables.table_of(name).some_keys(size)
        keys = np.resize(some, size) if len(some) else np.zeros(size, np.int64)
        return Keys(keys, None if feature.pooling == "none" else np.arange(size + 1))

    def score(self, batch: Batch) -> Array:
        """Probabilities or numbers for rows that have all features of the layout, [B], with several tasks [B, K]."""
        if not batch.size:
            return self.no_rows()
        inputs = {"numbers": batch.numbers, **_pooled(self.collections, self._inputs, batch, self.keys)}
        inputs |= _lists(self.collections.get("deep"), batch, self.sequences)
        if self.wide:
            inputs["wide"] = _pooled_rows(self.collections["wide"], batch, self.wide)[:, :, 0]
        return predictions_of(self._dense.graphs["rank"].run(**inputs), self.labels, self._losses)

    def rank(self, user: FeatureRows, items: FeatureRows | EntityRows) -> Array:
        """The result of `score` for one user, with the context, and many items."""
        if not items.size:
            return self.no_rows()
        if self._dense.native is not None:
            return self._dense.native.rank(user, items)[1]
        if isinstance(items, EntityRows):
            items = items.rows
        logits = self._dense.graphs["rank_split"].run(**self._split_inputs(user, items))
        return predictions_of(logits, self.labels, self._losses)

    def _split_inputs(self, user: FeatureRows, items: FeatureRows) -> dict[str, Array]:
        inputs = _lists(self.collections.get("deep"), user, self.sequences, "user_")
        for part, rows in (("user", user), ("item", items)):
            numbers, keys, wide = self._of[part]
            inputs[f"{part}_numbers"] = rows.matrix(numbers)
            inputs |= _pooled(self.collections, self._inputs, rows, keys, f"{part}_")
            if self.wide:
                inputs[f"{part}_wide"] = _pooled_rows(self.collections["wide"], rows, wide)[:, :, 0]
        return inputs

    def no_rows(self) -> Array:
        """Probabilities of no rows."""
        return np.empty((0, len(self.tasks.tasks)) if self.tasks.tasks else 0, np.float32)


class TowerModel:
    """One tower of the retrieval model: features to unit vectors."""

    def __init__(self, bundle: Bundle, side: str) -> None:
        model = bundle.manifest["models"]["retrieval"]
        self.sequences: tuple[str, ...] = tuple(model.get("sequences", ())) if side == "user" else ()
        self.features: tuple[str, ...] = (*model[side], *self.sequences)
        self.layout = Layout.of(bundle.columns, self.features)
        self.dim: int = model["dim"]
        # A history reads the rows of its items.
        self._inputs = _pooled_inputs(bundle, "item" if self.sequences else side, model)
        self.collections = {name: bundle.collection(name) for name in self._inputs}
        path = bundle.graph(side)
        assert path is not None, "a retrieval model has a graph for each tower"
        self._graph = Graph(path)
        self._native = self._opened(bundle.path / "graphs" / TOWER_FILE) if side == "user" else None

    def vectors(self, batch: Batch) -> Array:
        """Unit vectors, float32 [rows, dim], of rows that have all features of the layout."""
        inputs = _lists(self.collections.get("item"), batch, self.sequences)
        if not self.sequences:
            inputs = _pooled(self.collections, self._inputs, batch, self.layout.keys)
        if self._native is not None:
            return _run_tower(self._native, batch.numbers, inputs["pooled"])
        return self._graph.run(numbers=batch.numbers, **inputs)

    def _opened(self, path: Path) -> _native.Tower | None:
        """The tower in native code, if export wrote its layers and they give what the graph gives."""
        content = _content(path)
        if content is None or len(self._inputs) != 1:
            return None
        tower = _native.Tower(TowerLayers.from_bytes(content, str(path)).layers)
        random = np.random.default_rng(0)
        numbers = random.random((_CHECKED_ITEMS, len(self.layout.number_columns)), np.float32)
        dim = next(iter(self.collections.values())).dim
        pooled = random.random((_CHECKED_ITEMS, len(self.layout.keys), dim), np.float32) - np.float32(0.5)
        expected = self._graph.run(numbers=numbers, pooled=pooled)
        differs = np.abs(_run_tower(tower, numbers, pooled) - expected).max() > _TOLERANCE
        return None if differs else tower


def _run_tower(tower: _native.Tower, numbers: Array, pooled: Array) -> Array:
    return tower.vectors(np.concatenate([numbers, pooled.reshape(len(pooled), -1)], axis=1))


def pooled_input(dim: int, model_dim: int) -> str:
    """The input of a graph for embeddings of a dim."""
    return "pooled" if dim == model_dim else f"pooled_{dim}"


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


PooledInputs = Mapping[str, tuple[str, set[str]]]  # collection -> input of the graph, and its features


def _pooled_inputs(bundle: Bundle, name: str, model: Mapping[str, Any]) -> PooledInputs:
    """Inputs of a collection and, if features have dims of their own, of its sibling collections."""
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
    """The inputs of a graph that are unpooled lists."""
    inputs = {}
    for index, name in enumerate(names):
        assert tables is not None, "what is not pooled has the dim of the model"
        inputs[f"{prefix}list{index}"], inputs[f"{prefix}mask{index}"] = tables.padded(name, rows.keys[name])
    return inputs
