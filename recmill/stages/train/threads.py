"""How many threads a run gets, from what the machine really gives."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from recmill.reporting.machine import available_cores, cpu_quota

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_PROBE_SECONDS = 0.08
_PROBES = 3  # of one thread and of all in turn: the best of each, for other work only makes them slower
_PROBE_SIZE = 256
_MIN_GAIN = 1.25  # all threads together over one, to use more than one
_MOST_GAIN = 1.2  # of the number of threads; noise beyond that


@dataclass(frozen=True)
class Threads:
    """The number chosen, and why."""

    number: int
    reason: str


def choose_threads(requested: int | None = None) -> Threads:
    """The requested number; else what cores, quota and half a second of measurement suggest."""
    torch.set_num_threads(1)  # one thread for each slice of a batch, none inside
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
    """All of them unless they gain too little. A gain beyond the cores says that something else took them from one."""
    if gain > allowed * _MOST_GAIN:
        return Threads(allowed, f"{why}; other work on them, so that their gain cannot be measured")
    number = allowed if gain >= _MIN_GAIN else 1
    return Threads(number, f"{why}; {allowed} threads give {gain:.1f}x of one")


def keep_freed_memory() -> None:
    """Let the allocator keep what a step frees for the next one, instead of giving it back to the system.

    glibc returns big blocks at once by default, and each step faults in over a thousand pages again.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        mallopt(option, 1 << 30)
    mallopt(_M_TOP_PAD, 64 << 20)


def _speed(num_threads: int) -> float:
    """Small matrix products a second, all threads together."""
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
