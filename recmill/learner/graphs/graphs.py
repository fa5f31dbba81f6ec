"""A learner's dense part as ONNX graphs that servers run: float32, any number of rows, inputs and outputs by name.

user, item    numbers [rows, F], pooled [rows, T, D] -> vectors [rows, V]
rank          numbers, pooled, wide [rows, W] -> logits [rows]
rank_split    user_numbers [1, F], user_pooled [1, T, D], user_wide [1, W] and item_* [rows, ...] -> logits [rows]

A model that reads lists unpooled also has, for each, list0 [rows, length0, D] and mask0 [rows, length0], 1 for each
element and 0 behind the last; they are the user's (user_list0 [1, length0, D]). A list has at least one place.
Features with a dim of their own, such as 8, are in inputs of their own: pooled_8 [rows, T, 8].

Features keep the learner's order. Inputs without any feature are left out; so is rank_split when no feature of the
ranker depends on the item.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from recmill.artifacts.bundle.models import pooled_input
from recmill.artifacts.bundle.sessions import Graph
from recmill.errors import MissingPackage, RecmillError
from recmill.learner.base import projection_of
from recmill.learner.eval_queries import Side
from recmill.learner.graphs.split import (
    FeatureIndices,
    IndicesByDim,
    Inputs,
    Parts,
    ProjectedInputs,
    is_mask,
    lists_of,
    split_model,
)
from recmill.learner.ranking import Ranker
from recmill.learner.retrieval import Retriever

if TYPE_CHECKING:
    from onnx import ModelProto

_ROWS = "rows"
_OPSET = 20
_TOLERANCE = 1e-4  # of the check, relative to the largest value: another summation order differs by far less


def write_graphs(learner: Ranker | Retriever, into: Path, owners: Mapping[str, str]) -> dict[str, Path]:
    """Write the learner's graphs as `into`/<name>.onnx and return their paths by name.

    `owners` has the owner of each feature: user, item or context; any other word counts as item.
    """
    return Graphs(learner, owners).write(into)


class Graphs:
    """The graphs of a learner that keeps training: traced on the first write, later only given new weights."""

    def __init__(self, learner: Ranker | Retriever, owners: Mapping[str, str]) -> None:
        check_packages()
        self.learner = learner
        self.owners = owners
        self._traced: dict[str, ModelProto] = {}

    def write(self, into: Path) -> dict[str, Path]:
        """Write the graphs with the learner's current weights; each is run and compared with torch."""
        into.mkdir(parents=True, exist_ok=True)
        self.learner.model.eval()
        with torch.no_grad():
            dense = _dense_parts(self.learner, self.owners)
            return {name: self._write_one(name, part, into) for name, part in dense.items()}

    def _write_one(self, name: str, part: _Dense, into: Path) -> Path:
        traced = self._traced.get(name)
        if traced is None or not (_set_weights(traced, part.module) and _agrees(traced, part)):
            self._traced[name] = traced = _trace(name, part)
        path = into / f"{name}.onnx"
        _write_bytes(path, traced.SerializeToString())
        return path


def check_packages() -> None:
    """Check that everything needed for writing graphs is installed; the error names the install line."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        try:
            __import__(package)
        except ImportError:
            raise MissingPackage("Writing graphs for servers", package, "export") from None


@dataclass(frozen=True)
class _Dense:
    """A module to export, with inputs by name, and their shapes with named free sizes."""

    module: nn.Module
    shapes: Mapping[str, Sequence[int | str]]
    output: str

    def random_inputs(self, num_rows: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(num_rows)
        length = num_rows + 2  # of the longest list
        sizes = {
            name: [num_rows if size == _ROWS else length if isinstance(size, str) else size for size in shape]
            for name, shape in self.shapes.items()
        }
        return {
            name: _random_mask(size, drawn) if is_mask(name) else torch.randn(size, generator=drawn)
            for name, size in sizes.items()
        }

    @property
    def free_sizes(self) -> dict[str, dict[int, str]]:
        """The free axes of each input, with their names."""
        return {
            name: {axis: size for axis, size in enumerate(shape) if isinstance(size, str)}
            for name, shape in self.shapes.items()
        }


def _random_mask(size: Sequence[int], drawn: torch.Generator) -> Tensor:
    """A mask of lists of any length, including empty ones."""
    rows, length = size
    lengths = torch.randint(0, length + 1, (rows, 1), generator=drawn)
    return (torch.arange(length) < lengths).float()


class _Whole(nn.Module):
    """Calls a model with numbers, pooled, lists and wide, also when a recipe has no numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Inputs) -> Tensor:
        first = next(iter(inputs.values()))
        numbers = inputs["numbers"] if "numbers" in inputs else first.new_zeros((first.shape[0], 0))
        pooled = inputs["pooled"] if "pooled" in inputs else first.new_zeros((first.shape[0], 0, 0))
        lists = lists_of(inputs)
        wide = [inputs["wide"]] if "wide" in inputs else []
        return self.model(numbers, pooled, *([lists] if lists else []), *wide)  # type: ignore[no-any-return]


