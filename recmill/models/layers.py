"""Layers that models share."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from recmill import _native
from recmill.dataset.batch import Array

_FIRST_SPREAD = 0.1  # spread of logits before training, relative to that of activations
_FACTOR_SCALE = 0.01  # scale of the vectors of numbers before training


class MLP(nn.Module):
    """Linear layers with ReLU in between; no batch statistics, so a row's result depends on that row alone."""

    def __init__(self, sizes: Sequence[int], last_relu: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_linear(*pair) for pair in pairwise(sizes))
        self.relus = [last_relu or number < len(sizes) - 2 for number in range(len(sizes) - 1)]
        self.dropout = dropout
        self._packed = _PackedWeights()

    def forward(
        self, inputs_BX: Tensor, repeats: _native.Repeats | None = None, first_column: int = 0
    ) -> Tensor:
        """Apply the layers. `repeats`: features whose ids repeat, with vectors from `first_column` on in the inputs.

        Each distinct vector is multiplied once. The gradient of an id's vector is then that of its first row, and the
        id's other rows get none: anything that is a function of the id alone learns the same.
        """
        drops = self.training and self.dropout > 0
        if len(self.layers) and not drops and _runs_natively(inputs_BX):
            weights = _weights_and_biases(self.layers)
            packed = self._packed.of(weights, self.relus)
            return _NativeMLP.apply(inputs_BX, packed, repeats, first_column, *weights)  # type: ignore[no-any-return, no-untyped-call]
        for layer, relu in zip(self.layers, self.relus, strict=True):
            inputs_BX = layer(inputs_BX)
            if relu:
                inputs_BX = functional.dropout(functional.relu(inputs_BX), self.dropout, self.training)
        return inputs_BX


def _runs_natively(inputs: Tensor) -> bool:
    plain = inputs.device.type == "cpu" and inputs.dtype == torch.float32 and inputs.dim() == 2
    other_ways = torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()
    return plain and torch.is_grad_enabled() and not other_ways


def _weights_and_biases(layers: Iterable[nn.Module], no_bias: Tensor | None = None) -> list[Tensor]:
    """Weights and biases of linear layers; zeros `no_bias` for those without one."""
    parts: list[Tensor] = []
    for layer in layers:
        assert isinstance(layer, nn.Linear)
        bias: Tensor | None = layer.bias
        parts += [layer.weight, no_bias if bias is None and no_bias is not None else layer.bias]
    return parts


class _PackedWeights:
    """Weights in the order of the native kernels, repacked after any of them changed.

    The slices of a batch share them: each thread packs some of the layers, and waits until all are packed.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._versions: list[tuple[int, int]] = []
        self._packed: _native.PackedMlp | None = None
        self._waiting: list[int] = []  # layers that no thread has started to pack
        self._num_unpacked = 0

    def __reduce__(self) -> tuple[type[_PackedWeights], tuple[()]]:
        return _PackedWeights, ()  # a copied model packs its own weights

    def of(self, weights_and_biases: Sequence[Tensor], relus: Sequence[bool]) -> _native.PackedMlp:
        arrays = [tensor.detach().contiguous().numpy() for tensor in weights_and_biases]
        weights, biases = arrays[::2], arrays[1::2]
        versions = [(tensor.data_ptr(), tensor._version) for tensor in weights_and_biases]
        with self._lock:
            if self._packed is None:
                sizes = [weights[0].shape[1], *(len(bias) for bias in biases)]
                self._packed = _native.PackedMlp(sizes, relus, trains=True)
            if versions != self._versions:
                self._versions = versions
                self._waiting = list(range(len(weights)))
                self._num_unpacked = len(weights)
            while self._waiting:
                self._pack_next(self._packed, weights, biases)
            self._lock.wait_for(lambda: not self._num_unpacked)
            return self._packed

    def _pack_next(
        self, packed: _native.PackedMlp, weights: Sequence[Array], biases: Sequence[Array]
    ) -> None:
        """Pack one layer without the lock."""
        layer = self._waiting.pop(0)
        self._lock.release()
        try:
            packed.pack_layer(layer, weights[layer], biases[layer])
        finally:
            self._lock.acquire()
            self._num_unpacked -= 1
            self._lock.notify_all()


class _NativeMLP(torch.autograd.Function):
    """All layers in one call each way, over blocks of rows that fit the cache (native/dense/mlp.hpp)."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        packed: _native.PackedMlp,
        repeats: _native.Repeats | None,
        first_column: int,
        *weights_and_biases: Tensor,
    ) -> Tensor:
        inputs = inputs.contiguous()
        outputs = torch.empty(len(inputs), len(weights_and_biases[-1]))
        hidden = torch.empty(packed.hidden_size(len(inputs)))
        packed.forward(inputs.numpy(), outputs.numpy(), hidden.numpy(), repeats, first_column)
        # Weights are saved so that torch checks that none has changed before backward: `packed` would have changed
        # too.
        ctx.save_for_backward(inputs, hidden, outputs, *weights_and_biases)
        ctx.packed, ctx.repeats, ctx.first_column = packed, repeats, first_column
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, hidden, outputs, *weights_and_biases = ctx.saved_tensors
        of_inputs = torch.empty_like(inputs) if ctx.needs_input_grad[0] else None
        of_weights = [
            torch.empty_like(part, memory_format=torch.contiguous_format) for part in weights_and_biases
        ]
        arrays = [part.numpy() for part in of_weights]
        ctx.packed.backward(
            inputs.numpy(),
            hidden.numpy(),
            outputs.numpy(),
            grad.contiguous().numpy(),
            arrays[::2],
            arrays[1::2],
            None if of_inputs is None else of_inputs.numpy(),
            ctx.repeats,
            ctx.first_column,
            weights_and_biases[0].detach().contiguous().numpy(),
        )
        return of_inputs, None, None, None, *of_weights


