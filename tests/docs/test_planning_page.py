"""docs/planning.md: its predictions are what the planner says, and its table of devices what it holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from pages import planning
from policygrad.planning.hardware import DEVICES, GB, TB

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")


def test_errors_are_of_the_prediction() -> None:
    row = planning.Row("run", "s", measured=50.0, planned=40.0)
    assert row.error == pytest.approx(-0.2)
    assert row.cells() == ("run", "s", "50", "40", "-20%")


def test_published_runs_are_planned() -> None:
    rows = [*planning.nemo_rows(), *planning.prime_rows()]
    assert {"s, sampling", "s, learning", "GiB at most", "tokens/s"} <= {row.what for row in rows}
    assert all(row.planned > 0 for row in rows)
    step = next(row for row in rows if (row.measured, row.what) == (112, "s, a step"))
    assert abs(step.error) < 0.2  # the run that the assumptions were chosen with
    memory = [row for row in rows if row.what == "GiB at most"]
    assert all(abs(row.error) < 0.2 for row in memory)


def test_runs_here_are_within_a_fifth_of_the_plan() -> None:
    """Of a calibration that was taken afterwards."""
    rows = list(planning.own_rows())
    assert rows
    assert all(abs(row.error) < 0.2 for row in rows if row.what == "CPU s, a step")


def test_figures_of_devices_are_those_of_the_planner() -> None:
    table = PAGE.split("| figure |")[1].split("\n\n")[0].splitlines()
    rows = {cells[0]: cells[1:] for line in table if (cells := [cell.strip() for cell in line.strip("| ").split("|")])}
    names = rows.pop("A100", None) or ["H100", "H200", "B200"]
    assert names[-3:] == ["H100", "H200", "B200"]
    devices = [DEVICES[name] for name in ("A100", "H100", "H200", "B200")]
    figures = {
        "memory, GB": [d.memory / GB for d in devices],
        "bandwidth, TB/s": [d.bandwidth / TB for d in devices],
        "bfloat16, Tflop/s, dense": [d.bf16 / TB for d in devices],
        "float32, Tflop/s": [d.fp32 / TB for d in devices],
        "to each other device of a machine, GB/s": [d.link / GB for d in devices],
        "network for each device, GB/s": [d.network / GB for d in devices],
    }
    for name, values in figures.items():
        assert [float(cell.replace(",", "")) for cell in rows[name]] == pytest.approx(values), name
