"""scripts/measure_algorithms.py: what it keeps, what it skips, and the page that is made of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import measure_algorithms
from pages import measured
from policygrad.algorithms import ALGORITHMS


def row(name: str, seed: int, after: float) -> dict[str, Any]:
    numbers = {
        "before": 0.2,
        "before_stderr": 0.01,
        "after": after,
        "after_stderr": 0.01,
        "steps": 40,
        "tokens": 350_000,
    }
    cost = {"seconds": 40.0, "cpu_seconds": 39.0, "peak_mib": 600, "threads": 1, "version": "0"}
    return {"name": name, "seed": seed, "command": f"policygrad train {name}", **numbers, **cost}


def test_results_are_appended_and_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    assert measure_algorithms.results(path) == []
    for name in ("grpo", "dapo"):
        measure_algorithms.append(row(name, 0, 0.8), path)
    assert [r["name"] for r in measure_algorithms.results(path)] == ["grpo", "dapo"]
    measure_algorithms.forget(["grpo"], path)
    assert [r["name"] for r in measure_algorithms.results(path)] == ["dapo"]
    path.write_text(path.read_text() + '{"name": "gr')
    with pytest.raises(measure_algorithms.MeasureError, match=r"line 2 is no JSON"):
        measure_algorithms.results(path)


def test_the_measured_page_has_a_row_for_every_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "results", lambda: [row("grpo", s, a) for s, a in ((1, 0.8), (0, 0.7), (2, 0.9))])
    lines = measured.measured_page().splitlines()
    for name in ALGORITHMS:
        (found,) = [line for line in lines if line.startswith(f"| [`{name}`]")]
        assert ("not measured yet" in found) == (name != "grpo")
    (grpo,) = [line for line in lines if line.startswith("| [`grpo`]")]
    assert "0.200 ± 0.000 | 0.800 ± 0.100 | +0.600 | 40 | 350k | 39 | 600 |" in grpo


def test_measuring_skips_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, ran = tmp_path / "results.jsonl", []

    def measure(name: str, seed: int, tokens: int, threads: int) -> dict[str, Any]:
        ran.append((name, seed))
        if name == "ppo":
            raise measure_algorithms.MeasureError("it failed")
        return row(name, seed, 0.5)

    def main(*args: str) -> None:
        monkeypatch.setattr(sys, "argv", ["measure", "--results", str(path), *args])
        measure_algorithms.main()

    monkeypatch.setattr(measure_algorithms, "measure", measure)
    main("--only", "grpo", "--seeds", "0")
    with pytest.raises(SystemExit, match="1 runs failed"):
        main("--only", "grpo", "ppo", "--seeds", "0")
    main("--redo", "grpo", "--seeds", "0")
    assert ran == [("grpo", 0), ("ppo", 0), ("grpo", 0)]
    assert [r["name"] for r in measure_algorithms.results(path)] == ["grpo"]
    assert "it failed" in capsys.readouterr().out


def test_a_runs_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps({"steps": 2, "held_out_before": 0.2, "held_out_after": 0.5}))
    rows = [{"held_out": 0.2, "held_out_stderr": 0.01}, {"tokens/sampled": 10}, {"tokens/sampled": 12}]
    rows.append({"held_out": 0.5, "held_out_stderr": 0.02})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = measure_algorithms.read(tmp_path)
    assert "peak_mib" not in found
    assert (found["tokens"], found["before_stderr"], found["after_stderr"]) == (22, 0.01, 0.02)
    (tmp_path / "result.json").write_text(
        json.dumps({"steps": 2, "held_out_before": 0.2, "held_out_after": 0.5, "tokens": 99, "peak_memory_mib": 7})
    )
    found = measure_algorithms.read(tmp_path)
    assert (found["tokens"], found["peak_mib"]) == (99, 7)
