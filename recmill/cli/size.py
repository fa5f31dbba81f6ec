"""`recmill size`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from recmill.cli.arguments import add_command, add_json, add_recipe, load
from recmill.cli.flags import add_flags, read_config
from recmill.stages.deploy.config import SizeConfig


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "size",
        _size,
        "show how much memory, disk and cores a recipe needs, with the arithmetic",
        """
recmill size quickstart
recmill size criteo-dlrm --rows 45840617
recmill size mine.toml --rows 200000000 --items 1000000 --users 5000000 --rate 300
""",
    )
    add_recipe(parser)
    add_flags(parser, SizeConfig)
    add_json(parser)


def _size(parsed: argparse.Namespace) -> int:
    from dataclasses import asdict

    from recmill.stages.deploy.sizing import size

    sizing = size(load(parsed), **vars(read_config(parsed, SizeConfig)))
    if parsed.json:
        print(json.dumps(asdict(sizing)))
        return 0
    for line in sizing.lines():
        print(line)
    print()
    for line in sizing.summary():
        print(line)
    return 0
