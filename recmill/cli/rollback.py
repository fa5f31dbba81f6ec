"""`recmill rollback`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from recmill.cli.arguments import add_command, add_json


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "rollback",
        _rollback,
        "serve an earlier version again; servers that watch the folder take it within a second",
        """
recmill rollback --bundle runs/quickstart/bundle                          the version before
recmill rollback --bundle runs/quickstart/bundle 0000000176-bc89affa
""",
    )
    parser.add_argument(
        "version", nargs="?", metavar="VERSION", help="default: the one that was current before"
    )
    parser.add_argument("--bundle", required=True, metavar="DIR", help="what `recmill export` wrote")
    add_json(parser)


def _rollback(parsed: argparse.Namespace) -> None:
    from recmill.stages.export.rollback import rollback

    version, before = rollback(parsed.bundle, parsed.version)
    if parsed.json:
        print(json.dumps({"version": version, "previous": before}))
    else:
        print(f"serves {version}   before {before or 'none'}")
