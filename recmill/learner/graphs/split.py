"""Rankers split in two: the part of user and context is computed once, the rest for each item.

They hold slices of a trained model's weights and give the same logits. Their inputs have names: user_numbers,
user_pooled and user_wide have one row, item_numbers, item_pooled and item_wide one for each of B items; unpooled
lists are the user's: user_list0 and user_mask0. Inputs without features are left out.

Shapes: B items, X columns of a layer's input, D embedding size, U and I vectors of the user and the item part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from recmill.artifacts.bundle.models import pooled_input
from recmill.models.dlrm import DLRM
from recmill.models.layers import MLP, DotInteraction
from recmill.models.numbers import NumberRanker
from recmill.models.projection import Projection, project
from recmill.models.sequences import ListVectors
from recmill.models.wide_deep import WideDeep

Inputs = Mapping[str, Tensor]
IndicesByDim = Mapping[int, Sequence[int]]  # of features with one embedding per row, among those of their dim


@dataclass(frozen=True)
class FeatureIndices:
    """Indices of the features of each part among all features of their kind."""

    user: tuple[int, ...]
    item: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[str], owners: Mapping[str, str]) -> FeatureIndices:
        """Features of users and of the context are the user part; all others, including crossed ones, the item part."""
        is_once = [owners.get(name, "context") in ("user", "context") for name in names]
        user = [index for index, once in enumerate(is_once) if once]
        item = [index for index, once in enumerate(is_once) if not once]
        return cls(tuple(user), tuple(item))

    def __len__(self) -> int:
        return len(self.user) + len(self.item)


def is_mask(name: str) -> bool:
    """Whether an input is the mask of a list."""
    return name.removeprefix("user_").startswith("mask")


def lists_of(inputs: Inputs, prefix: str = "") -> list[ListVectors]:
    """The unpooled lists, in the model's order."""
    number = sum(name.startswith(f"{prefix}list") for name in inputs)
    return [
        ListVectors(inputs[f"{prefix}list{index}"], inputs[f"{prefix}mask{index}"]) for index in range(number)
    ]


@dataclass(frozen=True)
class Parts:
    """A ranker's features by kind, each split into its user part and its item part."""

    numbers: FeatureIndices
    pooled: FeatureIndices
    wide: FeatureIndices


def split_model(model: nn.Module, parts: Parts) -> nn.Module:
    """The split model; one without an implementation gets the user part repeated for each item."""
    if isinstance(model, NumberRanker):
        return SplitNumbers(model, parts)
    if isinstance(model, WideDeep):
        return SplitWideDeep(model, parts)
    if isinstance(model, DLRM) and model.cross is None:
        return SplitDLRM(model, parts)
    return TiledModel(model, parts)


class ProjectedInputs(nn.Module):
    """A module that reads embeddings of one dim, with inputs for each dim of the tables.

    `parts` has the features of each input by its prefix: user_ and item_, or all under an empty one.
    """

    def __init__(self, module: nn.Module, projection: Projection, parts: Mapping[str, IndicesByDim]) -> None:
        super().__init__()
        self.module, self.dim, self.parts = module, projection.dim, parts
        for prefix, by_dim in parts.items():
            for dim, indices in by_dim.items():
                if dim != projection.dim:
                    weights = projection.weights[str(dim)].detach()[list(indices)]
                    self.register_buffer(f"{prefix}{dim}", weights)

    def forward(self, inputs: Inputs) -> Tensor:
        others = {name: value for name, value in inputs.items() if "pooled" not in name}
        for prefix, by_dim in self.parts.items():
            names = {dim: prefix + pooled_input(dim, self.dim) for dim, indices in by_dim.items() if indices}
            if names:
                weights = {dim: self.get_buffer(f"{prefix}{dim}") for dim in names if dim != self.dim}
                pooled = {dim: inputs[name] for dim, name in names.items()}
                others[f"{prefix}pooled"] = project(pooled, weights)
        return self.module(others)  # type: ignore[no-any-return]


class SplitNumbers(nn.Module):
    """A numeric ranker: its model is split, and the result is put on the labels' scale."""

    def __init__(self, ranker: NumberRanker, parts: Parts) -> None:
        super().__init__()
        self.model = split_model(ranker.model, parts)
        self.register_buffer("offset", ranker.offset)
        self.register_buffer("scale", ranker.scale)

    def forward(self, inputs: Inputs) -> Tensor:
        return self.model(inputs) * self.get_buffer("scale") + self.get_buffer("offset")  # type: ignore[no-any-return]


