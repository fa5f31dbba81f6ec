"""Flags from the environment: `RECMILL_TRAIN_THREADS=1` stands for `recmill train --threads 1`.

The name is RECMILL, the command and the flag, in capitals and with underscores. A flag on the command line overrides
a variable. A variable that names a command but none of its flags is an error, like an unknown flag.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recmill.cli.flags import UsageError

_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off", "")


def with_environment(
    parser: argparse.ArgumentParser, arguments: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """The arguments of a command line, preceded by those of the environment, so that the command line wins."""
    path, command, position = _command_of(parser, arguments)
    own = list(arguments[position:])
    prefix = "_".join(("RECMILL", *path, "")).upper().replace("-", "_")
    variables = sorted(name for name in environment if path and name.startswith(prefix))
    more = [
        argument
        for name in variables
        for argument in _as_arguments(command, name, name.removeprefix(prefix), environment[name], own)
    ]
    return [*arguments[:position], *more, *own]


def _command_of(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[list[str], argparse.ArgumentParser, int]:
    """The names of a command and its stage, its parser, and the index of its first own argument."""
    path: list[str] = []
    for position, argument in enumerate(arguments, 1):
        commands = _commands(parser)
        if argument in commands:
            path.append(argument)
            parser = commands[argument]
            if not _commands(parser):
                return path, parser, position
    return [], parser, len(arguments)


def _commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def _as_arguments(
    command: argparse.ArgumentParser, variable: str, name: str, value: str, own: Sequence[str]
) -> Iterator[str]:
    flag = "--" + name.lower().replace("_", "-")
    action = command._option_string_actions.get(flag)
    if action is None or isinstance(action, argparse._HelpAction):
        raise UsageError(f"The environment has {variable}, but `{command.prog}` has no flag {flag}.")
    if action.nargs == 0:
        yield from _switch(action, flag, variable, value)
    elif isinstance(action, argparse._AppendAction):
        if not any(argument.partition("=")[0] == flag for argument in own):
            yield from (f"{flag}={line}" for line in value.splitlines())
    else:
        yield f"{flag}={value}"


def _switch(action: Any, flag: str, variable: str, value: str) -> Iterator[str]:
    if value.lower() not in (*_YES, *_NO):
        raise UsageError(f"{variable} must be 1 or 0, because {flag} takes no value, got {value}")
    if value.lower() in _YES:
        yield flag
    elif (opposite := "--no-" + flag[2:]) in action.option_strings:
        yield opposite
