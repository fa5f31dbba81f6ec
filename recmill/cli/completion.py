"""`recmill completion`: a script for the completion of commands and flags."""

from __future__ import annotations

import argparse
from typing import Any

from recmill.cli.arguments import add_command

_SHELLS = ("bash", "zsh", "tcsh")


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "completion",
        _completion,
        "print a script that completes commands and flags in your shell",
        """
recmill completion bash > ~/.local/share/bash-completion/completions/recmill
recmill completion zsh > "${fpath[1]}/_recmill"
""",
    )
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=", ".join(_SHELLS))


def _completion(parsed: argparse.Namespace) -> int:
    import shtab

    from recmill.cli import build_parser

    print(shtab.complete(build_parser(), shell=parsed.shell))
    return 0
