"""`scripts/measure_gpu.py` on a CPU, with tiny shapes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import measure_gpu
import pytest

from doubles.forked import Forked

COMPILED = (
    *("learner 16k recomputed, compiled", "learner groups, compiled"),
    "learner 4B LoRA 16k recomputed, compiled",
)
"""What `learner 16k compiled` does once more, with other words for the learner."""
Measure = Callable[..., tuple[int, dict[str, dict[str, object]]]]


@pytest.fixture
def measure(forked: Forked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measure:
    """`measure("head")` -> (exit code, the parts in the file of results). Its parts are forks of this process, with time."""
    monkeypatch.setattr(measure_gpu, "PARTS", {name: (3600, work) for name, (_, work) in measure_gpu.PARTS.items()})
    results = tmp_path / "gpu.json"

    def call(*parts: str) -> tuple[int, dict[str, dict[str, object]]]:
        words = ["--device", "cpu", "--results", str(results), "--seconds", "1e6", "--parts", *parts]
        monkeypatch.setattr(sys, "argv", ["measure_gpu.py", *words])
        return measure_gpu.main(), json.loads(results.read_text())["parts"]

    return call


@pytest.mark.full
def test_later_calls_keep_what_earlier_ones_have_measured(measure: Measure) -> None:
    code, parts = measure("head")
    assert (code, list(parts)) == (0, ["head"]), parts
    code, parts = measure("resume")
    assert (code, list(parts)) == (0, ["head", "resume"]), parts
    assert all("result" in part for part in parts.values())


@pytest.mark.full
def test_every_part_runs_on_a_cpu(measure: Measure) -> None:
    chosen = [name for name in measure_gpu.PARTS if name not in COMPILED]
    code, parts = measure(*chosen)
    assert not {name: part for name, part in parts.items() if "result" not in part}
    assert (code, list(parts)) == (0, chosen)


def test_a_part_that_fails_dies_or_hangs_costs_none_of_the_others(forked: Forked) -> None:
    def fail(device: str) -> dict[str, object]:
        raise measure_gpu.CheckFailedError(f"something is off on the {device}")

    def hang(device: str) -> dict[str, object]:
        while True:
            time.sleep(0.01)

    outcomes = [measure_gpu.run_part(work, "cpu", limit) for work, limit in ((fail, 3600), (hang, 1))]
    outcomes.append(measure_gpu.run_part(lambda _: os._exit(7), "cpu", 3600))
    outcomes.append(measure_gpu.run_part(lambda _: {"seen": 1.0}, "cpu", 3600))
    assert [outcome.get("error") for outcome in outcomes] == [
        "CheckFailedError: something is off on the cpu",
        "it ran past its 1 s",
        "its process ended with 7",
        None,
    ]
    assert measure_gpu.describe(outcomes[-1]) == "seen 1"
