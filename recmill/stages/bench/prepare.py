"""bench prepare: raw Criteo text to Table, beside a bare read of the same file and, on request, peers."""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from recmill.reporting.machine import available_cores
from recmill.stages.bench.config import PrepareBenchConfig
from recmill.stages.bench.contest import Result, criteo_log, header, run_command
from recmill.stages.bench.peers import Peer, find_peers

FLOOR, OURS = "polars_read", "recmill"


def bench_prepare(config: PrepareBenchConfig) -> Result:
    """Run all contestants `repeat` times, interleaved; report medians and ratios."""
    chosen = {peer.name: peer for peer in find_peers("prepare", config.peer)}
    workers = config.workers or available_cores()
    with tempfile.TemporaryDirectory(prefix="recmill-bench-") as temporary:
        log = criteo_log((config.data or Path(temporary)).resolve(), config.rows) / "train.txt"
        into = Path(temporary) / "table"
        runs: dict[str, list[Result]] = {name: [] for name in (FLOOR, OURS, *chosen)}
        for _ in range(config.repeat):
            runs[FLOOR].append(
                run_command([sys.executable, "-m", "recmill.stages.bench.bare_read", str(log)])
            )
            runs[OURS].append(_prepare(config, log, into, workers))
            for name, peer in chosen.items():
                runs[name].append(_run_peer(peer, log, into))
        num_bytes = log.stat().st_size
    return {
        **header("prepare", workers),
        "recipe": config.recipe,
        "rows": config.rows,
        "bytes": num_bytes,
        "memory_bound": config.memory,
        "repeat": config.repeat,
        "digest": runs[OURS][0]["digest"],
        "contestants": _contestants(runs, config.rows, workers),
    }


def _prepare(config: PrepareBenchConfig, log: Path, into: Path, workers: int) -> Result:
    shutil.rmtree(into, ignore_errors=True)
    changes = ["--set", "table.order=log", "--set", f'log.files=["{log.name}"]']
    command = [sys.executable, "-m", "recmill", "prepare", config.recipe, *changes]
    command += ["--data", str(log.parent), "--into", str(into), "--memory", str(config.memory)]
    result = run_command([*command, "--workers", str(workers), "--quiet", "--json"])
    return {**result, "seconds": sum(result["seconds"].values())}


def _run_peer(peer: Peer, log: Path, into: Path) -> Result:
    shutil.rmtree(into, ignore_errors=True)
    return peer.run([str(log), str(into)])


def _contestants(runs: dict[str, list[Result]], rows: int, cores: int) -> Result:
    floor = statistics.median(run["seconds"] for run in runs[FLOOR])
    return {name: _contestant(of, rows, cores, floor) for name, of in runs.items()}


def _contestant(runs: list[Result], rows: int, cores: int, floor: float) -> Result:
    if "absent" in runs[0]:
        return {"absent": runs[0]["absent"]}
    seconds = statistics.median(run["seconds"] for run in runs)
    return {
        "seconds": round(seconds, 2),
        "rows_per_second": round(rows / seconds),
        "rows_per_second_per_core": round(rows / seconds / cores),
        "peak_mb": round(max(run["peak_bytes"] for run in runs) / 2**20),
        "times_bare_read": round(seconds / floor, 2),
    }


def describe(result: Result) -> str:
    """The result as a table for people."""
    machine = result["machine"]
    lines = [
        f"{result['rows']:,} rows, {result['bytes'] / 1e9:.2f} GB of text, recipe {result['recipe']}, "
        f"{machine['cores']} cores of {machine['processor']}, median of {result['repeat']}",
        f"{'':<15}{'seconds':>9}{'rows/s':>12}{'rows/s/core':>13}{'peak MB':>9}{'x bare read':>13}",
    ]
    return "\n".join(lines + [_line(name, entry) for name, entry in result["contestants"].items()])


def _line(name: str, entry: Result) -> str:
    if "absent" in entry:
        return f"{name:<15}  {entry['absent']}"
    return (
        f"{name:<15}{entry['seconds']:>9.2f}{entry['rows_per_second']:>12,}"
        f"{entry['rows_per_second_per_core']:>13,}{entry['peak_mb']:>9,}{entry['times_bare_read']:>13.2f}"
    )
