"""What becomes of a training run that is disturbed. Every row must be learned exactly once, or an error says why not.

    python benchmarks/chaos_train.py [--only ray] [--runs 10] [--seed 1] [--rows 24000]
    python benchmarks/chaos_train.py --only local [--tries 10] [--fault "shard flips"]

`--only local` needs no Ray: flipped bits in a Table, in checkpoints and in unfinished work, kills before the calls
with which a checkpoint is saved, two writers, a worker that stands still, a log that loses its end (chaos_local.py).
Without it, the script starts a cluster of three nodes on this machine, trains straight from a raw log once undisturbed
(two workers, two data workers), then again and again; each time one process is killed with SIGKILL at a random moment:
a training worker, a data task, or the raylet of a node, with all that runs on it. Prints a line for each run. Counts
are how often each table has seen each key, and samples how many rows were learned: both must be exactly those of the
undisturbed run.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from chaos_local import FAULTS, run_local
from ray.cluster_utils import Cluster

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.recipe.load import load_recipe
from recmill.recipe.recipe import Recipe
from recmill.reporting.tracking import JSONL_FILE
from recmill.stages.train.config import RayTrainConfig, TrainConfig
from recmill.stages.train.launch import launch
from recmill.stages.train.source import LogData
from recmill.stages.train.train import TrainResult
from recmill.synthetic.generate import generate

KINDS = ("training worker", "data task", "raylet")
NUM_FILES = 12
STORE_BYTES = 150 << 20
SET = [
    'log.files=["train-*.txt"]',
    "ranking.embedding_dim=8",
    "ranking.bottom=[64, 8]",
    "ranking.top=[64]",
    "ranking.train.batch_size=128",
    "ranking.train.epochs=4",
    "ranking.train.evaluations=4",
    "ranking.train.saving={ every_steps = 20, full_every = 4, keep = 2 }",
]


@dataclass
class Kill:
    """What was killed, how long after training had begun, and at which step the last checkpoint was then."""

    kind: str
    after_seconds: float
    step: int = 0
    found: bool = False


@dataclass
class Run:
    trained: TrainResult
    seconds: float
    starts: int
    counts: dict[str, dict[int, int]] = field(repr=False)

    @property
    def auc(self) -> float:
        return self.trained.best.metrics["auc"]

    @property
    def samples(self) -> int:
        return self.trained.state.samples


class Stage:
    """A cluster of three nodes: the head, on which the driver is, and two that may die."""

    def __init__(self) -> None:
        self.cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": STORE_BYTES}
        )
        self.mortal: list[Any] = []
        self.complete()
        ray.init(self.cluster.address, log_to_driver=False, logging_level="error")

    def complete(self) -> None:
        """Nodes that died are replaced."""
        for node in [node for node in self.mortal if not _is_alive(_raylet_of(node))]:
            self.cluster.remove_node(node, allow_graceful=False)
            self.mortal.remove(node)
        while len(self.mortal) < 2:
            self.mortal.append(self.cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES))
        self.cluster.wait_for_nodes()

    def processes(self, title: str) -> list[int]:
        """Processes of Ray with this title, on any node of this cluster."""
        raylets = {_raylet_of(node) for node in self.cluster.list_all_nodes()}
        return [pid for pid, parent, name in _processes() if parent in raylets and title in name]

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


def _raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def _is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _processes() -> Iterator[tuple[int, int, str]]:
    """Number, parent and title of every process."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended
            continue
        yield int(folder.name), int(parent), title


def disturb(stage: Stage, kill: Kill, into: Path, over: threading.Event, draw: random.Random) -> None:
    """Wait for the moment, then kill one process of the kind."""
    while not (into / "ranking" / JSONL_FILE).exists() and not over.is_set():
        time.sleep(0.05)
    if over.wait(kill.after_seconds):
        return
    titles = {"training worker": "ray::RayTrainWorker", "data task": "ray::_read_slices"}
    while not over.is_set():
        raylets = {_raylet_of(node): node for node in stage.mortal}
        victims = list(raylets) if kill.kind == "raylet" else stage.processes(titles[kill.kind])
        if victims:
            kill.step, kill.found = _last_step(into), True
            victim = draw.choice(victims)
            os.kill(victim, signal.SIGKILL)
            if victim in raylets:  # its children end when it is really gone
                raylets[victim].all_processes["raylet"][0].process.wait()
            return
        time.sleep(0.01)


def _last_step(into: Path) -> int:
    names = (path.name for path in (into / "ranking").glob("step-*"))
    return max((int(name[5:]) for name in names if name[5:].isdigit()), default=0)


