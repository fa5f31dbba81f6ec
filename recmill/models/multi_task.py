"""Several labels in one model: logits [B, K] over DLRM's interaction, one for each of K tasks.

Shapes: B rows, F numbers, T embedded features, D embedding size, K tasks, E experts, X columns of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recmill.models.dlrm import Interaction
from recmill.models.layers import MLP, scoring_mlp
from recmill.recipe.recipe import Ranking, Tasks


class MultiTask(Interaction):
    """A tower for each task over the output of `_shared`; subclasses define what the tasks share."""

    def __init__(self, spec: Ranking, num_numbers: int, num_embedded: int) -> None:
        super().__init__(spec, num_numbers, num_embedded)
        assert spec.tasks is not None
        width = self._add_shared(spec, spec.tasks)
        sizes = [width, *spec.tasks.tower]
        self.towers = nn.ModuleList(scoring_mlp(sizes, spec.dropout) for _ in spec.tasks.labels)

    def _add_shared(self, spec: Ranking, tasks: Tasks) -> int:
        """Create the layers below the towers; returns their width."""
        raise NotImplementedError

    def _shared(self, mixed_BX: Tensor) -> Sequence[Tensor]:
        """The input of each tower."""
        raise NotImplementedError

    def forward(self, numbers_BF: Tensor, pooled_BTD: Tensor) -> Tensor:
        shared = self._shared(self.mix(numbers_BF, pooled_BTD))
        return torch.cat([tower(inputs) for tower, inputs in zip(self.towers, shared, strict=True)], dim=1)

    def start(self, rates: Sequence[float]) -> None:
        """Initialise with the positive rate of each task as the prediction for all rows."""
        with torch.no_grad():
            for tower, rate in zip(self.towers, rates, strict=True):
                tower.layers[-1].bias.fill_(math.log(rate / (1 - rate)))  # type: ignore[union-attr, index]


class SharedBottom(MultiTask):
    """All tasks share the layers of `top`."""

    def _add_shared(self, spec: Ranking, tasks: Tasks) -> int:
        self.top = MLP([self.width, *spec.top], last_relu=True, dropout=spec.dropout)
        return spec.top[-1] if spec.top else self.width

    def _shared(self, mixed_BX: Tensor) -> Sequence[Tensor]:
        return [self.top(mixed_BX)] * len(self.towers)


class ESMM(SharedBottom):
    """A click and a conversion after it, learned over all impressions (entire-space multi-task model).

    The second tower predicts the conversion of a click; the second logit is that of click and conversion.
    """

    def forward(self, numbers_BF: Tensor, pooled_BTD: Tensor) -> Tensor:
        click_B, conversion_B = super().forward(numbers_BF, pooled_BTD).unbind(dim=1)
        # 1 / (sigmoid(a) sigmoid(b)) - 1 = exp(-a) + exp(-b) + exp(-a - b)
        both = torch.stack([-click_B, -conversion_B, -click_B - conversion_B])
        return torch.stack([click_B, -torch.logsumexp(both, dim=0)], dim=1)

    def start(self, rates: Sequence[float]) -> None:
        click, both = rates
        super().start([click, min(both / click, 0.999)])


class Experts(nn.Module):
    """Parallel MLPs: [B, X] -> [B, E, X]."""

    def __init__(self, number: int, sizes: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.experts = nn.ModuleList(MLP(sizes, last_relu=True, dropout=dropout) for _ in range(number))

    def forward(self, inputs_BX: Tensor) -> Tensor:
        return torch.stack([expert(inputs_BX) for expert in self.experts], dim=1)


def weighed(gate: nn.Module, inputs_BX: Tensor, experts_BEX: Tensor) -> Tensor:
    """The mean of experts with the weights of a gate for each row."""
    weights_BE = torch.softmax(gate(inputs_BX), dim=1)
    return torch.matmul(weights_BE.unsqueeze(1), experts_BEX).squeeze(1)


class MMoE(MultiTask):
    """Every task weights the same experts with a gate of its own."""

    def _add_shared(self, spec: Ranking, tasks: Tasks) -> int:
        self.experts = Experts(tasks.experts, [self.width, *spec.top], spec.dropout)
        self.gates = nn.ModuleList(nn.Linear(self.width, tasks.experts) for _ in tasks.labels)
        return spec.top[-1]

    def _shared(self, mixed_BX: Tensor) -> Sequence[Tensor]:
        experts_BEX = self.experts(mixed_BX)
        return [weighed(gate, mixed_BX, experts_BEX) for gate in self.gates]


class PLE(MultiTask):
    """Experts of all tasks and experts of each, level above level (progressive layered extraction)."""

    def _add_shared(self, spec: Ranking, tasks: Tasks) -> int:
        widths = [self.width] + [spec.top[-1]] * (tasks.levels - 1)
        self.levels = nn.ModuleList(
            Extraction(tasks, [width, *spec.top], spec.dropout, is_last=number == len(widths))
            for number, width in enumerate(widths, start=1)
        )
        return spec.top[-1]

    def _shared(self, mixed_BX: Tensor) -> Sequence[Tensor]:
        states = [mixed_BX] * (len(self.towers) + 1)
        for level in self.levels:
            states = level(states)
        return states


class Extraction(nn.Module):
    """One level of PLE: maps the states of each task and the shared state; the last level drops the shared one."""

    def __init__(self, tasks: Tasks, sizes: Sequence[int], dropout: float, is_last: bool) -> None:
        super().__init__()
        numbers = [*[tasks.task_experts] * len(tasks.labels), tasks.experts]
        self.experts = nn.ModuleList(Experts(number, sizes, dropout) for number in numbers)
        seen = [tasks.task_experts + tasks.experts] * len(tasks.labels) + ([] if is_last else [sum(numbers)])
        self.gates = nn.ModuleList(nn.Linear(sizes[0], number) for number in seen)

    def forward(self, states: Sequence[Tensor]) -> list[Tensor]:
        *own, shared = (experts(state) for experts, state in zip(self.experts, states, strict=True))
        seen = [torch.cat([one, shared], dim=1) for one in own]
        if len(self.gates) > len(own):
            seen.append(torch.cat([*own, shared], dim=1))
        return [weighed(*parts) for parts in zip(self.gates, states, seen, strict=False)]