def _dense_parts(learner: Ranker | Retriever, owners: Mapping[str, str]) -> dict[str, _Dense]:
    if isinstance(learner, Retriever):
        return {side: _tower(learner, side) for side in learner.layouts}
    by_dim = learner.pooled_features(learner.deep_collections)
    deep = [name for names in by_dim.values() for name in names]
    kinds = [
        FeatureIndices.of(some, owners) for some in (learner.layout.number_columns, deep, learner.spec.wide)
    ]
    numbers, _, wide = kinds
    of_dims = {own: FeatureIndices.of(names, owners) for own, names in by_dim.items()}
    dim, num_lists = learner.spec.table_dim, len(learner.spec.sequences)
    whole = {own: range(len(names)) for own, names in by_dim.items()}
    shapes = {
        **_shapes("", _ROWS, len(numbers), whole, len(wide), dim),
        **_lists("", _ROWS, num_lists, dim),
    }
    model = learner.model
    graphs = {"rank": _Dense(_projected(_Whole(model), model, {"": whole}), shapes, "logits")}
    if any(kind.item for kind in kinds):
        user, item = (
            {own: getattr(some, part) for own, some in of_dims.items()} for part in ("user", "item")
        )
        shapes = {
            **_shapes("user_", 1, len(numbers.user), user, len(wide.user), dim),
            **_lists("user_", 1, num_lists, dim),
            **_shapes("item_", _ROWS, len(numbers.item), item, len(wide.item), dim),
        }
        split = _projected(split_model(model, Parts(*kinds)), model, {"user_": user, "item_": item})
        graphs["rank_split"] = _Dense(split, shapes, "logits")
    return graphs


def _projected(module: nn.Module, model: nn.Module, parts: Mapping[str, IndicesByDim]) -> nn.Module:
    """The module with inputs of each dim, if the model's features have dims of their own."""
    projection = projection_of(model)
    return module if projection is None else ProjectedInputs(module, projection, parts)


def _tower(learner: Retriever, side: Side) -> _Dense:
    layout, dim = learner.layouts[side], learner.spec.embedding_dim
    num_lists = len(learner.sequences) if side == "user" else 0
    by_dim = learner.pooled_features(learner.tower_collections.get(side, {}))
    pooled = {own: range(len(names)) for own, names in by_dim.items()}
    shapes = {
        **_shapes("", _ROWS, len(layout.number_columns), pooled, 0, dim),
        **_lists("", _ROWS, num_lists, dim),
    }
    tower = getattr(learner.towers, side)
    return _Dense(_projected(_Whole(tower), tower, {"": pooled}), shapes, "vectors")


def _lists(prefix: str, num_rows: int | str, number: int, dim: int) -> dict[str, Sequence[int | str]]:
    """Shapes of the unpooled lists, and of their masks."""
    shapes: dict[str, Sequence[int | str]] = {}
    for index in range(number):
        shapes[f"{prefix}list{index}"] = (num_rows, f"length{index}", dim)
        shapes[f"{prefix}mask{index}"] = (num_rows, f"length{index}")
    return shapes


def _shapes(
    prefix: str, num_rows: int | str, numbers: int, pooled: IndicesByDim, wide: int, dim: int
) -> dict[str, Sequence[int | str]]:
    """Shapes of numbers, pooled and wide, where there are such features."""
    every: dict[str, Sequence[int | str]] = {
        f"{prefix}numbers": (num_rows, numbers),
        **{
            prefix + pooled_input(own, dim): (num_rows, len(features), own)
            for own, features in pooled.items()
        },
        f"{prefix}wide": (num_rows, wide),
    }
    return {name: shape for name, shape in every.items() if shape[1]}


