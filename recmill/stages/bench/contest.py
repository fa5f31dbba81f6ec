"""What benches share: commands that run in processes of their own, and the facts that belong beside their numbers."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    """Processor, vector units, usable cores, load average, and how idle OpenMP threads wait."""
    processor, flags = cpu(Path("/proc/cpuinfo"))
    return {
        "processor": processor,
        "simd": [flag for flag in _SIMD if flag in flags],
        "cores": cores or available_cores(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "not set"),
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


def criteo_log(folder: Path, rows: int) -> Path:
    """The folder of a generated Criteo log of so many rows; an earlier run's log is used again."""
    log = folder / f"criteo-{rows}"
    if read_truth(log) is None:
        generate("criteo", rows, 0, log)
    return log


def median_and_range(values: Sequence[float]) -> Result:
    return {"median": round(statistics.median(values)), "min": round(min(values)), "max": round(max(values))}
