"""The configs of bench serve and of the CSV client: what is asked, where, and how often."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from recmill.config import (
    ABOVE_ZERO,
    COUNT,
    NAMES,
    NOT_NEGATIVE,
    SEED,
    Flag,
    ValueKind,
    parse_whole,
)

TransportName = Literal["grpc", "http"]
DEFAULT_RATE = 50.0

_FILE = ValueKind(Path, "FILE")
_SECONDS = ValueKind(ABOVE_ZERO.parse, "S", ABOVE_ZERO.show)
_FROM_ZERO = ValueKind(NOT_NEGATIVE.parse, "S", NOT_NEGATIVE.show)
_ARGUMENTS = ValueKind(lambda text: tuple(shlex.split(text)), "FLAGS", shlex.join)


@dataclass(frozen=True)
class BenchTarget:
    """A bundle that bench serves itself, or the address of a running server."""

    bundle: Annotated[Path | None, Flag("serve this bundle on free ports, and measure that")] = None
    address: Annotated[str | None, Flag("measure a server that is already running", metavar="HOST:PORT")] = (
        None
    )
    metrics: Annotated[
        str | None,
        Flag("HTTP address of the server at --address, for its own numbers", metavar="HOST:PORT"),
    ] = None
    serve_with: Annotated[
        tuple[str, ...],
        Flag('more flags for `recmill serve`, in one text: --serve-with="--threads 1"', _ARGUMENTS),
    ] = ()
    users: Annotated[Path | None, Flag("Parquet with users (default: those of the bundle)", _FILE)] = None


@dataclass(frozen=True)
class BenchBundleConfig:
    """A bundle that is made to be measured; nothing is made without `items`."""

    items: Annotated[int | None, Flag("without --bundle: first make a bundle with so many items")] = None
    shape: Annotated[Literal["dlrm-deeprec"], Flag("model of that bundle")] = "dlrm-deeprec"
    rows_dtype: Annotated[Literal["float32", "float16", "int8"], Flag("embedding rows of that bundle")] = (
        "float32"
    )
    products: Annotated[Literal["float32", "int8"], Flag("how the ranker of that bundle multiplies")] = (
        "float32"
    )
    into: Annotated[Path, Flag("folder of that bundle, used again by later runs")] = Path("bench-bundles")


@dataclass(frozen=True)
class ServeBenchConfig:
    """The requests, how they are sent, and for how long."""

    transport: Annotated[TransportName, Flag("protocol of requests")] = "grpc"
    zipf: Annotated[
        float,
        Flag(
            "the n-th most active user sends requests in proportion to 1 / n**S; 0: uniform",
            _FROM_ZERO,
        ),
    ] = 1.0
    k: Annotated[int, Flag("items in an answer")] = 50
    candidates: Annotated[int, Flag("items to rank")] = 500
    batch: Annotated[int, Flag("users in a request")] = 1
    context: Annotated[
        Path | None,
        Flag("raw context columns, one row for each request in turn: Parquet or JSON lines", _FILE),
    ] = None
    seed: Annotated[int, Flag("of users and arrivals", SEED)] = 0
    rate: Annotated[
        tuple[float, ...],
        Flag(
            "open loop: R requests a second, whether or not earlier ones are answered; may be repeated (default: 50)",
            metavar="R",
        ),
    ] = ()
    clients: Annotated[int | None, Flag("closed loop: N clients that wait for each answer")] = None
    slo: Annotated[
        str | None, Flag("find the highest rate that meets it, such as p99=30ms", metavar="SLO")
    ] = None
    seconds: Annotated[float, Flag("measured seconds of a load", _SECONDS)] = 10.0
    warm_up: Annotated[float, Flag("seconds before that", _FROM_ZERO)] = 2.0
    probe_seconds: Annotated[float, Flag("of a probe for --slo", _SECONDS)] = 4.0
    deadline_ms: Annotated[float, Flag("of a request", ABOVE_ZERO, metavar="MS")] = 1000.0
    without_echo: Annotated[bool, Flag("do not measure the generator itself")] = False
    labels: Annotated[
        Path | None,
        Flag(
            "Parquet with user, item and label: AUC of Rank and recall@k of Recommend are measured with it",
            _FILE,
        ),
    ] = None
    label_users: Annotated[int, Flag("of the labels")] = 500

    @property
    def rates(self) -> tuple[float, ...]:
        """Of the open loops."""
        return self.rate or (() if self.clients or self.slo or self.labels else (DEFAULT_RATE,))


@dataclass(frozen=True)
class CsvClientConfig:
    """A CSV file and the server that scores it. The first `warm_up_iteration` requests are not timed."""

    data_file: Path
    server: Annotated[str, Flag("where it answers", metavar="HOST:PORT", aliases=("-s",))] = "localhost:8081"
    batch_size: Annotated[int, Flag("rows of a request", aliases=("-b", "--batch_size"))] = 1
    num_iteration: Annotated[
        int | None,
        Flag(
            "requests (default: 40; with --out as many as the file has)",
            aliases=("-n", "--num_iteration"),
        ),
    ] = None
    warm_up_iteration: Annotated[
        int,
        Flag(
            "of them, first ones that are not timed",
            ValueKind(parse_whole, "N"),
            aliases=("-w", "--warm_up_iteration"),
        ),
    ] = 10
    transport: Annotated[TransportName, Flag("how to ask")] = "grpc"
    clients: Annotated[int, Flag("requests at once", COUNT)] = 1
    label: Annotated[
        str | None,
        Flag("0 or 1, for accuracy and AUC (default: label, click or clicked, if there)", metavar="COLUMN"),
    ] = None
    columns: Annotated[
        tuple[str, ...], Flag("of a file without a line of names: a,b,c", NAMES, metavar="NAMES")
    ] = ()
    separator: Annotated[str, Flag("between values (default: a comma)", metavar="TEXT")] = ","
    out: Annotated[
        Path | None, Flag("score the whole file and write its probabilities there, as CSV", _FILE)
    ] = None
    deadline_seconds: float = 30.0

    @property
    def num_batches(self) -> int:
        """0: as many as the file has."""
        return 0 if self.out else self.num_iteration or 40
