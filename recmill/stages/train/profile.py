"""A Chrome trace of some steps: where the time of a step goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

_WARM_UP = 3


@contextmanager
def profiled(num_steps: int | None, into: Path) -> Iterator[Callable[[], None]]:
    """Trace some steps: call the yielded function after each step.

    Steps after a short warm-up are written to `into`.
    """
    if num_steps is None:
        yield lambda: None
        return
    into.parent.mkdir(parents=True, exist_ok=True)
    # Slices of a batch run on threads of their own, which torch does not profile by default.
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=_WARM_UP, active=num_steps, repeat=1),
        on_trace_ready=lambda trace: trace.export_chrome_trace(str(into)),
        experimental_config=every_thread,
    ) as profiler:
        yield profiler.step
