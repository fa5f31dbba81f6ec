"""Start a server on free ports, and read its CPU, memory and metrics from outside."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recmill.errors import RecmillError

_SECONDS_TO_START = 120
_SECONDS_TO_END = 15


@dataclass(frozen=True)
class BenchServer:
    """Addresses of a server. One that was already running has no `pid`, and maybe no HTTP address."""

    grpc: str | None
    http: str | None
    pid: int | None = None
    seconds_to_ready: float | None = None


@contextmanager
def start_server(bundle: Path, arguments: Sequence[str] = ()) -> Iterator[BenchServer]:
    """`recmill serve` in a process of its own on free ports, until the block ends."""
    command = [sys.executable, "-m", "recmill", "serve", "--bundle", str(bundle)]
    command += ["--http-port", "0", "--grpc-port", "0", "--json", *arguments]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            ready = _ready_line(process)
            yield BenchServer(
                _address(ready, "grpc"), _address(ready, "http"), process.pid, time.perf_counter() - began
            )
        finally:
            _end(process)


def _ready_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    deadline = time.monotonic() + _SECONDS_TO_START
    while time.monotonic() < deadline:
        if not select.select([process.stdout], [], [], 0.2)[0]:
            continue
        line = process.stdout.readline()
        if not line:
            raise RecmillError(f"The server ended with code {process.wait()} before it was ready.")
        if line.startswith("{") and "grpc" in (ready := json.loads(line)):
            return dict(ready)
    raise RecmillError(f"The server was not ready after {_SECONDS_TO_START} s.")


def _address(ready: dict[str, Any], transport: str) -> str | None:
    address = ready.get(transport)
    if address is None or isinstance(address, int):
        return None if address is None else f"127.0.0.1:{address}"
    return str(address).rpartition("//")[2].rstrip("/")


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()


@dataclass(frozen=True)
class Usage:
    """CPU time and memory of all processes of a server."""

    cpu_seconds: float
    resident_bytes: int

    @staticmethod
    def of(server: BenchServer) -> Usage | None:
        """From /proc for a process that we started, otherwise from the server's metrics; None when unknown."""
        if server.pid is not None:
            pids = _process_tree(server.pid)
            return Usage(sum(map(_cpu_seconds, pids)), sum(map(_resident_bytes, pids)))
        metrics = read_metrics(server.http)
        cpu = metrics.get("process_cpu_seconds_total")
        return Usage(cpu, int(metrics.get("process_resident_memory_bytes", 0))) if cpu is not None else None


def _process_tree(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        children = []
    return [pid, *(one for child in children for one in _process_tree(int(child)))]


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
    except OSError:
        return 0


_METRIC = re.compile(r"^(\w+)(\{[^}]*\})? ([-+.\deEinfNa]+)$")


def read_metrics(address: str | None) -> dict[str, float]:
    """The values of /metrics by name and labels; empty when there is no such page."""
    if address is None:
        return {}
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            text = answer.read().decode("utf-8", "replace")
    except (urllib.error.URLError, OSError):
        return {}
    matches = map(_METRIC.match, text.splitlines())
    return {match[1] + (match[2] or ""): float(match[3]) for match in matches if match}


_STAGE = re.compile(r'^recmill_stage_seconds_(sum|count)\{stage="([^"]+)"\}$')
_DEGRADED = re.compile(r'^recmill_degraded_total\{reason="([^"]+)"\}$')


def metrics_delta(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """Mean milliseconds of each stage, and degraded answers by reason, between two readings."""
    growth = {name: value - before.get(name, 0.0) for name, value in after.items()}
    stages: dict[str, dict[str, float]] = {}
    for name, value in growth.items():
        if match := _STAGE.match(name):
            stages.setdefault(match[2], {})[match[1]] = value
    degraded = {
        match[1]: int(value) for name, value in growth.items() if value and (match := _DEGRADED.match(name))
    }
    return {
        "stages_ms": {
            name: round(stage["sum"] / stage["count"] * 1e3, 4)
            for name, stage in stages.items()
            if stage.get("count")
        },
        "degraded": degraded,
    }
