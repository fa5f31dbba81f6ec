"""Kills at every change of the file system: what is resumed afterwards must equal an undisturbed run, byte for byte.

    python benchmarks/chaos_prepare.py [--stages prepare,unfitted,score,train,export,run] [--points 0] [--twice]

runs each stage once to count its file-system calls (files opened for writing, renames, links, removals, directories
made and removed, fsyncs), then once for each call, with SIGKILL just before it; then it runs the stage again to its
end. `--points N` takes N calls spread evenly instead of all; with `--twice`, the second run is killed too, at a random
call. `unfitted` is prepare with features that need no fitting: it reads the log once. Prints a line for each stage:
kill points, resumed, equal, lost. Lost must be 0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from recmill.artifacts.lock import LOCK
from recmill.cli import main as recmill
from recmill.dataset.table import Table
from recmill.recipe.load import recipe_from_dict
from recmill.stages.prepare import prepare as preparation
from recmill.stages.prepare.config import PrepareConfig

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

    def __init__(self, root: Path, kill_at: int | None = None) -> None:
        self.root = str(root)
        self.kill_at = kill_at
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
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def _is_write(arguments: tuple[Any, ...]) -> bool:
    _, mode, flags = arguments
    return bool(set(mode or "") & set("wax+")) or bool((flags or 0) & WRITES)


def killed(name: str, base: Path, into: Path, at: int) -> bool:
    """Run a stage in a process of its own until the call; False when it made fewer calls and came to its end."""
    arguments = [sys.executable, __file__, "--stages", name, "--child", f"{base}", f"{into}", f"{at}"]
    code = subprocess.run(arguments, check=False, stdout=subprocess.DEVNULL).returncode
    assert code in (0, -signal.SIGKILL), f"{name} ended with {code}"
    return code != 0


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


def events_recipe(**changes: Any) -> Any:
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
            **changes,
        }
    )


def prepare_stage(log: Path, recipe: Any) -> Stage:
    options = PrepareConfig(workers=1, partitions=3, max_bad=0.01)

    def result(into: Path) -> object:
        table = Table.open(into)
        table.verify()
        read, rejected = table.manifest["rows_read"], sum(table.manifest["rows_rejected"].values())
        kept = sum(table.num_rows(split) for split in ("train", "eval", "test"))
        assert (read, rejected, kept) == (NUM_ROWS, NUM_BAD, NUM_ROWS - NUM_BAD), (read, rejected, kept)
        aside = sum(len(file.read_text().splitlines()) for file in (into / "rejected").iterdir())
        assert aside == NUM_BAD, f"{aside} rows are set aside"
        return table.digest, table.manifest["plan_digest"], names_in(into)

    return Stage(lambda into: preparation.prepare(recipe, str(log), into, options), result)


def command(*arguments: object) -> None:
    with redirect_stdout(sys.stderr):
        code = recmill([*map(str, arguments), "--quiet"])
    assert code == 0, f"recmill {arguments[0]} ended with {code}"


def score_stage(shop: Path) -> Stage:
    places = [
        "--checkpoint",
        shop / "checkpoint",
        "--table",
        shop / "table",
        "--split",
        "train",
        "--workers",
        1,
    ]

    def result(into: Path) -> object:
        manifest = json.loads((into / "manifest.json").read_text())
        written = manifest["outputs"]["scores"]["rows"]
        assert manifest["rows_read"] == written + sum(manifest["rows_rejected"].values())
        return written, digests_of(into, but="manifest.json")

    return Stage(lambda into: command("score", *places, "--into", into), result)


def train_stage(shop: Path) -> Stage:
    def work(into: Path) -> None:
        places = ["--table", shop / "table", "--into", into, "--threads", 1, "--only", "ranking"]
        command("train", "quickstart", *SMALL, *places, "--resume")

    def result(into: Path) -> object:
        steps = sorted((into / "ranking").glob("step-*"))
        assert not [step for step in steps if step.suffix], "damaged or unfinished ones are left"
        rows = {file.relative_to(into): rows_of(file) for step in steps for file in step.rglob("*.arrow")}
        dense = {step.name: (step / "dense.safetensors").read_bytes() for step in steps}
        return [step.name for step in steps], rows, dense

    return Stage(work, result)


def export_stage(shop: Path) -> Stage:
    def result(into: Path) -> object:
        version = json.loads((into / "current").read_text())["version"]
        names = sorted(path.name for path in into.iterdir() if not path.name.startswith(LOCK))
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


def rows_of(file: Path) -> list[str]:
    """The keys of an embedding table with all that belongs to them; their order means nothing."""
    return sorted(map(str, pl.read_ipc(file).rows()))


def names_in(folder: Path) -> list[str]:
    """All files but the lock that a killed process left."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(LOCK)]
    return sorted(str(path.relative_to(folder)) for path in files)


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


def chaos(name: str, base: Path, points: int, twice: bool, seed: int) -> Outcome:
    stage, folder = stage_of(name, base), base / name
    folder.mkdir()
    calls = Calls(folder)
    stage.work(folder / "reference")
    expected, outcome, draw = stage.result(folder / "reference"), Outcome(calls.count), random.Random(seed)
    step = max(1, outcome.calls // points) if points else 1
    for kill_at in range(1, outcome.calls + 1, step):
        into = folder / f"killed-at-{kill_at}"
        if not killed(name, base, into, kill_at):
            continue
        outcome.points += 1
        if twice:
            killed(name, base, into, draw.randrange(1, outcome.calls + 1))
        try:
            stage.work(into)
            outcome.resumed += 1
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


def stage_of(name: str, base: Path) -> Stage:
    if name == "prepare":
        return prepare_stage(base / "log", events_recipe())
    if name == "unfitted":
        features = [{"columns": "user", "steps": ["key"]}, {"columns": "item", "steps": ["key"]}]
        return prepare_stage(base / "log", events_recipe(features=features, table={"order": "log"}))
    if name == "run":
        return run_stage()
    return {"score": score_stage, "train": train_stage, "export": export_stage}[name](base / "shop")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stages", default="prepare")
    parser.add_argument("--points", type=int, default=0)
    parser.add_argument("--twice", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.child:
        base, into, kill_at = parsed.child
        Calls(Path(into), int(kill_at))
        stage_of(parsed.stages, Path(base)).work(Path(into))
        return 0
    base = Path(tempfile.mkdtemp(prefix="chaos-prepare-"))
    try:
        return 1 if sum(_measured(name, base, parsed) for name in parsed.stages.split(",")) else 0
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _measured(name: str, base: Path, parsed: argparse.Namespace) -> int:
    """How many kills of a stage lost something; prints what became of them."""
    if name in ("prepare", "unfitted") and not (base / "log").exists():
        write_log(base / "log")
    elif name in ("score", "train", "export") and not (base / "shop").exists():
        make_shop(base / "shop")
    started = time.monotonic()
    found = chaos(name, base, parsed.points, parsed.twice, parsed.seed)
    lost = found.points - found.equal
    print(
        f"{name}: {found.calls} calls, {found.points} kill points, {found.resumed} resumed, {found.equal} equal, "
        f"lost {lost}   {time.monotonic() - started:.0f} s",
        flush=True,
    )
    for problem in found.problems:
        print(f"  {problem}", flush=True)
    return lost


if __name__ == "__main__":
    sys.exit(main())