def _trace(name: str, part: _Dense) -> ModelProto:
    """The graph as torch traces it. Weights stay inputs of its nodes under their own names: nothing is folded.

    Uses torch's first exporter where it gives the right answers, in a tenth of a second, and torch.export, which
    takes several seconds, for forwards that the first cannot trace.
    """
    with _quiet():
        graph = _traced_by_script(part)
        if graph is None or not _agrees(graph, part):
            graph = _traced_by_export(name, part)
    if not _agrees(graph, part):
        raise RecmillError(
            f'Graph "{name}" does not give what its torch model gives for the same rows. '
            "Does the model's forward draw random numbers or depend on the number of rows?"
        )
    return graph


class _Positional(nn.Module):
    """Adapts a module to positional inputs."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self.names = names

    def forward(self, *values: Tensor) -> Tensor:
        return self.module(dict(zip(self.names, values, strict=True)))  # type: ignore[no-any-return]


def _traced_by_script(part: _Dense) -> ModelProto | None:
    import onnx

    inputs, content = part.random_inputs(num_rows=3), io.BytesIO()
    # A new module is in training mode, and the exporter restores that mode in all of its parts.
    positional = _Positional(part.module, list(inputs)).eval()
    try:
        torch.onnx.export(
            positional,
            tuple(inputs.values()),
            content,  # type: ignore[arg-type]  # the first exporter takes one
            dynamo=False,
            do_constant_folding=False,
            opset_version=_OPSET,
            input_names=list(inputs),
            output_names=[part.output],
            dynamic_axes=part.free_sizes,
        )
    except Exception:  # whatever it was: the other exporter says what is wrong with a forward
        return None
    graph = onnx.load_from_string(content.getvalue())
    for initializer in graph.graph.initializer:
        initializer.name = initializer.name.removeprefix("module.")
    for node in graph.graph.node:
        node.input[:] = [one.removeprefix("module.") for one in node.input]
        node.doc_string = ""
    return graph


def _traced_by_export(name: str, part: _Dense) -> ModelProto:
    inputs = part.random_inputs(num_rows=3)
    sizes = {name: torch.export.Dim(name) for axes in part.free_sizes.values() for name in axes.values()}
    free = {key: {axis: sizes[name] for axis, name in axes.items()} for key, axes in part.free_sizes.items()}
    try:
        program = torch.onnx.export(
            part.module,
            kwargs={"inputs": inputs},
            dynamo=True,
            optimize=False,
            verbose=False,
            opset_version=_OPSET,
            input_names=list(inputs),
            output_names=[part.output],
            dynamic_shapes={"inputs": free},
        )
    except torch.onnx.errors.OnnxExporterError as error:
        raise RecmillError(
            f'Graph "{name}" cannot be traced: {_reason(error)} '
            "A model's forward must be one that torch.export takes: no branches on values, no NumPy."
        ) from error
    assert program is not None
    return _without_notes(program.model_proto)


def _set_weights(graph: ModelProto, module: nn.Module) -> bool:
    """Set the weights of a traced graph; returns whether every shape matched."""
    from onnx import numpy_helper

    weights = dict((*module.named_parameters(), *module.named_buffers()))
    for initializer in graph.graph.initializer:
        weight = weights.get(initializer.name)
        if weight is not None:
            if list(weight.shape) != list(initializer.dims):
                return False
            values = weight.detach().contiguous().numpy()
            initializer.CopyFrom(numpy_helper.from_array(values, initializer.name))
    return True


def _agrees(graph: ModelProto, part: _Dense) -> bool:
    """Whether graph and module agree, for one row and for several."""
    served = Graph(graph.SerializeToString())
    for num_rows in (1, 5):
        inputs = part.random_inputs(num_rows)
        expected = part.module(inputs).numpy()
        answer = served.run(**{name: value.numpy() for name, value in inputs.items()})
        tolerance = _TOLERANCE * (1 + np.abs(expected).max())
        if answer.shape != expected.shape or not np.allclose(answer, expected, rtol=0, atol=tolerance):
            return False
    return True


def _without_notes(graph: ModelProto) -> ModelProto:
    """Remove torch's notes about its tracing: half of a small graph, and local paths."""
    parts = graph.graph
    for message in (graph, parts, *parts.node, *parts.input, *parts.output):
        del message.metadata_props[:]
    for message in (*parts.initializer, *parts.value_info):
        del message.metadata_props[:]
    return graph


def _reason(error: BaseException) -> str:
    """The first line of the underlying error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().split("\n")[0] or type(error).__name__


def _write_bytes(path: Path, content: bytes) -> None:
    aside = path.with_name(path.name + ".partial")
    aside.write_bytes(content)
    os.replace(aside, path)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch.onnx's warnings about optional packages and its own deprecations; errors are raised anyway."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
