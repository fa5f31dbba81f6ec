"""`recmill size`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from recmill.cli.arguments import add_command, add_json, add_recipe, load
from recmill.cli.flags import typed
from recmill.config import COUNT


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "size",
        _size,
        "say how much memory, disk and cores a recipe needs, with the arithmetic",
        """
recmill size quickstart
recmill size criteo-dlrm --rows 45840617
recmill size mine.toml --rows 200000000 --items 1000000 --users 5000000 --rate 300
""",
    )
    add_recipe(parser)
    parser.add_argument("--rows", type=typed(COUNT), metavar="N", help="rows of the log")
    parser.add_argument("--items", type=typed(COUNT), metavar="M", help="different items")
    parser.add_argument("--users", type=typed(COUNT), metavar="U", help="different users")
    parser.add_argument("--rate", type=typed(COUNT), metavar="R", help="requests a second (default: 50)")
    add_json(parser)


def _size(parsed: argparse.Namespace) -> int:
    from dataclasses import asdict

    from recmill.stages.deploy.sizing import size

    sizing = size(load(parsed), parsed.rows, parsed.items, parsed.users, parsed.rate)
    if parsed.json:
        print(json.dumps(asdict(sizing)))
        return 0
    for line in sizing.lines():
        print(line)
    print()
    for line in sizing.summary():
        print(line)
    return 0
