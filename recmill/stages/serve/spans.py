"""OpenTelemetry traces: one span per request, with a child span per stage. Only with --otlp."""

from __future__ import annotations

import time
from collections.abc import Mapping

from recmill.errors import MissingPackage, RecmillError


class Spans:
    """Sends spans to a collector in the background (OTLP over HTTP), and drops what it cannot accept.

    All requests are traced, unless the `traceparent` of a request has its sampled flag off.
    """

    def __init__(self, address: str) -> None:
        if not address.startswith(("http://", "https://")):
            raise RecmillError(f"--otlp {address}: expected an address such as http://localhost:4318")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
            from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            packages = "opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http"
            raise MissingPackage("--otlp", packages, "otel") from None
        traces = address.rstrip("/")
        exporter = OTLPSpanExporter(
            endpoint=traces if traces.endswith("/v1/traces") else f"{traces}/v1/traces"
        )
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "recmill"}),
            sampler=ParentBased(ALWAYS_ON),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("recmill.serve")
        self._incoming = TraceContextTextMapPropagator()
        self._kind, self._inside = SpanKind.SERVER, set_span_in_context
        self._failed = Status(StatusCode.ERROR)

    def add(
        self,
        name: str,
        seconds: float,
        stages: Mapping[str, float],
        attributes: Mapping[str, str],
        failed: bool = False,
        traceparent: str | None = None,
    ) -> None:
        """Record an answered request. Stages follow one another from its beginning."""
        end = time.time_ns()
        start = end - int(seconds * 1e9)
        context = self._incoming.extract({"traceparent": traceparent}) if traceparent else None
        span = self._tracer.start_span(name, context, self._kind, dict(attributes), start_time=start)
        if span.is_recording():
            if failed:
                span.set_status(self._failed)
            inside = self._inside(span)
            for stage, milliseconds in stages.items():
                child = self._tracer.start_span(stage, inside, start_time=start)
                start += int(milliseconds * 1e6)
                child.end(min(start, end))
        span.end(end)

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()
