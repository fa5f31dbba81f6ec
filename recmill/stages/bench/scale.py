"""bench scale: one process and several workers, Table and raw log, each engine; and a forecast for many workers.

Every run is a command that a user would type, in a process of its own; they are interleaved.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.recipe.defaults import DEFAULT_BATCH_SIZE
from recmill.recipe.load import load_recipe
from recmill.reporting.machine import available_cores
from recmill.reporting.progress import Progress
from recmill.stages.bench.config import ScaleBenchConfig
from recmill.stages.bench.contest import Result, criteo_log, header, median_and_range, run_command
from recmill.stages.bench.forecast import MachineRates, Network, forecast

RECIPE = "criteo-deeprec"
PREPARE_RECIPE = "criteo-dlrm"  # counts vocabularies, which is the harder work for an engine
PREPARE_ROWS = 10  # times as many as for training: clusters take seconds to start
FORECAST_WORKERS = (8, 64, 512)
_RECMILL = [sys.executable, "-m", "recmill"]
_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True)
class TrainSetup:
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


def train_setups(cores: int, with_ray: bool) -> list[TrainSetup]:
    """One process on one core and on all of them, workers of one thread each under torchrun, and on Ray."""
    workers = max(2, cores)
    setups = [
        TrainSetup("one process", 1, 1),
        TrainSetup("one process", 1, cores),
        TrainSetup("torchrun", workers, 1, torchrun=True),
        TrainSetup("torchrun, half floats", workers, 1, torchrun=True, flags=("--wire", "float16")),
        TrainSetup("one process", 1, cores, reads="raw log"),
    ]
    if with_ray:
        ray = ("--engine", "ray", "--workers")
        setups += [
            TrainSetup("Ray", 1, 1, flags=(*ray, "1")),
            TrainSetup("Ray", workers, 1, flags=(*ray, str(workers))),
            TrainSetup("Ray, data tasks", 1, 1, flags=(*ray, "1", "--data-workers", "1"), reads="Table"),
            TrainSetup("Ray, data tasks", 1, 1, flags=(*ray, "1", "--data-workers", "1"), reads="raw log"),
        ]
    return setups


def bench_scale(config: ScaleBenchConfig, progress: Progress | None = None) -> Result:
    """Run every setup `repeat` times, interleaved; medians, and a forecast from them."""
    rows, repeat, engines = config.rows, config.repeat, config.engine or ("local", "ray", "spark")
    with tempfile.TemporaryDirectory(prefix="recmill-bench-") as temporary:
        folder = (config.data or Path(temporary)).resolve()
        log, long_log = criteo_log(folder, rows), criteo_log(folder, PREPARE_ROWS * rows)
        table, out = folder / f"{RECIPE}-{rows}", Path(temporary) / "out"
        _prepare(RECIPE, log, table)
        trained: dict[TrainSetup, list[Result]] = {
            setup: [] for setup in train_setups(available_cores(), "ray" in engines)
        }
        prepared: dict[str, list[Result]] = {engine: [] for engine in engines}
        num_runs = repeat * (len(trained) + len(prepared))
        with (progress or Progress(quiet=True)).stage("bench", num_runs) as stage:
            for _ in range(repeat):
                for setup, runs in trained.items():
                    shutil.rmtree(out, ignore_errors=True)
                    runs.append(run_command(setup.command(table, log, out), _PASSIVE)["models"][0])
                    stage.advance(1, 0)
                dense = _dense_parameters(out)
                for engine, runs in prepared.items():
                    shutil.rmtree(out, ignore_errors=True)
                    runs.append(_prepare(PREPARE_RECIPE, long_log, out, engine))
                    stage.advance(1, 0)
    return _summary(trained, prepared, rows, repeat, dense, Network(config.gigabits))


def _prepare(recipe: str, log: Path, into: Path, engine: str = "local") -> Result:
    where = ["--data", str(log), "--into", str(into), "--engine", engine]
    return run_command([*_RECMILL, "prepare", recipe, *where, "--quiet", "--json"], _PASSIVE)


def _dense_parameters(checkpoint: Path) -> int:
    """Weights that every worker holds."""
    arrays = Checkpoint.open(checkpoint).of("ranking").find("last").arrays()
    return sum(value.size for name, value in arrays.items() if name.startswith("model."))


def _summary(
    trained: dict[TrainSetup, list[Result]],
    prepared: dict[str, list[Result]],
    rows: int,
    repeat: int,
    dense: int,
    network: Network,
) -> Result:
    entries = [_train_entry(setup, runs) for setup, runs in trained.items()]
    ranking = load_recipe(RECIPE).ranking
    assert ranking is not None
    batch_size = ranking.train.batch_size or DEFAULT_BATCH_SIZE
    several = [entry for entry in entries if entry["workers"] > 1]
    alone = next(entry for entry in entries if entry["threads"] == 1 and entry["workers"] == 1)
    measured = MachineRates(
        samples_per_second=alone["samples_per_second"]["median"],
        wire_bytes_per_sample=several[0]["wire_bytes_per_sample"],
        measured_with_workers=several[0]["workers"],
        dense_parameters=dense,
    )
    return {
        **header("scale"),
        "recipe": RECIPE,
        "batch_size": batch_size,
        "rows": rows,
        "repeat": repeat,
        "train": entries,
        "prepare": {engine: _prepare_entry(runs) for engine, runs in prepared.items()},
        "measured": asdict(measured),
        "network": asdict(network),
        "forecast": [
            asdict(forecast(measured, network, workers, rows_each))
            for rows_each in (256, batch_size)
            for workers in FORECAST_WORKERS
        ],
    }


def _train_entry(setup: TrainSetup, runs: list[Result]) -> Result:
    wire_bytes = [setup.workers * run["wire_bytes"] / run["samples"] for run in runs]
    return {
        "name": setup.name,
        "reads": setup.reads,
        "workers": setup.workers,
        "threads": setup.threads,
        "samples_per_second": median_and_range([run["samples_per_second"] for run in runs]),
        "data_wait": round(statistics.median(run["data_wait"] for run in runs), 3),
        "wire_bytes_per_sample": round(statistics.median(wire_bytes)),
        "auc": round(statistics.median(run["metrics"]["auc"] for run in runs), 4),
    }


def _prepare_entry(runs: list[Result]) -> Result:
    speeds = [run["rows_read"] / sum(run["seconds"].values()) for run in runs]
    return {
        "rows": runs[0]["rows_read"],
        "rows_per_second": median_and_range(speeds),
        "digest": runs[0]["digest"],
    }


def describe(result: Result) -> str:
    """The result as tables for people."""
    machine, network = result["machine"], result["network"]
    return "\n".join(
        [
            f"{result['recipe']}, batch {result['batch_size']}, {result['rows']:,} rows, {result['repeat']} rounds, "
            f"medians; {machine['cores']} cores of {machine['processor']}",
            f"{'train':<24}{'reads':<9}{'workers':>8}{'threads':>8}{'samples/s':>11}{'min':>9}{'max':>9}"
            f"{'data wait':>11}{'wire B/sample':>15}{'AUC':>8}",
            *map(_train_line, result["train"]),
            "",
            f"{'prepare':<24}{'rows':>12}{'rows/s':>12}{'min':>12}{'max':>12}  digest",
            *(_prepare_line(engine, entry) for engine, entry in result["prepare"].items()),
            "",
            f"forecast for {network['gigabits_per_second']:g} Gbit/s and {network['microseconds_per_message']:g} us "
            "a message (docs/scaling.md has the arithmetic)",
            f"{'workers':>8}{'rows each':>11}{'samples/s':>13}{'efficiency':>12}  limit",
            *map(_forecast_line, result["forecast"]),
        ]
    )


def _train_line(entry: Result) -> str:
    speed = entry["samples_per_second"]
    return (
        f"{entry['name']:<24}{entry['reads']:<9}{entry['workers']:>8}{entry['threads']:>8}{speed['median']:>11,}"
        f"{speed['min']:>9,}{speed['max']:>9,}{entry['data_wait']:>11.0%}{entry['wire_bytes_per_sample']:>15,}"
        f"{entry['auc']:>8.4f}"
    )


def _prepare_line(engine: str, entry: Result) -> str:
    speed = entry["rows_per_second"]
    return (
        f"{engine:<24}{entry['rows']:>12,}{speed['median']:>12,}{speed['min']:>12,}{speed['max']:>12,}"
        f"  {entry['digest']}"
    )


def _forecast_line(entry: Result) -> str:
    return (
        f"{entry['workers']:>8}{entry['rows_each']:>11,}{entry['samples_per_second']:>13,.0f}"
        f"{entry['efficiency']:>12.0%}  {entry['limit']}"
    )
