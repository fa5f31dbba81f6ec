"""Lack of memory, in any library, as one error: which step failed, how much there is and what to change."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from recmill.errors import ResourceError, first_line, is_out_of_memory

_ADVICE = {
    "train": "use a smaller batch (--set ranking.train.batch_size=256), fewer --threads, or --table-memory",
    "prepare": "lower --memory and --workers",
    "serve": "use fewer --processes and --threads",
}
_OTHERWISE = "use fewer threads and workers"
# What each package was doing.
_DOING = {
    "dataset": "rows were read",
    "logs": "a log was read",
    "features": "features were computed",
    "embeddings": "rows of embedding tables were looked up or updated",
    "learner": "the model ran",
    "models": "the model ran",
    "artifacts": "a checkpoint or a bundle was read or written",
}
_ALMOST = 0.9  # fraction of the limit: libraries fail in many ways when little is left
# Memory of torch, Polars and their threads before the first row (x86-64: 1,250 MB are not enough, 1,300 are). Below
# that, a library may even wait for ever for a thread that it could not start.
_LEAST = {"train": 1250 << 20}


@contextmanager
def within_address_space(command: str) -> Iterator[None]:
    """Below a limit of address space, use less of it, and explain libraries that abort the process."""
    limit = _limit_bytes()
    if limit is None:
        yield
        return
    if limit < (least := _LEAST.get(command, 0)):
        raise ResourceError(
            _message(command, f" before it began: it needs at least {least >> 20:,} MB", limit)
        )
    # Arrow's default pool reserves 1 GB at once where that fits, and leaves what remains to everything else.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    from recmill import _native

    _native.save_address_space()
    text = f"recmill: {_message(command, ': native code could not go on', limit)}\n"
    _native.explain_aborts(text, ResourceError.exit_code)
    try:
        yield
    except BaseException:
        _native.explain_aborts("", ResourceError.exit_code)  # other threads may still abort the process
        raise
    _native.explain_aborts("", 0)


def lack_of_memory(command: str, error: BaseException) -> ResourceError | None:
    """The message for an error caused by a lack of memory; None for others."""
    limit = _limit_bytes()
    if not is_out_of_memory(error) and not (limit and _peak_bytes() > _ALMOST * limit):
        return None
    doing = _doing(error.__traceback__)
    asked = first_line(error).rstrip(".")
    return ResourceError(_message(command, f" while {doing}: {asked}" if doing else f": {asked}", limit))


def _message(command: str, what: str, limit: int | None) -> str:
    found = f" The limit of address space (ulimit -v) is {limit >> 20:,} MB." if limit is not None else ""
    return f"{command} ran out of memory{what}.{found} Allow more, or {_ADVICE.get(command, _OTHERWISE)}."


def _doing(trace: TracebackType | None) -> str | None:
    """What the innermost part of the package was doing."""
    found = None
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        if name.startswith("recmill."):
            is_import = trace.tb_frame.f_code.co_name == "<module>"
            found = "modules were loaded" if is_import else _DOING.get(name.split(".")[1], found)
        trace = trace.tb_next
    return found


def _limit_bytes() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def _peak_bytes() -> int:
    """The peak address space of this process; 0 where the system does not report it."""
    if sys.platform != "linux":
        return 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmPeak:"):
            return int(line.split()[1]) << 10
    return 0
