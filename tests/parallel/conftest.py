"""Every kind of model, trained alone and by several workers: once for all tests that look at it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from even_odd import MODELS, prepare_table, recipe_named, with_training
from processes import together
from worker_runs import Ran, in_turn, run

from recmill.dataset.table import Table
from recmill.distributed.workers import SINGLE_WORKER

STOPS = {1: 5, 2: 9, 4: 11}  # the step at which a run that goes on with more workers is interrupted


class Runs:
    """Where runs are, and what each worker says of them."""

    def __init__(self, folder: Path, table: Table) -> None:
        self.folder, self.table = folder, table
        self.found: dict[tuple[str, int], list[Ran]] = {}

    def into(self, name: str, size: int) -> Path:
        return self.folder / f"{name}-{size}"

    @property
    def moving(self) -> Path:
        """A run that goes on with 1, 2, 4 and then 1 workers."""
        return self.folder / "moving"

    def tasks(self, size: int) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
        plain = {
            name: (run, (recipe_named(name), self.table.path, self.into(name, size)), {}) for name in MODELS
        }
        if size > 1:  # the same answers with most rows on the disk
            plain["wide"][2]["table_memory"] = 1 << 16
        part = with_training(recipe_named("dynamic"), max_steps=STOPS[size])
        moving = (run, (part, self.table.path, self.moving), {"resume": size > 1})
        return [*plain.values(), moving]

    def keep(self, size: int, answers: list[list[Ran]]) -> None:
        for rank, answer in enumerate(answers):
            assert not isinstance(answer, str), f"worker {rank}: {answer}"
            assert answer is not None, f"worker {rank} gave no answer"
        for place, name in enumerate([*MODELS, "moving"]):
            self.found[name, size] = [answer[place] for answer in answers]


@pytest.fixture(scope="session")
def even_odd_table(tmp_path_factory) -> Table:
    return prepare_table(tmp_path_factory.mktemp("even-odd"))


@pytest.fixture(scope="session")
def runs(even_odd_table, tmp_path_factory) -> Runs:
    found = Runs(tmp_path_factory.mktemp("runs"), even_odd_table)
    found.keep(1, [in_turn(SINGLE_WORKER, found.tasks(1))])
    for size in (2, 4):
        found.keep(size, together(found.folder / f"answers-{size}", size, in_turn, found.tasks(size)))
    run(SINGLE_WORKER, recipe_named("dynamic"), even_odd_table.path, found.moving, resume=True)
    return found
