"""Kills at every change of the file system: what is resumed afterwards must equal an undisturbed run, byte for byte.

    python benchmarks/chaos_prepare.py [--stages prepare,score,train,export,run] [--points 0] [--twice] [--seed 1]

runs each stage once to count its file-system calls (files opened for writing, renames, links, removals, directories
made and removed, fsyncs), then once for each call, with SIGKILL just before it; then it runs the stage again to its
end. `--points N` takes N calls spread evenly instead of all; with `--twice`, the second run is killed too, at a random
call. Prints a line for each stage: kill points, resumed, equal, lost. Lost must be 0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl  # noqa: F401, imported once, before the forks
import pyarrow.parquet  # noqa: F401

from recmill import prepare as preparation
from recmill.cli import main as recmill
from recmill.logs.base import open_source  # noqa: F401
from recmill.spec.load import recipe_from_dict
from recmill.table import Table

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
NUM_ROWS, NUM_BAD = 3_000, 3
SMALL = [
    "--set=ranking.train.max_steps=8",
    "--set=retrieval.train.max_steps=4",
    "--set=ranking.train.saving={ every_steps = 3, full_every = 2, keep = 2 }",
    "--set=ranking.train.evaluations=2",
]


# killing


class Calls:
    """Counts the calls of a process that change files below a folder, and kills it before one of them."""

    def __init__(self, root: Path, kill_at: int | None, counter: mmap.mmap) -> None:
        self.root = str(root)
        self.kill_at = kill_at
        self.counter = counter
        self.count = 0
        sys.addaudithook(self._hear)
        fsync = os.fsync

        def counted(descriptor: int) -> None:
            self._add()
            fsync(descriptor)

        os.fsync = counted

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and _is_write(arguments)):
            path = arguments[0]
            if isinstance(path, (str, Path)) and str(path).startswith(self.root):
                self._add()

    def _add(self) -> None:
        self.count += 1
        self.counter[:8] = self.count.to_bytes(8, "little")
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def _is_write(arguments: tuple[Any, ...]) -> bool:
    _, mode, flags = arguments
    return bool(set(mode or "") & set("wax+")) or bool((flags or 0) & WRITES)


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (negative: the signal), and how many calls it made."""

    code: int
    calls: int


def in_a_fork(work: Callable[[], object], root: Path, kill_at: int | None = None) -> Ended:
    """Run in a process of its own, which starts at once: all is imported."""
    counter = mmap.mmap(-1, 8)
    pid = os.fork()
    if pid == 0:
        try:
            Calls(root, kill_at, counter)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Ended(code, int.from_bytes(counter[:8], "little"))


# stages


@dataclass(frozen=True)
class Stage:
    """What to run into a folder, and what tells its result from another."""

    work: Callable[[Path], object]
    result: Callable[[Path], object]


def write_log(folder: Path) -> None:
    """Events with a few bad rows among them, in three files, and a side table of items."""
    folder.mkdir()
    rows = [f"u{n % 37}\t{n * n % 101}\t{n}\t{n % 13 / 4}\t{n % 3 % 2}\n" for n in range(NUM_ROWS)]
    for number in range(NUM_BAD):
        rows[number * 911 + 7] = "u1\tnot a number\t1\t1\t1\n"
    third = NUM_ROWS // 3
    for number in range(3):
        (folder / f"events{number}.tsv").write_text("".join(rows[number * third : (number + 1) * third]))
    items = "".join(f"{item},{item / 2}\n" for item in range(101))
    (folder / "items.csv").write_text("item,weight\n" + items)


def events_recipe() -> Any:
    columns = [("user", "text"), ("item", "int"), ("time", "int"), ("price", "float"), ("click", "int")]
    return recipe_from_dict(
        {
            "name": "events",
            "log": {
                "files": ["events*.tsv"],
                "user": "user",
                "item": "item",
                "time": "time",
                "columns": [{"name": name, "type": kind} for name, kind in columns],
            },
            "tables": {
                "items": {
                    "files": ["items.csv"],
                    "separator": ",",
                    "header": True,
                    "columns": [{"name": "item", "type": "int"}, {"name": "weight", "type": "float"}],
                }
            },
            "rows": [{"join": {"table": "items", "on": "item"}}],
            "split": {"by": "tail", "held_out": 0.1},
            "labels": [{"name": "clicked", "columns": "click"}],
            "features": [
                {"columns": "user", "steps": ["vocabulary"]},
                {"columns": "item", "steps": [{"vocabulary": {"min_count": 2}}]},
                {"columns": "price", "steps": [{"fill": {"statistic": "mean"}}, "standardise"]},
                {"columns": "weight", "steps": ["standardise"]},
            ],
            "table": {"order": "shuffle"},
        }
    )


def prepare_stage(log: Path) -> Stage:
    options = preparation.Options(workers=1, partitions=3, max_bad=0.01)

    def result(into: Path) -> object:
        table = Table.open(into)
        table.verify()
        read, rejected = table.manifest["rows_read"], sum(table.manifest["rows_rejected"].values())
        kept = sum(table.num_rows(split) for split in ("train", "eval", "test"))
        assert (read, rejected, kept) == (NUM_ROWS, NUM_BAD, NUM_ROWS - NUM_BAD), (read, rejected, kept)
        aside = sum(len(file.read_text().splitlines()) for file in (into / "rejected").iterdir())
        assert aside == NUM_BAD, f"{aside} rows are set aside"
        return table.digest, table.manifest["plan_digest"], names_in(into)

    return Stage(lambda into: preparation.prepare(events_recipe(), str(log), into, options), result)


