"""bench dense: GFLOP/s of each product of a dense layer, on one core, beside torch's product of the same matrices.

A kernel whose accumulators a compiler spilled to memory shows here: it falls to half of its neighbours or below torch.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from recmill import _native
from recmill.errors import MissingPackage
from recmill.stages.bench.config import DenseBenchConfig
from recmill.stages.bench.contest import Result, header

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_ROWS = 256  # as the layers are trained
LAYERS = (13, 512), (512, 256), (432, 512), (845, 1024)  # of DLRM and of Wide & Deep
PRODUCTS = "forward", "input_grad", "weight_grad"


def bench_dense(config: DenseBenchConfig) -> Result:
    """Time the products of layers of several sizes, each target of the kernels beside torch."""
    if importlib.util.find_spec("torch") is None:
        raise MissingPackage("bench dense", "torch", "train")
    return {
        **header("dense", 1),
        "rows": BLOCK_ROWS,
        "layers": [
            {"in": width, "out": next_width, "gflops": _rates(width, next_width, config.milliseconds / 1e3)}
            for width, next_width in LAYERS
        ],
    }


def _rates(width: int, next_width: int, seconds: float) -> Result:
    rates = {
        target: _native.measure_dense_kernels(target, BLOCK_ROWS, width, next_width, seconds)
        for target in _native.dense_targets()
    }
    rates["torch"] = _torch_rates(width, next_width, seconds)
    return {
        target: {name: round(rate, 1) for name, rate in zip(PRODUCTS, of, strict=True)}
        for target, of in rates.items()
    }


def _torch_rates(width: int, next_width: int, seconds: float) -> list[float]:
    """The bare products, without bias, ReLU and mask."""
    import torch

    torch.set_num_threads(1)
    x, weights, y = (torch.rand(*shape) for shape in _shapes(width, next_width))
    x_grad, w_grad = torch.empty_like(x), torch.empty_like(weights)

    def product(left: Tensor, right: Tensor, into: Tensor) -> Callable[[], object]:
        return lambda: torch.mm(left, right, out=into)

    products = [product(x, weights.t(), y), product(y, weights, x_grad), product(y.t(), x, w_grad)]
    flops = 2 * BLOCK_ROWS * width * next_width
    return [flops / _best_seconds(run, seconds) / 1e9 for run in products]


def _shapes(width: int, next_width: int) -> tuple[tuple[int, int], ...]:
    return (BLOCK_ROWS, width), (next_width, width), (BLOCK_ROWS, next_width)


def _best_seconds(run: Callable[[], object], seconds: float) -> float:
    best, until = float("inf"), time.thread_time() + seconds
    while best == float("inf") or time.thread_time() < until:
        started = time.thread_time()
        run()
        best = min(best, time.thread_time() - started)
    return best


def describe(result: Result) -> str:
    """The result as a table for people."""
    machine = result["machine"]
    lines = [
        f"GFLOP/s of {result['rows']} rows on one core of {machine['processor']} ({', '.join(machine['simd'])}), "
        f"load {machine['load']}; by CPU time, best of many calls",
        f"{'layer':>12}{'kernels':>10}" + "".join(f"{name:>14}" for name in PRODUCTS),
    ]
    for layer in result["layers"]:
        for target, of in layer["gflops"].items():
            rates = "".join(f"{of[name]:>14.1f}" for name in PRODUCTS)
            lines.append(f"{layer['in']:>6}-{layer['out']:<5}{target:>10}{rates}")
    return "\n".join(lines)
