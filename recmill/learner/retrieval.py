"""A retriever: two towers that map users and items to unit vectors, close for good matches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recmill.dataset.batch import Array, Batch, Keys, Layout
from recmill.dataset.splits import SplitRows
from recmill.embeddings.collection import BatchLookup
from recmill.embeddings.table import DiskTier
from recmill.features.chain import ColumnInfo
from recmill.features.labels import check_binary
from recmill.learner.base import Learner, StepResult, check_numbers, columns_of, norm_of, pooled_inputs
from recmill.learner.batch_items import BatchItems
from recmill.learner.eval_queries import EvalQueries, ItemLists, Side, id_feature
from recmill.learner.gradients import RowGradients
from recmill.metrics import RankingSums
from recmill.models.two_tower import Tower, TwoTower, in_batch_softmax, own_tower, pairwise_bce
from recmill.recipe import recipe as r
from recmill.recipe.protocols import Protocol, protocol_for

_ROWS_AT_ONCE = 256  # users whose scores of all items of a batch fit the cache
_SCORES_AT_ONCE = 1 << 24  # of users and all items in an evaluation: 64 MB
_NUM_COUNTERS = 1 << 20  # for items whose keys have no bound


class Retriever(Learner):
    """The two towers of a recipe, the tables that feed them and their optimizers. Towers share no table.

    An in-batch softmax reads the vectors of the batch's items: several workers replace `find_items` so that these are
    the items of all workers' rows.
    """

    sequences: tuple[str, ...] = ()  # lists that the user tower reads unpooled

    def __init__(
        self,
        recipe: r.Recipe,
        columns: Sequence[ColumnInfo],
        num_threads: int = 1,
        disk: DiskTier | None = None,
    ) -> None:
        spec = recipe.retrieval
        assert spec is not None
        super().__init__(spec.train, num_threads, disk, spec.dynamic)
        self.recipe = recipe
        self.spec = spec
        self.item_id = id_feature(recipe, columns, "item")
        self.layout = Layout.of(columns, [*spec.user, *spec.item])
        self.layouts: dict[Side, Layout] = {
            "user": Layout.of(columns, spec.user),
            "item": Layout.of(columns, spec.item),
        }
        by_name = {column.name: column for column in columns}
        self.tower_collections: dict[Side, dict[int, str]] = {}  # by dim
        self.add_towers(by_name)
        self.counts = ItemCounts(by_name[self.item_id].size)
        self.find_items: Callable[[Array], BatchItems] = BatchItems.of
        self._queries: tuple[tuple[object, ...], EvalQueries] | None = None

    def add_towers(self, by_name: Mapping[str, ColumnInfo]) -> None:
        """Add the dense model, and the tables of the features that it reads."""
        spec = self.spec
        make = Tower if spec.model == "two_tower" else own_tower(spec.model)
        self.towers: Any = TwoTower(spec, _sizes(self.layouts["user"]), _sizes(self.layouts["item"]), make)
        for side, layout in self.layouts.items():
            columns = [by_name[name] for name in layout.keys]
            names = self.add_tables(side, columns, spec.embedding_dim, spec.train.sparse)
            self.add_projection(getattr(self.towers, side), names, spec.embedding_dim)
            self.tower_collections[side] = names
        self.set_model(self.towers)

    @property
    def trains_on(self) -> str | None:
        """A softmax over items trains on clicks alone."""
        return self.spec.label if self.spec.loss == "in_batch_softmax" else None

    def step(self, batch: Batch, rate_factor: float = 1.0) -> StepResult:
        """Train on one batch. A loss or gradient that is not finite is an error, before any weight has changed.

        The softmax trains on the rows whose label is 1 and ignores others.
        """
        check_numbers(batch, self.layout)
        check_binary(self.spec.label, batch.labels[self.spec.label])
        if self.trains_on is not None and not batch.labels[self.trains_on].all():
            batch = some_rows(batch, np.flatnonzero(batch.labels[self.trains_on]))
        self.model.train()
        self.steps += 1
        items = self.find_items(batch.keys[self.item_id].values)
        if not len(items.keys):
            return StepResult(0.0)
        with self.constant_buffers():
            users = self._forward("user", self._side_of("user", batch))
            own_items = self._forward("item", some_rows(self._side_of("item", batch), items.tower_rows))
        self.counts.add(items.keys, items.counts)
        task = _Task(batch, items, self.counts.log_q(items.keys) if self.spec.log_q else None)
        loss, user_grads, item_grads, rest = self._loss(task, users.vectors, items.gather(own_items.vectors))
        user_dense, user_rows = self._backward("user", users, user_grads)
        item_dense, item_rows = self._backward("item", own_items, items.reduce(item_grads))
        rows = [*user_rows, *item_rows]
        norm = norm_of([torch.from_numpy(part.grads) for part in rows])
        dense = [[*rest, *user_dense, *item_dense]]
        return StepResult(self.apply_gradients(loss, dense, rows, norm, rate_factor))

    def user_vectors(self, batch: Batch) -> Array:
        """Unit vectors [B, V] of a batch of `layouts["user"]`, also of new users. Changes no state."""
        return self._vectors("user", batch)

    def item_vectors(self, batch: Batch) -> Array:
        """Unit vectors [B, V] of a batch of `layouts["item"]`. Changes no state."""
        return self._vectors("item", batch)

    def evaluate(
        self, table: SplitRows, split: str = "eval", protocol: Protocol | None = None
    ) -> RankingSums:
        """Rank the whole catalogue for each query of a split, some users at a time."""
        queries = self.eval_queries(table, split, protocol)
        items = self.item_vectors(queries.catalogue.batch(self.layouts["item"]))
        return self.measure(queries, items, query_chunks(queries))

    def eval_queries(self, table: SplitRows, split: str, protocol: Protocol | None = None) -> EvalQueries:
        """The queries of a split, cached for its next evaluation."""
        protocol = protocol or protocol_for(self.recipe)
        key = (table.path, split, protocol.name)
        if self._queries is None or self._queries[0] != key:
            self._queries = key, EvalQueries.of(table, self.recipe, split, protocol)
        return self._queries[1]

    def measure(self, queries: EvalQueries, item_vectors: Array, chunks: Iterable[slice]) -> RankingSums:
        """Rank all items, given their vectors, for these chunks of the queries."""
        cutoffs, items = queries.protocol.cutoffs, torch.from_numpy(item_vectors)
        sums = RankingSums(cutoffs)
        for rows in chunks:
            users = torch.from_numpy(self.user_vectors(queries.batch(rows, self.layouts["user"])))
            if len(users):
                ranked = self.rank(users, items, queries.seen.of(rows), max(cutoffs))
                truth = queries.ground_truth.of(rows)
                sums.add(ranked, truth.offsets, truth.items)
        return sums

    def rank(self, users: Tensor, items: Tensor, seen: ItemLists, k: int) -> Array:
        """The k best items for each user, best first, without those seen; padded with -1."""

        def rank_slice(rows: slice) -> Array:
            scores = users[rows] @ items.T
            masked = seen.of(rows)
            scores[torch.from_numpy(masked.queries), torch.from_numpy(masked.items)] = -torch.inf
            best, indices = scores.topk(min(k, len(items)), dim=1)
            return torch.where(torch.isfinite(best), indices, -1).numpy()

        return np.concatenate(self.map_slices(rank_slice, len(users)))

    def arrays(self) -> dict[str, Array]:
        return {**super().arrays(), "items.counts": self.counts.values.copy()}

    def load_arrays(self, arrays: Mapping[str, Array]) -> None:
        super().load_arrays(arrays)
        self.counts.values[:] = arrays["items.counts"]

    def _vectors(self, side: Side, batch: Batch) -> Array:
        check_numbers(batch, self.layouts[side])
        self.model.eval()
        return np.asarray(self._forward(side, batch, train=False).vectors.numpy())

    def _side_of(self, side: Side, batch: Batch) -> Batch:
        """A tower's part of a batch of both sides: numbers of users precede those of items."""
        num_user = len(self.layouts["user"].number_columns)
        numbers = batch.numbers[:, :num_user] if side == "user" else batch.numbers[:, num_user:]
        return Batch(
            batch.size, numbers, {name: batch.keys[name] for name in self.layouts[side].keys}, {}, {}
        )

    def _forward(self, side: Side, batch: Batch, train: bool = True) -> _TowerOutput:
        """Look up a side's embeddings and apply its tower, each thread some rows."""
        tower, lookups = getattr(self.towers, side), {}
        for dim, name in self.tower_collections[side].items():
            columns = columns_of(batch.keys, self.collections[name])
            lookups[dim] = self.collections[name].lookup(columns, train, self.steps)

        def forward_slice(rows: slice) -> tuple[list[Tensor], Tensor]:
            pooled = {
                dim: torch.from_numpy(lookup.values[rows]).requires_grad_(train)
                for dim, lookup in lookups.items()
            }
            with torch.set_grad_enabled(train):
                inputs = pooled_inputs(tower, pooled)
                return list(pooled.values()), tower(torch.from_numpy(batch.numbers[rows]), inputs)

        slices = self.map_slices(forward_slice, batch.size) or [forward_slice(slice(0, 0))]
        return _TowerOutput(list(lookups.values()), slices)

    def _loss(self, task: _Task, users: Tensor, items: Tensor) -> tuple[float, Tensor, Tensor, list[Tensor]]:
        """The batch's mean loss and its gradients: of users, of items, and of parameters outside of towers."""
        items = items.requires_grad_()
        outside = [self.towers.bias] if self.towers.bias is not None else []

        def loss_of_slice(rows: slice) -> tuple[float, list[Tensor]]:
            some = users[rows].requires_grad_()
            loss = self._loss_of(task, some, items, rows) / task.items.num_rows
            return float(loss.detach()), list(torch.autograd.grad(loss, [some, items, *outside]))

        per_thread = -(-task.batch.size // (_ROWS_AT_ONCE * self.num_threads))
        slices = self.map_slices(loss_of_slice, task.batch.size, max(1, per_thread))
        losses, grads = zip(*(slices or [loss_of_slice(slice(0, 0))]), strict=True)
        of_users, *others = zip(*grads, strict=True)
        of_items, *of_outside = (torch.stack(parts).sum(dim=0) for parts in others)
        return sum(losses), torch.cat(of_users), of_items, of_outside

    def _loss_of(self, task: _Task, users: Tensor, items: Tensor, rows: slice) -> Tensor:
        spec, own = self.spec, torch.from_numpy(task.items.of_rows[rows])
        if self.towers.bias is not None:
            labels = torch.from_numpy(task.batch.labels[spec.label][rows])
            return pairwise_bce(users, items, own, labels, self.towers.bias, spec.temperature)
        counts = torch.from_numpy(task.items.counts.astype(np.float32))
        log_q = None if task.log_q is None else torch.from_numpy(task.log_q)
        return in_batch_softmax(users, items, own, counts, spec.temperature, log_q)

    def _backward(
        self, side: Side, output: _TowerOutput, grads: Tensor
    ) -> tuple[list[Tensor], list[RowGradients]]:
        """Gradients of a tower's weights and of its input embeddings."""
        weights = list(getattr(self.towers, side).parameters())
        grads_of_slices = torch.split(grads, [len(vectors) for _, vectors in output.slices])

        def backward(index: int) -> list[Tensor]:
            pooled, vectors = output.slices[index]
            return list(torch.autograd.grad(vectors, [*weights, *pooled], grads_of_slices[index]))

        found = list(zip(*self._map(backward, range(len(output.slices))), strict=True))
        dense, of_pooled = found[: len(weights)], found[len(weights) :]
        names = self.tower_collections[side].values()
        rows = [
            RowGradients(name, self.collections[name], lookup, torch.cat(parts).numpy())
            for name, lookup, parts in zip(names, output.lookups, of_pooled, strict=True)
        ]
        return [torch.stack(part).sum(dim=0) for part in dense], rows


@dataclass(frozen=True)
class _TowerOutput:
    """The tower output of one side of a batch: its lookups, and inputs and vectors of each thread's rows."""

    lookups: Sequence[BatchLookup]  # of each dim
    slices: Sequence[tuple[list[Tensor], Tensor]]

    @property
    def vectors(self) -> Tensor:
        return torch.cat([vectors.detach() for _, vectors in self.slices])


@dataclass(frozen=True)
class _Task:
    """The targets of the loss: the index of each row's item among those of the step."""

    batch: Batch
    items: BatchItems
    log_q: Array | None


class ItemCounts:
    """Number of training rows of each item so far: an estimate of its probability in a batch.

    Keys without bound share counters occasionally; that only blurs the estimate.
    """

    def __init__(self, size: int | None) -> None:
        self.values = np.zeros(size or _NUM_COUNTERS, dtype=np.int64)

    def add(self, keys: Array, counts: Array) -> None:
        """Add distinct keys, each with its number of rows."""
        np.add.at(self.values, keys % len(self.values), counts)

    def log_q(self, keys: Array) -> Array:
        counts = self.values[keys % len(self.values)] + 1
        log_probabilities: Array = np.log(counts / (self.values.sum() + len(self.values))).astype(np.float32)
        return log_probabilities


def query_chunks(queries: EvalQueries) -> list[slice]:
    """Queries whose scores of all items are computed together."""
    size = max(16, _SCORES_AT_ONCE // len(queries.catalogue))
    return [slice(first, min(first + size, len(queries))) for first in range(0, len(queries), size)]


def some_rows(batch: Batch, rows: Array) -> Batch:
    """These rows of a batch, in the given order."""
    return Batch(
        len(rows),
        batch.numbers[rows],
        {name: _some_keys(keys, rows) for name, keys in batch.keys.items()},
        {name: _some_keys(keys, rows) for name, keys in batch.lists.items()},
        {name: labels[rows] for name, labels in batch.labels.items()},
    )


def _some_keys(keys: Keys, rows: Array) -> Keys:
    if keys.offsets is None:
        return Keys(keys.values[rows])
    starts, lengths = keys.offsets[rows], np.diff(keys.offsets)[rows]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    indices = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    return Keys(keys.values[indices], offsets)


def _sizes(layout: Layout) -> tuple[int, int]:
    return len(layout.number_columns), len(layout.keys)
