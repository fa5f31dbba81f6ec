"""bench train: our training beside its own limits and, on request, peers, on the same batches, interleaved."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from recmill.dataset.loader import Batches
from recmill.errors import MissingPackage, RecmillError
from recmill.recipe.defaults import DEFAULT_BATCH_SIZE
from recmill.recipe.load import load_recipe
from recmill.recipe.recipe import DLRM_CROSS_RANK, Interaction, Optimizer, Recipe, Schedule, Training
from recmill.reporting.machine import available_cores
from recmill.reporting.progress import Progress
from recmill.stages.bench.config import Shape, TrainBenchConfig
from recmill.stages.bench.contest import (
    CoreUse,
    Result,
    criteo_log,
    header,
    measured_neighbours,
    median_and_range,
    pinned_to,
    run_command,
)
from recmill.stages.bench.peers import Peer, find_peers
from recmill.stages.bench.race import MemoryBatch, Task, write_batches
from recmill.stages.prepare.prepare import prepare
from recmill.stages.train.config import TrainConfig

PEAK, BASELINE = "gemm_peak", "recmill_table"
INTERACTIONS: dict[Shape, Interaction] = {"dlrm": "cat", "dlrm_dot": "dot", "dlrm_cross": "cross"}
PEER_SHAPES = ("dlrm", "wide_deep")
LOSS_TOLERANCE = 0.03  # a contestant whose loss differs more from ours does not train the same model


@dataclass(frozen=True)
class OwnTrainer:
    """A contestant of recmill.stages.bench.trainers: where its rows come from, and which optimizers it uses."""

    reads: str
    tables: str
    wide: str


OURS = {
    BASELINE: OwnTrainer("Table", "row-wise Adagrad (wide_deep: Adagrad)", "FTRL"),
    "recmill_log": OwnTrainer("raw log", "row-wise Adagrad (wide_deep: Adagrad)", "FTRL"),
    "dense_floor": OwnTrainer("nothing", "none", "none"),
}


def bench_train(shape: Shape, config: TrainBenchConfig, progress: Progress | None = None) -> Result:
    """Run all contestants `repeat` times, interleaved, bound to as many cores as they have threads."""
    if importlib.util.find_spec("torch") is None:
        raise MissingPackage("bench train", "torch", "train")
    threads = config.threads or tuple(sorted({1, available_cores()}))
    if max(threads) > available_cores():
        raise RecmillError(
            f"bench train was asked for {max(threads)} threads, but this process may use "
            f"{available_cores()} cores; a thread needs a core of its own."
        )
    chosen = {peer.name: peer for peer in find_peers("train", config.peer, config.peer_python)}
    if chosen and shape not in PEER_SHAPES:
        raise RecmillError(
            f"No peer trains {shape}. Measure it without --peer, or: {', '.join(PEER_SHAPES)}."
        )
    names = [PEAK, *OURS, *chosen]
    runs: dict[str, dict[int, list[Result]]] = {name: {count: [] for count in threads} for name in names}
    with tempfile.TemporaryDirectory(prefix="recmill-bench-") as temporary:
        task = make_task(shape, config, (config.data or Path(temporary)).resolve())
        turns = [(name, count) for _ in range(config.repeat) for name in names for count in threads]
        with (progress or Progress(quiet=True)).stage("bench", len(turns)) as stage:
            for name, count in turns:
                results = runs[name][count]
                if not (results and "absent" in results[0]):
                    results.append(run_trainer(chosen.get(name, name), replace(task, threads=count)))
                stage.advance(1, 0)
    return summarize(runs, chosen, task, config.rows, config.repeat)


def recipe_of(shape: Shape) -> Recipe:
    """The reference's model over bounded ids, rows in log order: every contestant gets the same batches."""
    if shape == "wide_deep":
        return load_recipe("criteo-widedeep", ['table.order="log"'])
    deeprec = load_recipe("criteo-deeprec").ranking
    assert deeprec is not None
    # Optimizers that every contestant has, without a schedule.
    train = Training(
        batch_size=DEFAULT_BATCH_SIZE,
        dense=Optimizer("adam", 0.001),
        sparse=Optimizer("rowwise_adagrad", 0.02),
        schedule=Schedule(decay_from=1.0),
    )
    return replace(
        load_recipe("criteo-dlrm", ["table.order=log"]),
        ranking=replace(deeprec, wide=(), dynamic=None, train=train, interaction=INTERACTIONS[shape]),
    )


