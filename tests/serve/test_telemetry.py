"""What the server tells about itself."""

from __future__ import annotations

import http.server
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from recmill.errors import MissingPackage, RecmillError
from recmill.stages.serve import telemetry as module
from recmill.stages.serve.live import MAX_STAGES, SECONDS, Ring
from recmill.stages.serve.messages import Answer, Status
from recmill.stages.serve.spans import Spans
from recmill.stages.serve.telemetry import MAX_REASONS, Telemetry

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
STAGES = {"user": 0.5, "recall": 1.5, "rank": 3.0}
STATUS = Status(
    version="0000000002-bbbbbbbb",
    previous="0000000001-aaaaaaaa",
    canary=None,
    versions=["0000000001-aaaaaaaa", "0000000002-bbbbbbbb"],
    recipe="quickstart",
    role="all",
    models=["ranking"],
    channels=["popular"],
    num_items=70,
    num_users=30,
    deltas=2,
    started_at=1_700_000_000.0,
    freshness_seconds=12.5,
    ready=True,
    manifest={},
)


def values_of(telemetry: Telemetry) -> dict[str, float]:
    """Every sample as Prometheus reads it: name and labels -> value."""
    families = text_string_to_metric_families(telemetry.metrics().decode())
    return {
        f"{sample.name}{{{','.join(f'{name}={value}' for name, value in sorted(sample.labels.items()))}}}": sample.value
        for family in families
        for sample in family.samples
    }


def everything_happened() -> Telemetry:
    telemetry = Telemetry()
    telemetry.watch(lambda: STATUS)
    telemetry.observe("http", "recommend", 200, 0.004, Answer(items=[], degraded=["rank: too late"]), STAGES)
    telemetry.observe("grpc", "rank", "RESOURCE_EXHAUSTED", 0.0001)
    telemetry.observe("http", "recommend", 504, 0.2)
    telemetry.queue_length(3)
    telemetry.store_failed()
    telemetry.delta(applied=True)
    telemetry.delta(applied=False)
    telemetry.swap(applied=True)
    telemetry.shadow(differs=True, score_difference=0.02)
    telemetry.logged("written", 10)
    return telemetry


def test_requests_are_counted_by_transport_method_and_status() -> None:
    found = values_of(everything_happened())
    assert found["recmill_requests_total{method=recommend,status=200,transport=http}"] == 1
    assert found["recmill_requests_total{method=rank,status=RESOURCE_EXHAUSTED,transport=grpc}"] == 1
    assert found["recmill_request_seconds_bucket{le=0.005,method=recommend,transport=http}"] == 1
    assert found["recmill_request_seconds_count{method=recommend,transport=http}"] == 2
    assert found["recmill_stage_seconds_sum{stage=rank}"] == pytest.approx(0.003)


def test_a_refusal_says_why_whatever_the_transport_calls_it() -> None:
    found = values_of(everything_happened())
    assert found["recmill_refused_total{reason=overloaded,transport=grpc}"] == 1
    assert found["recmill_refused_total{reason=too_late,transport=http}"] == 1


def test_what_is_true_now_is_read_from_the_status() -> None:
    found = values_of(everything_happened())
    assert found["recmill_version{recipe=quickstart,use=current,version=0000000002-bbbbbbbb}"] == 1
    assert found["recmill_version{recipe=quickstart,use=previous,version=0000000001-aaaaaaaa}"] == 1
    assert found["recmill_freshness_seconds{}"] == 12.5
    assert found["recmill_items{}"] == 70
    assert found["recmill_queue_length{}"] == 3


