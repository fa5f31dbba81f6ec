"""The number of threads of a run, from the capacity that the machine really provides."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from recmill.reporting.machine import available_cores, cpu_quota

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_PROBE_SECONDS = 0.08
# measurements of one thread and of all in turn: the best of each, because other work only makes them slower
_PROBES = 3
_PROBE_SIZE = 256
_MIN_GAIN = 1.25  # minimal speedup of all threads over one, to use more than one
_MOST_GAIN = 1.2  # speedup over the number of threads; beyond that it is noise


@dataclass(frozen=True)
class Threads:
    """The chosen number, and why."""

    number: int
    reason: str


def choose_threads(requested: int | None = None) -> Threads:
    """The requested number; else the number that cores, quota and half a second of measurement suggest."""
    torch.set_num_threads(1)  # one thread per slice of a batch, none inside
    if requested is not None:
        return Threads(requested, "as asked")
    allowed, quota = available_cores(), cpu_quota()
    why = f"{allowed} cores" + (f", quota {quota:g}" if quota else "")
    if allowed == 1:
        return Threads(1, why)
    probes = [(_speed(1), _speed(allowed)) for _ in range(_PROBES)]
    alone, together = (max(speeds) for speeds in zip(*probes, strict=True))
    return threads_by_gain(together / alone, allowed, why)


def threads_by_gain(gain: float, allowed: int, why: str) -> Threads:
    """All of them unless they gain too little.

    A gain above the number of cores means that other work slowed one thread.
    """
    if gain > allowed * _MOST_GAIN:
        return Threads(allowed, f"{why}; other work runs on them, so the gain cannot be measured")
    number = allowed if gain >= _MIN_GAIN else 1
    return Threads(number, f"{why}; {allowed} threads give {gain:.1f}x of one")


def keep_freed_memory() -> None:
    """Make the allocator reuse what a step frees, instead of returning it to the system.

    glibc returns large blocks at once by default, and each step then faults in over a thousand pages again.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        mallopt(option, 1 << 30)
    mallopt(_M_TOP_PAD, 64 << 20)


def _speed(num_threads: int) -> float:
    """Small matrix products per second, all threads together."""
    matrix = torch.rand(_PROBE_SIZE, _PROBE_SIZE)
    matrix @ matrix
    end = time.perf_counter() + _PROBE_SECONDS

    def work(_: int) -> int:
        done = 0
        while time.perf_counter() < end:
            matrix @ matrix
            done += 1
        return done

    with ThreadPoolExecutor(num_threads) as pool:
        return max(1, sum(pool.map(work, range(num_threads)))) / _PROBE_SECONDS