class TiledModel(nn.Module):
    """Any model, called with whole rows: the user part is repeated for each item."""

    def __init__(self, model: nn.Module, parts: Parts) -> None:
        super().__init__()
        self.model = model
        self.parts = parts

    def forward(self, inputs: Inputs) -> Tensor:
        first = next(values for name, values in inputs.items() if name.startswith("item_"))
        num_rows = first.shape[0]
        numbers, pooled = first.new_zeros((num_rows, 0)), first.new_zeros((num_rows, 0, 0))
        if len(self.parts.numbers):
            numbers = _joined(inputs, "numbers", self.parts.numbers, num_rows)
        if len(self.parts.pooled):
            pooled = _joined(inputs, "pooled", self.parts.pooled, num_rows)
        lists = lists_of(inputs, "user_")  # of one row, which stands for all
        wide = [_joined(inputs, "wide", self.parts.wide, num_rows)] if len(self.parts.wide) else []
        return self.model(numbers, pooled, *([lists] if lists else []), *wide)  # type: ignore[no-any-return]


class SplitMLP(nn.Module):
    """An MLP with a split first layer: columns that are the same for all rows, and columns of each row.

    Without columns of each row the result has one row, which stands for all.
    """

    def __init__(self, mlp: MLP, once_columns: Iterable[int], row_columns: Iterable[int]) -> None:
        super().__init__()
        first = _linear(mlp, 0)
        weights_XY = first.weight.detach().t()
        self.register_buffer("once", weights_XY[list(once_columns)])
        self.register_buffer("each", weights_XY[list(row_columns)])
        self.register_buffer("bias", first.bias.detach())
        self.layers = mlp.layers[1:]
        self.relus = mlp.relus

    def forward(self, once_1X: Tensor | None, rows_BX: Tensor | None) -> Tensor:
        state = self.get_buffer("bias")
        for inputs, weights in ((once_1X, "once"), (rows_BX, "each")):
            if inputs is not None:
                state = torch.addmm(state, inputs, self.get_buffer(weights))
        state = functional.relu(state) if self.relus[0] else state
        for layer, relu in zip(self.layers, self.relus[1:], strict=True):
            state = functional.relu(layer(state)) if relu else layer(state)
        return state


class SplitWideDeep(nn.Module):
    """Wide & Deep with a split first layer, and a split sum of wide weights."""

    def __init__(self, model: WideDeep, parts: Parts) -> None:
        super().__init__()
        numbers, pooled = parts.numbers, _ColumnsOfPooled(model.deep, len(parts.numbers), len(parts.pooled))
        self.deep = SplitMLP(
            model.deep,
            [*numbers.user, *pooled.of(parts.pooled.user)],
            [*numbers.item, *pooled.of(parts.pooled.item)],
        )

    def forward(self, inputs: Inputs) -> Tensor:
        once = _beside(inputs.get("user_numbers"), _flat(inputs.get("user_pooled")))
        rows = _beside(inputs.get("item_numbers"), _flat(inputs.get("item_pooled")))
        return _with_wide(self.deep(once, rows).squeeze(1), inputs)


class SplitDLRM(nn.Module):
    """DLRM with `cat` or `dot`: the top's first layer is split, and products of user vectors are computed once."""

    def __init__(self, model: DLRM, parts: Parts) -> None:
        super().__init__()
        self.bottom = SplitBottom(model.bottom, parts.numbers)
        width_below, once_below = self.bottom.width, self.bottom.is_once
        once = list(range(width_below)) if once_below else []
        rows = [] if once_below else list(range(width_below))
        self.is_dot = model.dot is not None
        if self.is_dot:
            vectors = _vectors(parts, once_below)
            once += _pair_columns(width_below, _pairs_among(vectors.user))
            crossed = ((user, item) for item in vectors.item for user in vectors.user)
            rows += _pair_columns(width_below, crossed)
            rows += _pair_columns(width_below, _pairs_among(vectors.item))
            self.among_user, self.among_item = _products(vectors.user), _products(vectors.item)
        else:
            pooled = _ColumnsOfPooled(model.top, width_below, len(parts.pooled))
            once += pooled.of(parts.pooled.user)
            rows += pooled.of(parts.pooled.item)
        self.top = SplitMLP(model.top, once, rows)

    def forward(self, inputs: Inputs) -> Tensor:
        once, rows = self._dot(inputs) if self.is_dot else self._cat(inputs)
        return _with_wide(self.top(once, rows).squeeze(1), inputs)

    def _cat(self, inputs: Inputs) -> tuple[Tensor | None, Tensor | None]:
        below_once, below = self.bottom(inputs)
        once = _beside(below_once, _flat(inputs.get("user_pooled")))
        return once, _beside(below, _flat(inputs.get("item_pooled")))

    def _dot(self, inputs: Inputs) -> tuple[Tensor | None, Tensor | None]:
        below_once, below = self.bottom(inputs)
        user_1UD = _stacked(below_once, inputs.get("user_pooled"))
        item_BID = _stacked(below, inputs.get("item_pooled"))
        among_user = None if self.among_user is None or user_1UD is None else self.among_user(user_1UD)
        among_item = None if self.among_item is None or item_BID is None else self.among_item(item_BID)
        if user_1UD is None or item_BID is None:
            crossed = None
        else:
            crossed = torch.matmul(item_BID, user_1UD.squeeze(0).t()).flatten(1)
        return _beside(below_once, among_user), _beside(below, crossed, among_item)


