"""What rankers and retrievers share: tables for columns, dense weights and their optimizer, state that can be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import pairwise
from operator import add
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recmill.dataset.batch import Array, Batch, Keys, between
from recmill.embeddings.collection import Column, EmbeddingCollection, EmbeddingFeature, Looked
from recmill.embeddings.peers import Peers
from recmill.embeddings.sharding import RowUpdate, ShardedCollection
from recmill.embeddings.table import OPTIMIZERS, DiskTier, EmbeddingTable, TableSpec
from recmill.errors import FeatureError, TrainingError
from recmill.features.chain import ColumnInfo
from recmill.learner.gradients import reduce_gradients
from recmill.learner.optimizers import dense_optimizer
from recmill.metrics import RankingSums, ScoreSums
from recmill.recipe import recipe as r

S = TypeVar("S")
T = TypeVar("T")
Sums = TypeVar("Sums", ScoreSums, RankingSums)

_DYNAMIC_SCALE = 0.01
_MOST = 1e12  # squares of larger gradients would overflow the optimizers' sums
_LOWER = "Lower the learning rates, or look for outliers in number features (clip, log, standardise)."


@dataclass(frozen=True)
class StepResult:
    """What one step gave: the mean loss of its rows, all workers' together."""

    loss: float


@dataclass(frozen=True)
class RowGradients:
    """The gradient of what a collection read."""

    collection: str
    looked: Looked
    grads: Array


