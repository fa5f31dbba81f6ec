"""Items of a batch whose rows are spread over workers: an in-batch softmax chooses from the items of all workers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recmill.dataset.batch import Array
from recmill.distributed.workers import Workers
from recmill.learner.batch_items import BatchItems


@dataclass(frozen=True)
class SharedBatchItems(BatchItems):
    """The items of all workers' rows. An item goes through the item tower of the first worker that has it."""

    workers: Workers
    by_worker: Array  # indices of the items, sorted by the worker whose tower computes them
    num_by_worker: Array

    @classmethod
    def of_all(cls, workers: Workers, item_keys: Array) -> SharedBatchItems:
        """Combine the items of all workers. A collective: each worker passes the item keys of its rows."""
        own = BatchItems.of(item_keys)
        pairs = np.stack([own.keys, own.counts], axis=1).astype(np.int64)
        pairs, sizes = workers.steps.all_gather_rows(pairs)
        keys, first, indices = np.unique(pairs[:, 0], return_index=True, return_inverse=True)
        counts = np.zeros(len(keys), np.int64)
        np.add.at(counts, indices, pairs[:, 1])
        ends = np.cumsum(sizes)
        begin = ends[workers.rank] - len(own.keys)
        worker_of = np.searchsorted(ends, first, side="right")
        tower_items = first[worker_of == workers.rank] - begin
        return cls(
            keys,
            counts,
            indices[begin : begin + len(own.keys)][own.of_rows],
            own.tower_rows[tower_items],
            workers,
            np.argsort(worker_of, kind="stable"),
            np.bincount(worker_of, minlength=workers.size),
        )

    def gather(self, vectors: Tensor) -> Tensor:
        gathered, _ = self.workers.steps.all_gather_rows(vectors.numpy())
        in_order = np.empty_like(gathered)
        in_order[self.by_worker] = gathered
        return torch.from_numpy(in_order)

    def reduce(self, grads: Tensor) -> Tensor:
        sent, num_own, size = grads.numpy()[self.by_worker], len(self.tower_rows), self.workers.size
        received = self.workers.steps.all_to_all(sent, self.num_by_worker, np.full(size, num_own)).wait()
        return torch.from_numpy(received.reshape(size, num_own, sent.shape[1]).sum(axis=0))
