"""`recmill init`, and what `recmill start` shares with it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import add_command, add_json, say_of
from recmill.cli.flags import UsageError, add_flags, read_config
from recmill.stages.init.config import InitConfig

if TYPE_CHECKING:
    from recmill.stages.init.init import InitResult
    from recmill.stages.init.roles import Unclear


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "init",
        _init,
        "profile a log and write a recipe for it",
        """
recmill init events.csv
recmill init events.csv items.csv users.csv --into shop.toml
recmill init ratings.dat --user 1 --item 2                       columns by number, without a header
recmill init events.parquet --positive "rating >= 3" --time none
recmill init "logs/part-*.csv.gz" --separator "\\t"
""",
    )
    add_files(parser)
    parser.add_argument("--into", metavar="FILE", help="the recipe to write (default: <events>.toml)")
    parser.add_argument("--force", action="store_true", help="replace an existing recipe")
    add_json(parser)
    add_flags(parser, InitConfig)


def add_files(parser: Any) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="the events, one row each (CSV, TSV, JSON lines, Parquet); then files of items and users, in any order",
    )


def _init(parsed: argparse.Namespace) -> None:
    from recmill.stages.init.init import name_for

    into = Path(parsed.into or f"{name_for(parsed.files[0])}.toml")
    if into.exists() and not parsed.force:
        raise UsageError(
            f"{into}: exists already. Give another file with --into, or replace it with --force."
        )
    result = decide(parsed.files, read_config(parsed, InitConfig), name_for(str(into)))
    into.parent.mkdir(parents=True, exist_ok=True)
    into.write_text(result.text, encoding="utf-8")
    if parsed.json:
        print(json.dumps({"recipe": str(into), "data": result.data, "decisions": list(result.lines)}))
        return
    say_decided(result, say_of(parsed))
    print(f"wrote  {into}")
    allowed = "" if result.max_bad == InitConfig().max_bad else f" --max-bad {result.max_bad:g}"
    print(f"next   recmill run {shlex.quote(str(into))} --data {shlex.quote(result.data)}{allowed}")


def say_decided(result: InitResult, say: Callable[[str], None]) -> None:
    for line in result.lines:
        say(line)


def decide(files: list[str], config: InitConfig, name: str) -> InitResult:
    """Decide the roles of columns. Open questions are asked on a terminal, and are errors elsewhere."""
    from recmill.stages.init.init import init
    from recmill.stages.init.roles import Unclear

    while True:
        try:
            return init(files, config, name)
        except Unclear as unclear:
            if not _is_terminal():
                raise
            config = replace(config, **{unclear.name: _ask(unclear)})  # type: ignore[arg-type]


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _ask(unclear: Unclear) -> str:
    print(unclear.question)
    for number, option in enumerate(unclear.options, 1):
        print(f"  {number}  {option}")
    while not (answer := input(f"--{unclear.name.replace('_', '-')} ").strip()):
        pass
    return unclear.answer(answer)
