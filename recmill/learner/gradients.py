"""One step of several workers: their gradients are added up before anybody's weights change.

All that must be added up travels in one message: loss, norm, what workers tell each other, gradients of replicated
tables and of dense weights. Gradients of sharded rows are on their way to the rows' owners meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn

from recmill.dataset.batch import Array
from recmill.embeddings.peers import Peers
from recmill.embeddings.sharding import RowUpdate


@dataclass(frozen=True)
class ReducedStep:
    """What all workers know after a step's gradients met; `updates` take a rate and a step."""

    loss: float
    size: float
    updates: Sequence[Callable[[float, int], None]]


def reduce_gradients(
    peers: Peers, loss: float, size: float, weights: Sequence[nn.Parameter], updates: Sequence[RowUpdate]
) -> ReducedStep:
    """Add up everybody's. Dense weights have the sum as their gradient afterwards; those of rows are on their way."""
    parts = [
        np.array([loss, size]),
        peers.own_flags(),
        _scales(peers, updates).reshape(-1),
        *(update.replicated_grads for update in updates),
        *(_flat(weight) for weight in weights),
    ]
    with np.errstate(over="ignore"):  # too large is not finite: an error to all
        bucket = np.concatenate(parts, dtype=np.float32, casting="same_kind")
    edges = np.cumsum([len(part) for part in parts])[:-1]
    adding = peers.steps.all_reduce(bucket)
    for update in updates:
        update.send()
    adding.wait()
    (loss, size), flags, scales, *rest = np.split(bucket, edges)
    peers.receive_flags(flags)
    replicated, dense = rest[: len(updates)], rest[len(updates) :]
    for weight, grad in zip(weights, dense, strict=True):
        weight.grad = torch.from_numpy(grad).view_as(weight)
    scales_UW = scales.reshape(len(updates), peers.size)
    return ReducedStep(float(loss), float(size), list(map(_applied, updates, replicated, scales_UW)))


def _applied(update: RowUpdate, replicated_grads: Array, scales_W: Array) -> Callable[[float, int], None]:
    return partial(update.apply, replicated_grads, scales_W)


def _scales(peers: Peers, updates: Sequence[RowUpdate]) -> Array:
    """Of each update, in this worker's place: added up, they are those of all workers."""
    scales_UW = np.zeros((len(updates), peers.size), np.float32)
    scales_UW[:, peers.rank] = [update.scale for update in updates]
    return scales_UW


def _flat(weight: nn.Parameter) -> Array:
    assert weight.grad is not None
    return weight.grad.numpy().reshape(-1)
