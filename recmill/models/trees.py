"""Gradient-boosted trees as a module without parameters: as a ranker, and blended with a model.

Trees are perfect: all leaves have the same depth, so that a row passes all trees at once, level by level, in plain
tensor operations that serving graphs support too. A leaf that was higher is repeated below itself.

Shapes: B rows, F numbers, R trees (rounds), N inner nodes of a tree, L leaves of a tree.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recmill.recipe.recipe import Ranking


class TreeEnsemble(nn.Module):
    """The sum of R trees for a row, as a logit; 0 before they are fitted."""

    features: Tensor  # [R, N], index among numbers
    thresholds: Tensor  # [R, N]; a row goes right when its number is above
    values: Tensor  # [R, L]
    first_nodes: Tensor  # [R], offset of each tree in the flat arrays
    first_leaves: Tensor

    def __init__(self, rounds: int, depth: int) -> None:
        super().__init__()
        nodes, leaves = 2**depth - 1, 2**depth
        self.depth, self.num_nodes = depth, nodes
        self.register_buffer("features", torch.zeros((rounds, nodes), dtype=torch.int64))
        self.register_buffer("thresholds", torch.zeros((rounds, nodes)))
        self.register_buffer("values", torch.zeros((rounds, leaves)))
        self.register_buffer("first_nodes", torch.arange(rounds) * nodes, persistent=False)
        self.register_buffer("first_leaves", torch.arange(rounds) * leaves, persistent=False)

    def forward(self, numbers_BF: Tensor) -> Tensor:
        features, thresholds = self.features.flatten(), self.thresholds.flatten()
        node_BR = torch.zeros(
            (numbers_BF.shape[0], self.first_nodes.shape[0]), dtype=torch.int64, device=numbers_BF.device
        )
        for _ in range(self.depth):
            at_BR = node_BR + self.first_nodes
            is_right = torch.gather(numbers_BF, 1, features[at_BR]) > thresholds[at_BR]
            node_BR = 2 * node_BR + 1 + is_right.to(torch.int64)
        leaf_BR = node_BR - self.num_nodes + self.first_leaves
        return self.values.flatten()[leaf_BR].sum(dim=1)


class TreeRanker(nn.Module):
    """Trees alone: logits from numbers [B, F], without embeddings."""

    def __init__(self, spec: Ranking, num_numbers: int, num_embedded: int) -> None:
        super().__init__()
        assert spec.trees is not None
        self.trees = TreeEnsemble(spec.trees.rounds, spec.trees.depth)

    def forward(self, numbers_BF: Tensor, pooled_BTD: Tensor) -> Tensor:
        return self.trees(numbers_BF)  # type: ignore[no-any-return]


class BlendedRanker(nn.Module):
    """In training, the model alone; elsewhere blend[0] model + blend[1] trees + blend[2], fitted on eval rows."""

    blend: Tensor

    def __init__(self, model: nn.Module, num_numbers: int, trees: TreeEnsemble) -> None:
        """The model reads the first `num_numbers` numbers; the trees read all."""
        super().__init__()
        self.model = model
        self.trees = trees
        self.num_numbers = num_numbers
        self.register_buffer("blend", torch.tensor([1.0, 0.0, 0.0]))

    @property
    def output_bias(self) -> nn.Parameter | None:
        return getattr(self.model, "output_bias", None)

    def forward(self, numbers_BF: Tensor, *inputs: Any) -> Tensor:
        model_B, trees_B = self.logits(numbers_BF, *inputs)
        if trees_B is None:
            return model_B
        return self.blend[0] * model_B + self.blend[1] * trees_B + self.blend[2]

    def logits(self, numbers_BF: Tensor, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Logits of the model, and of the trees outside of training."""
        model_B = self.model(numbers_BF[:, : self.num_numbers], *inputs)
        return model_B, None if self.training else self.trees(numbers_BF)
