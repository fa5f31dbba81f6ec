"""`recmill client`: scores a CSV file on a server, with the flags of Intel's serving client."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from recmill.cli.arguments import add_command, add_json
from recmill.cli.flags import UsageError, typed
from recmill.config import COUNT

_EXAMPLES = """
recmill client -s 127.0.0.1:8081 -d eval.csv -b 512 -n 40 -w 10
recmill client -s 127.0.0.1:8080 --transport http -d eval.csv -b 1000 --out scores.csv
"""


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "client",
        _client,
        "score the rows of a CSV file on a server, over the Open Inference Protocol",
        _EXAMPLES,
    )
    parser.add_argument(
        "-s",
        "--server",
        default="localhost:8081",
        metavar="HOST:PORT",
        help="where it answers (default: localhost:8081)",
    )
    parser.add_argument(
        "-d", "--data-file", "--data_file", required=True, metavar="FILE", help="CSV with a line of names"
    )
    parser.add_argument(
        "-b",
        "--batch-size",
        "--batch_size",
        type=typed(COUNT),
        default=1,
        metavar="N",
        help="rows of a request (default: 1)",
    )
    parser.add_argument(
        "-n",
        "--num-iteration",
        "--num_iteration",
        type=typed(COUNT),
        metavar="N",
        help="requests (default: 40; with --out as many as the file has)",
    )
    parser.add_argument(
        "-w",
        "--warm-up-iteration",
        "--warm_up_iteration",
        type=int,
        default=10,
        metavar="N",
        help="of them, first ones that are not timed (default: 10)",
    )
    parser.add_argument(
        "--transport", choices=["grpc", "http"], default="grpc", help="how to ask (default: grpc)"
    )
    parser.add_argument(
        "--clients", type=typed(COUNT), default=1, metavar="N", help="requests at once (default: 1)"
    )
    parser.add_argument(
        "--label",
        metavar="COLUMN",
        help="0 or 1, for accuracy and AUC (default: label, click or clicked, if there)",
    )
    parser.add_argument(
        "--columns", default="", metavar="NAMES", help="of a file without a line of names: a,b,c"
    )
    parser.add_argument("--separator", default=",", metavar="TEXT", help="between values (default: a comma)")
    parser.add_argument(
        "--out", metavar="FILE", help="score the whole file and write its probabilities there, as CSV"
    )
    add_json(parser)


def _client(parsed: argparse.Namespace) -> None:
    from recmill.stages.bench.serve.csv_client import CsvClientConfig, describe, score_file

    if parsed.out and parsed.num_iteration:
        raise UsageError("--out scores the whole file; leave out -n, or --out.")
    number = 0 if parsed.out else parsed.num_iteration or 40
    if number and not 0 <= parsed.warm_up_iteration < number:
        raise UsageError(f"-w must be from 0 to less than -n {number}, got {parsed.warm_up_iteration}.")
    options = CsvClientConfig(
        server=parsed.server,
        data=Path(parsed.data_file),
        transport=parsed.transport,
        batch=parsed.batch_size,
        num_batches=number,
        warm_up=parsed.warm_up_iteration,
        clients=parsed.clients,
        label=parsed.label,
        columns=tuple(name.strip() for name in parsed.columns.split(",") if name.strip()),
        separator=parsed.separator,
        out=Path(parsed.out) if parsed.out else None,
    )
    result = score_file(options)
    print(json.dumps(result) if parsed.json else describe(result))
