"""`--metrics-port`: what Prometheus reads while a run is at work, with names that it accepts."""

from __future__ import annotations

import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from policygrad.errors import ConfigError
from policygrad.trackers import RunInfo
from policygrad.trackers.prometheus import PrometheusMetrics, metric_name
from policygrad.trackers.registry import parse_metrics_port

pytest.importorskip("prometheus_client")


def scrape(port: int) -> dict[str, Any]:
    """The families that a server has, parsed as Prometheus would, by name."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        assert reply.headers["content-type"].startswith("text/plain")
        return {family.name: family for family in text_string_to_metric_families(reply.read().decode())}


def value(families: Mapping[str, Any], name: str) -> float:
    (sample,) = (s for s in families[name].samples if not s.name.endswith("_created"))
    return float(sample.value)


class Scraping(pg.Callback):
    """Reads the metrics after each step, as Prometheus would."""

    def __init__(self, port: int) -> None:
        self._port, self.seen = port, list[tuple[Mapping[str, float], dict[str, Any]]]()

    def step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        self.seen.append((metrics, scrape(self._port)))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_every_metric_of_a_step_is_a_gauge_and_counters_go_on_after_a_resume(small: pg.Run, tmp_path: Path) -> None:
    port = free_port()
    run = replace(small, steps=3, metrics_port=str(port), output=str(tmp_path / "run"))
    scraping = Scraping(port)
    pg.train(run, display=False, callbacks=[scraping], stop_after=2)
    pg.train(run, resume=tmp_path / "run", display=False, callbacks=[scraping])
    tokens = 0.0
    for step, (metrics, families) in enumerate(scraping.seen, 1):
        tokens += metrics["tokens/sampled"]
        for name, number in metrics.items():
            assert families[metric_name(name)].type == "gauge"
            assert value(families, metric_name(name)) == pytest.approx(number, nan_ok=True)
        assert (value(families, "policygrad_steps"), families["policygrad_steps"].type) == (step, "counter")
        assert value(families, "policygrad_tokens") == tokens
        assert value(families, "policygrad_up") == 1
        assert value(families, "policygrad_last_step_timestamp_seconds") > 1e9
        assert value(families, "policygrad_steps_planned") == 3
    labels = families["policygrad_run_info"].samples[0].labels
    assert (labels["run"], labels["algorithm"], labels["model"]) == ("run", "dr_grpo", run.model)
    assert "reward [reward]: mean reward" in families["policygrad_reward"].documentation
    with pytest.raises(urllib.error.URLError):  # it ends with the run
        scrape(port)


def test_names_are_prometheus_names_and_stay_apart() -> None:
    assert metric_name("clip_ratio/high") == "policygrad_clip_ratio_high"
    assert metric_name("rewards/mine.py:f/std") == "policygrad_rewards_mine_py_f_std"
    with PrometheusMetrics("0") as tracker:
        tracker.start(RunInfo("a run", steps=9, first_step=5, sampled_tokens=70))
        tracker.log(5, {"a/b": 1.0, "a_b": 2.0, "nan": float("nan"), "step": 7.0, "tokens": 5.0})
        tracker.note("careful")
        families = scrape(tracker.port)
    assert value(families, "policygrad_a_b") == 1.0
    assert value(families, "policygrad_step") == 5
    assert value(families, "policygrad_tokens") == 75
    assert value(families, "policygrad_notes") == 1


def test_a_server_is_alive_before_the_first_step() -> None:
    with PrometheusMetrics("127.0.0.1:0") as tracker:
        families = scrape(tracker.port)
    assert value(families, "policygrad_up") == 1
    assert value(families, "policygrad_last_step_timestamp_seconds") == 0
    assert "policygrad_run_info" not in families


def test_a_port_in_use_is_refused_before_a_folder_is_made(small: pg.Run, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = replace(small, metrics_port=str(port), output=str(tmp_path / "run"))
        with pytest.raises(
            ConfigError, match=rf"--metrics-port {port}: cannot listen at 127\.0\.0\.1:{port} .*another one"
        ):
            pg.train(run, display=False)
    assert not (tmp_path / "run").exists()


def test_addresses() -> None:
    assert parse_metrics_port("9100") == ("127.0.0.1", 9100)
    assert parse_metrics_port("0.0.0.0:9100") == ("0.0.0.0", 9100)
    assert parse_metrics_port("[::1]:9100") == ("::1", 9100)
    for wrong in ("", "http", "99999", "host:", "::1:9100", "-1"):
        with pytest.raises(ConfigError, match="give a port, 9100, or an address and a port"):
            pg.Run(metrics_port=wrong)


def test_a_missing_library_is_refused_with_the_command_that_installs_it(
    small: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(
        ConfigError, match=r"--metrics-port needs prometheus_client.*pip install '\.\[prometheus\]' in a"
    ):
        pg.train(replace(small, metrics_port="0", output=str(tmp_path / "run")), display=False)
    assert not (tmp_path / "run").exists()