def command(*arguments: object) -> None:
    code = recmill([*map(str, arguments), "--quiet"])
    assert code == 0, f"recmill {arguments[0]} ended with {code}"


def score_stage(shop: Path) -> Stage:
    places = ["--checkpoint", shop / "checkpoint", "--data", shop / "log", "--workers", 1, "--partitions", 3]

    def result(into: Path) -> object:
        manifest = json.loads((into / "manifest.json").read_text())
        written = manifest["outputs"]["scores"]["rows"]
        assert manifest["rows_read"] == written + sum(manifest["rows_rejected"].values())
        return written, digests_of(into, but="manifest.json")

    return Stage(lambda into: command("score", "quickstart", *places, "--into", into), result)


def train_stage(shop: Path) -> Stage:
    def work(into: Path) -> None:
        places = ["--table", shop / "table", "--into", into, "--threads", 1, "--only", "ranking"]
        command("train", "quickstart", *SMALL, *places, "--resume")

    def result(into: Path) -> object:
        steps = sorted(path.name for path in (into / "ranking").glob("step-*"))
        return [(step, digests_of(into / "ranking" / step, but="manifest.json")) for step in steps]

    return Stage(work, result)


def export_stage(shop: Path) -> Stage:
    def result(into: Path) -> object:
        version = json.loads((into / "current").read_text())["version"]
        names = sorted(path.name for path in into.iterdir())
        return names, digests_of(into / version, but="manifest.json")

    places = ["--checkpoint", shop / "checkpoint", "--data", shop / "log"]
    return Stage(lambda into: command("export", *places, "--into", into), result)


def run_stage() -> Stage:
    def result(into: Path) -> object:
        table = Table.open(into / "table")
        table.verify()
        version = json.loads((into / "bundle" / "current").read_text())["version"]
        return table.digest, digests_of(into / "bundle" / version / "items", but="")

    return Stage(lambda into: command("run", "quickstart", "--rows", 2000, *SMALL, "--into", into), result)


def make_shop(shop: Path) -> None:
    command("generate", "shop", "--rows", 2000, "--into", shop / "log")
    command("prepare", "quickstart", "--data", shop / "log", "--into", shop / "table", *SMALL)
    places = ["--table", shop / "table", "--into", shop / "checkpoint", "--threads", 1]
    command("train", "quickstart", *SMALL, *places)


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def digests_of(folder: Path, but: str) -> dict[str, str]:
    names = [name for name in names_in(folder) if not but or not name.endswith(but)]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


# the loop


@dataclass
class Outcome:
    """What became of the kills of a stage."""

    calls: int
    points: int = 0
    resumed: int = 0
    equal: int = 0
    problems: list[str] = field(default_factory=list)


def chaos(stage: Stage, folder: Path, points: int, twice: bool, seed: int) -> Outcome:
    reference = folder / "reference"
    ended = in_a_fork(lambda: stage.work(reference), folder)
    assert ended.code == 0, "the undisturbed run failed"
    expected = stage.result(reference)
    outcome, random_point = Outcome(ended.calls), random.Random(seed)
    step = max(1, ended.calls // points) if points else 1
    for kill_at in range(1, ended.calls + 1, step):
        into = folder / "killed" / f"at-{kill_at}"
        into.parent.mkdir(exist_ok=True)
        if in_a_fork(lambda into=into: stage.work(into), folder, kill_at).code != -signal.SIGKILL:
            continue  # it made fewer calls this time
        outcome.points += 1
        if twice:
            again = random_point.randrange(1, ended.calls + 1)
            in_a_fork(lambda into=into: stage.work(into), folder, again)
        if in_a_fork(lambda into=into: stage.work(into), folder).code != 0:
            outcome.problems.append(f"call {kill_at}: cannot be resumed")
            continue
        outcome.resumed += 1
        try:
            found = stage.result(into)
        except Exception as error:
            outcome.problems.append(f"call {kill_at}: {type(error).__name__} {error}")
            continue
        if found == expected:
            outcome.equal += 1
            shutil.rmtree(into)
        else:
            outcome.problems.append(f"call {kill_at}: another result")
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stages", default="prepare")
    parser.add_argument("--points", type=int, default=0)
    parser.add_argument("--twice", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parsed = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-prepare-"))
    lost = 0
    try:
        write_log(folder / "log")
        names = parsed.stages.split(",")
        if set(names) & {"score", "train", "export"}:
            assert in_a_fork(lambda: make_shop(folder / "shop"), folder).code == 0
        stages: dict[str, Callable[[], Stage]] = {
            "prepare": lambda: prepare_stage(folder / "log"),
            "score": lambda: score_stage(folder / "shop"),
            "train": lambda: train_stage(folder / "shop"),
            "export": lambda: export_stage(folder / "shop"),
            "run": run_stage,
        }
        for name in names:
            (folder / name).mkdir()
            started = time.monotonic()
            found = chaos(stages[name](), folder / name, parsed.points, parsed.twice, parsed.seed)
            lost += found.points - found.equal
            print(
                f"{name}: {found.calls} calls, {found.points} kill points, {found.resumed} resumed, "
                f"{found.equal} equal, lost {found.points - found.equal}   {time.monotonic() - started:.0f} s",
                flush=True,
            )
            for problem in found.problems:
                print(f"  {problem}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
