"""`recmill run`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import (
    UsageError,
    add_command,
    add_max_bad,
    add_output_options,
    add_recipe,
    add_spark_conf,
    load,
    positive,
    prepare_options,
    silent,
    size,
)
from recmill.cli.evaluate import say_evaluated
from recmill.cli.export import exported_json, say_exported
from recmill.cli.generate import say_generated
from recmill.cli.prepare import say_prepared
from recmill.cli.train_options import (
    add_train_options,
    say_trained,
    set_wait_policy,
    train_options,
    trained_json,
)
from recmill.cli.workers import worker_range

if TYPE_CHECKING:
    from recmill.stages.train.launch import WorkerRange


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "run",
        _run,
        "run a recipe's whole chain; what is done already is not done again",
        """
recmill run quickstart                             generate a shop's log and take it through every stage
recmill run movielens --data ml-1m --into runs/ml  your own files
recmill run criteo-dlrm --data /data/criteo --gate "auc>=0.79"
recmill run criteo-dlrm --data /data/criteo --into /shared/run --prepare-engine spark --train-engine ray --workers 4
                                                   Spark prepares while Ray trains
""",
    )
    add_recipe(parser)
    parser.add_argument("--data", metavar="DIR", help="the log's directory or URL (default: generate one)")
    parser.add_argument("--into", metavar="DIR", help="where stages land (default: runs/<recipe>)")
    parser.add_argument("--rows", type=positive, metavar="N", help="rows to generate (default: 100000)")
    parser.add_argument(
        "--gate", metavar="CONDITIONS", help="exit with 1 unless the models meet them; see evaluate"
    )
    add_train_options(parser)
    _add_engine_options(parser)
    add_max_bad(parser)
    add_output_options(parser)


def _add_engine_options(parser: Any) -> None:
    """Where stages run. Those of prepare are stored as `recmill prepare` stores its own."""
    parser.add_argument(
        "--prepare-engine",
        choices=["local", "ray", "spark"],
        default="local",
        dest="engine",
        help="where to prepare (default: local, threads of this process)",
    )
    parser.add_argument(
        "--prepare-address",
        metavar="URL",
        dest="address",
        help="the cluster that prepares; see prepare --address",
    )
    parser.add_argument(
        "--prepare-workers",
        type=positive,
        metavar="N",
        dest="workers",
        help="threads, or tasks of a cluster at once, that prepare (default: all cores)",
    )
    parser.add_argument(
        "--memory",
        type=size,
        default="2GB",
        metavar="SIZE",
        help="memory bound of prepare, such as 1GB (default: 2GB)",
    )
    add_spark_conf(parser)
    parser.add_argument(
        "--train-engine",
        choices=["local", "ray"],
        default="local",
        help="where to train (default: this process)",
    )
    parser.add_argument(
        "--train-address",
        metavar="auto|HOST:PORT",
        help="the Ray cluster that trains (default: one that is started on this machine)",
    )
    parser.add_argument(
        "--workers",
        type=worker_range,
        metavar="N|A..B",
        dest="train_workers",
        help="with --train-engine ray: processes that train together",
    )
    parser.add_argument(
        "--at-once",
        action="store_true",
        help="train while the Table is prepared, in log order; so it is when both stages run on clusters",
    )


def _run(parsed: argparse.Namespace) -> int:
    from pathlib import Path

    if parsed.data and parsed.rows:
        raise UsageError(
            "--rows is for generated logs; with --data, the log is read as it is. Remove one of them."
        )
    _check_train_flags(parsed)
    recipe = load(parsed)
    set_wait_policy(parsed)
    from recmill.reporting.progress import Progress
    from recmill.stages.evaluate.gate import parse_gate
    from recmill.stages.run.run import DEFAULT_ROWS, RunConfig, run

    into = Path(parsed.into or f"runs/{recipe.name}")
    say = silent if parsed.json else print

    def report(stage: str, result: Any) -> None:
        if stage == "generate" and result is not None:
            say_generated(result, str(into / "log"), say)
        elif stage == "prepare":
            say_prepared(result, say)
        elif stage == "train":
            for trained in result:
                say_trained(trained, say)
        elif stage == "evaluate":
            say_evaluated(result, into / "report.html", say)
        elif stage == "export":
            say_exported(result, parsed.data or str(into / "log"), say)

    options = RunConfig(
        rows=parsed.rows or DEFAULT_ROWS,
        prepare=prepare_options(parsed),
        train=train_options(parsed, resume=True),
        scale=_scale(parsed) if parsed.train_engine == "ray" else None,
        at_once=parsed.at_once or (parsed.engine != "local" and parsed.train_engine != "local"),
        note=lambda line: print(f"note   {line}", file=sys.stderr),
        gate=tuple(parse_gate(parsed.gate)) if parsed.gate else (),
    )
    ran = run(recipe, parsed.data, into, options, Progress(parsed.quiet), report)
    if parsed.json:
        print(json.dumps(_as_json(ran)))
    else:
        if "export" in ran.results:
            _say_recommendation(into)
        times = "   ".join(f"{stage} {seconds:.1f}" for stage, seconds in ran.seconds.items())
        print(f"seconds {times}   all {ran.total_seconds:.1f}")
    return 0 if ran.passed else 1


def _check_train_flags(parsed: argparse.Namespace) -> None:
    for name, flag in {"train_workers": "--workers", "train_address": "--train-address"}.items():
        if getattr(parsed, name) is not None and parsed.train_engine != "ray":
            raise UsageError(f"{flag} is for --train-engine ray. Add it, or remove {flag}.")


def _scale(parsed: argparse.Namespace) -> WorkerRange:
    from recmill.errors import MissingPackage

    try:
        from recmill.stages.train.launch import WorkerRange
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "ray":
            raise
        raise MissingPackage('Engine "ray"', "ray", "ray") from None
    least, most = parsed.train_workers or (1, 1)
    return WorkerRange(least, most, parsed.train_address)


def _say_recommendation(into: Any) -> None:
    from recmill.stages.run.run import recommend

    shown = recommend(into)
    if shown is not None:
        user, answer = shown
        items = ", ".join(f"{item.id} ({item.score:.2f})" for item in answer.items)
        print(f"user {user} is recommended   {items}")
    print(f"next   recmill serve --bundle {into / 'bundle'}")


def _as_json(ran: Any) -> dict[str, Any]:
    table = ran.results["prepare"].table
    evaluated = ran.results.get("evaluate", [])
    return {
        "data": ran.data,
        "table": str(table.path),
        "digest": table.digest,
        "trained": [trained_json(model) for model in ran.results.get("train", [])],
        "evaluated": {model.model: model.metrics for model in evaluated},
        "exported": exported_json(ran.results["export"]) if "export" in ran.results else None,
        "passed": ran.passed,
        "seconds": ran.seconds,
    }
