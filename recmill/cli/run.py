"""`recmill run`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from recmill.cli.arguments import (
    UsageError,
    add_command,
    add_prepare_options,
    add_recipe,
    load,
    positive,
    prepare_options,
    silent,
)
from recmill.cli.evaluate import say_evaluated
from recmill.cli.export import exported_json, say_exported
from recmill.cli.generate import say_generated
from recmill.cli.prepare import say_prepared
from recmill.cli.train import add_train_options, say_trained, set_wait_policy, train_options, trained_json


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
    add_prepare_options(parser)


def _run(parsed: argparse.Namespace) -> int:
    from pathlib import Path

    if parsed.data and parsed.rows:
        raise UsageError(
            "--rows is for generated logs; with --data, the log is read as it is. Remove one of them."
        )
    recipe = load(parsed)
    set_wait_policy(parsed)
    from recmill.evaluate.gate import parse_gate
    from recmill.progress import Progress
    from recmill.run import DEFAULT_ROWS, Options, run

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

    options = Options(
        rows=parsed.rows or DEFAULT_ROWS,
        prepare=prepare_options(parsed),
        train=train_options(parsed, resume=True),
        gate=tuple(parse_gate(parsed.gate)) if parsed.gate else (),
    )
    ran = run(recipe, parsed.data, into, options, Progress(parsed.quiet), report)
    if parsed.json:
        print(json.dumps(_as_json(ran)))
    else:
        if "export" in ran.results:
            _say_recommendation(into)
        times = "   ".join(f"{stage} {seconds:.1f}" for stage, seconds in ran.seconds.items())
        print(f"seconds {times}   all {sum(ran.seconds.values()):.1f}")
    return 0 if ran.passed else 1


def _say_recommendation(into: Any) -> None:
    from recmill.run import recommend

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
