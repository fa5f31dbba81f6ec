"""A ranker at work: a dense model and the tables that feed it, trained together.

One thread for each share of a batch, single-threaded torch inside, one join a step: gradients are returned, summed once
and applied once. On two cores this beats torch's own threads inside each operation (design notes, section 7).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from recmill.batches import Array, Batch, Keys, Layout
from recmill.embeddings.collection import EmbeddingCollection, EmbeddingFeature, Looked
from recmill.embeddings.table import OPTIMIZERS, EmbeddingTable, TableSpec
from recmill.errors import FeatureError
from recmill.features.chain import ColumnInfo
from recmill.models.dlrm import DLRM
from recmill.models.wide_deep import WideDeep
from recmill.spec import recipe as r
from recmill.train.optimizers import dense_optimizer

T = TypeVar("T")

MODELS: dict[str, type[DLRM] | type[WideDeep]] = {"dlrm": DLRM, "wide_deep": WideDeep}
_DYNAMIC_SCALE = 0.01
EVICT_EVERY = 500  # steps


@dataclass(frozen=True)
class Step:
    """What one step gave: the mean loss of its rows."""

    loss: float


class Ranker:
    """Numbers, tables, dense weights and their optimizers of one ranking model."""

    def __init__(self, spec: r.Ranking, columns: Sequence[ColumnInfo], num_threads: int = 1) -> None:
        torch.manual_seed(spec.train.seed)
        self.spec = spec
        self.num_threads = num_threads
        self.layout = Layout.of(columns, spec.features or None)
        self._check(columns)
        known = {column.name: column for column in columns}
        self.deep = tables_for(
            [known[name] for name in self.layout.keys],
            spec.embedding_dim,
            spec.train.sparse,
            spec,
            num_threads,
        )
        wide_optimizer = spec.wide_optimizer or r.Optimizer("ftrl", 0.005)
        self.wide_optimizer = wide_optimizer
        self.wide = (
            tables_for([known[name] for name in spec.wide], 1, wide_optimizer, spec, num_threads)
            if spec.wide
            else None
        )
        self.model: nn.Module = MODELS[spec.model](spec, len(self.layout.numbers), len(self.layout.keys))
        self.parameters = list(self.model.parameters())
        self.optimizer = dense_optimizer(spec.train.dense, self.parameters)
        self.steps = 0
        self._pool = ThreadPoolExecutor(num_threads) if num_threads > 1 else None

    def _check(self, columns: Sequence[ColumnInfo]) -> None:
        """What a recipe may ask for and this ranker cannot do yet is an error, never ignored."""
        if self.spec.model not in MODELS:
            raise FeatureError(
                f'Ranking model "{self.spec.model}" cannot be trained; there are: {", ".join(MODELS)}.'
            )
        if self.layout.lists:
            raise FeatureError(
                f'Ranking cannot use "{self.layout.lists[0]}": lists of numbers have no place in it.'
            )
        for column in columns:
            if column.name in self.layout.keys and column.dim not in (None, self.spec.embedding_dim):
                raise FeatureError(
                    f'Feature "{column.name}" has dim {column.dim}, but ranking.embedding_dim is '
                    f"{self.spec.embedding_dim}; tables of one model have one dim."
                )

    def step(self, batch: Batch, rate_factor: float = 1.0) -> Step:
        """Learn from one batch. Nothing changes if a gradient is not finite; that is an error."""
        self.model.train()
        self.steps += 1
        deep = self.deep.lookup(_columns(batch.keys, self.deep), train=True, step=self.steps)
        wide = (
            self.wide.lookup(_columns(batch.keys, self.wide), train=True, step=self.steps)
            if self.wide
            else None
        )
        shares = self._map(lambda rows: self._share(batch, deep, wide, rows), batch.size)
        loss = sum(share[0] for share in shares)
        self._apply_dense([share[1] for share in shares], rate_factor)
        train = self.spec.train
        grads = np.concatenate([share[2] for share in shares])
        self.deep.update(deep, grads, train.sparse.learning_rate * rate_factor, self.steps)
        if self.wide is not None and wide is not None:
            wide_grads = np.concatenate([share[3] for share in shares])
            self.wide.update(wide, wide_grads, self.wide_optimizer.learning_rate * rate_factor, self.steps)
        if self.steps % EVICT_EVERY == 0:
            self.evict()
        return Step(loss)

    def evict(self) -> int:
        """Drop the keys of dynamic tables that the recipe no longer wants; how many went."""
        options = self.spec.dynamic
        evicted = 0
        if options is None:
            return 0
        for table in (table for table in self.deep.tables.values() if table.spec.num_rows is None):
            if options.evict_after_steps is not None:
                evicted += table.evict_by_age(self.steps, options.evict_after_steps)
            if options.evict_below_norm is not None:
                evicted += table.evict_by_norm(options.evict_below_norm)
            if options.capacity is not None:
                evicted += table.evict_by_capacity(options.capacity)
        return evicted

    def predict(self, batch: Batch) -> Array:
        """Probabilities [B]; learns nothing, not even which keys exist."""
        self.model.eval()
        deep = self.deep.lookup(_columns(batch.keys, self.deep), train=False)
        wide = self.wide.lookup(_columns(batch.keys, self.wide), train=False) if self.wide else None

        def share(rows: slice) -> Array:
            with torch.no_grad():
                inputs = [torch.from_numpy(batch.numbers[rows]), torch.from_numpy(deep.values[rows])]
                if wide is not None:
                    inputs.append(torch.from_numpy(wide.values[rows, :, 0]))
                return np.asarray(torch.sigmoid(self.model(*inputs)).numpy())

        return np.concatenate(self._map(share, batch.size))

    def _share(
        self, batch: Batch, deep: Looked, wide: Looked | None, rows: slice
    ) -> tuple[float, list[Tensor], Array, Array | None]:
        """Loss and gradients of some rows of the batch, as parts of the whole batch's mean."""
        pooled = torch.from_numpy(deep.values[rows]).requires_grad_()
        inputs = [torch.from_numpy(batch.numbers[rows]), pooled]
        leaves = [pooled]
        if wide is not None:
            weights = torch.from_numpy(wide.values[rows, :, 0]).requires_grad_()
            inputs.append(weights)
            leaves.append(weights)
        labels = torch.from_numpy(batch.labels[self.spec.label][rows])
        loss = (
            functional.binary_cross_entropy_with_logits(self.model(*inputs), labels, reduction="sum")
            / batch.size
        )
        dense_and_leaves = torch.autograd.grad(loss, [*self.parameters, *leaves])
        dense = list(dense_and_leaves[: len(self.parameters)])
        of_leaves = [gradient.numpy() for gradient in dense_and_leaves[len(self.parameters) :]]
        of_wide = of_leaves[1][:, :, None] if wide is not None else None
        return float(loss.detach()), dense, of_leaves[0], of_wide

    def _apply_dense(self, parts: list[list[Tensor]], rate_factor: float) -> None:
        for place, parameter in enumerate(self.parameters):
            parameter.grad = parts[0][place]
            for other in parts[1:]:
                parameter.grad += other[place]
        for group in self.optimizer.param_groups:
            group["lr"] = self.spec.train.dense.learning_rate * rate_factor
        self.optimizer.step()

    def _map(self, function: Callable[[slice], T], size: int) -> list[T]:
        """`function` of each thread's share of the rows."""
        edges = [size * number // self.num_threads for number in range(self.num_threads + 1)]
        shares = [slice(start, stop) for start, stop in pairwise(edges) if start < stop]
        if self._pool is None or len(shares) == 1:
            return [function(rows) for rows in shares]
        return list(self._pool.map(function, shares))


def tables_for(
    columns: Sequence[ColumnInfo], dim: int, optimizer: r.Optimizer, spec: r.Ranking, num_threads: int
) -> EmbeddingCollection:
    """One table for each vocabulary, and the features that read it."""
    features = [
        EmbeddingFeature(
            column.name, _table_name(column), "mean" if column.kind in ("ids", "keys") else "none"
        )
        for column in columns
    ]
    specs: dict[str, TableSpec] = {}
    for column in columns:
        specs.setdefault(_table_name(column), _table_spec(column, dim, optimizer, spec))
    return EmbeddingCollection([EmbeddingTable(table) for table in specs.values()], features, num_threads)


def _table_name(column: ColumnInfo) -> str:
    return column.vocabulary or column.name


def _table_spec(column: ColumnInfo, dim: int, optimizer: r.Optimizer, spec: r.Ranking) -> TableSpec:
    given = {"weight_decay": optimizer.weight_decay, "l1": optimizer.l1, "l2": optimizer.l2}
    if optimizer.eps is not None:
        given["eps"] = optimizer.eps
    parameters = {name: value for name, value in given.items() if name in OPTIMIZERS[optimizer.name]}
    scale = 0.0 if dim == 1 else column.size**-0.5 if column.size else _DYNAMIC_SCALE
    waits = spec.dynamic.admit_after if spec.dynamic is not None and column.size is None else 1
    return TableSpec(
        name=_table_name(column),
        dim=dim,
        optimizer=optimizer.name,
        parameters=parameters,
        num_rows=column.size,
        init_scale=scale,
        seed=spec.train.seed,
        admit_after=waits,
    )


def _columns(
    keys: Mapping[str, Keys], collection: EmbeddingCollection
) -> dict[str, tuple[Array, Array | None]]:
    return {
        feature.name: (keys[feature.name].values, keys[feature.name].offsets)
        for feature in collection.features
    }
