"""A retriever whose user tower reads an ordered history, over the item tower's table.

A row's history and its own item are one sequence, of which a step predicts each element from those before it: one row
per user (a packed history) teaches as much as one row per event would.

Shapes: B rows, N elements of all histories, M states that predict an element, U distinct items, K negatives, D dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from recmill.dataset.batch import Array, Batch, Keys
from recmill.embeddings.collection import Column
from recmill.features.chain import ColumnInfo
from recmill.features.labels import check_binary
from recmill.learner.base import StepResult, norm_of
from recmill.learner.batch_items import BatchItems
from recmill.learner.eval_queries import Side
from recmill.learner.gradients import RowGradients
from recmill.learner.retrieval import Retriever, some_rows
from recmill.models.sasrec import SASRec, sampled_softmax
from recmill.models.sequences import pad_lists
from recmill.recipe.recipe import History, Recipe

_STATES_AT_ONCE = 2048  # whose activations fit the cache
_DEFAULT_LENGTH = 100  # of lists that are in the log itself

NO_KEYS: Column = (np.empty(0, np.int64), None)


class SequenceRetriever(Retriever):
    """A sequence user tower and the items that it reads and predicts."""

    def add_towers(self, by_name: Mapping[str, ColumnInfo]) -> None:
        (sequence,), (item,) = self.spec.user, self.spec.item
        self.sequences = (sequence,)
        columns = [by_name[item], by_name[sequence]]
        assert columns[0].size is not None, "check refuses keys without bound"
        self.num_ids = columns[0].size
        dim, sparse = self.spec.embedding_dim, self.spec.train.sparse
        self.tower_collections["item"] = self.add_tables("item", columns, dim, sparse, sequences=[sequence])
        self.towers = SASRec(self.spec, history_length(self.recipe, sequence))
        self.set_model(self.towers)

    @property
    def trains_on(self) -> str | None:
        return self.spec.label

    @property
    def trains_on_list(self) -> str | None:
        """Rows without a history have nothing to predict from."""
        return self.sequences[0]

    def step(self, batch: Batch, rate_factor: float = 1.0) -> StepResult:
        """Train on one batch. A loss or gradient that is not finite is an error, before any weight has changed."""
        check_binary(self.spec.label, batch.labels[self.spec.label])
        self.model.train()
        self.steps += 1
        sequences = self._sequences(batch)
        drawn = self._draw()
        items, negatives = self.find_items(sequences.targets), self.find_items(drawn)
        if not len(items.keys):
            return StepResult(0.0)
        # Of several workers, each looks up some of the items and negatives, and receives the others'.
        own = np.concatenate([sequences.targets[items.tower_rows], drawn[negatives.tower_rows]])
        collection, history = self.collections["item"], self.sequences[0]
        columns: dict[str, Column] = {self.item_id: (own, None), history: sequences.column}
        lookup = collection.lookup(columns, True, self.steps)
        looked_up, num_items = torch.from_numpy(lookup.values[:, 0]), len(items.tower_rows)
        vectors = items.gather(looked_up[:num_items]), negatives.gather(looked_up[num_items:])
        step = _Step(sequences, lookup.sequences[history], items, negatives.keys, *vectors)
        loss, dense, grads = self._gradients(step)
        of_own = torch.cat([items.reduce(grads.items), negatives.reduce(grads.negatives)]).numpy()
        rows = RowGradients("item", collection, lookup, of_own[:, None], {history: grads.elements})
        norm = norm_of([torch.from_numpy(of_own), torch.from_numpy(grads.elements)])
        return StepResult(self.apply_gradients(loss, dense, [rows], norm, rate_factor))

    def _gradients(self, step: _Step) -> tuple[float, list[list[Tensor]], _Gradients]:
        """Loss of this process's rows, as a part of the batch's mean, and its gradients: dense ones, and the others."""
        grads = _Gradients(
            np.empty_like(step.elements), torch.zeros_like(step.items), torch.zeros_like(step.negatives)
        )
        loss, dense = 0.0, []
        slices = step.sequences.slices(self.num_threads)
        results = self._map(lambda rows: self._slice_gradients(step, rows), slices)
        for rows, (loss_of_slice, gradients) in zip(slices, results, strict=True):
            *of_dense, of_elements, of_items, of_negatives = gradients
            loss += loss_of_slice
            dense.append(of_dense)
            grads.elements[step.sequences.elements(rows)] = of_elements.numpy()
            grads.items.add_(of_items)
            grads.negatives.add_(of_negatives)
        return loss, dense, grads

    def _slice_gradients(self, step: _Step, rows: slice) -> tuple[float, list[Tensor]]:
        sequences, item_tower = step.sequences, self.towers.item
        elements = torch.from_numpy(step.elements[sequences.elements(rows)]).requires_grad_()
        items, negatives = (part.detach().requires_grad_() for part in (step.items, step.negatives))
        padded = pad_lists(elements, sequences.lengths[rows])
        states = self.towers.user.states(padded.vectors).flatten(0, 1)
        places, targets = sequences.predictions(rows, padded.mask.shape[1] + 1)
        of_targets = step.batch_items.of_rows[targets]
        loss = sampled_softmax(
            states.index_select(0, torch.from_numpy(places)),
            item_tower(elements, items.unsqueeze(1)).index_select(0, torch.from_numpy(of_targets)),
            item_tower(elements, negatives.unsqueeze(1)),
            _matches(step.batch_items.keys[of_targets], step.negative_keys),
            self.spec.temperature,
            math.log((self.num_ids - 1) / len(step.negative_keys)) if self.spec.log_q else 0.0,
        )
        loss = loss / step.batch_items.num_rows
        gradients = torch.autograd.grad(loss, [*self.parameters, elements, items, negatives])
        return float(loss.detach()), list(gradients)

    def _sequences(self, batch: Batch) -> _Sequences:
        """The training rows, ordered by length, so that the rows of a slice have similar lengths."""
        history, label = self.sequences[0], batch.labels[self.spec.label]
        lengths = np.diff(_offsets(batch.keys[history]))
        order = np.argsort(lengths, kind="stable")
        batch = some_rows(batch, order[(label[order] == 1) & (lengths[order] > 0)])
        return _Sequences(batch.keys[history], batch.keys[self.item_id].values)

    def _draw(self) -> Array:
        """The negatives of this step, the same on every worker; id 0 is not an item."""
        random = np.random.default_rng([self.train_spec.seed, self.steps])
        num_items = max(1, self.num_ids - 1)
        return 1 + random.choice(num_items, min(self.spec.negatives, num_items), replace=False)

    def _vectors(self, side: Side, batch: Batch) -> Array:
        self.model.eval()
        return self._item_vectors(batch) if side == "item" else self._user_vectors(batch)

    def _item_vectors(self, batch: Batch) -> Array:
        columns: dict[str, Column] = {
            self.item_id: (batch.keys[self.item_id].values, None),
            self.sequences[0]: NO_KEYS,
        }
        values = self.collections["item"].lookup(columns, False, self.steps).values
        with torch.no_grad():
            return np.asarray(self.towers.item(torch.empty(0), torch.from_numpy(values)).numpy())

    def _user_vectors(self, batch: Batch) -> Array:
        keys = batch.keys[self.sequences[0]]
        order = np.argsort(np.diff(_offsets(keys)), kind="stable")
        ordered = some_rows(batch, order).keys[self.sequences[0]]
        sequences = _Sequences(ordered, np.zeros(batch.size, np.int64))
        columns: dict[str, Column] = {self.item_id: NO_KEYS, self.sequences[0]: sequences.column}
        lookup = self.collections["item"].lookup(columns, False, self.steps)
        flat = lookup.sequences[self.sequences[0]]

        def vectors_of(rows: slice) -> Array:
            elements = torch.from_numpy(flat[sequences.elements(rows)])
            with torch.no_grad():
                lists = [pad_lists(elements, sequences.lengths[rows])]
                return np.asarray(self.towers.user(torch.empty(0), torch.empty(0), lists).numpy())

        vectors = np.empty((batch.size, self.spec.vector_size), np.float32)
        slices = sequences.slices(self.num_threads)
        for rows, some in zip(slices, self._map(vectors_of, slices), strict=True):
            vectors[order[rows]] = some
        return vectors


@dataclass(frozen=True)
class _Sequences:
    """Histories, shortest first, each with the next item. Id 0, an unknown item, is never predicted."""

    history: Keys
    items: Array

    @property
    def offsets(self) -> Array:
        return _offsets(self.history)

    @property
    def column(self) -> Column:
        """All elements, one history after the other."""
        return self.history.values, None

    @cached_property
    def lengths(self) -> Array:
        return np.diff(self.offsets)

    @cached_property
    def all_targets(self) -> Array:
        """The targets after no element, after the first element and so on, of each row."""
        return np.insert(self.history.values, self.offsets[1:], self.items)

    @cached_property
    def is_known(self) -> Array:
        return np.asarray(self.all_targets != 0)

    @cached_property
    def targets(self) -> Array:
        """The targets that are predicted."""
        return self.all_targets[self.is_known]

    @cached_property
    def _num_known(self) -> Array:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.is_known)])

    def slices(self, num_threads: int) -> list[slice]:
        """Slices of rows with about equally many states each, enough for all threads."""
        ends = self.offsets[1:] + np.arange(1, len(self.items) + 1)
        total = int(ends[-1]) if len(ends) else 0
        number = max(num_threads, -(-total // _STATES_AT_ONCE))
        edges = np.searchsorted(ends, np.arange(1, number) * total / number)
        edges = np.unique([0, *edges, len(self.items)])
        return [slice(int(first), int(stop)) for first, stop in pairwise(edges)]

    def elements(self, rows: slice) -> slice:
        """The range of some rows' elements among all."""
        return slice(int(self.offsets[rows.start]), int(self.offsets[rows.stop]))

    def predictions(self, rows: slice, num_states: int) -> tuple[Array, slice]:
        """The predicting states of some rows, among `num_states` of each row, and their `targets`."""
        first = int(self.offsets[rows.start]) + rows.start
        stop = int(self.offsets[rows.stop]) + rows.stop
        is_state = np.arange(num_states) <= self.lengths[rows, None]
        places = np.flatnonzero(is_state)[self.is_known[first:stop]]
        return places, slice(int(self._num_known[first]), int(self._num_known[stop]))


