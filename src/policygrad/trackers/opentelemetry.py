"""`--track otel`: the spans of a run, sent to a collector by OpenTelemetry's protocol (OTLP over http).

The standard variables say where and how: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES, OTEL_BSP_* (https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/).
"""

from __future__ import annotations

import os
import threading
from typing import Any

from policygrad.errors import ConfigError, import_optional
from policygrad.trackers.base import RunInfo
from policygrad.trackers.trace import SpanTracker
from policygrad.utils.span_recorder import SpanRecord

PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class OpenTelemetry(SpanTracker):
    """Exports each step, evaluation and background rollout as a trace of its own, with the spans in it.

    A run would be too large a trace for the usual stores. The run is the resource's attribute `policygrad.run`. Spans of the same
    step in other threads are found by their attribute `step`.
    """

    def __init__(self) -> None:
        for module in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"):
            import_optional(module, "--track otel", "trace")
        for variable in PROTOCOL_VARIABLES:
            if (protocol := os.environ.get(variable, "http/protobuf")) != "http/protobuf":
                raise ConfigError(
                    f"{variable} is {protocol!r}, and --track otel speaks http/protobuf alone: unset it, and let the endpoint be "
                    "the collector's http port (4318 by default)"
                )
        self._provider: Any = None

    def start(self, info: RunInfo) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import IdGenerator

        run = info.folder.name if info.folder is not None else info.title
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        resource = Resource.create({"policygrad.run": run} | ({} if named else {SERVICE_NAME: "policygrad"}))
        ids = threading.local()

        class RecordedIds(IdGenerator):
            """Gives a span the ids that it was recorded with, on this machine or another."""

            def generate_span_id(self) -> int:
                return int(ids.span)

            def generate_trace_id(self) -> int:
                return int(ids.trace)

        self._ids, self._model = ids, str(info.config.get("model", ""))
        self._provider = TracerProvider(resource=resource, id_generator=RecordedIds(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("policygrad")
        super().start(info)

    def write(self, records: list[SpanRecord]) -> None:
        from opentelemetry.trace import (
            NonRecordingSpan,
            SpanContext,
            Status,
            StatusCode,
            TraceFlags,
            set_span_in_context,
        )

        for record in records:
            self._ids.span = record.id
            self._ids.trace = trace_id = record.root << 64 | record.root
            context = None
            if record.parent:
                parent = SpanContext(
                    trace_id, record.parent, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
                )
                context = set_span_in_context(NonRecordingSpan(parent))
            attributes = {"policygrad.process": record.process, "thread.name": record.track, **record.attributes}
            if "gen_ai.operation.name" in attributes:
                attributes["gen_ai.request.model"] = self._model
            if record.error:
                attributes["error.type"] = record.error.partition(":")[0]
            span = self._tracer.start_span(record.name, context, attributes=attributes, start_time=record.start)
            if record.error:
                span.set_status(Status(StatusCode.ERROR, record.error))
            span.end(record.end)

    def close(self) -> None:
        super().close()
        if self._provider is not None:
            self._provider.shutdown()
            self._provider = None
