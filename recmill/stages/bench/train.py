"""bench train: our training beside its peers on the same batches, taking turns, each in a process of its own."""

from __future__ import annotations

import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from recmill import __version__
from recmill.dataset.batch import Batches
from recmill.errors import RecmillError
from recmill.recipe.load import load_recipe
from recmill.recipe.recipe import Optimizer, Recipe, Training
from recmill.reporting.machine import available_cores
from recmill.reporting.progress import Progress
from recmill.stages.bench.machine import machine
from recmill.stages.bench.peers.race import MemoryBatch, Task, write_batches
from recmill.stages.prepare.prepare import prepare
from recmill.synthetic.generate import generate, read_truth

Shape = Literal["dlrm", "wide_deep"]
Result = dict[str, Any]

OURS = "recmill_table"
LOSS_BAND = 0.03  # a contestant whose loss is further from ours does not learn the same


@dataclass(frozen=True)
class Contestant:
    """Who takes part: where its rows come from, and what updates tables (and the wide part)."""

    reads: str
    tables: str
    wide: str
    install: str = ""  # of peers: what to do when its packages are missing


CONTESTANTS = {
    OURS: Contestant("Table", "row-wise Adagrad (wide_deep: Adagrad)", "FTRL"),
    "recmill_log": Contestant("raw log", "row-wise Adagrad (wide_deep: Adagrad)", "FTRL"),
    "dense_floor": Contestant("nothing", "none", "none"),
    "torch_embedding_bag": Contestant("memory", "Adagrad", "Adagrad", "pip install torch"),
    "fbgemm": Contestant(
        "memory", "row-wise Adagrad", "Adagrad", "pip install fbgemm-gpu-cpu (1.8.0 fits torch 2.13)"
    ),
    "tensorflow": Contestant(
        "memory",
        "Adagrad",
        "FTRL",
        "pip install tensorflow-cpu, in an environment of its own, and name it: --peer-python tensorflow=PYTHON",
    ),
}
PEERS = tuple(name for name, contestant in CONTESTANTS.items() if contestant.install)


def bench_train(
    shape: Shape,
    rows: int = 1_000_000,
    repeat: int = 5,
    threads: Sequence[int] = (1, 2),
    peers: Sequence[str] = PEERS,
    peer_python: Mapping[str, str] | None = None,
    data: Path | None = None,
    seconds_each: float = 5.0,
    least_steps: int = 60,
    progress: Progress | None = None,
) -> Result:
    """Run all contestants `repeat` times, taking turns, bound to as many cores as they have threads.

    `peer_python` names the interpreter of a peer that has an environment of its own; `data` keeps the generated log,
    Table and batches for the next time. A run takes `seconds_each`, or longer until it has made `least_steps`.
    """
    peer_python = peer_python or {}
    _check(threads, peers, peer_python)
    names = [name for name in CONTESTANTS if name in peers or name not in PEERS]
    runs: dict[str, dict[int, list[Result]]] = {
        name: {count: [] for count in threads} for name in ["gemm_peak", *names]
    }
    with tempfile.TemporaryDirectory(prefix="recmill-bench-") as temporary:
        task = make_task(shape, rows, (data or Path(temporary)).resolve(), seconds_each, least_steps)
        turns = [(name, count) for _ in range(repeat) for name in runs for count in threads]
        with (progress or Progress(quiet=True)).stage("bench", len(turns)) as stage:
            for name, count in turns:
                found = runs[name][count]
                if not (found and "absent" in found[0]):
                    found.append(run_contestant(name, replace(task, threads=count), peer_python.get(name)))
                stage.advance(1, 0)
    return summarise(runs, task, rows, repeat)


def _check(threads: Sequence[int], peers: Sequence[str], peer_python: Mapping[str, str]) -> None:
    if max(threads) > available_cores():
        raise RecmillError(
            f"bench train was asked for {max(threads)} threads, but this process may use "
            f"{available_cores()} cores; a thread needs a core of its own."
        )
    for name in (*peers, *peer_python):
        if name not in PEERS:
            raise RecmillError(f'bench train has no peer "{name}"; there are: {", ".join(PEERS)}.')


