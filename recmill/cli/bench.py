"""`recmill bench`: one sub-command for each stage that can be measured."""

from __future__ import annotations

import argparse
import json
from typing import Any

from recmill.cli.arguments import add_command, add_json
from recmill.cli.bench_serve import add_serve
from recmill.cli.flags import UsageError, typed
from recmill.config import COUNT, SIZE

_EXAMPLES = """
recmill bench prepare
recmill bench prepare --rows 10000000 --memory 1GB --json
recmill bench train --shape dlrm
recmill bench embeddings --keys 100000 --keys 10000000
recmill bench serve --bundle bundles/shop --slo p99=30ms
recmill bench scale --engine local --engine ray
"""


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "bench",
        lambda parsed: parser.print_help(),
        "measure a stage on this machine, beside peers if asked",
        _EXAMPLES,
    )
    stages = parser.add_subparsers(title="stages", metavar="STAGE", help="what to measure")
    _add_prepare(stages)
    _add_train(stages)
    _add_embeddings(stages)
    add_serve(stages)
    _add_scale(stages)


def _add_prepare(stages: Any) -> None:
    parser = add_command(
        stages,
        "prepare",
        _prepare,
        "raw Criteo text to Table, beside a bare Polars read of the same file",
        "recmill bench prepare --rows 10000000 --memory 1GB",
    )
    _add_rows(parser, "generated Criteo rows")
    parser.add_argument(
        "--recipe", default="criteo-dlrm", help="recipe to prepare with (default: criteo-dlrm)"
    )
    parser.add_argument(
        "--memory",
        type=typed(SIZE),
        default="2GB",
        metavar="SIZE",
        help="memory bound of prepare (default: 2GB)",
    )
    parser.add_argument(
        "--workers", type=typed(COUNT), metavar="N", help="threads (default: the cores this process may use)"
    )
    _add_repeat(parser, 1)
    _add_peer(parser)
    _add_data_and_json(parser)


def _add_train(stages: Any) -> None:
    parser = add_command(
        stages,
        "train",
        _train,
        "samples/s from a Table and from the raw log, beside the dense model alone and the GEMM peak",
        """
recmill bench train --shape dlrm --shape wide_deep --data /tmp/bench
recmill bench train --shape dlrm --peer torch_embedding_bag --threads 2 --repeat 3
recmill bench train --peer all --peer-python tensorflow=/opt/tf/bin/python
""",
    )
    parser.add_argument(
        "--shape",
        choices=["dlrm", "wide_deep"],
        action="append",
        help="DeepRec's DLRM (batch 2048) or Intel's Wide & Deep (batch 512); may be repeated (default: dlrm)",
    )
    _add_rows(parser, "generated Criteo rows")
    _add_repeat(parser, 5)
    parser.add_argument(
        "--threads",
        type=typed(COUNT),
        action="append",
        metavar="N",
        help="may be repeated (default: 1 and all cores)",
    )
    _add_peer(parser)
    parser.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="PEER=PYTHON",
        help="interpreter of a peer that has an environment of its own; may be repeated",
    )
    parser.add_argument(
        "--seconds", type=typed(COUNT), default=5, metavar="N", help="timed seconds of one run (default: 5)"
    )
    _add_data_and_json(parser)


def _add_embeddings(stages: Any) -> None:
    parser = add_command(
        stages,
        "embeddings",
        _embeddings,
        "lookup and update of embedding tables: nanoseconds and bytes for a key",
        """
recmill bench embeddings
recmill bench embeddings --keys 100000000 --memory 4GB --data /var/tmp
""",
    )
    parser.add_argument(
        "--keys",
        type=typed(COUNT),
        action="append",
        metavar="N",
        help="keys in all tables together; may be repeated (default: 100000 and 10000000)",
    )
    parser.add_argument(
        "--dim", type=typed(COUNT), default=16, metavar="N", help="floats of a row (default: 16)"
    )
    parser.add_argument(
        "--memory",
        type=typed(SIZE),
        metavar="SIZE",
        help="bound of records in memory; the rest is on disk (default: none)",
    )
    parser.add_argument(
        "--threads", type=typed(COUNT), metavar="N", help="threads (default: the cores this process may use)"
    )
    _add_repeat(parser, 5)
    parser.add_argument(
        "--data", metavar="DIR", help="folder of the disk tier (default: the current directory)"
    )
    add_json(parser)


