"""Shared by commands: their arguments, and the format of sizes and counts."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from recmill.cli.flags import UsageError

if TYPE_CHECKING:
    from recmill.recipe.recipe import Recipe

Say = Callable[[str], None]

LOG_LEVELS = ("debug", "info", "warning", "error")
_logger = logging.getLogger("recmill")


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int | None], help: str, examples: str
) -> Any:
    parser = commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog="examples:\n" + "\n".join(f"  {line}" for line in examples.strip().splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=run, command_name=name)
    return parser


def add_recipe(parser: Any) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a shipped recipe's name, a TOML file, or file.py:function"
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override a value of the recipe; without VALUE, its default holds",
    )


def add_folder(parser: Any, flag: str, help: str, required: bool = False) -> None:
    """A flag for a directory that a command reads or writes."""
    parser.add_argument(flag, required=required, metavar="DIR", help=help)


def add_json(parser: Any) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_output_options(parser: Any) -> None:
    parser.add_argument("--quiet", action="store_true", help="no progress")
    add_json(parser)


def load(parsed: argparse.Namespace) -> Recipe:
    from recmill.recipe.load import load_recipe

    return load_recipe(parsed.recipe, parsed.overrides)


def refuse(parsed: argparse.Namespace, names: tuple[str, ...], reason: str) -> None:
    """Raise UsageError for the first of these arguments that was given."""
    for name in names:
        if getattr(parsed, name) not in (None, False, []):
            raise UsageError(f"--{name.replace('_', '-')} {reason}")


def say_of(parsed: argparse.Namespace) -> Say:
    """The function that prints lines for people; it prints nothing with --json."""
    return silent if parsed.json else say


def print_result(parsed: argparse.Namespace, result: Any, describe: Callable[[Any], str]) -> None:
    print(json.dumps(result) if parsed.json else describe(result))


def set_log_level(level: str) -> None:
    """Set what notes, warnings and loggers print, in this process and its children."""
    if level not in LOG_LEVELS:  # from a variable; argparse checks the flag
        raise UsageError(f"RECMILL_LOG_LEVEL must be one of {', '.join(LOG_LEVELS)}, got {level}")
    _logger.setLevel(level.upper())
    os.environ["RECMILL_LOG_LEVEL"] = level


def note(line: str) -> None:
    if _logger.isEnabledFor(logging.INFO):
        print(f"note   {line}", file=sys.stderr)


def warn(message: str) -> None:
    if _logger.isEnabledFor(logging.WARNING):
        print(f"warning: {message}", file=sys.stderr)


def say(line: str) -> None:
    print(line, flush=True)  # flushed, for readers of a pipe


def silent(line: str) -> None:
    """Print nothing."""


def counted(number: int, one: str) -> str:
    return f"{number} {one}" if number == 1 else f"{number} {one}s"


def show_bytes(number: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1024:
            return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TB"
