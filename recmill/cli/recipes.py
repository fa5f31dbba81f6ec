"""`recmill recipes`."""

from __future__ import annotations

import argparse
from typing import Any

from recmill.cli.arguments import add_command
from recmill.cli.flags import UsageError


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "recipes",
        _recipes,
        "list the shipped recipes, or print one to start your own from",
        """
recmill recipes
recmill recipes quickstart > mine.toml
""",
    )
    parser.add_argument("name", nargs="?", help="print this recipe's TOML")


def _recipes(parsed: argparse.Namespace) -> None:
    from recmill.recipe.load import load_recipe, shipped_recipes
    from recmill.recipe.names import nearest

    shipped = shipped_recipes()
    if parsed.name is None:
        for name in shipped:
            print(f"{name:<20} {load_recipe(name).description}")
        return
    if parsed.name not in shipped:
        raise UsageError(f'There is no shipped recipe "{parsed.name}"{nearest(parsed.name, shipped)}')
    print(shipped[parsed.name].read_text(encoding="utf-8"), end="")
