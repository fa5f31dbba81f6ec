"""bench serve: loads on a server, the highest rate that meets an SLO, and the accuracy of its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from recmill.errors import RecmillError
from recmill.stages.bench.contest import Result, header
from recmill.stages.bench.serve.config import BenchTarget, ServeBenchConfig, TransportName
from recmill.stages.bench.serve.measure import Load, LoadGenerator, generator_cost
from recmill.stages.bench.serve.requests import (
    Id,
    RequestCodec,
    RequestShape,
    codec_for,
    make_requests,
    read_bundle_users,
    read_users,
    shape_of,
)
from recmill.stages.bench.serve.server import BenchServer, start_server
from recmill.stages.bench.serve.slo import Slo, highest_rate

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


@contextmanager
def _running(target: BenchTarget, transport: TransportName) -> Iterator[BenchServer]:
    if target.address is not None:
        is_grpc = transport == "grpc"
        http = target.metrics or (None if is_grpc else target.address)
        yield BenchServer(target.address if is_grpc else None, http)
    else:
        assert target.bundle is not None
        with start_server(target.bundle, target.serve_with) as server:
            yield server


def _known_users(target: BenchTarget) -> list[Id]:
    if target.users is not None:
        return read_users(target.users)
    if target.bundle is None:
        raise RecmillError(
            "A server at an address needs users to ask for: --users FILE.parquet or --bundle DIR."
        )
    return read_bundle_users(target.bundle)


def _loads(config: ServeBenchConfig) -> list[Load]:
    rates = [Load(rate, None, config.seconds, config.warm_up) for rate in config.rates]
    closed = [Load(None, config.clients, config.seconds, config.warm_up)] if config.clients else []
    return rates + closed


def bench_serve(target: BenchTarget, config: ServeBenchConfig, report: Report = lambda line: None) -> Result:
    """Run every load of the config on one server; `report` gets a line after each."""
    slo = Slo.parse(config.slo) if config.slo else None
    shape = shape_of(config)
    users = _known_users(target)
    with _running(target, config.transport) as server:
        address = server.grpc if config.transport == "grpc" else server.http
        if address is None:
            raise RecmillError(f"The server has no {config.transport} transport.")
        codec = codec_for(config.transport, address)
        result = _header(config, shape, server, users)
        with _generator(codec, server, users, config, shape) as generator:

            def measure(load: Load) -> Result:
                run = generator.measure(load)
                report(_line(run))
                return run

            if not config.without_echo:
                rate = max(config.rates, default=250.0)
                result["generator"] = generator_cost(rate, generator.requests[0])
            result["loads"] = [measure(load) for load in _loads(config)]
            if slo is not None:
                result["slo"] = _find_rate(measure, config, slo)
        if config.labels is not None:
            from recmill.stages.bench.serve.accuracy import measure_accuracy, read_labels

            labels = read_labels(config.labels, config.label_users)
            result["accuracy"] = measure_accuracy(codec, labels, shape)
    return result


def _header(
    config: ServeBenchConfig, shape: RequestShape, server: BenchServer, users: Sequence[Id]
) -> Result:
    ready = server.seconds_to_ready
    return {
        **header("serve"),
        "transport": config.transport,
        "users": {"known": len(users), "zipf": config.zipf or None, "seed": config.seed},
        "request": {**asdict(shape), "contexts": len(shape.contexts)},
        "deadline_seconds": config.deadline_ms / 1000,
        "warm_up": config.warm_up,
        "seconds_to_ready": None if ready is None else round(ready, 3),
    }


def _generator(
    codec: RequestCodec,
    server: BenchServer,
    users: Sequence[Id],
    config: ServeBenchConfig,
    shape: RequestShape,
) -> LoadGenerator:
    loads = _loads(config) or [Load(2000.0, None, 5, 0)]
    number = int(max((load.rate or 2000.0) * load.end for load in loads)) + 1
    requests = make_requests(codec, users, shape, number, config.seed, config.zipf or None)
    traced = [
        codec.recommend([user], shape, index, trace=True) for index, user in enumerate(users[:_NUM_TRACED])
    ]
    return LoadGenerator(codec, server, requests, traced, shape.batch, config.deadline_ms / 1000, config.seed)


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