def make_task(shape: Shape, config: TrainBenchConfig, data: Path) -> Task:
    """Generate the log and prepare its Table unless they exist; write its training rows as plain arrays."""
    log, folder = criteo_log(data, config.rows), data / f"{shape}-{config.rows}"
    table = prepare(recipe_of(shape), str(log), folder / "table").table
    spec = table.recipe.ranking
    assert spec is not None
    batch_size = spec.train.batch_size or DEFAULT_BATCH_SIZE
    if table.num_rows() < batch_size:
        raise RecmillError(
            f"bench train needs at least one batch of {batch_size} rows, but {config.rows} rows have only "
            f"{table.num_rows()} to train on. Ask for more rows."
        )
    batches = Batches(table, batch_size, features=spec.features or None)
    write_batches(_arrays(batches, spec.label), folder / "batches")
    return Task(
        shape=shape,
        log=str(log),
        folder=str(folder),
        batch_size=batches.batch_size,
        num_numbers=len(batches.layout.number_columns),
        sizes=[batches.layout.bounds[name] for name in batches.layout.keys],
        embedding_dim=spec.embedding_dim,
        bottom=list(spec.bottom),
        top=list(spec.top),
        hidden=list(spec.hidden),
        dense_rate=spec.train.dense.learning_rate,
        sparse_rate=spec.train.sparse.learning_rate,
        wide_rate=spec.wide_optimizer.learning_rate if spec.wide_optimizer else 0.0,
        threads=1,
        seconds=config.seconds,
        min_steps=config.min_steps,
        cross=(spec.cross_layers, spec.cross_rank or DLRM_CROSS_RANK),
    )


def _arrays(batches: Batches, label: str) -> Iterator[MemoryBatch]:
    for batch, _ in batches.read():
        ids = np.stack([batch.keys[name].values for name in batches.layout.keys], axis=1)
        yield MemoryBatch(batch.numbers, ids, batch.labels[label])


def run_trainer(trainer: str | Peer, task: Task) -> Result:
    """One run in a process of its own, bound to `task.threads` cores, and what else ran meanwhile."""
    uses: list[CoreUse] = []
    with pinned_to(task.threads), measured_neighbours(uses):
        result = _run_pinned(trainer, task)
    return {**result, **asdict(uses[0])}


def _run_pinned(trainer: str | Peer, task: Task) -> Result:
    threads = str(task.threads)
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    argument = json.dumps(asdict(task))
    if isinstance(trainer, Peer):
        return trainer.run([argument], environment)
    # As `recmill train` waits; a peer waits as it does by itself.
    policy = os.environ.get("OMP_WAIT_POLICY", TrainConfig().wait_policy.upper())
    command = [sys.executable, "-m", "recmill.stages.bench.trainers", trainer, argument]
    return run_command(command, {**environment, "OMP_WAIT_POLICY": policy})


