"""`recmill start`: init, run and serve in one command."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import add_command, add_folder, note, say, warn
from recmill.cli.flags import UsageError, add_flags, read_config
from recmill.cli.init import add_files, decide, say_decided
from recmill.cli.run import check_serving_installed, run_and_say
from recmill.cli.train import set_wait_policy
from recmill.stages.init.config import InitConfig
from recmill.stages.prepare.config import PrepareConfig
from recmill.stages.run.config import RunConfig
from recmill.stages.serve.config import ServeConfig
from recmill.stages.train.config import TrainConfig

if TYPE_CHECKING:
    from recmill.stages.serve.server import Ready

_RECIPE = "recipe.toml"
SERVED = ("http_port", "grpc_port")  # flags of `serve` that `start` has too


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "start",
        _start,
        "from a log to recommendations over HTTP: init, run and serve",
        """
recmill start events.csv
recmill start events.csv items.csv users.csv --into runs/shop
recmill start ratings.dat movies.dat users.dat --http-port 8000
""",
    )
    add_files(parser)
    add_folder(parser, "--into", "directory of the recipe and all results (default: runs/<events>)")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    add_flags(parser, InitConfig)
    others = [field.name for field in fields(ServeConfig) if field.name not in SERVED]
    add_flags(parser, ServeConfig, leave_out=others)


def _start(parsed: argparse.Namespace) -> int:
    began = time.monotonic()
    check_serving_installed()
    from recmill.stages.init.init import name_for

    into = Path(parsed.into or f"runs/{name_for(parsed.files[0])}")
    decided = decide(parsed.files, read_config(parsed, InitConfig), name_for(str(into)))
    say_decided(decided, say)
    _write(into, decided.text, decided.data)
    train = TrainConfig(resume=True)
    set_wait_policy(train)
    config = RunConfig(prepare=PrepareConfig(max_bad=decided.max_bad), train=train, note=note, warn=warn)
    ran = run_and_say(decided.recipe, decided.data, into, config, parsed.quiet, say)
    has_lists = decided.recipe.log.user is not None
    answer = "recommendation" if has_lists else "score"
    say(f"first  {answer} after {time.monotonic() - began:.0f} s")
    if "export" not in ran.results:
        return 1
    from recmill.stages.serve.server import run

    return run(read_config(parsed, ServeConfig, bundle=into / "bundle"), partial(_say_ready, has_lists))


def _write(into: Path, text: str, data: str) -> None:
    """Write the recipe next to its results. An edited one is not replaced."""
    path = into / _RECIPE
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise UsageError(
            f"{path}: is there already, and is another recipe than the one for these files. Run it as it is: "
            f"recmill run {path} --data {data} --into {into}; or give another directory with --into."
        )
    into.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    say(f"wrote  {path}")


def _say_ready(has_lists: bool, ready: Ready) -> None:
    say(f"ready  {ready.http}/   the console; HTTP and gRPC ({ready.grpc}) answer too. Stop with Ctrl-C")
    if has_lists:
        say(f"shop   {ready.http}/shop   a page of an app that uses the HTTP API")
    open_browser(f"{ready.http}/")


def open_browser(address: str) -> None:
    """Open a browser on a desktop."""
    has_display = sys.platform == "darwin" or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    if sys.stdout.isatty() and has_display:
        import webbrowser

        webbrowser.open(address)
