"""scripts/stress_engines.py: what it takes for a promise that is broken; and a small one on the real path, with real servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stress_engines as engine_faults
from pages.blocks import faults_block

WELL: dict[str, Any] = {
    "repeats": 30,
    "moments": {"rollout": 20, "learning": 10},
    "steps": 40,
    "groups": 320,
    "lost": 0,
    "twice": 0,
    "unknown": 0,
    "completions": 1280,
    "of_another_version": 0,
    "asked_again": 17,
    "ended_and_resumed": 0,
    "seconds": 90.0,
}


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("killed", {}, []),
        ("killed", {"lost": 1}, ["killed: 1 groups lost"]),
        ("hangs", {"twice": 2}, ["hangs: 2 groups twice"]),
        ("hangs", {"unknown": 3}, ["hangs: 3 groups unknown"]),
        ("old", {"of_another_version": 4}, ["old: 4 completions are not of the version that they claim"]),
        ("gone", {"ended_and_resumed": 30}, []),
        ("gone", {}, ["gone: 30 times without a server, and the run has never ended"]),
        ("garbage", {"ended_by": "no server"}, ["garbage: the run ended: no server"]),
    ],
)
def test_what_does_not_hold_is_said(kind: str, change: dict[str, Any], says: list[str]) -> None:
    assert engine_faults.list_broken_promises({kind: WELL | change}) == says


def test_the_table_has_a_line_per_fault_and_what_does_not_hold() -> None:
    result = {
        "made_by": "python scripts/stress_engines.py",
        "versions": {"xllamacpp": "1", "torch": "2"},
        "machine": "Linux",
        "staleness": 0,
        "kinds": {"killed": WELL, "garbage": {"repeats": 1, "ended_by": "x"}},
        "broken": ["garbage: the run ended: x"],
    }
    text = faults_block(result)
    assert "| 30: learning 10, rollout 20 | 320 | 0 | 0 | 1,280 | 0 | 17 | 0 |" in text
    assert "**Broken:** garbage: the run ended: x." in text
    assert text.count(engine_faults.KINDS["garbage"]) == 0


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for child processes in /proc")
def test_two_real_servers_with_faults_lose_nothing_and_draw_what_they_claim(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    results = tmp_path / "faults.json"
    argv = ["--repeats", "1", "--kinds", "garbage", "old", "--results", str(results)]
    command = [sys.executable, engine_faults.__file__, *argv]
    child = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stdout + child.stderr
    result: dict[str, Any] = json.loads(results.read_text())
    assert result["broken"] == []
    assert list(result["kinds"]) == ["garbage", "old"]
    for seen in result["kinds"].values():
        assert (seen["repeats"], seen["lost"], seen["twice"], seen["of_another_version"]) == (1, 0, 0, 0)
        assert seen["groups"] == 8 * seen["steps"] > 0
        assert seen["completions"] >= 4 * seen["groups"]
