"""`recmill client`: scores a CSV file on a server, with the flags of Intel's serving client."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from recmill.cli.arguments import add_command, add_json
from recmill.cli.flags import UsageError, add_flags, read_config
from recmill.stages.bench.serve.config import CsvClientConfig

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
        "-d", "--data-file", "--data_file", required=True, metavar="FILE", help="CSV with a line of names"
    )
    add_flags(parser, CsvClientConfig)
    add_json(parser)


def _client(parsed: argparse.Namespace) -> None:
    from recmill.stages.bench.serve.csv_client import describe, score_file

    config = read_config(parsed, CsvClientConfig, data_file=Path(parsed.data_file))
    if config.out and config.num_iteration:
        raise UsageError("--out scores the whole file; leave out -n, or --out.")
    number = config.num_batches
    if number and config.warm_up_iteration >= number:
        raise UsageError(f"-w must be from 0 to less than -n {number}, got {config.warm_up_iteration}.")
    result = score_file(config)
    print(json.dumps(result) if parsed.json else describe(result))
