"""Make a single-process learner train with others. Nothing in `recmill.learner` depends on workers.

A step needs other workers in three places, and `distribute` installs them:

1. Reads. Collections become sharded ones, whose lookups read rows of other workers. A retriever's `find_items` gives
   the items of all workers' rows.
2. Gradients. `reduce_gradients` sums those of all workers before any weight changes.
3. Evictions by capacity, which compare the keys of all workers.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from recmill.dataset.batch import Batch
from recmill.distributed import sharding
from recmill.distributed.batch_items import SharedBatchItems
from recmill.distributed.gradients import reduce_over_workers
from recmill.distributed.placement import TablePlacement, plan_placement
from recmill.distributed.placement import explain as explain_tables
from recmill.distributed.sharding import WIRES, ShardedCollection, prefetch
from recmill.distributed.workers import Workers
from recmill.embeddings.collection import EmbeddingCollection
from recmill.embeddings.table import EmbeddingTable, KeyShard
from recmill.errors import RecmillError
from recmill.learner.base import Learner
from recmill.learner.retrieval import Retriever

_KEYS_OF_A_LIST = 8  # a guess, where placement is planned


def distribute(learner: Learner, workers: Workers, wire: str = "float32") -> None:
    """Turn a new learner into one of several: it owns a shard of the tables, and learns from all workers' rows."""
    if workers.size == 1:
        return
    if wire not in WIRES:
        raise RecmillError(f'Rows cannot be sent as "{wire}"; known: {", ".join(WIRES)}.')
    is_sharded = {
        table.name: table.placement == "sharded" for table in placement_of(learner, workers.size, wire)
    }
    for name, collection in learner.collections.items():
        names = {table for table in collection.tables if is_sharded[f"{name}/{table}"]}
        learner.collections[name] = _shard(learner, collection, names, workers, wire)
    if isinstance(learner, Retriever):
        learner.find_items = partial(SharedBatchItems.of_all, workers)
    learner.reduce_gradients = partial(reduce_over_workers, workers)
    learner.evict_by_capacity = partial(evict_by_capacity, workers)
    _same_weights(learner, workers)


def _shard(
    learner: Learner, collection: EmbeddingCollection, sharded: set[str], workers: Workers, wire: str
) -> ShardedCollection:
    shard = KeyShard(workers.rank, workers.size)
    tables = [
        EmbeddingTable(table.spec, disk=learner.disk, shard=shard if name in sharded else None)
        for name, table in collection.tables.items()
    ]
    return ShardedCollection(tables, collection.features, workers, learner.num_threads, wire)


def prefetch_keys(learner: Learner, batch: Batch) -> None:
    """Begin the exchange of the keys that a step on this batch looks up. Steps must come in the same order."""
    if columns := learner.key_columns(batch):
        prefetch([_sharded(learner.collections[name]) for name in columns], list(columns.values()))


def finish_prefetch(learner: Learner) -> None:
    """Leave nothing under way between workers."""
    sharding.finish_prefetch(
        one for one in learner.collections.values() if isinstance(one, ShardedCollection)
    )


def _sharded(collection: EmbeddingCollection) -> ShardedCollection:
    assert isinstance(collection, ShardedCollection)
    return collection


def evict_by_capacity(workers: Workers, table: EmbeddingTable, max_keys: int) -> int:
    """Evict the keys that a single process would evict; returns how many of them were this worker's.

    Each worker proposes its least frequent keys, as many as must be evicted in total: the union covers the result.
    """
    surplus = sum(workers.steps.all_gather(table.statistics().keys)) - max_keys
    if surplus <= 0:
        return 0
    least = workers.steps.all_gather(table.least_frequent(surplus))
    keys, counts, steps = (np.concatenate(parts) for parts in zip(*least, strict=True))
    return table.remove(keys[np.lexsort((~keys, steps, counts))[:surplus]])


def _same_weights(learner: Learner, workers: Workers) -> None:
    """Start from worker 0's dense weights on every machine; dropout differs between workers."""
    for weight in learner.parameters:
        values = weight.detach().numpy().reshape(-1)
        if not workers.is_first:
            values[:] = 0
        workers.steps.all_reduce(values).wait()
    scatter_randomness(learner, workers)


def scatter_randomness(learner: Learner, workers: Workers) -> None:
    """Give each worker but the first its own random numbers."""
    if not workers.is_first:
        torch.manual_seed(learner.train_spec.seed + 1_000_003 * workers.rank + learner.steps)


def placement_of(learner: Learner, num_workers: int, wire: str = "float32") -> list[TablePlacement]:
    """The placement of a learner's tables, and its costs."""
    keys_per_row: dict[str, float] = dict.fromkeys(learner.tables, 0.0)
    for name, collection in learner.collections.items():
        for feature in collection.features:
            is_list = feature.pooling != "none"
            keys_per_row[f"{name}/{feature.table}"] += _KEYS_OF_A_LIST if is_list else 1
    specs = {name: table.spec for name, table in learner.tables.items()}
    return plan_placement(specs, keys_per_row, learner.batch_size, num_workers, wire)


def explain(learner: Learner, num_workers: int, wire: str = "float32") -> list[str]:
    """The placement of a learner's tables, as lines of text."""
    num_weights = sum(weight.numel() for weight in learner.parameters)
    tables = placement_of(learner, num_workers, wire)
    return explain_tables(tables, num_workers, learner.batch_size, num_weights)
