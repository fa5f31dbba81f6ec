"""`recmill bench`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from recmill.cli.arguments import add_command, positive, size


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "bench",
        _bench,
        "measure a stage beside its peers, in one run",
        """
recmill bench prepare
recmill bench prepare --rows 10000000 --memory 1GB --json
""",
    )
    parser.add_argument("stage", choices=["prepare"], help="what to measure")
    parser.add_argument(
        "--rows",
        type=positive,
        default=1_000_000,
        metavar="N",
        help="generated Criteo rows (default: 1000000)",
    )
    parser.add_argument(
        "--recipe", default="criteo-dlrm", help="recipe to prepare with (default: criteo-dlrm)"
    )
    parser.add_argument(
        "--memory", type=size, default="2GB", metavar="SIZE", help="memory bound of prepare (default: 2GB)"
    )
    parser.add_argument(
        "--workers", type=positive, metavar="N", help="threads (default: the cores this process may use)"
    )
    parser.add_argument(
        "--repeat",
        type=positive,
        default=1,
        metavar="N",
        help="interleaved rounds; medians are reported (default: 1)",
    )
    parser.add_argument(
        "--without-pandas",
        action="store_true",
        help="leave out the pandas peer, which needs much memory and time",
    )
    parser.add_argument(
        "--data", metavar="DIR", help="keep and reuse the generated log there (default: a temporary folder)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _bench(parsed: argparse.Namespace) -> None:
    from recmill.bench.prepare import bench_prepare, describe

    result = bench_prepare(
        parsed.recipe,
        parsed.rows,
        parsed.memory,
        parsed.workers,
        parsed.repeat,
        not parsed.without_pandas,
        parsed.data,
    )
    print(json.dumps(result) if parsed.json else describe(result))
