"""`--track otel`: a collector on this machine receives a run's spans as protocol buffers."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from policygrad.errors import ConfigError
from policygrad.trackers.registry import create_trackers

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


class Collector(ThreadingHTTPServer):
    """Keeps the resource spans of every request to /v1/traces."""

    def __init__(self) -> None:
        self.received = list[Any]()
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        self.server.received += request.resource_spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        for name in (
            "OTEL_SERVICE_NAME",
            "OTEL_RESOURCE_ATTRIBUTES",
            "OTEL_EXPORTER_OTLP_PROTOCOL",
            "OTEL_SDK_DISABLED",
        ):
            monkeypatch.delenv(name, raising=False)
        yield server
        server.shutdown()


def values(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


def test_a_collector_receives_every_span_with_its_parent(small: pg.Run, tmp_path: Path, collector: Collector) -> None:
    run = replace(small, steps=2, track=("otel",), output=str(tmp_path / "the-run"))
    pg.train(run, display=False)
    resource = values(collector.received[0].resource.attributes)
    assert (resource["service.name"], resource["policygrad.run"]) == ("policygrad", "the-run")
    spans = [span for each in collector.received for scope in each.scope_spans for span in scope.spans]
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    steps = [span for span in spans if span.name == "step"]
    assert [values(span.attributes)["step"] for span in steps] == [1, 2]
    assert len({span.trace_id for span in steps}) == 2  # each step is a trace
    assert all(not span.parent_span_id for span in steps)
    for span in spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if span.parent_span_id:
            parent = by_id[span.parent_span_id]
            assert parent.trace_id == span.trace_id
            assert parent.start_time_unix_nano < span.start_time_unix_nano
            assert span.end_time_unix_nano <= parent.end_time_unix_nano
    sampled = values(next(span for span in spans if span.name == "sample").attributes)
    assert sampled["gen_ai.operation.name"] == "text_completion"
    assert sampled["gen_ai.request.model"] == run.model
    assert sampled["gen_ai.usage.output_tokens"] > 0
    assert sampled["thread.name"] == "main"


def test_a_failed_span_has_the_status_error(small: pg.Run, tmp_path: Path, collector: Collector) -> None:
    def make_learner(model: Any, run: pg.Run) -> Any:
        learner = pg.make_local_learner(model, run)

        def update(*arguments: Any) -> Any:
            raise pg.RunError("no more")

        learner.update = update  # type: ignore[method-assign]
        return learner

    run = replace(small, track=("otel",), output=str(tmp_path / "run"))
    with pytest.raises(pg.RunError, match="no more"):
        pg.train(run, learner=make_learner, display=False)
    spans = [span for each in collector.received for scope in each.scope_spans for span in scope.spans]
    failed = {span.name: values(span.attributes)["error.type"] for span in spans if span.status.code == 2}
    assert failed == dict.fromkeys(("update", "learn", "step"), "RunError")


def test_the_standard_variables_name_the_service(
    small: pg.Run, tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "post-training")
    pg.train(replace(small, steps=1, track=("otel",), output=str(tmp_path / "run")), display=False)
    assert values(collector.received[0].resource.attributes)["service.name"] == "post-training"


def test_another_protocol_or_a_missing_library_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(
        ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc', and --track otel speaks http/protobuf"
    ):
        create_trackers(["otel"])
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"--track otel needs opentelemetry.*pip install '\.\[trace\]' in a clone"):
        create_trackers(["otel"])
