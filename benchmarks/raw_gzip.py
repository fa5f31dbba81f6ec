"""Training straight from gzip files with Ray's data workers, beside the same files as plain text.

    python benchmarks/raw_gzip.py [--files 20] [--rows 823000] [--data-workers 4] [--no-calm] [--data DIR]

Generates FILES files of Criteo's shape (823,000 rows are 200 MB of text), compresses them with gzip -6, and trains a
small ranker on them once: from plain files, from gzip, and from gzip while data workers are killed with SIGKILL in the
middle of files. Prints for each run: samples/s, data wait, the most memory of a data task, and whether the tables have
seen each key exactly as often as in the run from plain files. `--data DIR` keeps the files for the next time.
"""

from __future__ import annotations

import argparse
import gzip
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import ray
from chaos_train import _processes, sightings

from recmill.recipe.load import load_recipe
from recmill.stages.train.config import RayTrainConfig, TrainConfig
from recmill.stages.train.launch import launch
from recmill.stages.train.source import LogData
from recmill.synthetic.generate import generate

STORE_BYTES = 600 << 20
TASKS = ("ray::_read_slices", "ray::_call")
SET = [
    "ranking.embedding_dim=4",
    "ranking.bottom=[16, 4]",
    "ranking.top=[16]",
    "ranking.train.batch_size=8192",
    "ranking.train.epochs=1",
    "ranking.train.evaluations=1",
    "ranking.train.saving={ every_steps = 100000, keep = 1 }",
]


@dataclass
class Watch:
    """Data workers of this run: the most memory that one had, and how many were killed."""

    kills: int
    peak_bytes: int = 0
    killed: list[float] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        draw, next_kill = random.Random(1), None
        while not self.over.wait(0.02):
            tasks = [(pid, title) for pid, _, title in _processes() if title.startswith(TASKS)]
            self.peak_bytes = max([self.peak_bytes, *(_anonymous_bytes(pid) for pid, _ in tasks)])
            reading = [pid for pid, title in tasks if title.startswith(TASKS[0])]
            if reading and len(self.killed) < self.kills:
                next_kill = next_kill or time.monotonic() + 5
                if time.monotonic() > next_kill:
                    os.kill(draw.choice(reading), signal.SIGKILL)
                    self.killed.append(time.monotonic())
                    next_kill = time.monotonic() + 5


def _anonymous_bytes(pid: int) -> int:
    """Memory of a process, without the object store that it shares with others."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")]
    return int(found[0]) << 10 if found else 0


def write_files(folder: Path, num_files: int, num_rows: int) -> None:
    for number in range(num_files):
        plain, packed = folder / f"day_{number}.txt", folder / f"day_{number}.txt.gz"
        if not plain.exists():
            generate("criteo", num_rows, 100 + number, folder / "part")
            (folder / "part" / "train.txt").rename(plain)
            shutil.rmtree(folder / "part")
        if not packed.exists():
            with open(plain, "rb") as text, gzip.open(packed, "wb", 6) as into:
                shutil.copyfileobj(text, into, 1 << 20)


def train(
    name: str, files: list[str], data: Path, into: Path, data_workers: int, kills: int
) -> dict[str, dict[int, int]]:
    """One run; its counts of keys."""
    recipe = load_recipe("criteo-deeprec", [f"log.files={files}".replace("'", '"'), *SET])
    watch = Watch(kills)
    threading.Thread(target=watch.run, daemon=True).start()
    began = time.monotonic()
    (trained,) = launch(
        recipe,
        lambda note: LogData(recipe, str(data), note=note),
        into,
        TrainConfig(),
        RayTrainConfig((1, 1), data_workers=data_workers),
        note=lambda line: print(line, file=sys.stderr),
    )
    seconds, state = time.monotonic() - began, trained.state
    watch.over.set()
    print(
        f"{name:<24} {state.samples:>12,} samples  {seconds:6.0f} s, "
        f"{seconds - state.seconds:4.0f} s of them not training  "
        f"{trained.samples_per_second:>9,.0f} samples/s  data wait {trained.data_wait:4.0%}  "
        f"{watch.peak_bytes >> 20:>5} MB a task  {len(watch.killed)} killed",
        flush=True,
    )
    counts = sightings(into)
    shutil.rmtree(into)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--rows", type=int, default=823_000, help="of each file")
    parser.add_argument("--data-workers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5, help="data workers that are killed in the last run")
    parser.add_argument(
        "--no-calm", action="store_true", help="leave out the run from gzip that nothing disturbs"
    )
    parser.add_argument("--data", type=Path)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rmg", dir="/tmp"))
    data = given.data or folder / "log"
    data.mkdir(exist_ok=True)
    write_files(data, given.files, given.rows)
    os.environ.pop("RAY_ADDRESS", None)
    ray.init(
        num_cpus=1 + given.data_workers,
        object_store_memory=STORE_BYTES,
        log_to_driver=False,
        _temp_dir=str(folder / "ray"),
    )
    names = [f"day_{number}.txt" for number in range(given.files)]
    size = sum((data / name).stat().st_size for name in names)
    packed = [f"{name}.gz" for name in names]
    print(f"{given.files} files, {size >> 20:,} MB of text, {given.data_workers} data workers")
    try:
        plain = train("plain", names, data, folder / "into", given.data_workers, 0)
        counts = {
            name: train(name, packed, data, folder / "into", given.data_workers, kills)
            for name, kills in (("gzip", 0), ("gzip, tasks killed", given.kills))
            if kills or not given.no_calm
        }
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    keys, seen = sum(map(len, plain.values())), sum(sum(table.values()) for table in plain.values())
    said = ", ".join(f"{name}: {'equal' if found == plain else 'DIFFER'}" for name, found in counts.items())
    print(f"{keys:,} keys seen {seen:,} times; counts of {said}")
    return 0 if all(found == plain for found in counts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
