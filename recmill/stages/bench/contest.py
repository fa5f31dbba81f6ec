"""What benches share: commands that run in processes of their own, and the facts that belong beside their numbers."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recmill import __version__
from recmill.errors import RecmillError
from recmill.reporting.html.environment import cpu
from recmill.reporting.machine import available_cores
from recmill.synthetic.generate import generate, read_truth

Result = dict[str, Any]
_POLL_SECONDS = 0.05
_PEAK = re.compile(r"VmHWM:\s+(\d+) kB")
_SIMD = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


class CommandFailed(RecmillError):
    """A contestant's process exited with an error; `reason` is the last line that it wrote."""

    def __init__(self, command: Sequence[str], reason: str) -> None:
        super().__init__(f"`{' '.join(command[1:4])} ...` failed: {reason}")
        self.reason = reason


def header(bench: str, cores: int | None = None) -> Result:
    """The first fields of every result: what was measured, when, with which version, on which machine."""
    return {
        "bench": bench,
        "date": datetime.date.today().isoformat(),
        "version": __version__,
        "machine": machine(cores),
    }


def machine(cores: int | None = None) -> Result:
    """Processor, vector units, usable cores and load average."""
    processor, flags = cpu(Path("/proc/cpuinfo"))
    return {
        "processor": processor,
        "simd": [flag for flag in _SIMD if flag in flags],
        "cores": cores or available_cores(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
    }


def run_command(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Result:
    """The JSON object on the last line that a command prints, with the process's `peak_bytes` of memory."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, stdout=output, stderr=errors, env={**os.environ, **(environment or {})}
        ) as process:
            peak = _peak_bytes(process)
        for file in (output, errors):
            file.seek(0)
        if process.returncode != 0:
            lines = errors.read().strip().splitlines()
            raise CommandFailed(command, lines[-1] if lines else f"exit code {process.returncode}")
        result: Result = json.loads(output.read().strip().splitlines()[-1])
    return {**result, "peak_bytes": peak}


def _peak_bytes(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process; its peak of resident memory, or 0 where there is no /proc.

    Not from getrusage: a child's ru_maxrss starts at what its parent used before exec.
    """
    peak, status = 0, Path(f"/proc/{process.pid}/status")
    while True:
        try:
            process.wait(_POLL_SECONDS)
            return peak
        except subprocess.TimeoutExpired:
            if status.is_file() and (match := _PEAK.search(status.read_text(encoding="utf-8"))):
                peak = max(peak, int(match[1]) * 1024)


@contextmanager
def pinned_to(num_cores: int) -> Iterator[None]:
    """Bind this process, and those it starts inside, to so many cores: prefetching must not use another one."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:num_cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class CoreUse:
    """Cores that were taken, on average: by other programs of this machine, and by other machines of its host."""

    others: float
    steal: float


@contextmanager
def measured_neighbours(uses: list[CoreUse]) -> Iterator[None]:
    """Append what else ran during the block, which must wait for the processes that it starts."""
    before = _core_seconds()
    yield
    wall, own, busy, steal = (after - then for after, then in zip(_core_seconds(), before, strict=True))
    uses.append(CoreUse(round(max(0.0, (busy - own) / wall), 2), round(steal / wall, 2)))


def _core_seconds() -> tuple[float, float, float, float]:
    """Wall clock; seconds of cores that this process and its children, all programs, and other machines used."""
    mine = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    own = sum(usage.ru_utime + usage.ru_stime for usage in mine)
    try:
        ticks = [int(field) for field in Path("/proc/stat").read_text(encoding="ascii").split()[1:9]]
    except (OSError, ValueError):  # not Linux: nothing is known of others
        return time.monotonic(), own, own, 0.0
    user, nice, system, _idle, _wait, irq, softirq, steal = (
        tick / os.sysconf("SC_CLK_TCK") for tick in ticks
    )
    return time.monotonic(), own, user + nice + system + irq + softirq, steal


def criteo_log(folder: Path, rows: int) -> Path:
    """The folder of a generated Criteo log of so many rows; an earlier run's log is used again."""
    log = folder / f"criteo-{rows}"
    if read_truth(log) is None:
        generate("criteo", rows, 0, log)
    return log


def median_and_range(values: Sequence[float]) -> Result:
    return {"median": round(statistics.median(values)), "min": round(min(values)), "max": round(max(values))}
