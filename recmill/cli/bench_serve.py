"""`recmill bench serve`: the flags of the load generator."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from recmill.cli.arguments import add_command, add_json, silent
from recmill.cli.flags import UsageError, add_flags, read_config
from recmill.stages.bench.serve.config import BenchBundleConfig, BenchTarget, ServeBenchConfig


def add_serve(stages: Any) -> None:
    parser = add_command(
        stages,
        "serve",
        _serve,
        "load a server: latencies, the highest rate that meets an SLO, accuracy of answers",
        """
recmill bench serve --bundle bundles/shop --rate 100 --rate 200 --plot serve.html
recmill bench serve --bundle bundles/shop --slo p99=30ms --labels held_out.parquet --json
recmill bench serve --address 127.0.0.1:8081 --metrics 127.0.0.1:8080 --users users.parquet --clients 8
recmill bench serve --items 1000000 --shape dlrm-deeprec --rows-dtype int8 --into /var/tmp/bench --slo p99=30ms
""",
    )
    for config in (BenchTarget, BenchBundleConfig, ServeBenchConfig):
        add_flags(parser, config)
    parser.add_argument("--plot", metavar="FILE", help="write a page with charts, such as serve.html")
    add_json(parser)


def _serve(parsed: argparse.Namespace) -> None:
    report = silent if parsed.json else _report
    target = _target(parsed, report)
    from recmill.stages.bench.serve.page import describe, write_page
    from recmill.stages.bench.serve.run import bench_serve

    result = bench_serve(target, read_config(parsed, ServeBenchConfig), report)
    if parsed.plot:
        write_page(Path(parsed.plot), result)
        report(f"wrote  {parsed.plot}")
    print(json.dumps(result) if parsed.json else describe(result))


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _target(parsed: argparse.Namespace, report: Callable[[str], None]) -> BenchTarget:
    """The arguments with a bundle: that of --bundle, or one made for --items; none for a running server."""
    target, made = read_config(parsed, BenchTarget), read_config(parsed, BenchBundleConfig)
    if target.bundle and made.items:
        raise UsageError("--items makes a bundle of its own; remove --bundle or --items.")
    if made.items:
        from recmill.stages.bench.serve.bundle import make_bundle

        bundle = make_bundle(made.items, made.into, made.rows_dtype, made.products, report)
        return replace(target, bundle=bundle)
    if target.bundle is None and target.address is None:
        raise UsageError(
            "bench serve needs something to measure: --bundle DIR, --items N, or --address HOST:PORT with --users FILE."
        )
    return target
