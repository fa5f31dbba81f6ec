"""When a worker fails or dies the others say so, soon; what was saved stays whole."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from even_odd import recipe_named, with_training
from processes import together
from worker_runs import in_turn, run

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.dataset.table import Table
from recmill.distributed.parallel import distribute
from recmill.distributed.workers import SINGLE_WORKER, Workers
from recmill.errors import RecmillError
from recmill.learner.saved import new_learner
from recmill.recipe.recipe import Recipe, Saving
from recmill.stages.train.config import TrainConfig
from recmill.stages.train.source import TableData
from recmill.stages.train.train import TrainContext, train
from recmill.stages.train.trainer import TrainProgress

pytestmark = pytest.mark.processes


def fails_at(
    workers: Workers, recipe: Recipe, table: Path, into: Path, rank: int, step: int, how: str
) -> Any:
    """Train; one worker comes to grief at a step. The others: how long until they noticed, and what they say."""
    source = TableData(Table.open(table))
    reached = [0.0]
    read = source.batches

    def watched(learner: Any) -> Any:
        batches = read(learner)
        inner = batches.read

        def rows(cursor: Any) -> Any:
            for number, item in enumerate(inner(cursor)):
                if number == step:
                    reached[0] = time.monotonic()
                    if workers.rank == rank:
                        come_to_grief(how)
                yield item

        batches.read = rows
        return batches

    source.batches = watched  # type: ignore[method-assign]
    try:
        train(recipe, source, into, TrainConfig(threads=1), context=TrainContext(workers))
    except RecmillError as error:
        return time.monotonic() - reached[0], type(error).__name__, str(error)
    except RuntimeError as error:
        return 0.0, type(error).__name__, str(error)
    return None


def come_to_grief(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("the cat sat on the keyboard")


def often_saved() -> Recipe:
    return with_training(recipe_named("dynamic"), saving=Saving(every_steps=2))


def test_a_worker_that_fails_is_named_by_the_others(even_odd_table, tmp_path):
    arguments = (often_saved(), even_odd_table.path, tmp_path / "into", 1, 7, "raise")
    answers = together(tmp_path / "answers", 3, fails_at, *arguments)
    assert answers[1][1:] == ("RuntimeError", "the cat sat on the keyboard")
    for seconds, kind, message in (answers[0], answers[2]):
        assert kind == "WorkerLost"
        assert message == "Worker 1 of 3 failed: RuntimeError: the cat sat on the keyboard"
        assert seconds < 90


def test_a_killed_worker_is_named_and_the_run_goes_on_without_it(even_odd_table, tmp_path):
    into = tmp_path / "into"
    arguments = (often_saved(), even_odd_table.path, into, 2, 7, "kill")
    answers = together(tmp_path / "answers", 3, fails_at, *arguments)
    assert answers[2] is None
    for seconds, kind, message in answers[:2]:
        assert kind == "WorkerLost"
        assert "Worker 2 of 3 is gone" in message
        assert seconds < 90
    saved = Checkpoint.open(into).of("ranking").all()
    assert saved
    assert saved[-1].step <= 7
    for checkpoint in saved:
        checkpoint.verify()
    ended = run(SINGLE_WORKER, often_saved(), even_odd_table.path, into, resume=True)
    straight = run(SINGLE_WORKER, often_saved(), even_odd_table.path, tmp_path / "straight")
    assert ended.state.samples == straight.state.samples
    assert ended.metrics["auc"] == pytest.approx(straight.metrics["auc"], abs=2e-3)
    assert not list(into.rglob("*.partial"))


def refused(workers: Workers, table: Path, into: Path) -> list[str]:
    """Errors that all workers must have alike."""
    columns, found = Table.open(table).columns, []
    recipe = recipe_named("fixed")
    found.append(
        message_of(lambda: distribute(new_learner(recipe, "ranking", columns, 1), workers, wire="float8"))
    )
    source = TableData(Table.open(table))
    short, context = with_training(recipe, max_steps=1), TrainContext(workers)
    found.append(message_of(lambda: train(short, source, into, TrainConfig(threads=1), context=context)))
    return found


def message_of(function: Any) -> str:
    try:
        function()
    except RecmillError as error:
        return str(error)
    return "no error"


def slow_clock(workers: Workers, table: Path, into: Path) -> tuple[str | None, int]:
    """Only the first worker's clock says that time is up."""
    recipe = with_training(
        recipe_named("fixed"), epochs=500.0, max_minutes=0.02 if workers.is_first else 1000.0
    )
    steps = [0]

    def count(model: str, progress: TrainProgress) -> None:
        steps[0] = progress.step

    context = TrainContext(workers, on_step=count)
    (trained,) = train(recipe, TableData(Table.open(table)), into, TrainConfig(threads=1), context=context)
    return trained.state.stopped_by, trained.best.step


@pytest.fixture(scope="module")
def answers(even_odd_table, tmp_path_factory) -> list[Any]:
    folder = tmp_path_factory.mktemp("answers")
    table, there = even_odd_table.path, folder / "there"
    run(SINGLE_WORKER, with_training(recipe_named("fixed"), max_steps=1), table, there)
    tasks = [(slow_clock, (table, folder / "into"), {}), (refused, (table, there), {})]
    return together(folder / "answers", 2, in_turn, tasks)


def test_the_first_workers_clock_ends_the_run_of_all(answers):
    (first, _), (second, _) = answers
    assert first == second
    assert first[0] == "minutes"


def test_what_several_workers_cannot_do_is_said_by_all_of_them(answers):
    (_, first), (_, second) = answers
    assert first == second
    wire, there = first
    assert wire == 'Rows cannot be sent as "float8"; known: float32, float16, bfloat16.'
    assert there.endswith(
        "holds checkpoints already. Add --resume to go on with them, or choose another --into."
    )