@dataclass(frozen=True)
class _Step:
    """Inputs shared by all slices of a step."""

    sequences: _Sequences
    elements: Array  # [N, D]
    batch_items: BatchItems  # the predicted ones, of all workers
    negative_keys: Array
    items: Tensor  # [U, D]
    negatives: Tensor  # [K, D]


@dataclass(frozen=True)
class _Gradients:
    """Gradients of a step's lookups."""

    elements: Array
    items: Tensor
    negatives: Tensor


def _matches(keys: Array, sorted_keys: Array) -> tuple[Tensor, Tensor]:
    """Matching keys of two arrays: indices of both."""
    places = np.searchsorted(sorted_keys, keys).clip(max=len(sorted_keys) - 1)
    is_match = sorted_keys[places] == keys
    return torch.from_numpy(np.flatnonzero(is_match)), torch.from_numpy(places[is_match])


def _offsets(keys: Keys) -> Array:
    assert keys.offsets is not None, "a list"
    return keys.offsets


def history_length(recipe: Recipe, feature: str) -> int:
    """The maximal length of a feature's lists, if a history of the recipe makes them."""
    columns = next(known.columns for known in recipe.features if known.name == feature)
    for operation in recipe.rows:
        if isinstance(operation, History) and set(columns) & set(operation.list_columns.values()):
            return operation.max_length
    return _DEFAULT_LENGTH
