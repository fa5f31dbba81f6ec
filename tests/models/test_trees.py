"""Trees give what LightGBM's give, and the blend with a model's score is a logistic regression."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from recmill.learner.trees import fit_blend, set_trees
from recmill.models.trees import BlendedRanker, TreeEnsemble

# As LightGBM dumps them: x[1] <= 0.5 ? (x[0] <= 2 ? 10 : 20) : 30, and a tree that never split.
SPLIT = {
    "split_feature": 1,
    "threshold": 0.5,
    "left_child": {
        "split_feature": 0,
        "threshold": 2.0,
        "left_child": {"leaf_value": 10.0},
        "right_child": {"leaf_value": 20.0},
    },
    "right_child": {"leaf_value": 30.0},
}
STUMP = {"leaf_value": 0.25}


def trees(*found: dict, depth: int = 3, rounds: int = 4, features: tuple[int, ...] = (0, 1)) -> TreeEnsemble:
    made = TreeEnsemble(rounds, depth)
    set_trees(made, found, features)
    return made


def test_a_row_adds_up_its_leaf_of_each_tree():
    numbers = torch.tensor([[1.0, 0.5], [2.0, 0.0], [2.1, 0.5], [0.0, 0.6]])
    assert trees(SPLIT, STUMP)(numbers).tolist() == [10.25, 10.25, 20.25, 30.25]


def test_trees_that_are_not_there_say_nothing():
    assert TreeEnsemble(4, 3)(torch.randn(2, 5)).tolist() == [0.0, 0.0]


def test_features_are_found_where_the_ranker_has_them():
    numbers = torch.tensor([[9.0, 9.0, 0.5, 1.0]])
    assert trees(SPLIT, features=(3, 2))(numbers).tolist() == [10.0]


def test_a_threshold_between_two_floats_parts_the_same_rows():
    third = {
        "split_feature": 0,
        "threshold": 1 / 3,  # np.float32(1 / 3) is above it
        "left_child": {"leaf_value": 0.0},
        "right_child": {"leaf_value": 1.0},
    }
    assert trees(third)(torch.tensor([[np.float32(1 / 3)], [np.float32(0.3333333)]])).tolist() == [1.0, 0.0]


def test_a_blend_finds_the_weights_of_planted_scores():
    random = np.random.default_rng(0)
    scores = random.normal(size=(200_000, 2))
    labels = random.random(200_000) < 1 / (1 + np.exp(-(0.3 * scores[:, 0] + 0.8 * scores[:, 1] - 1.0)))
    assert fit_blend(scores, labels).tolist() == pytest.approx([0.3, 0.8, -1.0], abs=0.03)


def test_a_blend_of_equal_scores_is_finite():
    scores = np.random.default_rng(0).normal(size=(1000, 1))
    weights = fit_blend(np.hstack([scores, scores]), scores[:, 0] + np.linspace(-2, 2, 1000) > 0)
    assert torch.isfinite(weights).all()


class SumOfNumbers(nn.Module):
    def forward(self, numbers: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        return numbers.sum(dim=1)


def test_the_model_trains_alone_and_is_blended_elsewhere():
    ranker = BlendedRanker(SumOfNumbers(), 1, trees(SPLIT))
    ranker.blend.copy_(torch.tensor([2.0, 0.5, 1.0]))
    numbers, pooled = torch.tensor([[3.0, 0.5]]), torch.zeros(1, 1, 1)
    assert ranker.train()(numbers, pooled).tolist() == [3.0]  # of its own numbers, the first one
    assert ranker.eval()(numbers, pooled).tolist() == [2.0 * 3.0 + 0.5 * 20.0 + 1.0]