class SplitBottom(nn.Module):
    """DLRM's bottom: computed once when items have no numbers, else with a split first layer.

    Returns (the value for all rows, the value of each row), of which at most one is present.
    """

    def __init__(self, mlp: MLP, numbers: FeatureIndices) -> None:
        super().__init__()
        self.numbers = numbers
        self.is_once = not numbers.item
        self.layers = SplitMLP(mlp, numbers.user, numbers.item) if len(mlp.layers) and len(numbers) else None
        self.width = _linear(mlp, -1).out_features if self.layers is not None else len(numbers)

    def forward(self, inputs: Inputs) -> tuple[Tensor | None, Tensor | None]:
        if not len(self.numbers):
            return None, None
        user, item = inputs.get("user_numbers"), inputs.get("item_numbers")
        if self.layers is not None:
            below = self.layers(user, item)
        else:
            below = user if item is None else _joined(inputs, "numbers", self.numbers, item.shape[0])
        return (below, None) if self.is_once else (None, below)


class _ColumnsOfPooled:
    """The columns of the embedded features in a layer's input, where they are contiguous from `start`."""

    def __init__(self, mlp: MLP, start: int, num_features: int) -> None:
        self.start = start
        self.dim = (_linear(mlp, 0).in_features - start) // num_features

    def of(self, features: Iterable[int]) -> list[int]:
        return [
            self.start + feature * self.dim + column for feature in features for column in range(self.dim)
        ]


def _with_wide(logits: Tensor, inputs: Inputs) -> Tensor:
    for name in ("user_wide", "item_wide"):
        logits = logits + inputs[name].sum(dim=1) if name in inputs else logits
    return logits


def _vectors(parts: Parts, once_below: bool) -> FeatureIndices:
    """Indices among the interacting vectors; numbers are the first of them, if there are any."""
    if not len(parts.numbers):
        return parts.pooled
    user, item = (tuple(index + 1 for index in indices) for indices in (parts.pooled.user, parts.pooled.item))
    return FeatureIndices((0, *user), item) if once_below else FeatureIndices(user, (0, *item))


def _pairs_among(vectors: Sequence[int]) -> list[tuple[int, int]]:
    """All pairs, in the order of DotInteraction."""
    return [(vectors[second], vectors[first]) for first in range(len(vectors)) for second in range(first)]


def _pair_columns(start: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """Columns of the pairs' products, from `start`, among those of all vectors."""
    return [start + max(pair) * (max(pair) - 1) // 2 + min(pair) for pair in pairs]


def _products(vectors: Sequence[int]) -> nn.Module | None:
    return DotInteraction(len(vectors)) if len(vectors) > 1 else None


def _linear(mlp: MLP, index: int) -> nn.Linear:
    layer = mlp.layers[index]
    assert isinstance(layer, nn.Linear)
    return layer


def _joined(inputs: Inputs, kind: str, indices: FeatureIndices, num_rows: int) -> Tensor:
    """All features of a kind in the ranker's order, the user part repeated for each row."""
    parts = [inputs[name] for name in (f"user_{kind}", f"item_{kind}") if name in inputs]
    rows = torch.cat([part.expand(num_rows, *part.shape[1:]) for part in parts], dim=1)
    both = [*indices.user, *indices.item]
    order = sorted(range(len(both)), key=both.__getitem__)
    return rows if order == list(range(len(both))) else rows[:, order]


def _beside(*parts: Tensor | None) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given, dim=1) if len(given) > 1 else next(iter(given), None)


def _stacked(below: Tensor | None, pooled: Tensor | None) -> Tensor | None:
    return _beside(None if below is None else below.unsqueeze(1), pooled)


def _flat(pooled: Tensor | None) -> Tensor | None:
    return None if pooled is None else pooled.flatten(1)
