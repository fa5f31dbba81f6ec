"""bench scale: one process beside several workers, Table beside raw log, engines beside each other; and a forecast.

Every run is the command that a user would type, in a process of its own; contestants take turns.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recmill import __version__
from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.errors import RecmillError
from recmill.recipe.load import load_recipe
from recmill.reporting.machine import available_cores
from recmill.reporting.progress import Progress
from recmill.stages.bench.forecast import MachineRates, Network, forecast
from recmill.stages.bench.machine import machine
from recmill.synthetic.generate import generate, read_truth

Result = dict[str, Any]

RECIPE = "criteo-deeprec"
PREPARED_WITH = "criteo-dlrm"  # the recipe with vocabularies to count, for engines
MORE_TO_PREPARE = 10
FORECAST_WORKERS = (8, 64, 512)


@dataclass(frozen=True)
class TrainContestant:
    """One way to train the same recipe on the same rows."""

    name: str
    workers: int
    threads: int
    torchrun: bool = False
    flags: tuple[str, ...] = ()
    reads: str = "Table"

    def command(self, table: Path, log: Path, into: Path) -> list[str]:
        rows = ["--table", str(table)] if self.reads == "Table" else ["--from-log", str(log)]
        python = [sys.executable, "-m"]
        if self.torchrun:
            python += ["torch.distributed.run", "--nproc-per-node", str(self.workers), "-m"]
        return [
            *python, "recmill", "train", RECIPE, *rows, "--into", str(into), "--threads", str(self.threads),
            *self.flags, "--quiet", "--json",
        ]  # fmt: skip


def trainings(cores: int, with_ray: bool) -> list[TrainContestant]:
    """One process on one core and on all; the same as workers of one thread each; and on Ray."""
    found = [
        TrainContestant("one process", 1, 1),
        TrainContestant("one process", 1, cores),
        TrainContestant("torchrun", cores, 1, torchrun=True),
        TrainContestant("torchrun, half floats", cores, 1, torchrun=True, flags=("--wire", "float16")),
        TrainContestant("one process", 1, cores, reads="raw log"),
    ]
    if with_ray:
        ray = ("--engine", "ray", "--workers")
        found += [
            TrainContestant("Ray", 1, 1, flags=(*ray, "1")),
            TrainContestant("Ray", cores, 1, flags=(*ray, str(cores))),
            TrainContestant("Ray, data tasks", 1, 1, flags=(*ray, "1", "--data-workers", "1"), reads="Table"),
            TrainContestant(
                "Ray, data tasks", 1, 1, flags=(*ray, "1", "--data-workers", "1"), reads="raw log"
            ),
        ]
    return found


def bench_scale(
    rows: int = 400_000,
    repeat: int = 3,
    engines: Sequence[str] = ("local", "ray", "spark"),
    data: Path | None = None,
    network: Network = Network(),  # noqa: B008, frozen
    progress: Progress | None = None,
) -> Result:
    """Run every contestant `repeat` times, taking turns; medians, and what they mean for many workers.

    Engines prepare `MORE_TO_PREPARE` times as many rows: clusters need seconds to start, and training is slower.
    """
    with tempfile.TemporaryDirectory(prefix="recmill-bench-") as temporary:
        folder = (data or Path(temporary)).resolve()
        log, long_log = (_generated(folder, number) for number in (rows, MORE_TO_PREPARE * rows))
        table, out = folder / f"{RECIPE}-{rows}", Path(temporary) / "out"
        _run(["prepare", RECIPE, "--data", str(log), "--into", str(table), "--quiet", "--json"])
        contestants = trainings(available_cores(), "ray" in engines)
        trained: dict[TrainContestant, list[Result]] = {contestant: [] for contestant in contestants}
        prepared: dict[str, list[Result]] = {engine: [] for engine in engines}
        num_runs = repeat * (len(trained) + len(prepared))
        with (progress or Progress(quiet=True)).stage("bench", num_runs) as stage:
            for _ in range(repeat):
                for contestant, runs in trained.items():
                    runs.append(_train(contestant, table, log, out))
                    stage.advance(1, 0)
                dense = _dense_parameters(out)
                for engine, done in prepared.items():
                    done.append(_prepare(engine, long_log, out))
                    stage.advance(1, 0)
    return _summary(trained, prepared, rows, repeat, dense, network)


def _generated(folder: Path, rows: int) -> Path:
    log = folder / f"criteo-{rows}"
    if read_truth(log) is None:
        generate("criteo", rows, 0, log)
    return log


def _train(contestant: TrainContestant, table: Path, log: Path, out: Path) -> Result:
    shutil.rmtree(out, ignore_errors=True)
    found: Result = _run_command(contestant.command(table, log, out))["models"][0]
    return found


def _prepare(engine: str, log: Path, out: Path) -> Result:
    shutil.rmtree(out, ignore_errors=True)
    return _run(
        [
            "prepare",
            PREPARED_WITH,
            "--data",
            str(log),
            "--into",
            str(out),
            "--engine",
            engine,
            "--quiet",
            "--json",
        ]
    )


def _run(arguments: Sequence[str]) -> Result:
    return _run_command([sys.executable, "-m", "recmill", *arguments])


def _run_command(command: Sequence[str]) -> Result:
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RecmillError(f"`{' '.join(command[1:])}` failed: {reason}")
    found: Result = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _dense_parameters(checkpoint: Path) -> int:
    """Weights that every worker holds."""
    arrays = Checkpoint.open(checkpoint).of("ranking").find("last").arrays()
    return sum(value.size for name, value in arrays.items() if name.startswith("model."))


def _summary(
    trained: dict[TrainContestant, list[Result]],
    prepared: dict[str, list[Result]],
    rows: int,
    repeat: int,
    dense: int,
    network: Network,
) -> Result:
    entries = [_entry(contestant, runs) for contestant, runs in trained.items()]
    recipe = load_recipe(RECIPE)
    assert recipe.ranking is not None
    measured = MachineRates(
        samples_per_second=_speed(trained, "one process", 1, "Table"),
        wire_bytes_per_sample=next(e["wire_bytes_per_sample"] for e in entries if e["workers"] > 1),
        measured_with_workers=max(e["workers"] for e in entries),
        dense_parameters=dense,
    )
    return {
        "bench": "scale",
        "date": datetime.date.today().isoformat(),
        "version": __version__,
        "machine": machine(),
        "recipe": RECIPE,
        "batch_size": recipe.ranking.train.batch_size,
        "rows": rows,
        "repeat": repeat,
        "train": entries,
        "prepare": {
            engine: {
                "rows": runs[0]["rows_read"],
                "rows_per_second": round(
                    statistics.median(run["rows_read"] / sum(run["seconds"].values()) for run in runs)
                ),
                "digest": runs[0]["digest"],
            }
            for engine, runs in prepared.items()
        },
        "measured": asdict(measured),
        "network": asdict(network),
        "forecast": [
            asdict(found)
            for rows_each in (256, recipe.ranking.train.batch_size)
            for workers in FORECAST_WORKERS
            for found in [forecast(measured, network, workers, rows_each)]
        ],
    }


def _entry(contestant: TrainContestant, runs: list[Result]) -> Result:
    speeds = [run["samples_per_second"] for run in runs]
    return {
        "name": contestant.name,
        "reads": contestant.reads,
        "workers": contestant.workers,
        "threads": contestant.threads,
        "samples_per_second": round(statistics.median(speeds)),
        "least": round(min(speeds)),
        "most": round(max(speeds)),
        "wait_share": round(statistics.median(run["wait_share"] for run in runs), 3),
        "wire_bytes_per_sample": round(
            statistics.median(contestant.workers * run["wire_bytes"] / run["samples"] for run in runs)
        ),
        "auc": round(statistics.median(run["metrics"]["auc"] for run in runs), 4),
    }


def _speed(trained: dict[TrainContestant, list[Result]], name: str, threads: int, reads: str) -> float:
    runs = next(
        runs for one, runs in trained.items() if (one.name, one.threads, one.reads) == (name, threads, reads)
    )
    return float(statistics.median(run["samples_per_second"] for run in runs))


def describe(result: Result) -> str:
    """The result as tables for people."""
    found = result["machine"]
    lines = [
        f"{result['recipe']}, batch {result['batch_size']}, {result['rows']:,} rows, {result['repeat']} rounds, "
        f"medians; {found['cores']} cores of {found['processor']}",
        f"{'train':<24}{'reads':<9}{'workers':>8}{'threads':>8}{'samples/s':>11}{'least':>9}{'most':>9}"
        f"{'waits':>7}{'wire B/sample':>15}{'AUC':>8}",
    ]
    lines += [
        f"{one['name']:<24}{one['reads']:<9}{one['workers']:>8}{one['threads']:>8}{one['samples_per_second']:>11,}"
        f"{one['least']:>9,}{one['most']:>9,}{one['wait_share']:>7.0%}{one['wire_bytes_per_sample']:>15,}"
        f"{one['auc']:>8.4f}"
        for one in result["train"]
    ]
    lines += ["", f"{'prepare':<24}{'rows':>12}{'rows/s':>12}  digest"]
    lines += [
        f"{engine:<24}{one['rows']:>12,}{one['rows_per_second']:>12,}  {one['digest']}"
        for engine, one in result["prepare"].items()
    ]
    network = result["network"]
    lines += [
        "",
        f"on paper: {network['gigabits_per_second']:g} Gbit/s and {network['microseconds_per_message']:g} us a message "
        "(docs/scaling.md has the arithmetic)",
        f"{'workers':>8}{'rows each':>11}{'samples/s':>13}{'efficiency':>12}  limit",
    ]
    lines += [
        f"{one['workers']:>8}{one['rows_each']:>11,}{one['samples_per_second']:>13,.0f}{one['efficiency']:>12.0%}"
        f"  {one['limit']}"
        for one in result["forecast"]
    ]
    return "\n".join(lines)
