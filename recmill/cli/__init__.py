"""The command line: one command for each verb. A verb is imported only when it is called."""

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
    deploy,
    evaluate,
    export,
    generate,
    load,
    prepare,
    recipes,
    rollback,
    run,
    score,
    serve,
    size,
    train,
    tune,
)
from recmill.cli.memory import aborts_explained, lack_of_memory
from recmill.errors import RecmillError, missing_package


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 only when it did what was asked."""
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.print_help()
        return 0
    try:
        with aborts_explained(parsed.command_name):
            code = int(parsed.command(parsed) or 0)
        sys.stdout.flush()  # so that a reader who is gone is noticed here
        return code
    except RecmillError as error:
        print(f"recmill: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if (missing := missing_package(error, "This command")) is None:
            raise
        print(f"recmill: {missing}", file=sys.stderr)
        return missing.exit_code
    except KeyboardInterrupt:
        print("recmill: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output is gone (`| head`): say nothing more, as other tools do.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit:
        raise
    except BaseException as error:  # Rust's panics are no exceptions of Python's usual kind
        if (lack := lack_of_memory(parsed.command_name, error)) is not None:
            print(f"recmill: {lack}", file=sys.stderr)
            return lack.exit_code
        if not isinstance(error, OSError):
            raise
        print(f"recmill: {error.filename or 'input or output'}: {error.strerror or error}", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="recmill", description="Turns raw click logs into a served recommender."
    )
    parser.add_argument("--version", action="version", version=f"recmill {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
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
    return parser