def summarize(
    runs: Mapping[str, Mapping[int, list[Result]]],
    peers: Mapping[str, Peer],
    task: Task,
    rows: int,
    repeat: int,
) -> Result:
    """Medians by contestant and number of threads; the GEMM peak is the best that was measured."""
    peaks = {count: max(run["gflops"] for run in of) for count, of in runs[PEAK].items()}
    trainers: dict[str, OwnTrainer | Peer] = {**OURS, **peers}
    return {
        **header("train"),
        "shape": task.shape,
        "layers": task.layers(),
        "features": {"number": len(task.sizes), "dim": task.embedding_dim, "ids": sum(task.sizes)},
        "batch_size": task.batch_size,
        "rows": rows,
        "repeat": repeat,
        "seconds_each": task.seconds,
        "mflop_per_sample": round(task.flops_per_sample() / 1e6, 3),
        "gemm_peak_gflops": {str(count): round(peak, 1) for count, peak in peaks.items()},
        "contestants": {
            name: {
                "reads": trainers[name].reads,
                "tables": trainers[name].tables,
                "wide": trainers[name].wide,
                "threads": {
                    str(count): _summary(name, of, runs[BASELINE][count], task, peaks[count])
                    for count, of in by_threads.items()
                },
            }
            for name, by_threads in runs.items()
            if name != PEAK
        },
    }


def _summary(name: str, runs: list[Result], ours: list[Result], task: Task, peak_gflops: float) -> Result:
    """Median and range of a contestant's runs, compared with ours and with the machine's limit."""
    if absent := next((run["absent"] for run in runs if "absent" in run), None):
        return {"absent": absent}
    speed = median_and_range([run["samples_per_second"] for run in runs])
    loss = statistics.median(run["loss"] for run in runs)
    difference = abs(loss - statistics.median(run["loss"] for run in ours))
    our_speed = statistics.median(run["samples_per_second"] for run in ours)
    return {
        "samples_per_second": speed,
        "samples_per_cpu_second": round(statistics.median(run["samples_per_cpu_second"] for run in runs)),
        "ours_over_this": round(our_speed / speed["median"], 3),
        "of_gemm_peak": round(speed["median"] * task.flops_per_sample() / peak_gflops / 1e9, 3),
        "loss": round(loss, 4),
        "loss_matches": None if name == "dense_floor" else difference <= LOSS_TOLERANCE,
        "others": statistics.median(run["others"] for run in runs),
        "steal": statistics.median(run["steal"] for run in runs),
        "versions": runs[0]["versions"],
    }


def describe(result: Result) -> str:
    """The result as a table for people."""
    machine = result["machine"]
    peaks = ", ".join(f"{peak} with {count}" for count, peak in result["gemm_peak_gflops"].items())
    lines = [
        f"{result['shape']}, layers {' and '.join('-'.join(map(str, mlp)) for mlp in result['layers'])}, "
        f"{result['features']['number']} features of dim {result['features']['dim']}, batch {result['batch_size']}",
        f"{result['rows']:,} rows, {result['repeat']} rounds of {result['seconds_each']:g} s, medians; "
        f"{machine['cores']} cores of {machine['processor']} ({', '.join(machine['simd'])}), load {machine['load']}; "
        "others, steal: cores that other programs and other machines of the host took",
        f"GEMM peak (GFLOP/s by threads): {peaks}; {result['mflop_per_sample']} MFLOP a sample",
        f"{'':<21}{'reads':<9}{'threads':>8}{'samples/s':>11}{'min':>9}{'max':>9}{'per CPU s':>11}"
        f"{'ours/this':>11}{'of peak':>9}{'loss':>8}{'others':>8}{'steal':>7}",
    ]
    for count in result["gemm_peak_gflops"]:
        lines += [_line(name, count, of) for name, of in result["contestants"].items()]
    return "\n".join(lines)


def _line(name: str, count: str, contestant: Result) -> str:
    run = contestant["threads"][count]
    start = f"{name:<21}{contestant['reads']:<9}{count:>8}"
    if "absent" in run:
        return f"{start}  {run['absent']}"
    speed = run["samples_per_second"]
    warning = "  loss differs from ours" if run["loss_matches"] is False else ""
    return (
        f"{start}{speed['median']:>11,}{speed['min']:>9,}{speed['max']:>9,}"
        f"{run['samples_per_cpu_second']:>11,}{run['ours_over_this']:>10.2f}x{run['of_gemm_peak']:>9.0%}"
        f"{run['loss']:>8.4f}{run['others']:>8.2f}{run['steal']:>7.2f}{warning}"
    )
