"""bench prepare: raw Criteo text to Table, beside a bare read of the same file and a plain pandas script."""

from __future__ import annotations

import datetime
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from recmill import __version__
from recmill.errors import MissingPackage, RecmillError
from recmill.reporting.machine import available_cores
from recmill.stages.bench.machine import machine
from recmill.synthetic.generate import generate, read_truth


def bench_prepare(
    recipe: str, rows: int, memory: int, workers: int | None, repeat: int, with_pandas: bool, data: str | None
) -> dict[str, Any]:
    """Run all contestants `repeat` times, taking turns; report medians and ratios."""
    if with_pandas and importlib.util.find_spec("pandas") is None:
        raise MissingPackage("The pandas peer of `bench prepare`", "pandas", "bench")
    with tempfile.TemporaryDirectory(prefix="recmill-bench-") as temporary:
        log = _log(Path(data) if data else Path(temporary) / "log", rows)
        names = ["polars_read", "recmill", *(["pandas_script"] if with_pandas else [])]
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for _ in range(repeat):
            for name in names:
                runs[name].append(_run(name, log, Path(temporary) / "out", recipe, memory, workers))
        return _summary(runs, recipe, rows, log.stat().st_size, memory, workers or available_cores())


def _log(folder: Path, rows: int) -> Path:
    truth = read_truth(folder)
    if truth is None or truth["rows"] != rows or truth["shape"] != "criteo":
        generate("criteo", rows, 0, folder)
    return folder / "train.txt"


def _run(name: str, log: Path, out: Path, recipe: str, memory: int, workers: int | None) -> dict[str, Any]:
    shutil.rmtree(out, ignore_errors=True)
    options: dict[str, Any] = {"log": str(log)}
    if name == "recmill":
        options |= {"into": str(out), "recipe": recipe, "memory": memory, "workers": workers}
    elif name == "pandas_script":
        options |= {"into": str(out)}
    command = [sys.executable, "-m", "recmill.stages.bench.contestants", name, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (
            done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        )
        raise RecmillError(f"Contestant {name} failed: {reason}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _summary(
    runs: dict[str, list[dict[str, Any]]], recipe: str, rows: int, num_bytes: int, memory: int, cores: int
) -> dict[str, Any]:
    seconds = {name: statistics.median(run["seconds"] for run in found) for name, found in runs.items()}
    return {
        "bench": "prepare",
        "date": datetime.date.today().isoformat(),
        "version": __version__,
        "machine": machine(cores),
        "recipe": recipe,
        "rows": rows,
        "bytes": num_bytes,
        "memory_bound": memory,
        "repeat": len(runs["recmill"]),
        "digest": runs["recmill"][0]["digest"],
        "contestants": {
            name: {
                "seconds": round(seconds[name], 2),
                "rows_per_second": round(rows / seconds[name]),
                "rows_per_second_per_core": round(rows / seconds[name] / cores),
                "peak_mb": round(max(run["peak_bytes"] for run in found) / 2**20),
                "times_bare_read": round(seconds[name] / seconds["polars_read"], 2),
            }
            for name, found in runs.items()
        },
    }


def describe(result: dict[str, Any]) -> str:
    """The result as a table for people."""
    machine = result["machine"]
    lines = [
        f"{result['rows']:,} rows, {result['bytes'] / 1e9:.2f} GB of text, recipe {result['recipe']}, "
        f"{machine['cores']} cores of {machine['processor']}, median of {result['repeat']}",
        f"{'':<15}{'seconds':>9}{'rows/s':>12}{'rows/s/core':>13}{'peak MB':>9}{'x bare read':>13}",
    ]
    for name, found in result["contestants"].items():
        lines.append(
            f"{name:<15}{found['seconds']:>9.2f}{found['rows_per_second']:>12,}{found['rows_per_second_per_core']:>13,}"
            f"{found['peak_mb']:>9,}{found['times_bare_read']:>13.2f}"
        )
    return "\n".join(lines)
