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
from recmill.cli.generate import say_generated
from recmill.cli.prepare import say_prepared


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "run",
        _run,
        "run a recipe's whole chain; what is done already is not done again",
        """
recmill run quickstart                             generate a shop's log and take it through every stage
recmill run movielens --data ml-1m --into runs/ml  your own files
""",
    )
    add_recipe(parser)
    parser.add_argument("--data", metavar="DIR", help="the log's directory or URL (default: generate one)")
    parser.add_argument("--into", metavar="DIR", help="where stages land (default: runs/<recipe>)")
    parser.add_argument("--rows", type=positive, metavar="N", help="rows to generate (default: 100000)")
    add_prepare_options(parser)


def _run(parsed: argparse.Namespace) -> None:
    from pathlib import Path

    from recmill.logs.generate import Generated
    from recmill.progress import Progress
    from recmill.run import DEFAULT_ROWS, run

    if parsed.data and parsed.rows:
        raise UsageError(
            "--rows is for generated logs; with --data, the log is read as it is. Remove one of them."
        )
    recipe = load(parsed)
    into = Path(parsed.into or f"runs/{recipe.name}")
    say = silent if parsed.json else print

    def report(result: Any) -> None:
        if isinstance(result, Generated):
            say_generated(result, str(into / "log"), say)
        else:
            say_prepared(result, say)

    ran = run(
        recipe,
        parsed.data,
        into,
        parsed.rows or DEFAULT_ROWS,
        prepare_options(parsed),
        Progress(parsed.quiet),
        report,
    )
    table = ran.prepared.table
    if parsed.json:
        print(json.dumps({"data": str(ran.data), "table": str(table.path), "digest": table.digest}))
        return
    print("first row of the Table:")
    for name, value in table.scan().head(1).collect().row(0, named=True).items():
        print(f"  {name:<28} {value}")
