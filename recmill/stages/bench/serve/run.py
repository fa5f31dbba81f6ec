"""bench serve: loads on a server, the highest rate that meets an SLO, and the accuracy of its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from recmill.errors import RecmillError
from recmill.stages.bench.contest import Result, header
from recmill.stages.bench.serve.measure import Load, LoadGenerator, generator_cost
from recmill.stages.bench.serve.requests import (
    Id,
    RequestCodec,
    RequestShape,
    codec_for,
    make_requests,
    read_bundle_users,
    read_users,
)
from recmill.stages.bench.serve.server import BenchServer, start_server
from recmill.stages.bench.serve.slo import Slo, highest_rate
from recmill.stages.bench.serve.transports import TransportName

Report = Callable[[str], None]
_NUM_TRACED = 50
_CONFIRM_AT = (
    1.0,
    0.95,
    0.9,
    0.8,
    0.65,
    0.5,
)  # fractions of the probed rate, tried until a whole run meets the SLO


@dataclass(frozen=True)
class ServeBenchConfig:
    """The requests, how they are sent, and for how long."""

    request: RequestShape = RequestShape()  # noqa: RUF009, frozen
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
    """A bundle that bench serves itself, or the address of a running server."""

    bundle: Path | None = None
    address: str | None = None
    metrics: str | None = None  # the HTTP address of a running server
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
            with start_server(self.bundle, self.serve_arguments) as server:
                yield server

    def known_users(self) -> list[Id]:
        if self.users is not None:
            return read_users(self.users)
        if self.bundle is None:
            raise RecmillError(
                "A server at an address needs users to ask for: --users FILE.parquet or --bundle DIR."
            )
        return read_bundle_users(self.bundle)


def bench_serve(target: BenchTarget, config: ServeBenchConfig, report: Report = lambda line: None) -> Result:
    """Run every load of the config on one server; `report` gets a line after each."""
    users = target.known_users()
    with target.running(config.transport) as server:
        address = server.grpc if config.transport == "grpc" else server.http
        if address is None:
            raise RecmillError(f"The server has no {config.transport} transport.")
        codec = codec_for(config.transport, address)
        result = _header(config, server, users)
        with _generator(codec, server, users, config) as generator:

            def measure(load: Load) -> Result:
                run = generator.measure(load)
                report(_line(run))
                return run

            if config.echo:
                rate = max(config.rates, default=250.0)
                result["generator"] = generator_cost(rate, generator.requests[0])
            result["loads"] = [measure(load) for load in config.loads()]
            if config.slo is not None:
                result["slo"] = _find_rate(measure, config, config.slo)
        if config.labels is not None:
            from recmill.stages.bench.serve.accuracy import measure_accuracy, read_labels

            labels = read_labels(config.labels, config.label_users)
            result["accuracy"] = measure_accuracy(codec, labels, config.request)
    return result


def _header(config: ServeBenchConfig, server: BenchServer, users: Sequence[Id]) -> Result:
    ready = server.seconds_to_ready
    return {
        **header("serve"),
        "transport": config.transport,
        "users": {"known": len(users), "zipf": config.zipf, "seed": config.seed},
        "request": {**asdict(config.request), "contexts": len(config.request.contexts)},
        "deadline_seconds": config.deadline_seconds,
        "warm_up": config.warm_up,
        "seconds_to_ready": None if ready is None else round(ready, 3),
    }


def _generator(
    codec: RequestCodec, server: BenchServer, users: Sequence[Id], config: ServeBenchConfig
) -> LoadGenerator:
    loads = config.loads() or [Load(2000.0, None, 5, 0)]
    number = int(max((load.rate or 2000.0) * load.end for load in loads)) + 1
    requests = make_requests(codec, users, config.request, number, config.seed, config.zipf)
    traced = [
        codec.recommend([user], config.request, index, trace=True)
        for index, user in enumerate(users[:_NUM_TRACED])
    ]
    return LoadGenerator(
        codec, server, requests, traced, config.request.batch, config.deadline_seconds, config.seed
    )


def _find_rate(measure: Callable[[Load], Result], config: ServeBenchConfig, slo: Slo) -> Result:
    """Short probes find the rate and a whole run confirms it; a rate that fails the whole run is lowered."""

    def probe(rate: float) -> Result:
        return measure(Load(rate, None, config.probe_seconds, config.probe_seconds / 4))

    search = highest_rate(probe, slo)
    confirmed = None
    for fraction in _CONFIRM_AT if search.rate else ():
        run = measure(Load(search.rate * fraction, None, config.seconds, config.warm_up))
        run["violation"] = slo.violation(run)
        search.probes.append(run)
        if not run["violation"]:
            confirmed = run
            break
    return {
        "slo": str(slo),
        "max_rate_at_slo": confirmed["achieved_rate"] if confirmed else 0.0,
        "confirmed": confirmed,
        "probes": search.probes,
    }


def _line(run: Result) -> str:
    p50, p99 = (run["latency"][f"{name}_ms"] for name in ("p50", "p99"))
    load = (
        f"{run['clients']} clients" if run["target_rate"] is None else f"{run['target_rate']:,.1f}/s target"
    )
    return (
        f"{load:<18}{run['achieved_rate']:>9,.1f}/s   p50 {_ms(p50)}  p99 {_ms(p99)}  failed {run['failed']}"
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"
