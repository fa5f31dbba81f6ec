"""`recmill train`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import (
    UsageError,
    add_command,
    add_output_options,
    add_recipe,
    load,
    share,
    silent,
)
from recmill.cli.follow import add_follow_options, check_follow_flags, follow
from recmill.cli.train_options import (
    add_train_options,
    note,
    say_trained,
    set_wait_policy,
    train_options,
    trained_json,
)
from recmill.cli.workers import (
    add_worker_options,
    check_worker_flags,
    explain_placement,
    is_one_of_several,
    train_on_ray,
)

if TYPE_CHECKING:
    from recmill.distributed.workers import Workers
    from recmill.recipe.recipe import Recipe
    from recmill.stages.train.launch import MakeSource
    from recmill.stages.train.source import TrainingData
    from recmill.stages.train.train import TrainResult


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "train",
        _train,
        "train a recipe's models: a Table or a raw log in, checkpoints out",
        """
recmill train quickstart --table runs/quickstart/table --into runs/quickstart/checkpoint
recmill train criteo-dlrm --table runs/criteo/table --into runs/criteo/checkpoint --resume
recmill train criteo-deeprec --from-log /data/criteo --into runs/deeprec   features on the fly, no Table
recmill train criteo-dlrm --from-log /data/new --plan runs/criteo/table --into runs/new
recmill train mine.toml --table t --into c --set ranking.train.max_minutes=10 --track tensorboard
recmill train criteo-dlrm --table t --into c --engine ray --workers 4 --address auto
recmill train criteo-deeprec --from-log /data/criteo --into c --engine ray --workers 2..4 --data-workers 8
torchrun --nproc-per-node 2 -m recmill train criteo-dlrm --table t --into c
recmill train quickstart --follow /data/shop --publish runs/quickstart/bundle --into runs/quickstart/checkpoint
""",
    )
    add_recipe(parser)
    rows = parser.add_mutually_exclusive_group(required=True)
    rows.add_argument("--table", metavar="DIR", help="the Table to learn from")
    rows.add_argument("--from-log", metavar="DIR", help="learn straight from a raw log's directory or URL")
    rows.add_argument(
        "--follow",
        metavar="DIR",
        help="go on learning from a log that is still written; needs --publish, and checkpoints in --into",
    )
    parser.add_argument(
        "--while-prepared", action="store_true", help="with --table: begin while it is still written"
    )
    add_follow_options(parser)
    parser.add_argument(
        "--plan", metavar="DIR", help="with --from-log: the Table or checkpoint whose fitted features to use"
    )
    parser.add_argument(
        "--max-bad",
        type=share,
        metavar="SHARE",
        help="with --from-log: share of bad rows that is an error (default: 0.1%%)",
    )
    parser.add_argument("--into", required=True, metavar="DIR", help="where checkpoints land")
    add_train_options(parser)
    add_worker_options(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the last good checkpoint in --into")
    add_output_options(parser)


def _train(parsed: argparse.Namespace) -> None:
    check_follow_flags(parsed)
    check_worker_flags(parsed)
    if parsed.follow:
        follow(parsed)
        return
    for flag in ("plan", "max_bad"):
        if getattr(parsed, flag) is not None and not parsed.from_log:
            raise UsageError(
                f"--{flag.replace('_', '-')} is for --from-log; a Table is prepared already. Remove it."
            )
    recipe = load(parsed)
    set_wait_policy(parsed)
    make_source = _make_source(parsed, recipe)
    trained: list[TrainResult] | None
    if parsed.engine == "ray":
        trained = train_on_ray(parsed, recipe, make_source)
    elif is_one_of_several():
        trained = _train_with_others(parsed, recipe, make_source)
    else:
        trained = _train_here(parsed, recipe, make_source)
    if trained and parsed.json:
        print(json.dumps({"checkpoint": parsed.into, "models": [trained_json(model) for model in trained]}))
    elif trained and parsed.table:
        print(f"next   recmill evaluate {parsed.recipe} --checkpoint {parsed.into} --table {parsed.table}")


def _make_source(parsed: argparse.Namespace, recipe: Recipe) -> MakeSource:
    """How any process, here or on another node, opens the rows."""
    from functools import partial

    from recmill.logs.tally import DEFAULT_MAX_BAD

    if parsed.table and parsed.while_prepared:
        from recmill.stages.train.partial_table import open_growing

        return partial(open_growing, os.path.abspath(parsed.table), None)
    if parsed.table:
        return partial(_table_source, os.path.abspath(parsed.table))
    plan = os.path.abspath(parsed.plan) if parsed.plan else None
    data = parsed.from_log if "://" in parsed.from_log else os.path.abspath(parsed.from_log)
    return partial(
        _log_source, recipe, data, plan, DEFAULT_MAX_BAD if parsed.max_bad is None else parsed.max_bad
    )


def _table_source(path: str, note: Callable[[str], None]) -> TrainingData:
    from recmill.dataset.table import Table
    from recmill.stages.train.source import TableData

    return TableData(Table.open(path))


def _log_source(
    recipe: Recipe, data: str, plan: str | None, max_bad: float, note: Callable[[str], None]
) -> TrainingData:
    from pathlib import Path

    from recmill.stages.train.source import LogData

    return LogData(recipe, data, Path(plan) if plan else None, max_bad, note)


def _train_here(
    parsed: argparse.Namespace, recipe: Recipe, make_source: MakeSource, workers: Workers | None = None
) -> list[TrainResult]:
    from dataclasses import replace
    from pathlib import Path

    from recmill.distributed.workers import SINGLE_WORKER
    from recmill.reporting.progress import Progress
    from recmill.stages.train.train import train

    workers = workers or SINGLE_WORKER
    source = make_source(note if workers.is_first else silent)
    say = silent if parsed.json or not workers.is_first else print
    if parsed.explain_placement:
        explain_placement(parsed, recipe, source, workers.size, say)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return train(
        recipe,
        source,
        Path(parsed.into),
        replace(train_options(parsed, parsed.resume or restarted), workers=workers),
        Progress(parsed.quiet or not workers.is_first),
        lambda model: say_trained(model, say),
    )


def _train_with_others(
    parsed: argparse.Namespace, recipe: Recipe, make_source: MakeSource
) -> list[TrainResult] | None:
    """One of the processes that torchrun started; what there is to say, the first one says."""
    from recmill.distributed.workers import from_environment
    from recmill.errors import RecmillError

    workers = from_environment()
    try:
        trained = _train_here(parsed, recipe, make_source, workers)
        return trained if workers.is_first else None
    except RecmillError as error:
        if workers.is_first:
            raise
        sys.exit(error.exit_code)
    finally:
        workers.close()
