"""`recmill bench`: one sub-command for each stage that can be measured."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from recmill.cli.arguments import add_command, add_json, print_result
from recmill.cli.bench_serve import add_serve
from recmill.cli.flags import add_flags, read_config
from recmill.stages.bench.config import (
    DenseBenchConfig,
    EmbeddingsBenchConfig,
    PrepareBenchConfig,
    ScaleBenchConfig,
    TrainBenchConfig,
)

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
        "measure a stage on this machine, optionally next to peers",
        _EXAMPLES,
    )
    stages = parser.add_subparsers(title="stages", metavar="STAGE", help="what to measure")
    _add(
        stages,
        "prepare",
        _prepare,
        PrepareBenchConfig,
        "raw Criteo text to Table, next to a plain Polars read of the same file",
        "recmill bench prepare --rows 10000000 --memory 1GB",
    )
    _add(
        stages,
        "train",
        _train,
        TrainBenchConfig,
        "samples/s from a Table and from the raw log, next to the dense model alone and the GEMM peak",
        """
recmill bench train --shape dlrm --shape wide_deep --data /tmp/bench
recmill bench train --shape dlrm --peer torch_embedding_bag --threads 2 --repeat 3
recmill bench train --peer all --peer-python tensorflow=/opt/tf/bin/python
""",
    )
    _add(
        stages,
        "embeddings",
        _embeddings,
        EmbeddingsBenchConfig,
        "lookup and update of embedding tables: nanoseconds and bytes for a key",
        """
recmill bench embeddings
recmill bench embeddings --keys 100000000 --memory 4GB --data /var/tmp
""",
    )
    _add(
        stages,
        "dense",
        _dense,
        DenseBenchConfig,
        "GFLOP/s of each product of dense layers, for every instruction set and torch",
        "recmill bench dense --milliseconds 1000",
    )
    add_serve(stages)
    _add(
        stages,
        "scale",
        _scale,
        ScaleBenchConfig,
        "one process and several workers, Table and raw log, each engine; and a forecast for many workers",
        """
recmill bench scale
recmill bench scale --rows 1000000 --engine local --engine spark --gigabits 100 --json
""",
    )


def _add(
    stages: Any,
    name: str,
    run: Callable[[argparse.Namespace], None],
    config: type,
    help: str,
    examples: str,
) -> None:
    parser = add_command(stages, name, run, help, examples)
    add_flags(parser, config)
    add_json(parser)


def _prepare(parsed: argparse.Namespace) -> None:
    from recmill.stages.bench.prepare import bench_prepare, describe

    print_result(parsed, bench_prepare(read_config(parsed, PrepareBenchConfig)), describe)


def _train(parsed: argparse.Namespace) -> None:
    from recmill.reporting.progress import Progress
    from recmill.stages.bench.train import bench_train, describe

    config = read_config(parsed, TrainBenchConfig)
    for shape in config.shape or ("dlrm",):
        print_result(parsed, bench_train(shape, config, Progress()), describe)


def _embeddings(parsed: argparse.Namespace) -> None:
    from recmill.stages.bench.embeddings import bench_embeddings, describe

    print_result(parsed, bench_embeddings(read_config(parsed, EmbeddingsBenchConfig)), describe)


def _dense(parsed: argparse.Namespace) -> None:
    from recmill.stages.bench.dense import bench_dense, describe

    print_result(parsed, bench_dense(read_config(parsed, DenseBenchConfig)), describe)


def _scale(parsed: argparse.Namespace) -> None:
    from recmill.reporting.progress import Progress
    from recmill.stages.bench.scale import bench_scale, describe

    print_result(parsed, bench_scale(read_config(parsed, ScaleBenchConfig), Progress()), describe)
