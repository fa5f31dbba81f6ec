"""A small shop, taken through every stage once for all tests, by whichever process asks first."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.cli import main

ROWS = 5_000
FEW_STEPS = ["--set", "ranking.train.max_steps=20", "--set", "retrieval.train.max_steps=6"]


@dataclass(frozen=True)
class Stages:
    """What the commands left behind. Tests must not change it."""

    path: Path

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def table(self) -> Path:
        return self.path / "table"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    @property
    def bundles(self) -> Path:
        return self.path / "bundles"


class Shop(Stages):
    @property
    def folder(self) -> Checkpoint:
        return Checkpoint.open(self.checkpoint)


def make_shop(path: Path) -> Shop:
    """Take the quickstart recipe through its stages; they are kept from one call to the next."""
    shop = Shop(path)
    _once(shop.log, lambda: run_quietly("generate", "shop", "--rows", ROWS, "--into", shop.log))
    run_quietly("prepare", "quickstart", "--data", shop.log, "--into", shop.table)
    trained = ["--table", shop.table, "--into", shop.checkpoint, *FEW_STEPS, "--threads", 1]
    _once(shop.checkpoint, lambda: run_quietly("train", "quickstart", *trained))
    measured = ["--checkpoint", shop.checkpoint, "--table", shop.table, "--threads", 1]
    _once(shop.bundles, lambda: run_quietly("evaluate", "quickstart", *measured))
    run_quietly("export", "--checkpoint", shop.checkpoint, "--into", shop.bundles)
    return shop


def shared_shop(folder: Path) -> Shop:
    """The shop of all test processes; one makes it while the others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder / "made"
        if not made.exists():
            make_shop(folder)
            made.touch()
    return Shop(folder)


def _once(path: Path, work: Callable[[], None]) -> None:
    if not path.exists():
        work()


def run_quietly(*arguments: object) -> None:
    assert main([*map(str, arguments), "--quiet"]) == 0
