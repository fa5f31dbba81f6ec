"""A retriever: users and items through two towers to unit vectors that lie close when they fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recmill.dataset.batch import Array, Batch, Keys, Layout
from recmill.dataset.table import Table
from recmill.embeddings.collection import Looked
from recmill.embeddings.peers import gather_rows
from recmill.embeddings.table import DiskTier
from recmill.features.chain import ColumnInfo
from recmill.features.labels import check_binary
from recmill.learner.base import Learner, RowGradients, StepResult, check_numbers, columns_of, norm_of
from recmill.learner.eval_queries import Pairs, Questions, Side, id_feature
from recmill.metrics import RankingSums
from recmill.models.two_tower import TwoTower, in_batch_softmax, pairwise_bce
from recmill.recipe import recipe as r
from recmill.recipe.protocols import Protocol, protocol_for

_ROWS_AT_ONCE = 256  # users whose scores of all items of a batch stay in the cache
_SCORES_AT_ONCE = 1 << 24  # of users and all items in an evaluation: 64 MB
_COUNTED_KEYS = 1 << 20  # places for counts of items whose keys have no bound


class Retriever(Learner):
    """The two towers of a recipe, the tables that feed them and their optimizers. Towers share no table."""

    def __init__(
        self,
        recipe: r.Recipe,
        columns: Sequence[ColumnInfo],
        num_threads: int = 1,
        disk: DiskTier | None = None,
    ) -> None:
        spec = recipe.retrieval
        assert spec is not None
        super().__init__(spec.train, num_threads, disk)
        self.recipe = recipe
        self.spec = spec
        self.item_id = id_feature(recipe, columns, "item")
        self.layout = Layout.of(columns, [*spec.user, *spec.item])
        self.layouts: dict[Side, Layout] = {
            "user": Layout.of(columns, spec.user),
            "item": Layout.of(columns, spec.item),
        }
        known = {column.name: column for column in columns}
        for side, layout in self.layouts.items():
            self.add_tables(
                side, [known[name] for name in layout.keys], spec.embedding_dim, spec.train.sparse
            )
        self.towers = TwoTower(spec, _sizes(self.layouts["user"]), _sizes(self.layouts["item"]))
        self.set_model(self.towers)
        self.counts = ItemCounts(known[self.item_id].size)
        self._asked: tuple[tuple[object, ...], Questions] | None = None

    @property
    def trains_on(self) -> str | None:
        """A softmax over items learns from clicks alone."""
        return self.spec.label if self.spec.loss == "in_batch_softmax" else None

    def step(self, batch: Batch, rate_factor: float = 1.0) -> StepResult:
        """Learn from one batch. A loss or gradient that is not finite is an error, and no weight has changed.

        The softmax learns from the rows whose label is 1 and takes no notice of others.
        """
        check_numbers(batch, self.layout.numbers)
        check_binary(self.spec.label, batch.labels[self.spec.label])
        if self.trains_on is not None and not batch.labels[self.trains_on].all():
            batch = some_rows(batch, np.flatnonzero(batch.labels[self.trains_on]))
        self.model.train()
        self.steps += 1
        items = self._items(batch)
        if not len(items.keys):
            return StepResult(0.0)
        users = self._forward("user", self._part("user", batch))
        own_items = self._forward("item", some_rows(self._part("item", batch), items.first_rows))
        self.counts.add(items.keys, items.counts)
        task = _Task(batch, items, self.counts.log_q(items.keys) if self.spec.log_q else None)
        vectors = self._from_all(items, own_items.vectors)
        loss, user_grads, item_grads, rest = self._loss(task, users.vectors, vectors)
        user_dense, user_sparse = self._backward("user", users, user_grads)
        item_dense, item_sparse = self._backward("item", own_items, self._to_owners(items, item_grads))
        of_rows = norm_of([torch.from_numpy(user_sparse), torch.from_numpy(item_sparse)])
        rows = [
            RowGradients("user", users.looked, user_sparse),
            RowGradients("item", own_items.looked, item_sparse),
        ]
        loss = self.learn(loss, [[*rest, *user_dense, *item_dense]], rows, of_rows, rate_factor)
        return StepResult(loss)

    def _items(self, batch: Batch) -> _Items:
        """The items of a step; of several workers that have one, the first takes it through its tower."""
        keys, first_rows, own, counts = np.unique(
            batch.keys[self.item_id].values, return_index=True, return_inverse=True, return_counts=True
        )
        if self.peers is None:
            return _Items(keys, counts, own, first_rows, np.arange(len(keys)), np.array([len(keys)]))
        asked, sizes = gather_rows(self.peers, np.stack([keys, counts], axis=1).astype(np.int64))
        every_key, first, places = np.unique(asked[:, 0], return_index=True, return_inverse=True)
        every_count = np.zeros(len(every_key), np.int64)
        np.add.at(every_count, places, asked[:, 1])
        ends = np.cumsum(sizes)
        begin = ends[self.peers.rank] - len(keys)
        holders = np.searchsorted(ends, first, side="right")
        by_holder = np.argsort(holders, kind="stable")
        num_held = np.bincount(holders, minlength=self.peers.size)
        held = first[holders == self.peers.rank] - begin
        own = places[begin : begin + len(keys)][own]
        return _Items(every_key, every_count, own, first_rows[held], by_holder, num_held)

    def _from_all(self, items: _Items, vectors: Tensor) -> Tensor:
        """Vectors of all items of the step, whoever took them through the tower."""
        if self.peers is None:
            return vectors
        gathered, _ = gather_rows(self.peers, vectors.numpy())
        in_order = np.empty_like(gathered)
        in_order[items.by_holder] = gathered
        return torch.from_numpy(in_order)

    def _to_owners(self, items: _Items, grads: Tensor) -> Tensor:
        """Gradients of the items that this worker holds, added up over the users of all workers."""
        if self.peers is None:
            return grads
        sent, num_own = grads.numpy()[items.by_holder], len(items.first_rows)
        every = np.full(self.peers.size, num_own)
        parts = self.peers.steps.all_to_all(sent, items.num_held, every).wait()
        return torch.from_numpy(parts.reshape(self.peers.size, num_own, sent.shape[1]).sum(axis=0))

    def user_vectors(self, batch: Batch) -> Array:
        """Unit vectors [B, V] of a batch of `layouts["user"]`; learns nothing. New users get one too."""
        return self._vectors("user", batch)

    def item_vectors(self, batch: Batch) -> Array:
        """Unit vectors [B, V] of a batch of `layouts["item"]`; learns nothing."""
        return self._vectors("item", batch)

    def evaluate(self, table: Table, split: str = "eval", protocol: Protocol | None = None) -> RankingSums:
        """Rank the whole catalogue for each question of a split, some users at a time.

        What is asked is kept for the next evaluation of the same rows.
        """
        protocol = protocol or protocol_for(self.recipe)
        key = (table.path, split, protocol.name)
        if self._asked is None or self._asked[0] != key:
            self._asked = key, Questions.of(table, self.recipe, split, protocol)
        questions = self._asked[1]
        sums = RankingSums(protocol.cutoffs)
        for some, ranked in self.answers(questions, max(protocol.cutoffs)):
            relevant = questions.relevant.of(some)
            sums.add(ranked, relevant.offsets, relevant.items)
        return self.added_up(sums)

    def answers(self, questions: Questions, k: int) -> Iterator[tuple[slice, Array]]:
        """The k best items for some questions at a time, as places in the catalogue, best first; -1 for no more.

        Several workers answer a share of the questions each.
        """
        items = torch.from_numpy(self._catalogue_vectors(questions))
        at_once = max(16, _SCORES_AT_ONCE // len(items))
        for first in range(0, len(questions), at_once):
            some = self._own_part(slice(first, min(first + at_once, len(questions))))
            users = torch.from_numpy(self.user_vectors(questions.batch(some, self.layouts["user"])))
            if len(users):
                yield some, self._rank(users, items, questions.seen.of(some), k)

    def _catalogue_vectors(self, questions: Questions) -> Array:
        batch = self.own_rows(questions.catalogue.batch(self.layouts["item"]))
        vectors = self.item_vectors(batch)
        return vectors if self.peers is None else gather_rows(self.peers, vectors)[0]

    def _own_part(self, rows: slice) -> slice:
        if self.peers is None:
            return rows
        size, rank, count = rows.stop - rows.start, self.peers.rank, self.peers.size
        return slice(rows.start + size * rank // count, rows.start + size * (rank + 1) // count)

    def _rank(self, users: Tensor, items: Tensor, seen: Pairs, k: int) -> Array:
        """The k best items for each user, best first, without those seen; -1 where there are no more."""

        def piece(rows: slice) -> Array:
            scores = users[rows] @ items.T
            masked = seen.of(rows)
            scores[torch.from_numpy(masked.questions), torch.from_numpy(masked.items)] = -torch.inf
            best, places = scores.topk(min(k, len(items)), dim=1)
            return torch.where(torch.isfinite(best), places, -1).numpy()

        return np.concatenate(self.shares(piece, len(users)))

    def arrays(self) -> dict[str, Array]:
        return {**super().arrays(), "items.counts": self.counts.values.copy()}

    def load_arrays(self, arrays: Mapping[str, Array]) -> None:
        super().load_arrays(arrays)
        self.counts.values[:] = arrays["items.counts"]

    def _vectors(self, side: Side, batch: Batch) -> Array:
        check_numbers(batch, self.layouts[side].numbers)
        self.model.eval()
        return np.asarray(self._forward(side, batch, train=False).vectors.numpy())

    def _part(self, side: Side, batch: Batch) -> Batch:
        """What a tower reads of a batch of both: numbers of users stand before those of items."""
        num_user = len(self.layouts["user"].numbers)
        numbers = batch.numbers[:, :num_user] if side == "user" else batch.numbers[:, num_user:]
        return Batch(
            batch.size, numbers, {name: batch.keys[name] for name in self.layouts[side].keys}, {}, {}
        )

    def _forward(self, side: Side, batch: Batch, train: bool = True) -> _Pieces:
        """Look up a side's embeddings and take them through its tower, each thread some rows."""
        collection = self.collections[side]
        looked = collection.lookup(columns_of(batch.keys, collection), train, self.steps)
        tower = getattr(self.towers, side)

        def piece(rows: slice) -> tuple[Tensor, Tensor]:
            pooled = torch.from_numpy(looked.values[rows]).requires_grad_(train)
            with torch.set_grad_enabled(train):
                return pooled, tower(torch.from_numpy(batch.numbers[rows]), pooled)

        return _Pieces(looked, self.shares(piece, batch.size) or [piece(slice(0, 0))])

    def _loss(self, task: _Task, users: Tensor, items: Tensor) -> tuple[float, Tensor, Tensor, list[Tensor]]:
        """The batch's mean loss and its gradients: of users, of items, and of what stands outside of towers."""
        items = items.requires_grad_()
        outside = [self.towers.bias] if self.towers.bias is not None else []

        def piece(rows: slice) -> tuple[float, list[Tensor]]:
            some = users[rows].requires_grad_()
            loss = self._loss_of(task, some, items, rows) / task.items.num_rows
            return float(loss.detach()), list(torch.autograd.grad(loss, [some, items, *outside]))

        num_pieces = -(-task.batch.size // (_ROWS_AT_ONCE * self.num_threads))
        pieces = self.shares(piece, task.batch.size, max(1, num_pieces)) or [piece(slice(0, 0))]
        losses, grads = zip(*pieces, strict=True)
        of_users, *others = zip(*grads, strict=True)
        of_items, *of_outside = (torch.stack(parts).sum(dim=0) for parts in others)
        return sum(losses), torch.cat(of_users), of_items, of_outside

    def _loss_of(self, task: _Task, users: Tensor, items: Tensor, rows: slice) -> Tensor:
        spec, own = self.spec, torch.from_numpy(task.items.own[rows])
        if self.towers.bias is not None:
            labels = torch.from_numpy(task.batch.labels[spec.label][rows])
            return pairwise_bce(users, items, own, labels, self.towers.bias, spec.temperature)
        counts = torch.from_numpy(task.items.counts.astype(np.float32))
        log_q = None if task.log_q is None else torch.from_numpy(task.log_q)
        return in_batch_softmax(users, items, own, counts, spec.temperature, log_q)

    def _backward(self, side: Side, pieces: _Pieces, grads: Tensor) -> tuple[list[Tensor], Array]:
        """Gradients of a tower's weights and of the embeddings that went into it."""
        weights = list(getattr(self.towers, side).parameters())
        parts = torch.split(grads, [len(vectors) for _, vectors in pieces.parts])

        def piece(number: slice) -> list[Tensor]:
            pooled, vectors = pieces.parts[number.start]
            return list(torch.autograd.grad(vectors, [*weights, pooled], parts[number.start]))

        # There are at most as many pieces as threads, so each share is one of them.
        *dense, of_pooled = zip(*self.shares(piece, len(parts)), strict=True)
        return [torch.stack(part).sum(dim=0) for part in dense], torch.cat(of_pooled).numpy()


@dataclass(frozen=True)
class _Pieces:
    """One side of a batch after its tower: what was looked up, and inputs and vectors of each thread's rows."""

    looked: Looked
    parts: Sequence[tuple[Tensor, Tensor]]

    @property
    def vectors(self) -> Tensor:
        return torch.cat([vectors.detach() for _, vectors in self.parts])


@dataclass(frozen=True)
class _Items:
    """The different items of a step's rows, in the order of their keys, with the number of rows of each.

    With several workers they are those of all; each holds some, and `by_holder` are their places, sorted by who.
    """

    keys: Array
    counts: Array
    own: Array  # for each row of this worker, the place of its item
    first_rows: Array  # a row of each item that this worker holds
    by_holder: Array
    num_held: Array  # by each worker

    @property
    def num_rows(self) -> int:
        """Of all workers."""
        return int(self.counts.sum())


@dataclass(frozen=True)
class _Task:
    """What the loss asks: which item each row must find among those of the step."""

    batch: Batch
    items: _Items
    log_q: Array | None


class ItemCounts:
    """How often each item was trained on so far: an estimate of the chance that a batch draws it.

    Keys without bound share places now and then; that only blurs the estimate.
    """

    def __init__(self, size: int | None) -> None:
        self.values = np.zeros(size or _COUNTED_KEYS, dtype=np.int64)

    def add(self, keys: Array, counts: Array) -> None:
        """Count different keys, each with its number of rows."""
        np.add.at(self.values, self._places(keys), counts)

    def log_q(self, keys: Array) -> Array:
        counts = self.values[self._places(keys)] + 1
        chances: Array = np.log(counts / (self.values.sum() + len(self.values))).astype(np.float32)
        return chances

    def _places(self, keys: Array) -> Array:
        return np.asarray(keys % len(self.values))


def some_rows(batch: Batch, rows: Array) -> Batch:
    """These rows of a batch, in the order given."""
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
    places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    return Keys(keys.values[places], offsets)


def _sizes(layout: Layout) -> tuple[int, int]:
    return len(layout.numbers), len(layout.keys)
