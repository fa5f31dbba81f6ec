"""bench serve as a whole: a server, loads on it, the rate that it can hold, how good its answers are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from recmill.errors import RecmillError
from recmill.stages.bench.contest import Result, header
from recmill.stages.bench.serve.measure import Generator, Load, generator_cost
from recmill.stages.bench.serve.requests import (
    Id,
    RequestShape,
    Words,
    make_requests,
    users_of_bundle,
    users_of_file,
    words_of,
)
from recmill.stages.bench.serve.server import BenchServer, started
from recmill.stages.bench.serve.slo import Slo, highest_rate
from recmill.stages.bench.serve.transports import TransportName

Say = Callable[[str], None]
_NUM_TRACED = 50
_CONFIRMED_AT = (
    1.0,
    0.95,
    0.9,
    0.8,
    0.65,
    0.5,
)  # shares of the rate that short probes found, until one holds


@dataclass(frozen=True)
class ServeBenchConfig:
    """What is asked, how and for how long."""

    question: RequestShape = RequestShape()  # noqa: RUF009, frozen
    transport: TransportName = "grpc"
    rates: tuple[float, ...] = ()
    clients: int | None = None
    seconds: float = 10.0
    warm_up: float = 2.0
    deadline_seconds: float = 1.0
    zipf: float | None = 1.0
    seed: int = 0
    slo: Slo | None = None
    probe_seconds: float = 4.0
    labels: Path | None = None
    label_users: int = 500
    echo: bool = True

    def loads(self) -> list[Load]:
        rates = [Load(rate, None, self.seconds, self.warm_up) for rate in self.rates]
        closed = [Load(None, self.clients, self.seconds, self.warm_up)] if self.clients else []
        return rates + closed


@dataclass(frozen=True)
class BenchTarget:
    """A bundle that we serve ourselves, or the address of a server that is there."""

    bundle: Path | None = None
    address: str | None = None
    metrics: str | None = None  # where an existing server's HTTP transport is
    users: Path | None = None
    serve_arguments: tuple[str, ...] = ()

    @contextmanager
    def running(self, transport: TransportName) -> Iterator[BenchServer]:
        if self.address is not None:
            is_grpc = transport == "grpc"
            http = self.metrics or (None if is_grpc else self.address)
            yield BenchServer(self.address if is_grpc else None, http)
        else:
            assert self.bundle is not None
            with started(self.bundle, self.serve_arguments) as running:
                yield running

    def known_users(self) -> list[Id]:
        if self.users is not None:
            return users_of_file(self.users)
        if self.bundle is None:
            raise RecmillError(
                "A server at an address needs users to ask for: --users FILE.parquet or --bundle DIR."
            )
        return users_of_bundle(self.bundle)


def bench_serve(target: BenchTarget, options: ServeBenchConfig, say: Say = lambda line: None) -> Result:
    """Load a server in every way that was asked for; all numbers are in the result."""
    users = target.known_users()
    with target.running(options.transport) as running:
        address = running.grpc if options.transport == "grpc" else running.http
        if address is None:
            raise RecmillError(f"The server has no {options.transport} transport.")
        words = words_of(options.transport, address)
        result = _head(options, running, users)
        with _generator(words, running, users, options) as generator:
            if options.echo:
                rate = max(options.rates, default=250.0)
                result["generator"] = generator_cost(rate, generator.requests[0])
            result["loads"] = [_told(generator.measure(load), say) for load in options.loads()]
            if options.slo is not None:
                result["slo"] = _find_rate(generator, options, options.slo, say)
        if options.labels is not None:
            from recmill.stages.bench.serve.accuracy import measure_accuracy, read_labels

            labels = read_labels(options.labels, options.label_users)
            result["accuracy"] = measure_accuracy(words, labels, options.question)
    return result


def _head(options: ServeBenchConfig, running: BenchServer, users: Sequence[Id]) -> Result:
    question = asdict(options.question)
    question["contexts"] = len(options.question.contexts)
    ready = running.seconds_to_ready
    return {
        **header("serve"),
        "transport": options.transport,
        "users": {"known": len(users), "zipf": options.zipf, "seed": options.seed},
        "question": question,
        "deadline_seconds": options.deadline_seconds,
        "warm_up": options.warm_up,
        "seconds_to_ready": None if ready is None else round(ready, 3),
    }


def _generator(
    words: Words, running: BenchServer, users: Sequence[Id], options: ServeBenchConfig
) -> Generator:
    most = max((load.rate or 2000.0) * load.end for load in options.loads() or [Load(2000.0, None, 5, 0)])
    requests = make_requests(words, users, options.question, int(most) + 1, options.seed, options.zipf)
    traced = [
        words.recommend([user], options.question, number, trace=True)
        for number, user in enumerate(users[:_NUM_TRACED])
    ]
    return Generator(
        words, running, requests, traced, options.question, options.deadline_seconds, options.seed
    )


def _find_rate(generator: Generator, options: ServeBenchConfig, slo: Slo, say: Say) -> Result:
    """Short probes find the rate, a whole run confirms it; what a whole run does not hold is lowered a little."""

    def probe(rate: float) -> Result:
        return _told(
            generator.measure(Load(rate, None, options.probe_seconds, options.probe_seconds / 4)), say
        )

    found = highest_rate(probe, slo)
    confirmed = None
    for share in _CONFIRMED_AT if found.rate else ():
        run = _told(generator.measure(Load(found.rate * share, None, options.seconds, options.warm_up)), say)
        run["broken"] = slo.broken_by(run)
        found.probes.append(run)
        if not run["broken"]:
            confirmed = run
            break
    return {
        "slo": str(slo),
        "max_rate_at_slo": confirmed["achieved_rate"] if confirmed else 0.0,
        "confirmed": confirmed,
        "probes": found.probes,
    }


def _told(run: Result, say: Say) -> Result:
    latency = run["latency"]
    asked = f"{run['clients']} clients" if run["asked_rate"] is None else f"{run['asked_rate']:,.1f}/s asked"
    say(
        f"{asked:<18}{run['achieved_rate']:>9,.1f}/s   p50 {_ms(latency['p50_ms'])}  p99 {_ms(latency['p99_ms'])}  "
        f"failed {run['failed']}"
    )
    return run


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"
