"""Telemetry of the server: Prometheus metrics, the last two minutes for the console, OpenTelemetry spans.

Every metric is listed in docs/metrics.md.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from recmill.stages.serve.live import COUNTS, Ring
from recmill.stages.serve.spans import Spans

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from recmill.stages.serve.messages import Status

# prometheus_client reads this when it is first imported, so nothing here may import it before a Telemetry exists.
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
STAGE_BUCKETS = (0.0001, 0.00025, *BUCKETS[:-1])
DIFFERENCES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
MAX_REASONS = 32  # distinct causes of degraded answers that get a label; the rest are "other"

# Statuses of load shedding, in HTTP and gRPC: not failures of the server.
_REFUSED = {
    "429": "overloaded",
    "RESOURCE_EXHAUSTED": "overloaded",
    "504": "too_late",
    "DEADLINE_EXCEEDED": "too_late",
}
_DIGITS = re.compile(r"\d+")
_ERRORS, _REFUSALS, _DEGRADED = (COUNTS.index(name) for name in ("errors", "refused", "degraded"))
# Monitoring requests, which the live charts leave out.
_MONITORING = frozenset({"live", "status", "users", "metrics", "health", "ready", "console", "openapi"})


class HasDegraded(Protocol):
    """What all answers have in common: `degraded` is empty when all is well."""

    @property
    def degraded(self) -> list[str]: ...


class Telemetry:
    """Counts what the server does. Any thread may call any method; each costs microseconds.

    Created in the process that serves. Where several processes share a port, create each inside
    `shared_by_processes()`: then `metrics` and `live` cover all of them.
    """

    def __init__(self, otlp: str | None = None) -> None:
        import prometheus_client as prometheus

        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        shared = os.environ.get(SHARED_FOLDER)
        self.folder = Path(shared) if shared else None
        self.registry = prometheus.CollectorRegistry()
        self.ring = Ring(self.folder)
        self.spans = Spans(otlp) if otlp else None
        self._status: Callable[[], Status] | None = None
        self._reasons: set[str] = set()
        self._lock = threading.Lock()
        self._requests = self._counter("requests", "Answered requests.", "transport", "method", "status")
        self._seconds = self._histogram("request_seconds", "Whole request.", BUCKETS, "transport", "method")
        self._stages = self._histogram("stage_seconds", "One stage of answers.", STAGE_BUCKETS, "stage")
        self._refused = self._counter(
            "refused", "Requests refused because of overload or a deadline.", "transport", "reason"
        )
        self._degraded = self._counter("degraded", "Degraded answers.", "reason")
        self._store_errors = self._counter("store_errors", "Lookups the feature store failed to answer.")
        self._missing_rows = self._counter(
            "store_missing_rows", "Rows that the feature store should have had.", "side", "reason"
        )
        self._deltas = self._counter("deltas", "Deltas of the bundle folder, applied or refused.", "outcome")
        self._swaps = self._counter("swaps", "Versions of the bundle folder, applied or refused.", "outcome")
        self._shadowed = self._counter("shadow_requests", "Requests that the shadow version answered too.")
        self._differing = self._counter(
            "shadow_differences", "Requests to which the shadow version gave other items."
        )
        self._score_differences = self._histogram(
            "shadow_score_difference", "Largest difference of a common item's score.", DIFFERENCES
        )
        self._logged = self._counter("request_log_rows", "Sampled requests.", "outcome")
        self._queue = prometheus.Gauge(
            "recmill_queue_length",
            "Requests waiting or being answered.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self._shown = self.registry if self.folder is None else self._registry_of_all(self.folder)
        if self.folder is None:
            prometheus.ProcessCollector(registry=self.registry)
        self._shown.register(_StatusMetrics(lambda: self._status))

    def watch(self, status: Callable[[], Status]) -> None:
        """Register the source of versions, sizes and freshness, which is read at each scrape."""
        self._status = status

    def observe(
        self,
        transport: str,
        method: str,
        status: int | str,
        seconds: float,
        answer: HasDegraded | None = None,
        stages: Mapping[str, float] | None = None,
        traceparent: str | None = None,
    ) -> None:
        """Count a request that was answered or refused.

        `method` is the name of a call, never a path that a client chose. `status` is an HTTP status or the name of a
        gRPC code. `stages` are milliseconds, as in `Trace`; `traceparent` is the header, if there was one.
        """
        code, stages = str(status), stages or {}
        self._requests(transport, method, code).inc()
        self._seconds(transport, method).observe(seconds)
        for stage, milliseconds in stages.items():
            self._stages(stage).observe(milliseconds / 1000)
        counted = []
        failed = code != "OK" and not code.startswith(("2", "3"))
        if code in _REFUSED:
            self._refused(transport, _REFUSED[code]).inc()
            counted.append(_REFUSALS)
        elif failed:
            counted.append(_ERRORS)
        if answer is not None and answer.degraded:
            self._count_degraded(answer.degraded)
            counted.append(_DEGRADED)
        if method not in _MONITORING:
            self.ring.add(seconds, counted, stages)
            if self.spans is not None:
                facts = {"transport": transport, "status": code, "version": getattr(answer, "version", "")}
                self.spans.add(method, seconds, stages, facts, failed, traceparent)

    def queue_length(self, length: int) -> None:
        self._queue.set(length)

    def store_failed(self) -> None:
        self._store_errors().inc()

    def missing_rows(self, side: str, reason: str, number: int) -> None:
        """Count rows of users or items that the store lacks or returned damaged."""
        if number:
            self._missing_rows(side, reason).inc(number)

    def delta(self, applied: bool) -> None:
        """Count a delta that was applied, or refused because it is damaged, too old or from another recipe."""
        self._deltas("applied" if applied else "refused").inc()

    def swap(self, applied: bool) -> None:
        """Count a version that was swapped in or refused."""
        self._swaps("applied" if applied else "refused").inc()

    def shadow(self, differs: bool, score_difference: float) -> None:
        """Count an answer of the shadow version: whether items or order differ, and the largest score difference."""
        self._shadowed().inc()
        self._score_differences().observe(score_difference)
        if differs:
            self._differing().inc()

    def logged(self, outcome: str, num_rows: int) -> None:
        """Count rows of the request log that were written, or dropped because the disk is slow or full."""
        self._logged(outcome).inc(num_rows)

    def metrics(self) -> bytes:
        """All metrics in the Prometheus text format; the content type is `CONTENT_TYPE`."""
        from prometheus_client import generate_latest

        return generate_latest(self._shown)

    def live(self) -> dict[str, Any]:
        """The last two minutes, second by second."""
        return self.ring.read()

    def close(self) -> None:
        """Send the remaining spans."""
        if self.spans is not None:
            self.spans.close()

    def _count_degraded(self, reasons: list[str]) -> None:
        for reason in reasons:
            # Text after a colon and numbers are about one request; as labels they would grow without bound.
            name = _DIGITS.sub("N", reason.partition(":")[0])
            if name not in self._reasons:
                with self._lock:
                    if len(self._reasons) >= MAX_REASONS:
                        name = "other"
                    else:
                        self._reasons.add(name)
            self._degraded(name).inc()

    def _counter(self, name: str, help_: str, *labels: str) -> _Children:
        from prometheus_client import Counter

        return _Children(Counter(f"recmill_{name}", help_, labels, registry=self.registry))

    def _histogram(self, name: str, help_: str, buckets: tuple[float, ...], *labels: str) -> _Children:
        from prometheus_client import Histogram

        return _Children(Histogram(f"recmill_{name}", help_, labels, registry=self.registry, buckets=buckets))

    def _registry_of_all(self, folder: Path) -> CollectorRegistry:
        """The registry of all processes, including this one."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(folder))  # type: ignore[no-untyped-call]
        registry.register(_MemoryOfAll(folder))
        return registry


