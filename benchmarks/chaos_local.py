"""Faults of one machine that training must survive or notice, without Ray. See chaos_train.py --only local.

Each try of a fault ends in one of: equal (the result is that of the undisturbed run, bit for bit), noticed (one clear
error), lost (the run cannot be resumed) or wrong (a traceback, or another result without an error). `happened` counts
the tries in which the fault came in time.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.dataset.table import Table
from recmill.errors import RecmillError
from recmill.recipe.load import load_recipe
from recmill.recipe.recipe import Recipe
from recmill.stages.prepare.prepare import prepare
from recmill.stages.train.config import TrainConfig
from recmill.stages.train.source import TableData
from recmill.stages.train.train import TrainContext, train
from recmill.stages.train.trainer import TrainProgress
from recmill.synthetic.generate import generate

FAULTS = (
    "shard flips",
    "checkpoint flips",
    "work flips",
    "kills while saving",
    "two writers",
    "SIGSTOP",
    "truncated log",
)
SET = [
    "ranking.embedding_dim=8",
    "ranking.bottom=[16, 8]",
    "ranking.top=[16]",
    "ranking.train.batch_size=128",
    "ranking.train.epochs=1",
    "ranking.train.evaluations=2",
    "ranking.train.saving={ every_steps = 4, full_every = 3, keep = 3 }",
]
NUM_ROWS = 4_000
_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}
_SECONDS_STOPPED = 3.0


class _Stopped(Exception):
    """A run that was interrupted."""


class Local:
    """A small log and Table, and what training makes of them when nothing happens."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.draw = random.Random(seed)
        self.recipe: Recipe = load_recipe("criteo-deeprec", SET)
        generate("criteo", NUM_ROWS, seed, folder / "log")
        prepare(self.recipe, str(folder / "log"), folder / "table")
        self.half = folder / "half"
        with suppress(_Stopped):
            self.train(folder / "table", self.half, stop_at=14)
        self.train(folder / "table", folder / "calm")
        self.calm = result_of(folder / "calm")
        self.unfinished = folder / "unfinished"
        with suppress(_Stopped), patch("recmill.stages.prepare.prepare._publish", side_effect=_Stopped):
            prepare(self.recipe, str(folder / "log"), self.unfinished)

    def train(self, table: Path, into: Path, stop_at: int | None = None) -> None:
        def on_step(model: str, progress: TrainProgress) -> None:
            if progress.step == stop_at:
                raise _Stopped

        config, context = TrainConfig(threads=1, resume=True), TrainContext(on_step=on_step)
        train(self.recipe, TableData(Table.open(table)), into, config, context=context)

    def outcome(self, work: Callable[[], object], into: Path) -> str:
        """How a run in this process ended."""
        try:
            work()
        except RecmillError:
            return "noticed"
        except Exception as error:
            print(f"  {type(error).__name__}: {error}", file=sys.stderr)
            return "wrong"
        return "equal" if result_of(into) == self.calm else "wrong"

    def command(self, into: Path, *flags: str) -> list[str]:
        source = [] if "--from-log" in flags else ["--table", str(self.folder / "table")]
        sets = [part for value in SET for part in ("--set", value)]
        ours = ["train", "criteo-deeprec", *source, "--into", str(into), "--threads", "1", "--quiet"]
        return [*ours, *sets, *flags]

    def start(self, into: Path, *flags: str, kill_at: int | None = None) -> subprocess.Popen[str]:
        python = [sys.executable, "-m", "recmill"]
        if kill_at is not None:
            python = [sys.executable, __file__, str(into), str(kill_at)]
        return subprocess.Popen(
            [*python, *self.command(into, *flags)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ended(self, process: subprocess.Popen[str], into: Path) -> str:
        """How a run in a process of its own ended."""
        _, said = process.communicate(timeout=600)
        if process.returncode == 0:
            return "equal" if result_of(into) == self.calm else "wrong"
        if process.returncode == 1 and said.startswith("recmill: ") and "Traceback" not in said:
            return "noticed"
        print(said, file=sys.stderr)
        return "wrong"

    # faults: each returns whether it happened, and how the try ended

    def shard_flips(self, into: Path) -> tuple[bool, str]:
        table = into.with_name(into.name + "-table")
        shutil.copytree(self.folder / "table", table)
        self._flip(table)
        return True, self.outcome(lambda: self.train(table, into), into)

    def checkpoint_flips(self, into: Path) -> tuple[bool, str]:
        shutil.copytree(self.half, into)
        self._flip(into)
        return True, self.outcome(lambda: self.train(self.folder / "table", into), into)

    def work_flips(self, into: Path) -> tuple[bool, str]:
        """What prepare left when it was killed before it published."""
        shutil.copytree(self.unfinished, into)
        self._flip(into)
        try:
            table = prepare(self.recipe, str(self.folder / "log"), into).table
            table.verify()
        except RecmillError as error:
            print(f"  {error}", file=sys.stderr)
            return True, "lost"
        except Exception as error:
            print(f"  {type(error).__name__}: {error}", file=sys.stderr)
            return True, "wrong"
        return True, "equal" if table.digest == Table.open(self.folder / "table").digest else "wrong"

    def _flip(self, folder: Path) -> None:
        """One bit of a file, each file alike."""
        path = self.draw.choice(
            sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
        )
        content = bytearray(path.read_bytes())
        content[self.draw.randrange(len(content))] ^= 1 << self.draw.randrange(8)
        path.write_bytes(bytes(content))

    def kills_while_saving(self, into: Path) -> tuple[bool, str]:
        """SIGKILL before a call that changes files, then once more before another, then to the end."""
        killed = 0
        for _ in range(2):
            process = self.start(into, "--resume", kill_at=self.draw.randrange(1, 160))
            process.communicate(timeout=600)
            killed += process.returncode == -signal.SIGKILL
        end = self.ended(self.start(into, "--resume"), into)
        return bool(killed), "lost" if end == "noticed" else end

    def two_writers(self, into: Path) -> tuple[bool, str]:
        shutil.copytree(self.half, into)
        both = [self.start(into, "--resume") for _ in range(2)]
        ends = sorted(self.ended(process, into) for process in both)
        return ends == ["equal", "noticed"], "wrong" if "wrong" in ends else ends[0]

    def sigstop(self, into: Path) -> tuple[bool, str]:
        """One of two workers stands still for some seconds."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        process = subprocess.Popen(
            [*torchrun, "-m", "recmill", *self.command(into)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        _wait(lambda: _steps(into) or process.poll() is not None)
        workers = [pid for pid, parent in _parents() if parent == process.pid]
        is_running = bool(workers) and process.poll() is None
        if is_running:
            victim = self.draw.choice(workers)
            os.kill(victim, signal.SIGSTOP)
            time.sleep(_SECONDS_STOPPED)
            os.kill(victim, signal.SIGCONT)
        process.communicate(timeout=600)
        # Two workers round in another order than one: rows are counted.
        is_right = process.returncode == 0 and result_of(into)["samples"] == self.calm["samples"]
        return is_running, "equal" if is_right else "wrong"

    def truncated_log(self, into: Path) -> tuple[bool, str]:
        """The log loses its end at a random moment of training straight from it."""
        log = into.with_name(into.name + "-log")
        shutil.copytree(self.folder / "log", log)
        process = self.start(into, "--from-log", str(log), "--set", "ranking.train.epochs=3")
        _wait(lambda: _steps(into) or process.poll() is not None)
        time.sleep(self.draw.uniform(0, 0.5))
        happened = process.poll() is None
        with open(log / "train.txt", "r+b") as file:
            file.truncate(self.draw.randrange(file.seek(0, 2)))
        _, said = process.communicate(timeout=600)
        if process.returncode == 0:
            all_rows = 3 * self.calm["samples"]
            return happened, "equal" if result_of(into)["samples"] == all_rows else "wrong"
        return happened, "noticed" if "Traceback" not in said else "wrong"


def result_of(into: Path) -> dict[str, Any]:
    """What was learned as of the last checkpoint: rows, dense weights and all keys."""
    checkpoints = Checkpoint.open(into).of("ranking")
    last = checkpoints.find("last")
    keys: dict[str, dict[int, bytes]] = {}
    for part in checkpoints.chain(last):
        removed = part.admission()
        for table in part.manifest["tables"]:
            rows = keys.setdefault(table, {})
            for key in removed[f"{table}.removed"].tolist():
                rows.pop(key, None)
            for records in part.records(table):
                rows |= dict(zip(records.keys.tolist(), map(bytes, records.rows), strict=True))
    dense = {name: array.tobytes() for name, array in last.arrays().items()}
    return {"step": last.step, "samples": last.state["samples"], "dense": dense, "keys": keys}


def _steps(into: Path) -> int:
    return len(list((into / "ranking").glob("step-*")))


def _wait(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 300
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def _parents() -> list[tuple[int, int]]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found.append((int(folder.name), int((folder / "stat").read_text().rpartition(")")[2].split()[1])))
        except OSError:  # it has just ended
            continue
    return found


def run_local(folder: Path, tries: int, seed: int, only: list[str], say: Callable[[str], None]) -> int:
    """Try every fault; how many tries were lost or wrong."""
    local = Local(folder, seed)
    say(f"undisturbed   {local.calm['samples']:,} samples, {local.calm['step']} steps")
    say(
        f"{'fault':20}{'tries':>7}{'happened':>9}{'equal':>7}{'noticed':>9}{'lost':>6}{'wrong':>7}{'seconds':>9}"
    )
    bad = 0
    for fault in only:
        method = getattr(local, fault.lower().replace(" ", "_"))
        ends, happened, began = Counter[str](), 0, time.monotonic()
        for number in range(tries):
            into = folder / f"{fault.replace(' ', '-')}-{number}"
            did_happen, end = method(into)
            ends[end] += 1
            happened += did_happen
            for path in folder.glob(into.name + "*"):
                shutil.rmtree(path)
        bad += ends["lost"] + ends["wrong"]
        say(
            f"{fault:20}{tries:>7}{happened:>9}{ends['equal']:>7}{ends['noticed']:>9}{ends['lost']:>6}"
            f"{ends['wrong']:>7}{time.monotonic() - began:>9.0f}"
        )
    return bad


def _die_at(root: str, kill_at: int) -> None:
    """SIGKILL this process before a call that changes files below a folder, fsyncs among them."""
    count = 0

    def add() -> None:
        nonlocal count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        is_write = event == "open" and bool(set(str(arguments[1] or "")) & set("wax+"))
        if (event in _CHANGES or is_write) and str(arguments[0]).startswith(root):
            add()

    fsync = os.fsync

    def counted(descriptor: int) -> None:
        add()
        fsync(descriptor)

    os.fsync = counted
    sys.addaudithook(hear)


if __name__ == "__main__":  # a run that kills itself: folder, number of the call, arguments of recmill
    from recmill.cli import main

    _die_at(sys.argv[1], int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
