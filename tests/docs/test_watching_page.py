"""docs/watching.md: its commands run as they stand, only smaller; its spans, variables and metric names are those of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from doubles.small_task import write_task
from policygrad.cli import main
from policygrad.report.timing import PHASES, summarise_events
from policygrad.trackers.glossary import load_glossary
from policygrad.trackers.prometheus import FIXED, metric_name

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "watching.md").read_text(encoding="utf-8")
SMALL = [
    "--steps",
    "2",
    "--prompts-per-step",
    "2",
    "--samples-per-prompt",
    "4",
    "--max-tokens",
    "16",
    "--evaluation.problems",
    "2",
    "--evaluation.samples-per-prompt",
    "1",
    "--rewards.num-workers",
    "1",
    "--plain",
]


def block(number: int) -> list[str]:
    """The lines of the page's nth block of commands."""
    return re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)[number].splitlines()


@pytest.mark.full
def test_a_run_is_traced_and_its_report_says_where_the_time_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    train, report = block(0)
    assert main([*train.split()[1:], *SMALL]) == 0
    capsys.readouterr()
    assert main(report.split()[1:]) == 0
    printed = capsys.readouterr()
    assert printed.out == "traced/report.html\n"
    assert re.match(r"Of \d.*: .*sampling \d+%.*Neither sampling nor learning: \d+%\.\nLongest gaps: ", printed.err)
    page = Path("traced/report.html").read_text(encoding="utf-8")
    assert '<a href="trace.json" download>trace.json</a>' in page
    assert printed.err.splitlines()[0] in page
    names = {event["name"] for event in json.loads(Path("traced/trace.json").read_text()) if event["ph"] == "X"}
    assert all(f"`{name}`" in PAGE for name in names)


def test_every_phase_of_the_summary_is_on_the_page() -> None:
    assert all(f"`{name}`" in PAGE for name in PHASES)


@pytest.mark.full
def test_a_run_exports_and_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.chdir(tmp_path)
    export, exporting = block(1)
    (serving,) = block(2)
    name, _, value = export.removeprefix("export ").partition("=")
    assert (name, value) == ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    monkeypatch.setenv(name, "http://127.0.0.1:9")  # where no collector is
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    fewer = [*SMALL, "--steps", "1", "--evaluation.problems", "0", *write_task(tmp_path)]
    assert main([*exporting.split()[1:], *fewer]) == 0
    assert main([*serving.replace("9100", "0").split()[1:], *fewer]) == 0


def test_names_of_metrics_exist() -> None:
    known = {f"policygrad_{name}" for name in FIXED} | {f"policygrad_{name}_total" for name in FIXED}
    known |= {metric_name(metric.name) for chapter in load_glossary() for metric in chapter.metrics}
    named = set(re.findall(r"\bpolicygrad_\w+", PAGE)) - {"policygrad_run_info"}
    assert named <= known
    assert {"policygrad_steps_total", "policygrad_staleness_mean", "policygrad_time_rollout"} <= named


def event(name: str, start: float, seconds: float, tid: int = 1, pid: int = 1) -> dict[str, object]:
    return {"name": name, "ph": "X", "ts": round(1e6 * start), "dur": round(1e6 * seconds), "pid": pid, "tid": tid}


def test_shares_and_gaps_by_hand() -> None:
    events = [
        event("load", 0, 10),
        event("step", 10, 10),
        event("sample", 10, 4),
        event("score", 14, 1.5),
        event("learn", 16, 4),
        event("sample", 16, 2, tid=9),  # of a rollout ahead
        event("step", 100, 10),  # of a later process: the time between is no gap
        event("sample", 100, 5),
        event("learn", 105, 4),
        event("learn", 0, 99, pid=2),  # of another rank
    ]
    summary = summarise_events(events)
    assert summary is not None
    assert summary.seconds == 30
    assert {what: seconds for what, seconds, _ in summary.phases} == {
        "loading": 10,
        "sampling": 11,
        "learning": 8,
        "scoring": 1.5,
    }
    assert summary.idle == pytest.approx(2 / 20)
    (gap,) = summary.gaps
    assert (gap.seconds, gap.start, gap.during) == (2, 14, "scoring 75%")
    assert summarise_events([]) is None
