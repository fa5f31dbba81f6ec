"""`recmill demo`: a shop page over a server, for an existing run or a small new one."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import add_command, note, say, warn
from recmill.cli.flags import add_flags, read_config
from recmill.cli.run import check_serving_installed, run_and_say
from recmill.cli.serve import bundle_of
from recmill.cli.start import SERVED, open_browser
from recmill.cli.train import set_wait_policy
from recmill.stages.run.config import RunConfig
from recmill.stages.serve.config import ServeConfig
from recmill.stages.train.config import TrainConfig

if TYPE_CHECKING:
    from recmill.stages.serve.server import Ready

_RUN = Path("runs/demo")


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "demo",
        _demo,
        "a shop page that uses the HTTP API: search, recommendations, similar items, live events",
        """
recmill demo                      make a small shop in runs/demo, train on its log, serve it
recmill demo runs/shop            the shop page over what `recmill start` or `recmill run` made
recmill demo --http-port 8000
""",
    )
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN_DIR",
        help=f"what `recmill run` or `start` wrote (default: make {_RUN})",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    others = [field.name for field in fields(ServeConfig) if field.name not in SERVED]
    add_flags(parser, ServeConfig, leave_out=others)


def _demo(parsed: argparse.Namespace) -> int:
    if parsed.run is None:
        check_serving_installed()
        _make(_RUN, parsed.quiet)
    from recmill.stages.serve.server import run

    bundle = bundle_of(parsed.run or str(_RUN), None)
    return run(read_config(parsed, ServeConfig, bundle=bundle), _say_ready)


def _make(into: Path, quiet: bool) -> None:
    from recmill.recipe.load import load_recipe

    train = TrainConfig(resume=True)
    set_wait_policy(train)
    config = RunConfig(train=train, note=note, warn=warn)
    run_and_say(load_recipe("quickstart"), None, into, config, quiet, say)


def _say_ready(ready: Ready) -> None:
    say(f"ready  {ready.http}/shop   the shop; the console is at {ready.http}/. Stop with Ctrl-C")
    open_browser(f"{ready.http}/shop")
