"""Gradient-boosted trees over numbers, counts of ids and out-of-fold means of the label: a baseline of rankers.

Shapes: B rows, C columns of the features that are given, F features of the trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np

from recmill.logistic import Array

_FOLDS = 5
_PRIOR_ROWS = 20.0  # of the mean of all rows, added to those of an id
_ROUNDS = 150
_MANY_ROWS = 50_000
_PARAMETERS = {
    "learning_rate": 0.07,
    "num_leaves": 31,
    "min_data_in_leaf": 50,
    "feature_fraction": 0.5,
    "lambda_l2": 10.0,
    "deterministic": True,
    "force_row_wise": True,
    "seed": 0,
    "verbose": -1,
}


def has_lightgbm() -> bool:
    return find_spec("lightgbm") is not None


def boosted_scores(
    train_BC: Sequence[Array],
    labels_B: Array,
    held_out_BC: Sequence[Array],
    num_threads: int,
    is_number: bool = False,
) -> Array:
    """What trees that were fitted to training rows predict of held-out rows: probabilities, or numbers as labels are.

    Columns of integers are ids.
    """
    import lightgbm

    pairs = [_encoded(one, labels_B, other) for one, other in zip(train_BC, held_out_BC, strict=True)]
    train_BF, held_out_BF = (np.concatenate(side, axis=1) for side in zip(*pairs, strict=True))
    # Threads of few rows wait for each other longer than they work.
    threads = num_threads if len(labels_B) >= _MANY_ROWS else 1
    objective = "regression" if is_number else "binary"
    parameters = {**_PARAMETERS, "objective": objective, "num_threads": threads}
    booster = lightgbm.train(parameters, lightgbm.Dataset(train_BF, labels_B), _ROUNDS)
    return np.asarray(booster.predict(held_out_BF))


def _encoded(train: Array, labels: Array, held_out: Array) -> tuple[Array, Array]:
    """A number as it is; an id as its count and the mean label of rows with it, which never holds a row's own label."""
    if train.dtype.kind == "f":
        return train[:, None], held_out[:, None]
    ids, indices = np.unique(train, return_inverse=True)
    found = np.minimum(np.searchsorted(ids, held_out), len(ids) - 1)
    found = np.where(ids[found] == held_out, found, len(ids))
    counts = np.append(np.bincount(indices), 0)
    folds = np.random.default_rng(0).integers(_FOLDS, size=len(labels))
    own = np.empty(len(labels))
    for fold in range(_FOLDS):
        others = folds != fold
        own[~others] = _means(indices[others], labels[others], len(ids))[indices[~others]]
    means = _means(indices, labels, len(ids))
    return np.stack([counts[indices], own], axis=1), np.stack([counts[found], means[found]], axis=1)


def _means(indices: Array, labels: Array, number: int) -> Array:
    """Of each id, drawn towards the mean of all rows; that mean for unknown ids."""
    prior = labels.mean()
    sums = np.bincount(indices, labels, minlength=number + 1)
    counts = np.bincount(indices, minlength=number + 1)
    return np.asarray((sums + _PRIOR_ROWS * prior) / (counts + _PRIOR_ROWS))
