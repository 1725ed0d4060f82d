"""docs/planning.md: its predictions are what the planner says, and its table of devices what it holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from pages import planning
from policygrad.planning.hardware import DEVICES, GB, TB
from results import load_result

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")


def test_errors_are_of_the_prediction() -> None:
    row = planning.Row("run", "s", measured=50.0, planned=40.0)
    assert row.error == pytest.approx(-0.2)
    assert row.cells() == ("run", "s", "50", "40", "-20%")


def test_runs_here_are_within_a_fifth_of_the_plan() -> None:
    """Of a calibration that was taken afterwards."""
    rows = list(planning.own_rows())
    assert rows
    assert all(abs(row.error) < 0.2 for row in rows if row.what == "CPU s, a step")


def test_figures_of_devices_are_those_of_the_planner() -> None:
    assert planning.devices_block() in PAGE
    for device in DEVICES.values():
        assert device.source
        assert device.memory < 200 * GB
        assert device.bandwidth < 10 * TB
        assert device.fp32 <= device.bf16 or device.dtype == "fp32"


def test_memory_of_an_update_is_within_a_tenth_of_the_plan() -> None:
    measured = load_result("plan-memory")
    assert measured is not None
    rows = [row for row in planning.memory_rows(measured) if row.what == "MiB of tensors"]
    assert len(rows) >= 3
    assert all(abs(row.error) < 0.1 for row in rows)