def recipe_of(shape: Shape) -> Recipe:
    """The reference's model over bounded ids, rows in log order, so that every contestant sees the same batches."""
    if shape == "wide_deep":
        return load_recipe("criteo-widedeep", ['table.order="log"'])
    deeprec = load_recipe("criteo-deeprec").ranking
    assert deeprec is not None
    # Optimizers that every contestant has, without a schedule.
    train = Training(
        batch_size=deeprec.train.batch_size,
        dense=Optimizer("adam", 0.001),
        sparse=Optimizer("rowwise_adagrad", 0.02),
    )
    return replace(load_recipe("criteo-dlrm"), ranking=replace(deeprec, dynamic=None, train=train))


def make_task(shape: Shape, rows: int, data: Path, seconds: float, least_steps: int) -> Task:
    """Generate the log and prepare its Table unless they are there; write its training rows as plain arrays."""
    log, folder = data / f"criteo-{rows}", data / f"{shape}-{rows}"
    if read_truth(log) is None:
        generate("criteo", rows, 0, log)
    table = prepare(recipe_of(shape), str(log), folder / "table").table
    spec = table.recipe.ranking
    assert spec is not None
    if table.num_rows() < spec.train.batch_size:
        raise RecmillError(
            f"bench train needs at least one batch of {spec.train.batch_size} rows, but {rows} rows have only "
            f"{table.num_rows()} to train on. Ask for more rows."
        )
    batches = Batches(table, spec.train.batch_size, features=spec.features or None)
    write_batches(_arrays(batches, spec.label), folder / "batches")
    return Task(
        shape=shape,
        log=str(log),
        folder=str(folder),
        batch_size=batches.batch_size,
        num_numbers=len(batches.layout.numbers),
        sizes=[batches.layout.bounds[name] for name in batches.layout.keys],
        embedding_dim=spec.embedding_dim,
        bottom=list(spec.bottom),
        top=list(spec.top),
        hidden=list(spec.hidden),
        dense_rate=spec.train.dense.learning_rate,
        sparse_rate=spec.train.sparse.learning_rate,
        wide_rate=spec.wide_optimizer.learning_rate if spec.wide_optimizer else 0.0,
        threads=1,
        seconds=seconds,
        least_steps=least_steps,
    )


def _arrays(batches: Batches, label: str) -> Iterator[MemoryBatch]:
    for batch, _ in batches.read():
        ids = np.stack([batch.keys[name].values for name in batches.layout.keys], axis=1)
        yield MemoryBatch(batch.numbers, ids, batch.labels[label])


def run_contestant(name: str, task: Task, python: str | None) -> Result:
    """One contestant's result; of a peer that cannot run, `absent` and the reason."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(task.threads), "MKL_NUM_THREADS": str(task.threads)}
    package = "recmill.stages.bench.peers"
    if python is not None:  # an interpreter that need not have recmill
        package, environment["PYTHONPATH"] = "peers", str(Path(__file__).parent)
    command = [python or sys.executable, "-m", f"{package}.{name}", json.dumps(asdict(task))]
    with _bound_to_cores(task.threads):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        except OSError as error:
            raise RecmillError(f"--peer-python {name}={python} cannot be run: {error.strerror}.") from None
    if done.returncode == 0:
        result: Result = json.loads(done.stdout.splitlines()[-1])
        return result
    reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    if name not in PEERS:
        raise RecmillError(f"Contestant {name} failed: {reason}")
    missing = re.match(r"ModuleNotFoundError: No module named '([\w.]+)'", reason)
    return {"absent": f"not installed: {CONTESTANTS[name].install}" if missing else f"failed: {reason}"}


@contextmanager
def _bound_to_cores(count: int) -> Iterator[None]:
    """Children started inside get that many cores: readers that run ahead must not borrow another one."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def summarise(runs: Mapping[str, Mapping[int, list[Result]]], task: Task, rows: int, repeat: int) -> Result:
    """Medians of all runs, by contestant and number of threads; the peak is the best that was seen."""
    peaks = {count: max(run["gflops"] for run in found) for count, found in runs["gemm_peak"].items()}
    ours = runs[OURS]
    return {
        "bench": "train",
        "date": datetime.date.today().isoformat(),
        "version": __version__,
        "machine": machine(),
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
                **asdict(CONTESTANTS[name]),
                "threads": {
                    str(count): _measured(
                        name, found, ours[count], task.flops_per_sample() / peaks[count] / 1e9
                    )
                    for count, found in by_threads.items()
                },
            }
            for name, by_threads in runs.items()
            if name in CONTESTANTS
        },
    }


