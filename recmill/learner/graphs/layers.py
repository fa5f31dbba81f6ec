"""The layers that servers compute without a graph: DLRM with `cat` or `dot`, Wide & Deep, and user towers."""

from __future__ import annotations

from torch import Tensor, nn

from recmill.artifacts.bundle.layers import Layer, RankerLayers, TowerLayers
from recmill.dataset.batch import Array
from recmill.learner.base import projection_of
from recmill.learner.ranking import Ranker
from recmill.learner.retrieval import Retriever
from recmill.models.dlrm import DLRM
from recmill.models.layers import MLP
from recmill.models.two_tower import Tower
from recmill.models.wide_deep import WideDeep


def layers_of(ranker: Ranker) -> RankerLayers | None:
    """The layers with the current weights; None for a model that has others."""
    model, projections = ranker.model, _projections(ranker)
    if ranker.spec.sequences:
        return None
    if type(model) is WideDeep:
        return RankerLayers("cat", [], _layers(model.deep), projections)
    if type(model) is DLRM and model.cross is None:
        has_numbers = bool(ranker.spec.bottom) and _has_numbers(ranker)
        bottom = _layers(model.bottom) if has_numbers else []
        if model.dot is not None and not bottom and _has_numbers(ranker):
            return None  # the numbers themselves are one of the vectors
        return RankerLayers(
            "dot" if model.dot is not None else "cat", bottom, _layers(model.top), projections
        )
    return None


def tower_layers_of(retriever: Retriever) -> TowerLayers | None:
    """Those of the user's tower; None for a tower that is more than them."""
    tower = retriever.towers.user
    if (
        retriever.sequences
        or type(tower) is not Tower
        or not tower.has_layers
        or projection_of(tower) is not None
    ):
        return None
    return TowerLayers(_layers(tower.layers))


def _has_numbers(ranker: Ranker) -> bool:
    return any(name in ranker.layout.numbers for name in ranker.deep_features)


def _layers(mlp: MLP) -> list[Layer]:
    linears = [layer for layer in mlp.layers if isinstance(layer, nn.Linear)]
    return [(_array(layer.weight), _array(layer.bias)) for layer in linears]


def _projections(ranker: Ranker) -> dict[str, Array]:
    projection = projection_of(ranker.model)
    if projection is None:
        return {}
    by_dim = ranker.pooled_features(ranker.deep_collections)
    return {
        name: _array(projection.weights[str(dim)][index])
        for dim, names in by_dim.items()
        if dim != projection.dim
        for index, name in enumerate(names)
    }


def _array(tensor: Tensor) -> Array:
    return tensor.detach().float().numpy().copy()