def scoring_mlp(sizes: Sequence[int], dropout: float = 0.0) -> MLP:
    """An MLP to one logit that starts near its bias: before training, all rows get about the same score."""
    mlp = MLP([*sizes, 1], last_relu=False, dropout=dropout)
    last = mlp.layers[-1]
    with torch.no_grad():
        last.weight.mul_(_FIRST_SPREAD)  # type: ignore[operator]
        last.bias.zero_()  # type: ignore[operator]
    return mlp


def _linear(width: int, next_width: int) -> nn.Linear:
    """A linear layer with DLRM's initialisation: normal, with a spread that preserves the size of activations."""
    layer = nn.Linear(width, next_width)
    nn.init.normal_(layer.weight, std=(2.0 / (width + next_width)) ** 0.5)
    nn.init.normal_(layer.bias, std=(1.0 / next_width) ** 0.5)
    return layer


def add_wide(logits_B: Tensor, wide_BW: Tensor | None) -> Tensor:
    """Add the weights of wide features to the logits, if the recipe has any."""
    return logits_B if wide_BW is None else logits_B + wide_BW.sum(dim=1)


class Linear(nn.Module):
    """A weight for each number, and a bias: [B, F] -> [B]. All start at zero."""

    def __init__(self, num_numbers: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(num_numbers)) if num_numbers else None
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, numbers_BF: Tensor) -> Tensor:
        rows = (
            numbers_BF.new_zeros(numbers_BF.shape[0]) if self.weights is None else numbers_BF @ self.weights
        )
        return rows + self.bias


class PairwiseSum(nn.Module):
    """The sum of the dot products of all pairs of features: [B, F] and [B, T, D] -> [B].

    The vector of a number feature is a learned vector times the number.
    """

    def __init__(self, num_numbers: int, dim: int) -> None:
        super().__init__()
        of_numbers = torch.randn(num_numbers, dim) * _FACTOR_SCALE
        self.of_numbers = nn.Parameter(of_numbers) if num_numbers else None

    def forward(self, numbers_BF: Tensor, pooled_BTD: Tensor) -> Tensor:
        vectors_BND = pooled_BTD
        if self.of_numbers is not None:
            vectors_BND = torch.cat([numbers_BF.unsqueeze(2) * self.of_numbers, pooled_BTD], dim=1)
        # (a + b + c)^2 - (a^2 + b^2 + c^2) contains each product twice.
        products_BD = vectors_BND.sum(dim=1).square() - vectors_BND.square().sum(dim=1)
        return 0.5 * products_BD.sum(dim=1)


class DotInteraction(nn.Module):
    """Dot products of all pairs of vectors: [B, N, D] -> [B, N (N - 1) / 2]."""

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("pairs", rows * num_vectors + columns, persistent=False)
        self.num_pairs = len(rows)

    def forward(self, vectors_BND: Tensor) -> Tensor:
        products = torch.bmm(vectors_BND, vectors_BND.transpose(1, 2)).flatten(1)
        return products.index_select(1, self.get_buffer("pairs"))


class CrossNetwork(nn.Module):
    """Cross layers (DCNv2): x <- x0 * (W x + b) + x, where W may be a low-rank product U V."""

    def __init__(self, width: int, num_layers: int, rank: int | None) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(num_layers) if rank)
        self.up = nn.ModuleList(nn.Linear(rank or width, width) for _ in range(num_layers))
        for layer in (*self.down, *self.up):
            nn.init.xavier_normal_(layer.weight)
        self.register_buffer("no_bias", torch.zeros(rank or 0), persistent=False)
        self._packed = [_PackedWeights() for _ in self.up]

    def forward(self, inputs_BX: Tensor) -> Tensor:
        state = inputs_BX
        for index in range(len(self.up)):
            state = inputs_BX * self._project(index, state) + state
        return state

    def _project(self, index: int, state_BX: Tensor) -> Tensor:
        """W x + b of one layer."""
        layers = [self.down[index], self.up[index]] if len(self.down) else [self.up[index]]
        if not _runs_natively(state_BX):
            return functools.reduce(lambda rows, layer: layer(rows), layers, state_BX)
        weights = _weights_and_biases(layers, self.get_buffer("no_bias"))
        packed = self._packed[index].of(weights, [False] * len(layers))
        return _NativeMLP.apply(state_BX, packed, None, 0, *weights)  # type: ignore[no-any-return, no-untyped-call]
