"""One trial: a model is trained, in a process of its own, and tells its numbers at every evaluation.

The conversation is in JSON lines. In comes what to train, then yes or no after each evaluation; out come evaluations
and how it ended. When whoever asked is gone, the process ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from recmill.dataset.table import Table
from recmill.distributed.workers import SINGLE_WORKER
from recmill.errors import RecmillError
from recmill.learner.base import Learner
from recmill.learner.saved import new_learner
from recmill.recipe.defaults import as_prepared, resolve
from recmill.recipe.load import recipe_from_dict
from recmill.recipe.recipe import Recipe
from recmill.recipe.tuning import quality_of
from recmill.stages.train.source import TableData, fit_ranker_trees
from recmill.stages.train.threads import choose_threads, keep_freed_memory
from recmill.stages.train.trainer import Trainer, TrainProgress

Numbers = dict[str, float]
Hear = Callable[[Numbers], bool]


class Stopped(Exception):
    """Whoever listens has heard enough."""


def run_trial(recipe: Recipe, model: str, table: Path, num_threads: int, hear: Hear) -> Numbers:
    """Train and give the numbers of the best evaluation, with what the whole run cost.

    `hear` gets the numbers of each evaluation; when it says no, Stopped is raised.
    """
    source = TableData(Table.open(table))
    recipe = as_prepared(recipe, source.plan.recipe)
    source.check(recipe)
    choose_threads(num_threads)
    keep_freed_memory()
    learner = new_learner(resolve(recipe, source.num_rows("train")), model, source.columns, num_threads)
    fit_ranker_trees(source, learner, SINGLE_WORKER, lambda done: None)
    evaluate = source.evaluation(learner)
    if evaluate is None:
        raise RecmillError(f"Table {table} has no eval rows, so no trial can be measured. Add a [split].")
    quality = quality_of(model, recipe.ranking)
    trainer = Trainer(learner, source.batches(learner), quality, evaluate)

    def report(progress: TrainProgress) -> None:
        if progress.metrics:
            share = progress.step / progress.total_steps
            go_on = hear(
                {**progress.metrics, **_costs(trainer, learner), "step": progress.step, "share": share}
            )
            if not go_on:
                raise Stopped

    trainer.report = report
    trainer.train()
    best = max(trainer.state.evaluations, key=lambda found: found[quality])
    return {**best, **_costs(trainer, learner)}


def _costs(trainer: Trainer, learner: Learner) -> Numbers:
    """What the run took so far, and what its model takes: weights, and bytes of them with the optimizer's rows."""
    tables = [(table.spec.dim, table.statistics()) for table in learner.tables.values()]
    num_weights = sum(weights.numel() for weights in learner.parameters)
    return {
        "samples": trainer.state.samples,
        "seconds": trainer.state.seconds_training,
        "parameters": num_weights + sum(dim * found.keys for dim, found in tables),
        "bytes": 4 * num_weights + sum(found.record_bytes + found.index_bytes for _, found in tables),
    }


def reason_of(error: BaseException) -> str:
    """Why a trial failed, in one line."""
    if isinstance(error, RecmillError):
        return str(error)
    if isinstance(error, MemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {error}"


def main() -> None:
    """Be the process of one trial."""
    answers: SimpleQueue[bool] = SimpleQueue()
    request: Mapping[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_listen, args=(answers,), daemon=True).start()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no part of the conversation

    def say(message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=out, flush=True)

    def hear(numbers: Numbers) -> bool:
        say({"evaluation": numbers})
        return answers.get()

    try:
        recipe = recipe_from_dict(request["recipe"])
        found = run_trial(recipe, request["model"], Path(request["table"]), request["threads"], hear)
        say({"found": found})
    except Stopped:
        say({"stopped": True})
    except Exception as error:
        say({"failed": reason_of(error)})
    os._exit(0)  # nothing is left to do, and threads that still read need not be waited for


def _listen(answers: SimpleQueue[bool]) -> None:
    for line in sys.stdin:
        answers.put(json.loads(line))
    os._exit(1)
