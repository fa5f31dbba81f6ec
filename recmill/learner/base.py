"""Common to rankers and retrievers: tables for columns, dense weights and their optimizer, state that can be saved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from recmill import _native
from recmill.dataset.batch import Array, Batch, Keys, Layout
from recmill.embeddings.collection import Column, EmbeddingCollection, EmbeddingFeature
from recmill.embeddings.table import OPTIMIZERS, DiskTier, EmbeddingTable, TableSpec
from recmill.errors import FeatureError, TrainingError
from recmill.features.chain import ColumnInfo
from recmill.learner.gradients import (
    ReduceGradients,
    RowGradients,
    RowUpdate,
    StepGradients,
    reduce_in_one_process,
)
from recmill.learner.optimizers import dense_optimizer
from recmill.models.projection import Projection
from recmill.recipe import recipe as r
from recmill.recipe.defaults import DEFAULT_BATCH_SIZE

S = TypeVar("S")
T = TypeVar("T")

_DYNAMIC_SCALE = 0.01
_MAX_NORM = 1e12  # squares of larger gradients would overflow the optimizers' sums
_REMEDY = "Lower the learning rates, or look for outliers in number features (clip, log, standardise)."


@dataclass(frozen=True)
class StepResult:
    """The result of a step: the mean loss of its rows, over all workers."""

    loss: float


class Learner:
    """A dense model, tables, and the optimizers of both.

    A batch is cut into slices, one per thread; torch is single-threaded inside; gradients are returned, summed once
    and applied once.

    This is single-process code. Several workers train one model by replacing what a step calls: the `collections`,
    which look up rows, `reduce_gradients`, and `evict_by_capacity` (see recmill/distributed/parallel.py).
    """

    def __init__(
        self,
        train: r.Training,
        num_threads: int,
        disk: DiskTier | None = None,
        dynamic: r.Dynamic | None = None,
    ) -> None:
        """`dynamic`: options of tables with unbounded keys."""
        torch.manual_seed(train.seed)
        self.train_spec = train
        self.batch_size = train.batch_size or DEFAULT_BATCH_SIZE
        self.num_threads = num_threads
        self.disk = disk
        self.steps = 0
        self._has_stepped = False
        self.trains_dense = True  # False: only embedding rows are trained
        self.dynamic = dynamic
        self.reduce_gradients: ReduceGradients = reduce_in_one_process
        self.evict_by_capacity: Callable[[EmbeddingTable, int], int] = EmbeddingTable.evict_by_capacity
        self.collections: dict[str, EmbeddingCollection] = {}
        self._sparse: dict[str, r.Optimizer] = {}
        # in addition to the calling thread
        self._pool = ThreadPoolExecutor(num_threads - 1) if num_threads > 1 else None

    def set_model(self, model: nn.Module) -> None:
        """Set the dense part; its optimizer follows from the recipe. Each thread updates some of the weights."""
        self.model = model
        self.parameters = list(model.parameters())
        self._groups = balanced([weights.numel() for weights in self.parameters], self.num_threads)
        self.optimizers = [
            dense_optimizer(self.train_spec.dense, [self.parameters[index] for index in group])
            for group in self._groups
        ]

    def add_tables(
        self,
        name: str,
        columns: Sequence[ColumnInfo],
        dim: int,
        optimizer: r.Optimizer,
        sequences: Collection[str] = (),
    ) -> dict[int, str]:
        """Create collections by dim: one table for each vocabulary of the columns, and the features that read it.

        A column may have a dim of its own: those are in a collection `name.dim`. Lists are pooled, except those named
        by `sequences`.
        """
        names = {}
        for own, some in columns_by_dim(columns, dim).items():
            names[own] = name if own == dim else f"{name}.{own}"
            self._add_collection(names[own], some, own, optimizer, sequences)
        return names

    def _add_collection(
        self,
        name: str,
        columns: Sequence[ColumnInfo],
        dim: int,
        optimizer: r.Optimizer,
        sequences: Collection[str],
    ) -> None:
        features = [EmbeddingFeature.of(column, sequences) for column in columns]
        specs: dict[str, TableSpec] = {}
        parameters = table_parameters(optimizer, self.batch_size)
        for column, feature in zip(columns, features, strict=True):
            spec = _table_spec(
                feature.table,
                column.size,
                dim,
                parameters,
                optimizer.name,
                self.dynamic,
                self.train_spec.seed,
            )
            specs.setdefault(spec.name, spec)
        tables = [EmbeddingTable(spec, disk=self.disk) for spec in specs.values()]
        self.collections[name] = EmbeddingCollection(tables, features, self.num_threads)
        self._sparse[name] = optimizer

    def pooled_features(self, collections: Mapping[int, str]) -> dict[int, list[str]]:
        """Features with one embedding per row, by dim, in the order in which models read them."""
        return {
            dim: [feature.name for feature in self.collections[name].features if not feature.is_sequence]
            for dim, name in collections.items()
        }

    def add_projection(
        self, model: nn.Module, collections: Mapping[int, str], dim: int, members: int = 1
    ) -> None:
        """Add the matrices to a model that convert embeddings of other dims to its own, if there are any.

        As a module of the model they are trained, saved and shared with its other weights.
        """
        if set(collections) != {dim}:
            features = self.pooled_features(collections)
            numbers = {own: len(names) for own, names in features.items()}
            model.add_module("projection", Projection(numbers, dim, members))

    @property
    def tables(self) -> dict[str, EmbeddingTable]:
        """Every table by its name in checkpoints: `collection/table`."""
        return {
            f"{name}/{table.spec.name}": table
            for name, collection in self.collections.items()
            for table in collection.tables.values()
        }

    @property
    def trains_on(self) -> str | None:
        """The label that a row must have to be used in training; None when all rows are used."""
        return None

    @property
    def trains_on_list(self) -> str | None:
        """The list feature that must not be empty in rows used for training; None when it does not matter."""
        return None

    def start(self, batch: Batch, add_up: Callable[[float], float] = float) -> None:
        """Initialise from the first batch; `add_up` sums a number over all workers."""

    def step(self, batch: Batch, rate_factor: float = 1.0) -> StepResult:
        """Train on one batch. A loss or gradient that is not finite is an error, before any weight has changed."""
        raise NotImplementedError

    def evict(self, options: r.Dynamic) -> int:
        """Evict keys of dynamic tables by the recipe's rules; returns how many."""
        evicted = 0
        for table in (table for table in self.tables.values() if table.spec.num_rows is None):
            if options.evict_after_steps is not None:
                evicted += table.evict_by_age(self.steps, options.evict_after_steps)
            if options.evict_below_norm is not None:
                evicted += table.evict_by_norm(options.evict_below_norm)
            if options.capacity is not None:
                evicted += self.evict_by_capacity(table, options.capacity)
        return evicted

    def key_columns(self, batch: Batch) -> dict[str, dict[str, Column]]:
        """The keys of a step on this batch, by collection.

        They depend on the batch alone, so they can be prefetched.
        """
        return {}

    def apply_gradients(
        self,
        loss: float,
        dense: Sequence[Sequence[Tensor]],
        rows: Sequence[RowGradients],
        norm_of_rows: float,
        rate_factor: float,
    ) -> float:
        """One optimizer step of all weights, and evictions when they are due; returns the loss of the whole batch.

        `dense` are the gradients of each slice. A value that is not finite is an error, before any weight has
        changed.
        """
        norm = self.sum_gradients(dense) + norm_of_rows
        reduced = self.reduce_gradients(StepGradients(loss, norm, self.parameters, rows))
        self.check_finite(reduced.loss, reduced.norm)
        self.step_dense(rate_factor)
        for part, update in zip(rows, reduced.updates, strict=True):
            self.update_rows(part.name, update, rate_factor)
        if self.dynamic is not None and self.steps % self.dynamic.evict_every_steps == 0:
            self.evict(self.dynamic)
        return reduced.loss

    def update_rows(self, collection: str, update: RowUpdate, rate_factor: float) -> None:
        """One step of the rows that were looked up."""
        optimizer = self._sparse[collection]
        # FTRL's weights are a function of its sums and of the rate: a rate decaying to 0 would take them along.
        rate = optimizer.learning_rate * (1.0 if optimizer.name == "ftrl" else rate_factor)
        try:
            update(rate, self.steps)
        except ValueError as error:
            raise TrainingError(f"Step {self.steps}: {error}. {_REMEDY}") from None

    def sum_gradients(self, slices: Sequence[Sequence[Tensor]]) -> float:
        """Store the sum of the slices' gradients in the dense weights; returns a norm of all.

        Each thread sums some of the weights.
        """

        def add_up(group: Sequence[int]) -> float:
            for index in group:
                total = slices[0][index]
                for other in slices[1:]:
                    total = total.add_(other[index])
                self.parameters[index].grad = total
            return norm_of([slices[0][index] for index in group])

        # A worker may have no row of a small batch.
        slices = slices or [[torch.zeros_like(weights) for weights in self.parameters]]
        return sum(self._map(add_up, self._groups))

    @contextmanager
    def constant_buffers(self) -> Iterator[None]:
        """Reject a forward that modifies buffers, as BatchNorm does: threads would race, and workers would diverge.

        This is checked in the first step.
        """
        is_alone = self.num_threads == 1 and self.reduce_gradients is reduce_in_one_process
        before = {} if is_alone or self._has_stepped else copied_buffers(self.model)
        self._has_stepped = True
        yield
        for name, buffer in self.model.named_buffers() if before else ():
            if not torch.equal(buffer, before[name]):
                raise TrainingError(
                    f'Training changes buffer "{name}" of the model, as BatchNorm does, which several threads or '
                    "workers would each do for themselves. Use LayerNorm, or train in one process with --threads 1."
                )

    def step_dense(self, rate_factor: float) -> None:
        """One step of the dense weights with their gradients, each thread some of the weights."""
        if not self.trains_dense:
            return

        rate = self.train_spec.dense.learning_rate * rate_factor
        self._map(lambda optimizer: optimizer.step(rate), self.optimizers)

    def check_finite(self, loss: float, norm: float) -> None:
        """Check that no weight receives a value that is not finite; `norm` is that of all gradients."""
        if not np.isfinite(loss) or not norm < _MAX_NORM:
            raise TrainingError(
                f"Step {self.steps}: the loss is {loss:g} and its gradient has size {norm:g}; nothing was updated. "
                f"{_REMEDY}"
            )

    def map_slices(
        self, function: Callable[[slice], T], num_rows: int, slices_per_thread: int = 1
    ) -> list[T]:
        """`function` of each slice of the rows: threads in parallel, the slices of a thread one after the other."""
        count = self.num_threads * slices_per_thread
        edges = [num_rows * index // count for index in range(count + 1)]
        return self._map(function, [slice(start, stop) for start, stop in pairwise(edges) if start < stop])

    def _map(self, function: Callable[[S], T], arguments: Sequence[S]) -> list[T]:
        """`function` of each argument, on threads if there are any.

        The calling thread takes its share too: one thread less to wake, and its cache holds what it has just written.
        """
        if self._pool is None or len(arguments) == 1:
            return [function(argument) for argument in arguments]
        count = self.num_threads
        others = [
            self._pool.submit(
                lambda share: [function(argument) for argument in share], arguments[index::count]
            )
            for index in range(1, min(count, len(arguments)))
        ]
        try:
            shares = [[function(argument) for argument in arguments[::count]]]
        finally:
            wait(others)  # they may write to memory of the caller
        shares += [other.result() for other in others]
        return [shares[index % count][index // count] for index in range(len(arguments))]

    def arrays(self) -> dict[str, Array]:
        """A copy of all dense state by name: weights, optimizer state, random state."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for name, state in self._optimizer_states():
            for slot, value in state.items():
                tensors[f"optimizer.{name}.{slot}"] = value
        tensors["random.torch"] = torch.get_rng_state()
        return {name: value.detach().numpy().copy() for name, value in tensors.items()}

    def _optimizer_states(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """The optimizer's state of each weight, by the weight's name."""
        names = [name for name, _ in self.model.named_parameters()]
        for group, optimizer in zip(self._groups, self.optimizers, strict=True):
            for index in group:
                yield names[index], optimizer.state[self.parameters[index]]

    def load_arrays(self, arrays: Mapping[str, Array]) -> None:
        """The inverse of `arrays`. Names or shapes that do not match are an error."""
        weights = {
            name.removeprefix("model."): torch.from_numpy(np.array(value))
            for name, value in arrays.items()
            if name.startswith("model.")
        }
        try:
            self.model.load_state_dict(weights)
        except RuntimeError as error:
            raise FeatureError(
                f"The checkpoint's dense weights do not fit this recipe's model: {error}"
            ) from None
        for name, state in self._optimizer_states():
            prefix = f"optimizer.{name}."
            slots = {
                key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)
            }
            state.update({slot: torch.from_numpy(np.array(value)) for slot, value in slots.items()})
        torch.set_rng_state(torch.from_numpy(np.array(arrays["random.torch"])))


def columns_by_dim(columns: Sequence[ColumnInfo], dim: int) -> dict[int, list[ColumnInfo]]:
    """Columns of dim `dim`, including those without their own, then those of each other dim."""
    dims = {column.dim or dim for column in columns}
    return {
        own: [column for column in columns if (column.dim or dim) == own]
        for own in sorted(dims, key=lambda own: (own != dim, own))
    }


def projection_of(model: nn.Module) -> Projection | None:
    """The model's projection from `add_projection`."""
    found = getattr(model, "projection", None)
    return found if isinstance(found, Projection) else None


def pooled_inputs(model: nn.Module, pooled: Mapping[int, Tensor]) -> Tensor:
    """Embeddings of each dim, converted to the one that the model reads."""
    projection = projection_of(model)
    return next(iter(pooled.values())) if projection is None else projection(pooled)


def copied_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def balanced(sizes: Sequence[int], num_groups: int) -> list[list[int]]:
    """Partition the indices of sizes into groups of about equal sums, none of them empty."""
    groups: list[list[int]] = [[] for _ in range(min(num_groups, len(sizes)))]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        min(groups, key=lambda group: sum(sizes[other] for other in group)).append(index)
    return groups


def table_parameters(optimizer: r.Optimizer, batch_size: int) -> dict[str, float]:
    """A table's optimizer parameters for the native core: its gradients are those of a batch's mean loss.

    A row that occurs once in a batch has a gradient of 1 / batch_size there, so parameters on the scale of gradients
    are divided likewise, and those on the scale of their squares twice.
    """
    given = {name: getattr(optimizer, name, None) for name in OPTIMIZERS[optimizer.name]}
    parameters = {
        **OPTIMIZERS[optimizer.name],
        **{n: value for n, value in given.items() if value is not None},
    }
    # Adam decays weights separately from gradients, and a step of SGD uses a gradient of the mean.
    by_size = {"sgd": (), "adam": ("eps",)}.get(optimizer.name, ("eps", "weight_decay", "l1", "l2"))
    scales = {**dict.fromkeys(by_size, batch_size), "initial_accumulator": batch_size**2}
    return {name: value / scales.get(name, 1) for name, value in parameters.items()}


def _table_spec(
    name: str,
    num_rows: int | None,
    dim: int,
    parameters: Mapping[str, float],
    optimizer: str,
    dynamic: r.Dynamic | None,
    seed: int,
) -> TableSpec:
    waits = dynamic is not None and num_rows is None and dynamic.admit_after > 1
    return TableSpec(
        name=name,
        dim=dim,
        optimizer=optimizer,
        parameters=parameters,
        num_rows=num_rows,
        init_scale=0.0 if dim == 1 else num_rows**-0.5 if num_rows else _DYNAMIC_SCALE,
        seed=seed,
        admit_after=dynamic.admit_after if dynamic is not None and waits else 1,
        bloom_counters=dynamic.bloom_counters if dynamic is not None and waits else None,
        shared_rows=dynamic.shared_rows if dynamic is not None and waits else 0,
    )


def norm_of(gradients: Sequence[Tensor]) -> float:
    """A number that is finite only if all elements are."""
    return float(torch.stack(torch._foreach_norm(list(gradients))).sum())


def norm_of_rows(gradient: Tensor) -> float:
    """`norm_of` one gradient, which may be columns of a larger one: torch takes five times as long for those."""
    if not gradient.numel():  # lists without a key
        return 0.0
    rows = gradient.flatten(1).numpy()
    # The gradient of a sum is one number for a whole row, without contiguous values of its own.
    return _native.norm(rows if rows.strides[1] == rows.itemsize else np.ascontiguousarray(rows))


def columns_of(keys: Mapping[str, Keys], collection: EmbeddingCollection) -> dict[str, Column]:
    """A batch's keys in the format of a collection."""
    return {
        feature.name: (keys[feature.name].values, keys[feature.name].offsets)
        for feature in collection.features
    }


def check_numbers(batch: Batch, layout: Layout) -> None:
    """Raise for a number that is not finite, naming its feature, before it spoils every weight."""
    if np.isfinite(batch.numbers).all():
        return
    row, column = np.argwhere(~np.isfinite(batch.numbers))[0]
    raise FeatureError(
        f'Feature "{layout.number_columns[column]}" is {batch.numbers[row, column]} in row {row} of a batch; '
        "models need finite numbers. Add a fill or clip step to the feature and prepare again."
    )
