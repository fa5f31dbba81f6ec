"""Gradient reduction in parallel training: gradients of all workers are summed before any weight changes.

One message carries everything that must be summed: loss, norm, flags, gradients of replicated tables and of dense
weights. Meanwhile, gradients of sharded rows travel to the workers that own the rows.

Shapes: U updates, W workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

from recmill.dataset.batch import Array
from recmill.distributed.sharding import ShardedCollection, ShardedUpdate
from recmill.distributed.workers import Workers
from recmill.learner.gradients import ReducedStep, RowGradients, StepGradients


def reduce_over_workers(workers: Workers, step: StepGradients) -> ReducedStep:
    """Sum the gradients of all workers. Gradients of sharded rows arrive when their update is applied."""
    updates = [_begin_update(rows) for rows in step.rows]
    parts = [
        np.array([step.loss, step.norm]),
        workers.take_flags(),
        _scales(workers, updates).reshape(-1),
        *(update.replicated_grads for update in updates),
        *(_flat_grad(weight) for weight in step.weights),
    ]
    with np.errstate(over="ignore"):  # an overflow becomes infinite, which is an error on all workers
        bucket = np.concatenate(parts, dtype=np.float32, casting="same_kind")
    sum_under_way = workers.steps.all_reduce(bucket)
    for update in updates:
        update.send()
    sum_under_way.wait()
    edges = np.cumsum([len(part) for part in parts])[:-1]
    (loss, norm), flags, scales, *grads = np.split(bucket, edges)
    workers.receive_flags(flags)
    for weight, grad in zip(step.weights, grads[len(updates) :], strict=True):
        weight.grad = torch.from_numpy(grad).view_as(weight)
    scales_UW = scales.reshape(len(updates), workers.size)
    apply = [
        partial(update.apply, replicated_grads, scales_W)
        for update, replicated_grads, scales_W in zip(updates, grads[: len(updates)], scales_UW, strict=True)
    ]
    return ReducedStep(float(loss), float(norm), apply)


def _begin_update(rows: RowGradients) -> ShardedUpdate:
    assert isinstance(rows.collection, ShardedCollection)
    return rows.collection.begin_update(rows.lookup, rows.grads, rows.sequence_grads)


def _scales(workers: Workers, updates: Sequence[ShardedUpdate]) -> Array:
    """The scales of all updates in this worker's column; the sum over workers has those of all."""
    scales_UW = np.zeros((len(updates), workers.size), np.float32)
    scales_UW[:, workers.rank] = [update.scale for update in updates]
    return scales_UW


def _flat_grad(weight: nn.Parameter) -> Array:
    assert weight.grad is not None
    return weight.grad.numpy().reshape(-1)