def train(stage: Stage, recipe: Recipe, log: Path, into: Path, kill: Kill | None, draw: random.Random) -> Run:
    notes: list[str] = []
    over = threading.Event()
    started = time.monotonic()
    if kill is not None:
        threading.Thread(target=disturb, args=(stage, kill, into, over, draw), daemon=True).start()
    try:
        (trained,) = launch(
            recipe,
            lambda note: LogData(recipe, str(log), note=note),
            into,
            TrainConfig(),
            RayTrainConfig((1, 2), data_workers=2),
            note=notes.append,
        )
    finally:
        over.set()
    starts = 1 + sum("started again" in note for note in notes)
    return Run(trained, time.monotonic() - started, starts, sightings(into))


def sightings(into: Path) -> dict[str, dict[int, int]]:
    """How often each table has seen each key that has a row, as of the last checkpoint."""
    checkpoints = Checkpoint.open(into).of("ranking")
    found: dict[str, dict[int, int]] = {}
    for part in checkpoints.chain(checkpoints.find("last")):
        for table in part.manifest["tables"]:
            counts = found.setdefault(table, {})
            for records in part.records(table):
                counts |= dict(zip(records.keys.tolist(), records.counts.tolist(), strict=True))
    return found


def write_log(folder: Path, num_rows: int, seed: int) -> Path:
    """One log in several files, so that there are units to deal."""
    generate("criteo", num_rows, seed, folder)
    lines = (folder / "train.txt").read_text().splitlines(keepends=True)
    (folder / "train.txt").unlink()
    for number in range(NUM_FILES):
        part = lines[number * num_rows // NUM_FILES : (number + 1) * num_rows // NUM_FILES]
        (folder / f"train-{number:02}.txt").write_text("".join(part))
    return folder


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rmc", dir="/tmp"))  # short: paths of Ray's sockets have a bound
    (folder / "ray").mkdir()
    os.environ["RAY_TMPDIR"] = str(folder)
    os.environ.pop("RAY_ADDRESS", None)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("local", "ray"), help="leave out the other part")
    parser.add_argument("--tries", type=int, default=10, help="of each local fault (default: 10)")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="local faults (default: all)")
    parser.add_argument("--runs", type=int, default=10, help="disturbed runs (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="of the data, the victims and the moments")
    parser.add_argument("--rows", type=int, default=24_000, help="rows of the log (default: 24000)")
    given = parser.parse_args()
    bad = 0
    with _folder() as folder:
        if given.only != "ray":
            (folder / "local").mkdir()
            bad += run_local(folder / "local", given.tries, given.seed, given.fault or list(FAULTS), _say)
        if given.only != "local":
            bad += _on_ray(folder, given)
    return 1 if bad else 0


def _on_ray(folder: Path, given: argparse.Namespace) -> int:
    """How many disturbed runs on Ray went wrong."""
    draw, recipe = random.Random(given.seed), load_recipe("criteo-deeprec", SET)
    log = write_log(folder / "log", given.rows, given.seed)
    stage = Stage()
    try:
        with redirect_stdout(sys.stderr):  # Ray prints there what died
            return _all_runs(stage, recipe, log, folder, given.runs, draw)
    finally:
        stage.close()


def _all_runs(
    stage: Stage, recipe: Recipe, log: Path, folder: Path, num_runs: int, draw: random.Random
) -> int:
    calm = train(stage, recipe, log, folder / "calm", None, draw)
    _say(
        f"undisturbed   {calm.samples:,} samples   AUC {calm.auc:.4f}   "
        f"{calm.seconds:.0f} s, {calm.trained.state.seconds:.0f} s of them training   "
        f"{sum(map(len, calm.counts.values())):,} keys seen {_sum(calm.counts):,} times"
    )
    _say("run  killed           after  checkpoint  starts  counts   samples  AUC     difference  seconds")
    wrong = 0
    kinds = [KINDS[number % len(KINDS)] for number in range(num_runs)]
    draw.shuffle(kinds)
    for number, kind in enumerate(kinds, start=1):
        stage.complete()
        kill = Kill(kind, draw.uniform(0, 0.9 * calm.trained.state.seconds))
        run = train(stage, recipe, log, folder / f"run-{number}", kill, draw)
        same_counts, same_samples = run.counts == calm.counts, run.samples == calm.samples
        wrong += not (same_counts and same_samples)
        _say(
            f"{number:3}  {kill.kind if kill.found else 'nothing in time':15}  {kill.after_seconds:4.1f} s  "
            f"step {kill.step:5}  {run.starts:6}  {'equal' if same_counts else 'DIFFER':7}  "
            f"{'equal' if same_samples else 'DIFFER':7}  {run.auc:.4f}  {run.auc - calm.auc:+.4f}     "
            f"{run.seconds:7.0f}"
        )
        shutil.rmtree(folder / f"run-{number}")
    _say(f"{num_runs - wrong} of {num_runs} runs learned every row exactly once")
    return wrong


def _say(line: str) -> None:
    print(line, file=sys.__stdout__, flush=True)


def _sum(counts: dict[str, dict[int, int]]) -> int:
    return sum(sum(of_table.values()) for of_table in counts.values())


if __name__ == "__main__":
    sys.exit(main())