class _Children:
    """The child of a metric for some labels. prometheus_client's own lookup takes longer than the counting."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._known: dict[tuple[str, ...], Any] = {} if metric._labelnames else {(): metric}

    def __call__(self, *labels: str) -> Any:
        child = self._known.get(labels)
        if child is None:
            child = self._known[labels] = self._metric.labels(*labels)
        return child


class _StatusMetrics:
    """Gauges that are read from the service's status at each scrape. Equal in all processes of one port."""

    def __init__(self, status: Callable[[], Callable[[], Status] | None]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import GaugeMetricFamily as Gauge

        ask = self._status()
        if ask is None:
            return
        status = ask()
        versions = Gauge("recmill_version", "1 for each version in use.", labels=("version", "use", "recipe"))
        uses = {
            "current": status.version,
            "previous": status.previous,
            "canary": (status.canary or "").partition("=")[0],
        }
        for use, version in uses.items():
            if version:
                versions.add_metric((version, use, status.recipe), 1)
        yield versions
        yield Gauge("recmill_ready", "1 once warm and until drained.", float(status.ready))
        yield Gauge("recmill_items", "Items that can be recommended.", status.num_items)
        yield Gauge("recmill_users", "Users with stored features.", status.num_users)
        yield Gauge("recmill_deltas_in_version", "Deltas on top of the current version.", status.deltas)
        behind = "1 while changes wait for the feature store, and once some were dropped."
        yield Gauge("recmill_store_behind", behind, float(status.store is not None))
        waits = "1 while the event stream cannot be read."
        yield Gauge("recmill_events_behind", waits, float(status.events is not None))
        yield Gauge(
            "recmill_refused_versions", "Versions and deltas that are not taken.", len(status.refused)
        )
        yield Gauge("recmill_started_seconds", "When the server started, in Unix time.", status.started_at)
        if status.freshness_seconds is not None:
            yield Gauge(
                "recmill_freshness_seconds",
                "Age of the newest training row in the current version.",
                status.freshness_seconds,
            )


class _MemoryOfAll:
    """Resident memory of all processes that write into a folder, by the metric name of a single process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import GaugeMetricFamily as Gauge

        pids = {file.stem.rpartition("_")[2] for file in self._folder.glob("gauge_live*_*.db")}
        pages = sum(_resident_pages(pid) for pid in pids)
        yield Gauge(
            "process_resident_memory_bytes",
            "Resident memory, of all processes.",
            pages * os.sysconf("SC_PAGE_SIZE"),
        )


def _resident_pages(pid: str) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0  # the process has ended


@contextmanager
def shared_by_processes() -> Iterator[Path]:
    """Processes started in this block share their metrics.

    Their parent calls `forget_process` for each one that ends.
    """
    before = os.environ.get(SHARED_FOLDER)
    with tempfile.TemporaryDirectory(prefix="recmill-metrics-") as folder:
        os.environ[SHARED_FOLDER] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ[SHARED_FOLDER]
            if before is not None:
                os.environ[SHARED_FOLDER] = before


def forget_process(pid: int, folder: Path) -> None:
    """Clear the queue gauge of a process that ended. Its counters stay."""
    for file in folder.glob(f"gauge_live*_{pid}.db"):
        file.unlink(missing_ok=True)
