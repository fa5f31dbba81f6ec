"""`recmill bench serve`: the flags of the load generator."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import add_command, add_json, silent
from recmill.cli.flags import UsageError, typed
from recmill.config import ABOVE_ZERO, COUNT, NOT_NEGATIVE, SEED

if TYPE_CHECKING:
    from recmill.stages.bench.serve.run import ServeBenchConfig

DEFAULT_RATE = 50.0


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
    _add_target(parser)
    _add_requests(parser)
    _add_load(parser)
    parser.add_argument(
        "--labels",
        metavar="FILE",
        help="Parquet with user, item and label: AUC of Rank and recall@k of Recommend are measured with it",
    )
    parser.add_argument(
        "--label-users", type=typed(COUNT), default=500, metavar="N", help="of the labels (default: 500)"
    )
    parser.add_argument("--plot", metavar="FILE", help="write a page with charts, such as serve.html")
    add_json(parser)


def _add_target(parser: Any) -> None:
    parser.add_argument("--bundle", metavar="DIR", help="serve this bundle on free ports, and measure that")
    parser.add_argument("--address", metavar="HOST:PORT", help="measure a server that is already running")
    parser.add_argument(
        "--transport", choices=["grpc", "http"], default="grpc", help="protocol of requests (default: grpc)"
    )
    parser.add_argument(
        "--metrics", metavar="HOST:PORT", help="HTTP address of the server at --address, for its own numbers"
    )
    parser.add_argument(
        "--serve-with",
        metavar="FLAGS",
        default="",
        help='more flags for `recmill serve`, in one text: --serve-with="--threads 1"',
    )
    parser.add_argument(
        "--items",
        type=typed(COUNT),
        metavar="N",
        help="without --bundle: first make a bundle with so many items",
    )
    parser.add_argument(
        "--shape",
        choices=["dlrm-deeprec"],
        default="dlrm-deeprec",
        help="model of that bundle (default: dlrm-deeprec)",
    )
    parser.add_argument(
        "--rows-dtype",
        choices=["float32", "float16", "int8"],
        default="float32",
        help="embedding rows of that bundle (default: float32)",
    )
    parser.add_argument(
        "--products",
        choices=["float32", "int8"],
        default="float32",
        help="how the ranker of that bundle multiplies (default: float32)",
    )
    parser.add_argument(
        "--into",
        metavar="DIR",
        default="bench-bundles",
        help="folder of that bundle, used again by later runs (default: bench-bundles)",
    )


def _add_requests(parser: Any) -> None:
    parser.add_argument("--users", metavar="FILE", help="Parquet with users (default: those of the bundle)")
    parser.add_argument(
        "--zipf",
        type=typed(NOT_NEGATIVE),
        default=1.0,
        metavar="S",
        help="the n-th most active user sends requests in proportion to 1 / n**S; 0: uniform (default: 1)",
    )
    parser.add_argument(
        "--k", type=typed(COUNT), default=50, metavar="N", help="items in an answer (default: 50)"
    )
    parser.add_argument(
        "--candidates", type=typed(COUNT), default=500, metavar="N", help="items to rank (default: 500)"
    )
    parser.add_argument(
        "--batch", type=typed(COUNT), default=1, metavar="N", help="users in a request (default: 1)"
    )
    parser.add_argument(
        "--context",
        metavar="FILE",
        help="raw context columns, one row for each request in turn: Parquet or JSON lines",
    )
    parser.add_argument(
        "--seed", type=typed(SEED), default=0, metavar="N", help="of users and arrivals (default: 0)"
    )


def _add_load(parser: Any) -> None:
    parser.add_argument(
        "--rate",
        type=typed(ABOVE_ZERO),
        action="append",
        metavar="R",
        help="open loop: R requests a second, whether or not earlier ones are answered; may be repeated (default: 50)",
    )
    parser.add_argument(
        "--clients", type=typed(COUNT), metavar="N", help="closed loop: N clients that wait for each answer"
    )
    parser.add_argument("--slo", metavar="SLO", help="find the highest rate that meets it, such as p99=30ms")
    parser.add_argument(
        "--seconds",
        type=typed(ABOVE_ZERO),
        default=10.0,
        metavar="S",
        help="measured seconds of a load (default: 10)",
    )
    parser.add_argument(
        "--warm-up",
        type=typed(NOT_NEGATIVE),
        default=2.0,
        metavar="S",
        help="seconds before that (default: 2)",
    )
    parser.add_argument(
        "--probe-seconds",
        type=typed(ABOVE_ZERO),
        default=4.0,
        metavar="S",
        help="of a probe for --slo (default: 4)",
    )
    parser.add_argument(
        "--deadline-ms",
        type=typed(ABOVE_ZERO),
        default=1000.0,
        metavar="MS",
        help="of a request (default: 1000)",
    )
    parser.add_argument("--without-echo", action="store_true", help="do not measure the generator itself")


def _serve(parsed: argparse.Namespace) -> None:
    report = silent if parsed.json else _report
    bundle = _bundle(parsed)
    from recmill.stages.bench.serve.page import describe, write_page
    from recmill.stages.bench.serve.run import BenchTarget, bench_serve

    target = BenchTarget(
        bundle,
        parsed.address,
        parsed.metrics,
        Path(parsed.users) if parsed.users else None,
        tuple(shlex.split(parsed.serve_with)),
    )
    result = bench_serve(target, _config(parsed), report)
    if parsed.plot:
        write_page(Path(parsed.plot), result)
        report(f"wrote  {parsed.plot}")
    print(json.dumps(result) if parsed.json else describe(result))


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _bundle(parsed: argparse.Namespace) -> Path | None:
    """The bundle of --bundle, or one made for --items; None for a server that is already running."""
    if parsed.bundle and parsed.items:
        raise UsageError("--items makes a bundle of its own; leave out --bundle, or --items.")
    if parsed.items:
        from recmill.stages.bench.serve.bundle import make_bundle

        return make_bundle(
            parsed.items,
            Path(parsed.into),
            parsed.rows_dtype,
            parsed.products,
            silent if parsed.json else _report,
        )
    if parsed.bundle is None and parsed.address is None:
        raise UsageError(
            "bench serve needs something to measure: --bundle DIR, --items N, or --address HOST:PORT with --users FILE."
        )
    return Path(parsed.bundle) if parsed.bundle else None


def _config(parsed: argparse.Namespace) -> ServeBenchConfig:
    from recmill.stages.bench.serve.requests import RequestShape, read_contexts
    from recmill.stages.bench.serve.run import ServeBenchConfig
    from recmill.stages.bench.serve.slo import Slo

    contexts = read_contexts(Path(parsed.context)) if parsed.context else ()
    other = parsed.clients or parsed.slo or parsed.labels
    return ServeBenchConfig(
        request=RequestShape(parsed.k, parsed.candidates, parsed.batch, contexts),
        transport=parsed.transport,
        rates=tuple(parsed.rate or (() if other else (DEFAULT_RATE,))),
        clients=parsed.clients,
        seconds=parsed.seconds,
        warm_up=parsed.warm_up,
        deadline_seconds=parsed.deadline_ms / 1000,
        zipf=parsed.zipf or None,
        seed=parsed.seed,
        slo=Slo.parse(parsed.slo) if parsed.slo else None,
        probe_seconds=parsed.probe_seconds,
        labels=Path(parsed.labels) if parsed.labels else None,
        label_users=parsed.label_users,
        echo=not parsed.without_echo,
    )
