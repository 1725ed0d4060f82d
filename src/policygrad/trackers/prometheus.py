"""`--metrics-port`: a run's metrics over http, for Prometheus and Grafana. The only file that imports prometheus_client."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from policygrad.errors import ConfigError, import_optional
from policygrad.trackers.base import RunInfo, Tracker
from policygrad.trackers.glossary import find_metric_doc
from policygrad.trackers.registry import parse_metrics_port

PREFIX = "policygrad_"
FIXED = {
    "up": "1 while the run's process lives, also while it loads",
    "last_step_timestamp_seconds": "Unix time at which the newest step was logged; 0 before the first of this process",
    "step": "number of the newest step",
    "steps_planned": "number of the run's last step",
    "steps": "steps done, those before a resume included",
    "tokens": "tokens sampled or read, those before a resume included",
    "notes": "warnings and remarks of this process",
    "run": "what runs",
}
"""Metrics beside those of the steps, without prefix and suffix, and their description."""


class PrometheusMetrics(Tracker):
    """Serves the newest value of every metric as a gauge at http://HOST:PORT/metrics, until it is closed.

    Args:
        address: As `parse_metrics_port` reads it; port 0 = any free one, which `port` says.

    Raises:
        ConfigError: prometheus_client is not installed, or the address is not available.
    """

    def __init__(self, address: str) -> None:
        import_optional("prometheus_client", "--metrics-port", "prometheus")
        self._values = dict[str, float]()
        self._info: RunInfo | None = None
        self._step = self._notes = self._tokens = 0.0
        self._logged = 0.0
        self._lock = threading.Lock()  # the server's threads read what the training thread writes
        self.port, self._close = serve_metrics(self._collect, address)

    def start(self, info: RunInfo) -> None:
        with self._lock:
            self._info, self._step, self._tokens = info, info.first_step - 1, info.sampled_tokens

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        with self._lock:
            self._step, self._logged = step, time.time()
            self._tokens += metrics.get("tokens/sampled", metrics.get("tokens", 0.0))
            self._values |= metrics

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._values |= metrics

    def note(self, text: str) -> None:
        with self._lock:
            self._notes += 1

    def close(self) -> None:
        self._close()

    def _collect(self) -> Iterator[Any]:
        """Yield the metric families of one request."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        with self._lock:
            values, info = dict(self._values), self._info
            gauges = {"up": 1.0, "last_step_timestamp_seconds": self._logged, "step": self._step}
            counters = {"notes": self._notes}
            if info is not None:
                gauges["steps_planned"] = info.steps
                counters |= {"steps": self._step, "tokens": self._tokens}
        for name, value in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, FIXED[name], value)
        for name, value in counters.items():
            yield CounterMetricFamily(PREFIX + name, FIXED[name], value)
        if info is not None:
            algorithm = info.config.get("algorithm", {})
            labels = {
                "run": info.folder.name if info.folder is not None else info.title,
                "algorithm": str(algorithm.get("name", "") if isinstance(algorithm, Mapping) else algorithm),
                "model": str(info.config.get("model", "")),
                "task": str(info.config.get("task") or info.config.get("data") or ""),
            }
            yield InfoMetricFamily(PREFIX + "run", FIXED["run"], labels)
        taken = {PREFIX + name for name in FIXED}
        for metric, value in values.items():
            if isinstance(value, int | float) and (name := metric_name(metric)) not in taken:
                taken.add(name)  # of two metrics with the same name, such as a/b and a_b, only one can be served
                yield GaugeMetricFamily(name, _describe(metric), value)


def metric_name(metric: str) -> str:
    """Return a metric's name for Prometheus: `reward/greedy` is `policygrad_reward_greedy`."""
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]+", "_", metric).strip("_")


def _describe(metric: str) -> str:
    doc = find_metric_doc(metric)
    return metric if doc is None else f"{metric} [{doc.unit}]: {doc.text}"


def serve_metrics(collect: Callable[[], Iterator[Any]], address: str) -> tuple[int, Callable[[], None]]:
    """Serve metric families over http in a thread; return the port, and a function that ends it.

    Raises:
        ConfigError: The address is not available.
    """
    from prometheus_client import CollectorRegistry, start_http_server

    host, port = parse_metrics_port(address)

    class Collector:
        def collect(self) -> Iterator[Any]:
            return collect()

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"--metrics-port {address}: cannot listen at {host}:{port} ({error.strerror or error}): another run or exporter may "
            "use the port, choose another one, or leave --metrics-port out"
        ) from error

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return int(server.server_address[1]), close
