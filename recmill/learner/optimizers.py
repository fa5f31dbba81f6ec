"""Dense optimizers, and the learning rate over a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from recmill.recipe import recipe as r

_EPS = {"adagrad": 1e-10, "adam": 1e-8, "adamw": 1e-8, "lamb": 1e-6}
_BETAS = 0.9, 0.999


class DenseOptimizer:
    """Updates dense weights with their gradients. `state` has, for each weight, tensors by name.

    The update rules are torch's fused kernels: one pass over weights, gradient and state. torch.optim calls the same
    ones and names the state alike, but its classes import torch's compiler, which takes two seconds in every training
    process.
    """

    slots: tuple[str, ...] = ()

    def __init__(self, spec: r.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        self.spec, self.parameters = spec, list(parameters)
        self.eps = spec.eps if spec.eps is not None else _EPS.get(spec.name, 1e-8)
        self.state = {weights: self._first_state(weights) for weights in self.parameters}

    def _first_state(self, weights: Tensor) -> dict[str, Tensor]:
        return {name: torch.zeros(() if name == "step" else weights.shape) for name in self.slots}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One step of all weights that have a gradient, with this learning rate."""
        learning = [weights for weights in self.parameters if weights.grad is not None]
        if learning:
            state = {name: [self.state[weights][name] for weights in learning] for name in self.slots}
            if self.slots:
                torch._foreach_add_(state["step"], 1)
            self._update(learning, [weights.grad for weights in learning], state, rate)
            torch.autograd.graph.increment_version(
                learning
            )  # the fused kernels do not; layers keep packed copies

    def _update(self, weights: list[Any], gradients: list[Any], state: dict[str, Any], rate: float) -> None:
        raise NotImplementedError


class Sgd(DenseOptimizer):
    def _update(self, weights: list[Any], gradients: list[Any], state: dict[str, Any], rate: float) -> None:
        torch._fused_sgd_(
            weights,
            gradients,
            [],
            weight_decay=self.spec.weight_decay,
            momentum=0.0,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


class Adagrad(DenseOptimizer):
    slots = ("step", "sum")

    def _first_state(self, weights: Tensor) -> dict[str, Tensor]:
        state = super()._first_state(weights)
        state["sum"] += self.spec.initial_accumulator or 0.0
        return state

    def _update(self, weights: list[Any], gradients: list[Any], state: dict[str, Any], rate: float) -> None:
        torch._fused_adagrad_(
            weights,
            gradients,
            state["sum"],
            state["step"],
            lr=rate,
            lr_decay=0.0,
            weight_decay=self.spec.weight_decay,
            eps=self.eps,
            maximize=False,
        )


class Adam(DenseOptimizer):
    """Adam with `weight_decay` as a part of the gradient (adam), or applied to the weights themselves (adamw)."""

    slots = ("step", "exp_avg", "exp_avg_sq")

    def _update(self, weights: list[Any], gradients: list[Any], state: dict[str, Any], rate: float) -> None:
        kernel = torch._fused_adamw_ if self.spec.name == "adamw" else torch._fused_adam_
        kernel(
            weights,
            gradients,
            state["exp_avg"],
            state["exp_avg_sq"],
            [],
            state["step"],
            lr=rate,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            weight_decay=self.spec.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )


class Lamb(DenseOptimizer):
    """Adam whose step for each tensor is proportional to that tensor's norm, for very large batches.

    m and v are bias-corrected; the trust ratio is |w| / |update|, with |w| at most 10, and 1 where either is 0.
    """

    slots = ("step", "mean", "square")

    def _update(self, weights: list[Any], gradients: list[Any], state: dict[str, Any], rate: float) -> None:
        slots = (state[name] for name in self.slots)
        for one, gradient, step, mean, square in zip(weights, gradients, *slots, strict=True):
            self._update_one(one, gradient, step, mean, square, rate)

    def _update_one(
        self, weights: Tensor, gradient: Tensor, step: Tensor, mean: Tensor, square: Tensor, rate: float
    ) -> None:
        first, second = _BETAS
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        corrected = mean / (1 - first ** float(step))
        spread = (square / (1 - second ** float(step))).sqrt_().add_(self.eps)
        change = corrected / spread + self.spec.weight_decay * weights
        size, length = weights.norm().clamp(max=10.0), change.norm()
        trust = float(size / length) if size > 0 and length > 0 else 1.0
        weights.add_(change, alpha=-rate * trust)


_KINDS: dict[str, type[DenseOptimizer]] = {
    "sgd": Sgd,
    "adagrad": Adagrad,
    "adam": Adam,
    "adamw": Adam,
    "lamb": Lamb,
}


def dense_optimizer(spec: r.Optimizer, parameters: Iterable[nn.Parameter]) -> DenseOptimizer:
    """The recipe's optimizer for dense weights. `check` rejects those that only tables have."""
    return _KINDS[spec.name](spec, parameters)


def rate_factor(schedule: r.Schedule, done: float) -> float:
    """The factor of the learning rate after a fraction `done` (0 to 1) of all steps."""
    if done < schedule.warmup:
        return done / schedule.warmup
    if schedule.decay_from is None or done <= schedule.decay_from or schedule.decay_from >= 1:
        return 1.0
    left = (1 - done) / (1 - schedule.decay_from)
    if schedule.decay == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (1 - left)))
    return float(max(0.0, left) ** schedule.power)