class Learner:
    """A dense model, tables, and the optimizers of both.

    A batch is cut into shares, one for each thread; torch is single-threaded inside; gradients are returned, summed
    once and applied once.
    """

    def __init__(self, train: r.Training, num_threads: int, disk: DiskTier | None = None) -> None:
        torch.manual_seed(train.seed)
        self.train_spec = train
        self.num_threads = num_threads
        self.disk = disk
        self.steps = 0
        self.trains_dense = True  # False: only rows of tables learn
        self.dynamic: r.Dynamic | None = None  # options of tables whose keys have no bound
        self.peers: Peers | None = None  # the other workers, if there are some
        self.collections: dict[str, EmbeddingCollection] = {}
        self._sparse: dict[str, r.Optimizer] = {}
        self._pool = ThreadPoolExecutor(num_threads) if num_threads > 1 else None

    def set_model(self, model: nn.Module) -> None:
        """The dense part; its optimizer follows from the recipe. Each thread will have some of the weights."""
        self.model = model
        self.parameters = list(model.parameters())
        self._groups = balanced([weights.numel() for weights in self.parameters], self.num_threads)
        self.optimizers = [
            dense_optimizer(self.train_spec.dense, [self.parameters[place] for place in group])
            for group in self._groups
        ]

    def add_tables(
        self,
        name: str,
        columns: Sequence[ColumnInfo],
        dim: int,
        optimizer: r.Optimizer,
        dynamic: r.Dynamic | None = None,
    ) -> None:
        """A collection: one table for each vocabulary of the columns, and the features that read it."""
        features = [
            EmbeddingFeature(
                column.name, _table_name(column), "mean" if column.kind in ("ids", "keys") else "none"
            )
            for column in columns
        ]
        specs: dict[str, TableSpec] = {}
        for column in columns:
            spec = _table_spec(column, dim, optimizer, dynamic, self.train_spec.seed)
            specs.setdefault(spec.name, spec)
        tables = [EmbeddingTable(spec, disk=self.disk) for spec in specs.values()]
        self.collections[name] = EmbeddingCollection(tables, features, self.num_threads)
        self._sparse[name] = optimizer

    @property
    def tables(self) -> dict[str, EmbeddingTable]:
        """Every table by the name that checkpoints use: `collection/table`."""
        return {
            f"{name}/{table.spec.name}": table
            for name, collection in self.collections.items()
            for table in collection.tables.values()
        }

    @property
    def trains_on(self) -> str | None:
        """The label that a row must have to teach anything; None when all rows do."""
        return None

    def step(self, batch: Batch, rate_factor: float = 1.0) -> StepResult:
        """Learn from one batch. A loss or gradient that is not finite is an error, and no weight has changed."""
        raise NotImplementedError

    def evict(self, options: r.Dynamic) -> int:
        """Drop the keys of dynamic tables that the recipe no longer wants; how many went."""
        evicted = 0
        for table in (table for table in self.tables.values() if table.spec.num_rows is None):
            if options.evict_after_steps is not None:
                evicted += table.evict_by_age(self.steps, options.evict_after_steps)
            if options.evict_below_norm is not None:
                evicted += table.evict_by_norm(options.evict_below_norm)
            if options.capacity is not None:
                evicted += table.evict_by_capacity(options.capacity)
        return evicted

    def learn(
        self,
        loss: float,
        dense: Sequence[Sequence[Tensor]],
        rows: Sequence[RowGradients],
        size_of_rows: float,
        rate_factor: float,
    ) -> float:
        """One step of all weights, by the gradients of all workers; the loss of the whole batch.

        `size_of_rows` is a norm of the gradients of rows. What is not finite is an error on all workers, and no weight
        has changed.
        """
        size = self.sum_gradients(dense) + size_of_rows
        if self.peers is None:
            self.check_finite(loss, size)
            for part in rows:
                update_here = partial(self.collections[part.collection].update, part.looked, part.grads)
                self.update_rows(part.collection, update_here, rate_factor)
            self.step_dense(rate_factor)
            return loss
        agreed = reduce_gradients(self.peers, loss, size, self.parameters, self._row_updates(rows))
        self.check_finite(agreed.loss, agreed.size)
        self.step_dense(rate_factor)  # while gradients of rows travel
        for part, update in zip(rows, agreed.updates, strict=True):
            self.update_rows(part.collection, update, rate_factor)
        return agreed.loss

    def _row_updates(self, rows: Sequence[RowGradients]) -> list[RowUpdate]:
        found = []
        for part in rows:
            collection = self.collections[part.collection]
            assert isinstance(collection, ShardedCollection)
            found.append(collection.begin_update(part.looked, part.grads))
        return found

    def update_rows(self, collection: str, update: Callable[[float, int], None], rate_factor: float) -> None:
        """One step of the rows that were looked up."""
        optimizer = self._sparse[collection]
        # FTRL's weights are a function of its sums and of the rate: a rate that falls to 0 would take them along.
        rate = optimizer.learning_rate * (1.0 if optimizer.name == "ftrl" else rate_factor)
        try:
            update(rate, self.steps)
        except ValueError as error:
            raise TrainingError(f"Step {self.steps}: {error}. {_LOWER}") from None

    def sum_gradients(self, parts: Sequence[Sequence[Tensor]]) -> float:
        """Give dense weights the sum of the shares' gradients, each thread some of the weights; a norm of all."""

        def add_up(group: Sequence[int]) -> float:
            for place in group:
                total = parts[0][place]
                for other in parts[1:]:
                    total = total.add_(other[place])
                self.parameters[place].grad = total
            return norm_of([parts[0][place] for place in group])

        parts = parts or [[torch.zeros_like(weights) for weights in self.parameters]]  # a share without rows
        return sum(self._each(add_up, self._groups))

    def step_dense(self, rate_factor: float) -> None:
        """One step of the dense weights by the gradients they were given, each thread some of the weights."""
        if not self.trains_dense:
            return

        def step(optimizer: Optimizer) -> None:
            for group in optimizer.param_groups:
                group["lr"] = self.train_spec.dense.learning_rate * rate_factor
            optimizer.step()

        self._each(step, self.optimizers)

    def check_finite(self, loss: float, size: float) -> None:
        """Nothing that is not finite may reach a weight; `size` is a norm of all gradients."""
        if not np.isfinite(loss) or not size < _MOST:
            raise TrainingError(
                f"Step {self.steps}: the loss is {loss:g} and its gradient has size {size:g}; nothing was updated. "
                f"{_LOWER}"
            )

    def expect(self, batch: Batch) -> None:
        """Begin what a step on this batch will need of other workers. Batches must come in this order."""

    def expect_no_more(self) -> None:
        """Leave nothing under way between workers."""
        for collection in self.collections.values():
            if isinstance(collection, ShardedCollection):
                collection.expect_no_more()

    def own_rows(self, batch: Batch) -> Batch:
        """This worker's share of a batch that all of them have; a share stays as it is."""
        if self.peers is None or batch.whole is not None:
            return batch
        rank, size = self.peers.rank, self.peers.size
        own = between(batch, batch.size * rank // size, batch.size * (rank + 1) // size)
        return replace(own, whole=batch.size)

    def added_up(self, sums: Sums) -> Sums:
        """What all workers measured together."""
        return sums if self.peers is None else reduce(add, self.peers.steps.all_gather(sums))

    def shares(self, function: Callable[[slice], T], size: int, num_pieces: int = 1) -> list[T]:
        """`function` of each piece of the rows: threads side by side, the pieces of a thread one after the other."""
        count = self.num_threads * num_pieces
        edges = [size * number // count for number in range(count + 1)]
        pieces = [slice(start, stop) for start, stop in pairwise(edges) if start < stop]
        return self._each(function, pieces)

    def _each(self, function: Callable[[S], T], things: Sequence[S]) -> list[T]:
        """`function` of each thing, on threads if there are some."""
        if self._pool is None or len(things) == 1:
            return [function(thing) for thing in things]
        return list(self._pool.map(function, things))

    def arrays(self) -> dict[str, Array]:
        """A copy of all dense state by name: weights, optimizer state, random state."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for name, state in self._optimizer_states():
            for slot, value in state.items():
                found[f"optimizer.{name}.{slot}"] = value
        found["random.torch"] = torch.get_rng_state()
        return {name: value.detach().numpy().copy() for name, value in found.items()}

    def _optimizer_states(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """What optimizers know of each weight, by the weight's name."""
        names = [name for name, _ in self.model.named_parameters()]
        for group, optimizer in zip(self._groups, self.optimizers, strict=True):
            for place in group:
                yield names[place], optimizer.state[self.parameters[place]]

    def load_arrays(self, arrays: Mapping[str, Array]) -> None:
        """The inverse of `arrays`. Names or shapes that do not fit are an error."""
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


def balanced(sizes: Sequence[int], num_groups: int) -> list[list[int]]:
    """Places of the sizes in groups of about equal sums, none of them empty."""
    groups: list[list[int]] = [[] for _ in range(min(num_groups, len(sizes)))]
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        min(groups, key=lambda group: sum(sizes[other] for other in group)).append(place)
    return groups


def _table_name(column: ColumnInfo) -> str:
    return column.vocabulary or column.name


def _table_spec(
    column: ColumnInfo, dim: int, optimizer: r.Optimizer, dynamic: r.Dynamic | None, seed: int
) -> TableSpec:
    given = {
        "weight_decay": optimizer.weight_decay,
        "l1": optimizer.l1,
        "l2": optimizer.l2,
        "eps": optimizer.eps,
        "initial_accumulator": optimizer.initial_accumulator,
        "decay_rate": optimizer.decay_rate,
        "decay_period": optimizer.decay_period,
    }
    known = OPTIMIZERS[optimizer.name]
    parameters = {name: value for name, value in given.items() if name in known and value is not None}
    waits = dynamic is not None and column.size is None and dynamic.admit_after > 1
    return TableSpec(
        name=_table_name(column),
        dim=dim,
        optimizer=optimizer.name,
        parameters=parameters,
        num_rows=column.size,
        init_scale=0.0 if dim == 1 else column.size**-0.5 if column.size else _DYNAMIC_SCALE,
        seed=seed,
        admit_after=dynamic.admit_after if dynamic is not None and waits else 1,
        bloom_counters=dynamic.bloom_counters if dynamic is not None and waits else None,
        shared_rows=dynamic.shared_rows if dynamic is not None and waits else 0,
    )


def norm_of(gradients: Sequence[Tensor]) -> float:
    """One number that is finite only if all of them are."""
    return float(torch.stack(torch._foreach_norm(list(gradients))).sum())


def columns_of(keys: Mapping[str, Keys], collection: EmbeddingCollection) -> dict[str, Column]:
    """A batch's keys as a collection wants them."""
    return {
        feature.name: (keys[feature.name].values, keys[feature.name].offsets)
        for feature in collection.features
    }


def check_numbers(batch: Batch, names: Sequence[str]) -> None:
    """A number that is not finite would spoil every weight: name it before it does."""
    if np.isfinite(batch.numbers).all():
        return
    row, place = np.argwhere(~np.isfinite(batch.numbers))[0]
    raise FeatureError(
        f'Feature "{names[place]}" is {batch.numbers[row, place]} in row {row} of a batch; '
        "models need finite numbers. Add a fill or clip step to the feature and prepare again."
    )
