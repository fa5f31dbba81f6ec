"""How a command reports a failure: one line for people, one JSON object with --json."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import NoReturn

from recmill.cli.flags import UsageError
from recmill.cli.memory import lack_of_memory
from recmill.errors import RecmillError, missing_package


class ArgumentsError(UsageError):
    """A command line that cannot be parsed; the usage of its command precedes the message."""

    def __init__(self, message: str, parser: argparse.ArgumentParser) -> None:
        super().__init__(message)
        self.parser = parser


class CommandParser(argparse.ArgumentParser):
    """Raises parse errors, so that `main` can show them like other errors."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentsError(message, self)


@dataclass(frozen=True)
class Failure:
    """What is shown of an error, and the exit code."""

    kind: str
    message: str
    exit_code: int
    usage: argparse.ArgumentParser | None = None

    def show(self, as_json: bool) -> None:
        if as_json:
            error = {"type": self.kind, "message": self.message, "exit_code": self.exit_code}
            print(json.dumps({"error": error}), file=sys.stderr)
        elif self.usage is not None:
            self.usage.print_usage(sys.stderr)
            print(f"{self.usage.prog}: error: {self.message}", file=sys.stderr)
        else:
            print(f"recmill: {self.message}", file=sys.stderr)


def explain(command: str, error: BaseException) -> Failure | None:
    """The message of an error; None for a bug, whose traceback is more useful."""
    if isinstance(error, ArgumentsError):
        return Failure("UsageError", str(error), error.exit_code, error.parser)
    if isinstance(error, KeyboardInterrupt):
        return Failure("Interrupted", "interrupted; run the same command again to continue", 130)
    if (ours := _ours(command, error)) is not None:
        return Failure(type(ours).__name__, str(ours), ours.exit_code)
    if isinstance(error, OSError):
        return Failure("OSError", f"{error.filename or 'input or output'}: {error.strerror or error}", 1)
    return None


def _ours(command: str, error: BaseException) -> RecmillError | None:
    if isinstance(error, RecmillError):
        return error
    if isinstance(error, ModuleNotFoundError):
        return missing_package(error, "This command")
    return lack_of_memory(command, error)
