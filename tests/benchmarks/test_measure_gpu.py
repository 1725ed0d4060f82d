"""`scripts/measure_gpu.py` on a CPU, with tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import measure_gpu
import pytest

SCRIPT = Path(measure_gpu.__file__)


def run(results: Path, *parts: str) -> tuple[int, str, dict[str, dict[str, object]]]:
    words = [sys.executable, str(SCRIPT), "--device", "cpu", "--results", str(results)]
    done = subprocess.run([*words, *(["--parts", *parts] if parts else [])], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr, json.loads(results.read_text())["parts"]


def test_some_parts(tmp_path: Path) -> None:
    """Later calls keep what earlier ones have measured."""
    results = tmp_path / "gpu.json"
    code, output, parts = run(results, "head", "learner groups")
    assert (code, list(parts)) == (0, ["head", "learner groups"]), output
    code, output, parts = run(results, "resume")
    assert (code, sorted(parts)) == (0, ["head", "learner groups", "resume"]), output
    assert all("result" in part for part in parts.values())


@pytest.mark.full
def test_all_parts(tmp_path: Path) -> None:
    code, output, parts = run(tmp_path / "gpu.json")
    assert code == 0, output
    assert list(parts) == list(measure_gpu.PARTS)


def test_a_part_that_fails_dies_or_hangs_costs_none_of_the_others() -> None:
    def fail(device: str) -> dict[str, object]:
        raise measure_gpu.CheckFailedError(f"something is off on the {device}")

    def hang(device: str) -> dict[str, object]:
        while True:
            time.sleep(0.01)

    outcomes = [measure_gpu.run_part(work, "cpu", limit) for work, limit in ((fail, 60), (hang, 1))]
    outcomes.append(measure_gpu.run_part(lambda _: os._exit(7), "cpu", 60))
    outcomes.append(measure_gpu.run_part(lambda _: {"seen": 1.0}, "cpu", 60))
    assert [outcome.get("error") for outcome in outcomes] == [
        "CheckFailedError: something is off on the cpu",
        "it ran past its 1 s",
        "its process ended with 7",
        None,
    ]
    assert measure_gpu.describe(outcomes[-1]) == "seen 1"
