"""The machine's own limit: float32 products of large square matrices."""

from __future__ import annotations

import json
import sys
import time

import torch

from .race import Task

SIZE = 1024  # large enough for the peak, short enough to fall between interruptions
SECONDS = 1.5


def gemm_peak(threads: int, seconds: float = SECONDS) -> float:
    """The best GFLOP/s of several products."""
    torch.set_num_threads(threads)
    left, right, product = (torch.rand(SIZE, SIZE) for _ in range(3))
    torch.mm(left, right, out=product)
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        started = time.perf_counter()
        torch.mm(left, right, out=product)
        best = min(best, time.perf_counter() - started)
    return 2 * SIZE**3 / best / 1e9


if __name__ == "__main__":
    print(json.dumps({"gflops": gemm_peak(Task(**json.loads(sys.argv[1])).threads)}))
