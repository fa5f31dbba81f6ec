"""The command line, with one module per command, which is imported only when the command runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from recmill import __version__
from recmill.cli import (
    bench,
    bundle,
    check,
    checkpoint,
    client,
    completion,
    demo,
    deploy,
    evaluate,
    export,
    generate,
    init,
    load,
    prepare,
    recipes,
    rollback,
    run,
    score,
    serve,
    size,
    start,
    train,
    tune,
)
from recmill.cli.arguments import LOG_LEVELS, set_log_level
from recmill.cli.environment import with_environment
from recmill.cli.failures import CommandParser, explain
from recmill.cli.memory import within_address_space


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 only on success."""
    parser = build_parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = "recmill"
    try:
        given = with_environment(parser, given, os.environ)
        parsed = parser.parse_args(given)
        if parsed.command is None:
            parser.print_help()
            return 0
        set_log_level(parsed.log_level)
        command = parsed.command_name
        with within_address_space(command):
            code = int(parsed.command(parsed) or 0)
        sys.stdout.flush()  # so that a closed pipe is noticed here
        return code
    except BrokenPipeError:
        # The reader of our output has closed the pipe (`| head`): print nothing more, as other tools do.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit:
        raise
    except BaseException as error:  # Rust's panics are not Exceptions
        if (failure := explain(command, error)) is None:
            raise
        failure.show(as_json="--json" in given)
        return failure.exit_code


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="recmill",
        description="Turns raw click logs into a served recommender.",
        epilog="Flags can come from the environment: RECMILL_TRAIN_THREADS=1 is `recmill train --threads 1`.",
    )
    parser.add_argument("--version", action="version", version=f"recmill {__version__}")
    parser.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default=os.environ.get("RECMILL_LOG_LEVEL", "info"),
        help="verbosity on stderr besides errors and progress (default: info, or RECMILL_LOG_LEVEL)",
    )
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    start.add(commands)
    demo.add(commands)
    init.add(commands)
    run.add(commands)
    generate.add(commands)
    recipes.add(commands)
    check.add(commands)
    prepare.add(commands)
    train.add(commands)
    evaluate.add(commands)
    score.add(commands)
    tune.add(commands)
    checkpoint.add(commands)
    export.add(commands)
    bundle.add(commands)
    load.add(commands)
    serve.add(commands)
    rollback.add(commands)
    client.add(commands)
    deploy.add(commands)
    size.add(commands)
    bench.add(commands)
    completion.add(commands)
    return parser