def _add_scale(stages: Any) -> None:
    parser = add_command(
        stages,
        "scale",
        _scale,
        "one process and several workers, Table and raw log, each engine; and a forecast for many workers",
        """
recmill bench scale
recmill bench scale --rows 1000000 --engine local --engine spark --gigabits 100 --json
""",
    )
    _add_rows(parser, "generated Criteo rows", 400_000)
    _add_repeat(parser, 3)
    parser.add_argument(
        "--engine",
        choices=["local", "ray", "spark"],
        action="append",
        help="engines to prepare with, and ray to train on; may be repeated (default: all three)",
    )
    parser.add_argument(
        "--gigabits", type=typed(COUNT), default=25, metavar="N", help="network of the forecast (default: 25)"
    )
    _add_data_and_json(parser)


def _add_rows(parser: Any, what: str, default: int = 1_000_000) -> None:
    parser.add_argument(
        "--rows", type=typed(COUNT), default=default, metavar="N", help=f"{what} (default: {default})"
    )


def _add_repeat(parser: Any, default: int) -> None:
    parser.add_argument(
        "--repeat",
        type=typed(COUNT),
        default=default,
        metavar="N",
        help=f"interleaved rounds; medians are reported (default: {default})",
    )


def _add_peer(parser: Any) -> None:
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME",
        help="another system of benchmarks/peers, or all; needs a checkout; may be repeated (default: none)",
    )


def _add_data_and_json(parser: Any) -> None:
    parser.add_argument(
        "--data", metavar="DIR", help="keep and reuse the generated log there (default: a temporary folder)"
    )
    add_json(parser)


def _prepare(parsed: argparse.Namespace) -> None:
    from pathlib import Path

    from recmill.stages.bench.prepare import bench_prepare, describe

    result = bench_prepare(
        parsed.recipe,
        parsed.rows,
        parsed.memory,
        parsed.workers,
        parsed.repeat,
        parsed.peer,
        Path(parsed.data) if parsed.data else None,
    )
    print(json.dumps(result) if parsed.json else describe(result))


def _train(parsed: argparse.Namespace) -> None:
    from pathlib import Path

    from recmill.reporting.machine import available_cores
    from recmill.reporting.progress import Progress
    from recmill.stages.bench.train import bench_train, describe

    for given in parsed.peer_python:
        if "=" not in given:
            raise UsageError(f"--peer-python must look like tensorflow=/path/to/python, got {given}")
    for shape in parsed.shape or ["dlrm"]:
        result = bench_train(
            shape,
            parsed.rows,
            parsed.repeat,
            parsed.threads or sorted({1, available_cores()}),
            parsed.peer,
            dict(given.split("=", 1) for given in parsed.peer_python),
            Path(parsed.data) if parsed.data else None,
            parsed.seconds,
            progress=Progress(),
        )
        print(json.dumps(result) if parsed.json else describe(result))


def _scale(parsed: argparse.Namespace) -> None:
    from pathlib import Path

    from recmill.reporting.progress import Progress
    from recmill.stages.bench.forecast import Network
    from recmill.stages.bench.scale import bench_scale, describe

    result = bench_scale(
        parsed.rows,
        parsed.repeat,
        parsed.engine or ("local", "ray", "spark"),
        Path(parsed.data) if parsed.data else None,
        Network(parsed.gigabits),
        Progress(),
    )
    print(json.dumps(result) if parsed.json else describe(result))


def _embeddings(parsed: argparse.Namespace) -> None:
    from pathlib import Path

    from recmill.stages.bench.embeddings import bench_embeddings, describe

    result = bench_embeddings(
        parsed.keys or (100_000, 10_000_000),
        dim=parsed.dim,
        threads=parsed.threads,
        memory=parsed.memory,
        repeat=parsed.repeat,
        folder=Path(parsed.data) if parsed.data else None,
    )
    print(json.dumps(result) if parsed.json else describe(result))
