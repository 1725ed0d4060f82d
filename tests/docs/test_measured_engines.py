"""scripts/measure_engines.py: what it reads off runs, and the block of docs/engines.md that is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import measure_engines
from doubles.files import write_rows
from pages.blocks import engines_block


def finished(folder: Path, after: float, probes: list[float]) -> Path:
    folder.mkdir(parents=True)
    report = {"eval_reward_before": 0.2, "eval_reward_after": after, "steps": len(probes), "seconds": 30.0, "tokens": 9}
    (folder / "result.json").write_text(json.dumps(report))
    steps = [
        {"step": k, "publication/probe_max": p, "publication/seconds": 0.5 * k, "publication/bytes": 2.0**21}
        for k, p in enumerate(probes, 1)
    ]
    write_rows(folder / "metrics.jsonl", [{"step": 0, "eval/reward": 0.2}, *steps])
    return folder


def test_what_is_read_off_a_run(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run", 0.9, [1e-6, 3e-6, 2e-6])
    results = measure_engines.accuracy(folder)
    assert (results["eval_reward_after"], results["publications"], results["probe_max"]) == (0.9, 3, 3e-6)
    assert measure_engines.publications(folder) == {
        "publications": 3,
        "probe_max": 3e-6,
        "probe_median": 2e-6,
        "seconds": 1.0,
        "mib": 2.0,
    }
    write_rows(tmp_path / "run" / "metrics.jsonl", [{"step": 0, "eval/reward": 0.2}, {"step": 1, "reward": 0.5}])
    assert "probe_max" not in measure_engines.accuracy(folder)


def test_the_block() -> None:
    assert "Not measured yet" in engines_block({})
    seed: dict[str, Any] = {"eval_reward_after": 0.9, "probe_max": 2e-6, "publications": 40}
    long = {"publications": 100, "probe_max": 5e-6, "probe_median": 1e-6, "seconds": 0.42, "mib": 2.7}
    results = {
        "local": {"seeds": {"0": {"eval_reward_after": 0.91}, "1": {"eval_reward_after": 0.89}}, "command": "python a"},
        "llama_cpp": {
            "seeds": {"0": seed, "1": seed | {"eval_reward_after": 0.88}},
            "long": long,
            "command": "python a",
        },
        "throughput": {
            "tokens_per_second": {"policygrad": [900.0, 1000.0, 1100.0], "vllm bench serve": [1000.0, 1010.0, 990.0]},
            "share": 1.0,
            "command": "python b",
        },
    }
    text = engines_block(results)
    assert "| this process | 0.910, 0.890 | 0.900 | – |" in text
    assert "| llama_cpp | 0.900, 0.880 | 0.890 | 2.0e-06 | 100 | 5.0e-06 | 1.0e-06 | 0.42 | 2.7 |" in text
    assert "policygrad 1,000, vllm bench serve 1,000 (a ratio of 1.00)" in text
    assert text.endswith("Measured by `python a`, `python b`.")
