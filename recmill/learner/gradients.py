"""The interface between backward and the optimizers.

A learner passes the gradients of its own rows to `reduce_gradients`, which returns those of the whole batch. In one
process they are the same. `recmill.distributed` replaces that one function for several workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from recmill.dataset.batch import Array
from recmill.embeddings.collection import BatchLookup, EmbeddingCollection

RowUpdate = Callable[[float, int], None]  # takes learning rate and step


@dataclass(frozen=True)
class RowGradients:
    """The gradient of a step's lookup in one collection."""

    name: str  # of the collection
    collection: EmbeddingCollection
    lookup: BatchLookup
    grads: Array  # of lookup.values
    sequence_grads: Mapping[str, Array] = field(default_factory=dict)  # of lookup.sequences


@dataclass(frozen=True)
class StepGradients:
    """Gradients of this process's rows. Those of dense weights are in their `.grad`."""

    loss: float  # this process's part of the batch's mean loss
    norm: float  # finite only if all gradients are
    weights: Sequence[nn.Parameter]
    rows: Sequence[RowGradients]


@dataclass(frozen=True)
class ReducedStep:
    """Loss and norm of the whole batch; dense weights hold its gradient, `updates` apply those of rows."""

    loss: float
    norm: float
    updates: Sequence[RowUpdate]  # one for each of StepGradients.rows


ReduceGradients = Callable[[StepGradients], ReducedStep]


def reduce_in_one_process(step: StepGradients) -> ReducedStep:
    """The gradients as they are: this process has all rows of the batch."""
    updates = [
        partial(part.collection.update, part.lookup, part.grads, sequence_grads=part.sequence_grads)
        for part in step.rows
    ]
    return ReducedStep(step.loss, step.norm, updates)
