"""Fits gradient-boosted trees with LightGBM, and the blend of their score with a model's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from recmill.dataset.batch import Array
from recmill.dataset.table import Table
from recmill.errors import check_installed
from recmill.models.trees import TreeEnsemble
from recmill.recipe import recipe as r

_MAX_ROWS = 5_000_000  # in memory; of more, every n-th row is used
_PATIENCE = 50  # rounds without a better log loss on eval rows
_NEWTON_STEPS = 25
_RIDGE = 1e-6  # keeps a blend of two equal scores well-defined


def check_lightgbm() -> None:
    """Fail before any work."""
    check_installed("[ranking.trees]", "lightgbm")


def fit_trees(
    spec: r.Trees,
    trees: TreeEnsemble,
    table: Table,
    numbers: Sequence[str],
    label: str,
    seed: int,
    num_threads: int,
    report: Callable[[int], None] = lambda rounds: None,
) -> int:
    """Fit the trees on a Table's training rows, up to the best round on its eval rows; returns their number.

    `numbers` are the ranker's number features in its order, which trees index; `spec.features` are those they may
    use.
    """
    check_lightgbm()
    import lightgbm

    parameters = {
        "objective": "binary",
        "learning_rate": spec.learning_rate,
        "num_leaves": 2**spec.depth,
        "max_depth": spec.depth,
        "min_data_in_leaf": spec.min_rows,
        "feature_fraction": spec.feature_fraction,
        "bagging_fraction": spec.row_fraction,
        "bagging_freq": 1,
        "lambda_l2": spec.l2,
        "use_missing": False,  # Tables have no missing numbers
        "deterministic": True,
        "force_row_wise": True,
        "seed": seed,
        "num_threads": num_threads,
        "verbose": -1,
    }
    train = lightgbm.Dataset(*_rows(table, "train", spec.features, label), params=parameters)
    callbacks: list[Any] = [lambda state: report(1)]
    held_out = []
    if table.num_rows("eval"):
        held_out.append(lightgbm.Dataset(*_rows(table, "eval", spec.features, label), reference=train))
        callbacks.append(lightgbm.early_stopping(_PATIENCE, verbose=False))
    booster = lightgbm.train(parameters, train, spec.rounds, valid_sets=held_out, callbacks=callbacks)
    found = booster.dump_model(num_iteration=booster.best_iteration or None)["tree_info"]
    set_trees(
        trees, [tree["tree_structure"] for tree in found], [numbers.index(name) for name in spec.features]
    )
    return len(found)


def _rows(table: Table, split: str, features: Sequence[str], label: str) -> tuple[Array, Array]:
    """Numbers and labels of a split, or of an even sample of it."""
    every = -(-table.num_rows(split) // _MAX_ROWS)
    frames = [
        frame.gather_every(every)
        for shard in table.files(split)
        for frame in shard.frames([*features, label])
    ]
    numbers = np.concatenate([frame.select(features).to_numpy() for frame in frames]).astype(np.float32)
    return numbers, np.concatenate([frame[label].to_numpy() for frame in frames])


def set_trees(trees: TreeEnsemble, found: Sequence[Mapping[str, Any]], features: Sequence[int]) -> None:
    """Convert LightGBM's trees to perfect ones; the module's other trees give 0.

    `features` has the indices of theirs.
    """
    for buffer in (trees.features, trees.thresholds, trees.values):
        buffer.zero_()
    for number, root in enumerate(found):
        _set_node(trees, number, root, 0, features)


def _set_node(
    trees: TreeEnsemble, tree: int, node: Mapping[str, Any], index: int, features: Sequence[int]
) -> None:
    if index >= trees.num_nodes:
        trees.values[tree, index - trees.num_nodes] = node["leaf_value"]
        return
    left, right = node, node  # a leaf is repeated until the last level
    if "left_child" in node:
        left, right = node["left_child"], node["right_child"]
        trees.features[tree, index] = features[node["split_feature"]]
        trees.thresholds[tree, index] = float(_largest_float32_up_to(node["threshold"]))
    _set_node(trees, tree, left, 2 * index + 1, features)
    _set_node(trees, tree, right, 2 * index + 2, features)


def _largest_float32_up_to(value: float) -> np.float32:
    """The threshold in float32: the same numbers are at or below it as at or below `value`."""
    nearest = np.float32(value)
    return nearest if float(nearest) <= value else np.nextafter(nearest, np.float32(-np.inf))


def fit_blend(logits_BK: Array, labels_B: Array) -> torch.Tensor:
    """Weights of K scores and a constant with minimal log loss: a logistic regression by Newton's method."""
    inputs = np.column_stack([logits_BK, np.ones(len(labels_B))]).astype(np.float64)
    weights = np.zeros(inputs.shape[1])
    for _ in range(_NEWTON_STEPS):
        probability = 1 / (1 + np.exp(-inputs @ weights))
        gradient = inputs.T @ (probability - labels_B) + _RIDGE * weights
        curvature = (inputs * (probability * (1 - probability))[:, None]).T @ inputs
        step = np.linalg.solve(curvature + _RIDGE * np.eye(len(weights)), gradient)
        weights -= step
        if np.abs(step).max() < 1e-6:
            break
    return torch.from_numpy(weights.astype(np.float32))
