"""The load generator against a small real server in a process of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

pytest.importorskip("grpc")

from recmill.errors import RecmillError
from recmill.stages.bench.serve.accuracy import measure_accuracy, read_labels
from recmill.stages.bench.serve.arrivals import poisson_times
from recmill.stages.bench.serve.config import BenchTarget, ServeBenchConfig, TransportName
from recmill.stages.bench.serve.http2 import CODES, call_headers, grpc_status
from recmill.stages.bench.serve.load import RequestRecords, closed_loop, open_loop
from recmill.stages.bench.serve.measure import generator_cost
from recmill.stages.bench.serve.page import describe, write_page
from recmill.stages.bench.serve.requests import (
    RequestShape,
    codec_for,
    make_requests,
    read_contexts,
    read_users,
)
from recmill.stages.bench.serve.run import bench_serve
from recmill.stages.bench.serve.transports import ask, precise_loop

pytestmark = pytest.mark.stages

PEER = Path(__file__).parent / "peer_server.py"
TRANSPORTS: tuple[TransportName, ...] = ("grpc", "http")


@contextmanager
def peer(**settings: float) -> Iterator[dict[TransportName, str]]:
    command = [sys.executable, str(PEER), json.dumps(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            grpc_port, http_port = process.stdout.readline().split()
            yield {"grpc": f"127.0.0.1:{grpc_port}", "http": f"127.0.0.1:{http_port}"}
        finally:
            process.kill()


def load(transport_name: TransportName, address: str, act: Any, deadline: float = 60.0) -> Any:
    async def run() -> Any:
        codec = codec_for(transport_name, address)
        transport = codec.transport("Recommend", deadline)
        await transport.open()
        try:
            return await act(transport, make_requests(codec, [1, 2, 3], RequestShape(k=2), 10, 0, None))
        finally:
            transport.close()
            await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=precise_loop) as runner:
        return runner.run(run())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_request_of_a_closed_loop_is_answered(transport: TransportName) -> None:
    with peer() as addresses:
        records: RequestRecords = load(
            transport, addresses[transport], lambda *args: closed_loop(*args, clients=3, seconds=0.5)
        )
    assert len(records.due) >= 3
    assert set(records.problems) == {""}
    assert 0 < records.latencies().mean() < 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stall_shows_in_every_request_that_was_due_meanwhile(transport: TransportName) -> None:
    times = poisson_times(100, 2.0, seed=0)
    with peer(stall_at=50, stall_seconds=1.0) as addresses:
        records: RequestRecords = load(transport, addresses[transport], lambda *args: open_loop(*args, times))
    latencies = np.sort(records.latencies())
    assert len(latencies) == len(times)
    assert latencies[-1] > 0.95
    # A closed loop would have one slow answer; here the hundred that were due in that second waited too.
    assert (latencies > 0.5).sum() > 30
    assert np.median(records.send_delays()) < 0.5


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_refusals_are_counted_by_themselves(transport: TransportName) -> None:
    with peer(refuse_every=2) as addresses:
        records: RequestRecords = load(
            transport, addresses[transport], lambda *args: open_loop(*args, np.arange(10) / 100)
        )
    assert Counter(records.problems) == {"": 5, "refused": 5}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_deadline_ends_a_request_that_is_not_answered(transport: TransportName) -> None:
    with peer(stall_at=1, stall_seconds=5.0) as addresses:
        problem, _ = load(
            transport,
            addresses[transport],
            lambda transport, requests: ask(transport, requests[0]),
            deadline=0.2,
        )
    assert problem == "late"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_that_is_gone_is_an_error_of_each_request(transport: TransportName) -> None:
    async def act(transport: Any, requests: list[bytes]) -> list[str]:
        assert (await ask(transport, requests[0]))[0] == ""
        stop()
        await asyncio.sleep(0.3)
        return [(await ask(transport, requests[0]))[0] for _ in range(3)]

    context = peer()
    addresses = context.__enter__()

    def stop() -> None:
        context.__exit__(None, None, None)

    assert load(transport, addresses[transport], act) == ["connection"] * 3


def test_no_server_at_all_is_said_at_once() -> None:
    with pytest.raises(RecmillError, match=r"No server answers at 127.0.0.1:1: .*recmill serve"):
        load("grpc", "127.0.0.1:1", None)


def test_a_message_larger_than_the_peers_window_arrives_whole() -> None:
    items = list(range(50_000))

    async def run(address: str) -> list[float]:
        codec = codec_for("grpc", address)
        transport = codec.transport("Rank", 20.0)
        await transport.open()
        problem, body = await ask(transport, codec.rank(1, items, {}))
        transport.close()
        assert problem == ""
        return codec.scores(body)

    with peer() as addresses, asyncio.Runner(loop_factory=precise_loop) as runner:
        scores = runner.run(run(addresses["grpc"]))
    assert np.allclose(scores, np.array(items) / 1e6)


def test_a_call_of_an_unknown_method_has_the_name_of_its_code() -> None:
    async def run(address: str) -> str:
        transport = codec_for("grpc", address).transport("Nothing", 5.0)
        await transport.open()
        problem, _ = await ask(transport, b"")
        transport.close()
        return problem

    with peer() as addresses, asyncio.Runner(loop_factory=precise_loop) as runner:
        assert runner.run(run(addresses["grpc"])) == "UNIMPLEMENTED"


def test_a_status_is_found_between_other_headers() -> None:
    status = b"\x00\x0bgrpc-status\x018"
    assert grpc_status(b"\x88" + call_headers("/a/b", "here", 1.0) + status + b"\x40\x01a\x01b") == "8"
    assert grpc_status(b"\x20\x88") == ""
    assert CODES[8] == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_whole_run_has_all_its_numbers(transport: TransportName, tmp_path: Path) -> None:
    pl.DataFrame({"user": [5, 6, 7]}).write_parquet(tmp_path / "users.parquet")
    options = ServeBenchConfig(
        k=2,
        batch=1 if transport == "http" else 2,
        transport=transport,
        rate=(60.0,),
        clients=2,
        seconds=1.0,
        warm_up=0.2,
        slo="p99=100ms",
        probe_seconds=0.2,
        deadline_ms=20_000.0,
        without_echo=True,
    )
    with peer(seconds=0.002) as addresses:
        target = BenchTarget(address=addresses[transport], users=tmp_path / "users.parquet")
        result = bench_serve(target, options)
    opened, closed = result["loads"]
    assert opened["loop"] == "open"
    assert opened["target_rate"] == 60.0
    assert opened["failed"] == closed["failed"] == 0
    assert opened["achieved_fraction"] > 0.3
    assert closed["users_per_second"] == pytest.approx(closed["achieved_rate"] * options.batch, abs=0.1)
    assert opened["latency"]["p50_ms"] >= 2
    assert opened["answers"]["versions"] == {"v1": opened["answers"]["answers"]}
    if transport == "grpc":
        assert opened["answers"]["degraded_fraction"] == 1.0
        assert opened["traced_stages_ms"] == {"rank": 1.5}
    assert result["slo"]["max_rate_at_slo"] < 500  # an answer takes 2 ms, one after the other
    assert json.loads(json.dumps(result)) is not None
    write_page(tmp_path / "serve.html", result)
    text = (tmp_path / "serve.html").read_text(encoding="utf-8")
    assert "Latency against rate" in text
    assert "Distribution of latencies" in text
    assert "max_rate_at_slo" in describe(result)


def test_auc_and_recall_are_those_of_the_planted_answers(tmp_path: Path) -> None:
    pairs = {"user": [1, 1, 1, 2, 2], "item": [3, 7, 1, 4, 2], "label": [1, 1, 0, 1, 0]}
    pl.DataFrame(pairs).write_parquet(tmp_path / "labels.parquet")
    labels = read_labels(tmp_path / "labels.parquet", max_users=10)
    with peer() as addresses:
        found = measure_accuracy(codec_for("grpc", addresses["grpc"]), labels, RequestShape(k=3))
    # The peer scores an item by its number: positives 3, 7, 4 are above negatives 1, 2. It shows 3, 1, 4 to all.
    assert found == {"pairs": 5, "auc": 1.0, "users": 2, "recall@3": 0.75}


def test_labels_without_their_columns_are_refused(tmp_path: Path) -> None:
    pl.DataFrame({"user": [1], "click": [0]}).write_parquet(tmp_path / "labels.parquet")
    with pytest.raises(RecmillError, match="has no column item, label"):
        read_labels(tmp_path / "labels.parquet", 10)


def test_the_generator_knows_its_own_cost() -> None:
    cost = generator_cost(100.0, b"x" * 60)
    assert 0 < cost["cpu_us_per_request"] < 5000
    assert cost["latency"]["p50_ms"] > 0


def test_users_and_contexts_come_from_files(tmp_path: Path) -> None:
    pl.DataFrame({"who": ["b", "a", "b", None]}).write_parquet(tmp_path / "users.parquet")
    (tmp_path / "context.jsonl").write_text('{"device": "phone"}\n\n{"hour": 3}\n', encoding="utf-8")
    assert read_users(tmp_path / "users.parquet") == ["b", "a"]
    assert read_contexts(tmp_path / "context.jsonl") == ({"device": "phone"}, {"hour": 3})


def test_the_same_seed_makes_the_same_requests() -> None:
    codec = codec_for("grpc", "127.0.0.1:1")
    ask_ = RequestShape(
        contexts=({"hour": 3, "device": "phone", "new": True, "x": 0.5, "tags": ["a", "b"]},), batch=3
    )
    users: list[str | int] = ["a", "b", "c", 4]
    assert make_requests(codec, users, ask_, 5, 1, 1.0) == make_requests(codec, users, ask_, 5, 1, 1.0)
    assert make_requests(codec, users, ask_, 5, 1, 1.0) != make_requests(codec, users, ask_, 5, 2, 1.0)