def _measured(name: str, found: list[Result], ours: list[Result], share_per_sample: float) -> Result:
    """Median and range of a contestant's runs, beside ours and the machine's limit."""
    if absent := next((run["absent"] for run in found if "absent" in run), None):
        return {"absent": absent}
    speeds = [run["samples_per_second"] for run in found]
    median = statistics.median(speeds)
    loss = statistics.median(run["loss"] for run in found)
    distance = abs(loss - statistics.median(run["loss"] for run in ours))
    return {
        "samples_per_second": round(median),
        "least": round(min(speeds)),
        "most": round(max(speeds)),
        "samples_per_cpu_second": round(statistics.median(run["samples_per_cpu_second"] for run in found)),
        "ours_is_times": round(statistics.median(run["samples_per_second"] for run in ours) / median, 3),
        "share_of_gemm_peak": round(median * share_per_sample, 3),
        "loss": round(loss, 4),
        "learns_like_ours": None if name == "dense_floor" else distance <= LOSS_BAND,
        "versions": found[0]["versions"],
    }


def describe(result: Result) -> str:
    """The result as a table for people."""
    found = result["machine"]
    peaks = ", ".join(f"{peak} with {count}" for count, peak in result["gemm_peak_gflops"].items())
    lines = [
        f"{result['shape']}, layers {' and '.join('-'.join(map(str, mlp)) for mlp in result['layers'])}, "
        f"{result['features']['number']} features of dim {result['features']['dim']}, batch {result['batch_size']}",
        f"{result['rows']:,} rows, {result['repeat']} rounds of {result['seconds_each']:g} s, medians; "
        f"{found['cores']} cores of {found['processor']} ({', '.join(found['simd'])}), "
        f"OMP_WAIT_POLICY {found['omp_wait_policy']}",
        f"GEMM peak (GFLOP/s by threads): {peaks}; {result['mflop_per_sample']} MFLOP a sample",
        f"{'':<21}{'reads':<9}{'threads':>8}{'samples/s':>11}{'least':>9}{'most':>9}{'per CPU s':>11}{'ours is':>9}"
        f"{'of peak':>9}{'loss':>8}",
    ]
    for count in result["gemm_peak_gflops"]:
        lines += [_line(name, count, of) for name, of in result["contestants"].items()]
    return "\n".join(lines)


def _line(name: str, count: str, contestant: Result) -> str:
    run = contestant["threads"][count]
    start = f"{name:<21}{contestant['reads']:<9}{count:>8}"
    if "absent" in run:
        return f"{start}  {run['absent']}"
    warning = "  does not learn like ours" if run["learns_like_ours"] is False else ""
    return (
        f"{start}{run['samples_per_second']:>11,}{run['least']:>9,}{run['most']:>9,}"
        f"{run['samples_per_cpu_second']:>11,}{run['ours_is_times']:>8.2f}x{run['share_of_gemm_peak']:>9.0%}"
        f"{run['loss']:>8.4f}{warning}"
    )