def test_the_metrics_page_lists_exactly_what_is_exposed() -> None:
    families = text_string_to_metric_families(everything_happened().metrics().decode())
    shown = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    listed = set(
        re.findall(r"^\| `((?:recmill|process)_\w+)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert listed == shown


def test_a_reason_is_counted_without_what_is_about_one_request() -> None:
    telemetry = Telemetry()
    for number in range(100):
        reasons = [f"features of {number} items: the store is at 10.0.0.{number}"]
        telemetry.observe("http", "recommend", 200, 0.01, Answer(items=[], degraded=reasons))
    assert values_of(telemetry)["recmill_degraded_total{reason=features of N items}"] == 100


def test_reasons_beyond_the_bound_are_counted_together() -> None:
    telemetry = Telemetry()
    for number in range(MAX_REASONS + 5):
        reason = "x" * (number + 1)
        telemetry.observe("http", "recommend", 200, 0.01, Answer(items=[], degraded=[reason]))
    found = [name for name in values_of(telemetry) if name.startswith("recmill_degraded_total")]
    assert len(found) == MAX_REASONS + 1
    assert values_of(telemetry)["recmill_degraded_total{reason=other}"] == 5


# the last two minutes


def test_live_shows_each_second_with_percentiles_and_stage_means() -> None:
    ring = Ring()
    begin = time.time()
    for number in range(100):
        ring.add(0.1 if number >= 98 else 0.005, [3] if number == 0 else [], {"rank": 2.0})
    end = time.time()
    live = ring.read(now=end + 1)
    assert len(live["seconds"]) == SECONDS
    assert live["seconds"][-1] == int(end)
    assert sum(live["requests"]) == 100
    assert sum(live["degraded"]) == 1
    if int(begin) == int(end):  # else they fell into two seconds
        assert live["p50_ms"][-1] == pytest.approx(5, rel=0.01)
        assert live["p99_ms"][-1] == pytest.approx(100, rel=0.01)
    assert live["stages_ms"]["rank"][-1] == pytest.approx(2.0)
    assert live["p50_ms"][0] is None


def test_what_is_older_than_two_minutes_is_gone() -> None:
    ring = Ring()
    ring.add(0.005, [], STAGES)
    live = ring.read(now=time.time() + SECONDS + 2)
    assert sum(live["requests"]) == 0
    assert live["stages_ms"]["rank"] == [None] * SECONDS


def test_stages_beyond_the_bound_are_left_out() -> None:
    ring = Ring()
    ring.add(0.005, [], {f"stage{number}": 1.0 for number in range(MAX_STAGES + 3)})
    assert len(ring.read()["stages_ms"]) == MAX_STAGES


def test_looking_at_the_server_is_no_request_in_the_charts() -> None:
    telemetry = Telemetry()
    for method in ("live", "status", "metrics", "users", "console", "health"):
        telemetry.observe("http", method, 200, 0.001)
    telemetry.observe("http", "recommend", 200, 0.001)
    live = telemetry.ring.read(now=time.time() + 1)
    assert sum(live["requests"]) == 1


def test_errors_and_refusals_are_told_apart() -> None:
    telemetry = everything_happened()
    telemetry.observe("http", "recommend", 500, 0.001)
    live = telemetry.ring.read(now=time.time() + 1)
    assert (sum(live["requests"]), sum(live["errors"]), sum(live["refused"])) == (4, 1, 2)


# several processes

CHILD = """
import sys
from recmill.stages.serve.telemetry import Telemetry
telemetry = Telemetry()
telemetry.queue_length(2)
for _ in range(5):
    telemetry.observe("http", "recommend", 200, 0.004, None, {"rank": 3.0})
print("ready", flush=True)
sys.stdin.read()
"""
PARENT = """
import json, os, subprocess, sys, time
from recmill.stages.serve.telemetry import Telemetry, forget_process, shared_by_processes
with shared_by_processes() as folder:
    children = [subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=-1, stdout=-1) for _ in range(2)]
    for child in children:
        child.stdout.readline()
    telemetry = Telemetry()
    before = telemetry.metrics().decode()
    live = telemetry.ring.read(now=time.time() + 1)
    for child in children:
        child.communicate()
        forget_process(child.pid, folder)
    print(json.dumps([before, telemetry.metrics().decode(), live, folder.exists()]))
print(folder.exists())
"""


@pytest.mark.processes
def test_processes_of_one_port_count_together() -> None:
    command = [sys.executable, "-c", PARENT, CHILD]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    before, after, live, there = json.loads(answer[0])
    counted = 'recmill_requests_total{method="recommend",status="200",transport="http"} 10.0'
    assert counted in before
    assert "recmill_queue_length 4.0" in before
    assert counted in after, "what a process counted stays when it ends"
    assert "recmill_queue_length 4.0" not in after, "its queue does not"
    memory = [float(re.search(r"process_resident_memory_bytes (\d\S*)", text)[1]) for text in (before, after)]
    assert memory[0] > memory[1] + 10e6, "memory is that of all, and of those that are left"
    assert sum(live["requests"]) == 10
    assert sum(value or 0 for value in live["stages_ms"]["rank"]) >= 3.0
    assert there
    assert answer[1] == "False", "the shared folder is removed"


# traces


class Collector(http.server.BaseHTTPRequestHandler):
    received: list[ExportTraceServiceRequest]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """An OpenTelemetry collector that keeps what it gets."""
    received: list[ExportTraceServiceRequest] = []
    kind = type("Keeping", (Collector,), {"received": received})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", received
        server.shutdown()
        thread.join()


def test_a_request_is_one_span_with_one_below_it_for_each_stage(
    collector: tuple[str, list[ExportTraceServiceRequest]],
) -> None:
    address, received = collector
    telemetry = Telemetry(otlp=address)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    telemetry.observe("http", "recommend", 200, 0.006, Answer(items=[], version="v1"), STAGES, parent)
    telemetry.observe("http", "status", 200, 0.001)
    telemetry.close()
    scopes = [scope for one in received for found in one.resource_spans for scope in found.scope_spans]
    spans = {span.name: span for scope in scopes for span in scope.spans}
    assert set(spans) == {"recommend", "user", "recall", "rank"}
    whole, rank = spans["recommend"], spans["rank"]
    assert whole.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert whole.parent_span_id.hex() == "b7ad6b7169203331"
    assert rank.parent_span_id == whole.span_id
    assert rank.end_time_unix_nano - rank.start_time_unix_nano == pytest.approx(3e6, rel=0.01)
    assert rank.start_time_unix_nano - whole.start_time_unix_nano == pytest.approx(2e6, rel=0.01)
    assert {fact.key: fact.value.string_value for fact in whole.attributes}["version"] == "v1"


def test_without_the_package_the_error_is_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MissingPackage, match=r'pip install "recmill\[otel\]"'):
        Spans("http://localhost:4318")


def test_an_address_of_a_collector_is_checked_at_once() -> None:
    with pytest.raises(RecmillError, match="expected an address such as http://localhost:4318"):
        Spans("localhost:4318")


def test_importing_telemetry_does_not_import_prometheus() -> None:
    code = f"import sys, {module.__name__}; print('prometheus_client' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
