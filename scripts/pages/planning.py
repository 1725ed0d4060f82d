"""Part of docs/planning.md: predictions of `policygrad plan`, compared with docs/results/bench.json and plan-memory.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from pages.markdown import table
from policygrad.planning.cost_model import MICRO_TOKENS_CPU, AlgorithmCost, ParallelLayout, Workload
from policygrad.planning.hardware import DEVICES, GB, TB, Calibration, Device, load_calibration
from policygrad.planning.planner import CapacityPlan, PlanRequest
from policygrad.planning.shapes import DenseShape
from policygrad.training.calibration import CPU
from results import RESULTS, load_result

SEVEN = DenseShape("7M", 256, 768, 6, 4, 2, 64, 8192, tied=True, qk_norm=True)
TWENTY_FIVE = DenseShape("25M", 384, 1152, 8, 6, 2, 64, 32768, tied=True, qk_norm=True)
HEAD = ("run", "what", "measured", "planned", "error")


@dataclass(frozen=True)
class Row:
    """One figure of one run."""

    run: str
    what: str
    measured: float
    planned: float

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1

    def cells(self) -> tuple[str, ...]:
        return self.run, self.what, _short(self.measured), _short(self.planned), f"{self.error:+.0%}"


def checked_block(bench: Mapping[str, Any] | None = None) -> str:
    """Write the tables and their errors, from the committed measurements unless others are given."""
    own, lines = list(own_rows(bench)), list[str]()
    if own:
        lines.append("### This library on one core\n\n" + _table(own) + f"\n\n{_describe(_calibration())}")
    else:
        lines.append(
            "### This library on one core\n\nNot calibrated yet: `OMP_NUM_THREADS=1 policygrad plan --calibrate "
            "--calibration "
            "docs/results/calibration.json` does it, and `make docs` writes this."
        )
    if (measured := load_result("plan-memory")) is not None:
        rows = list(memory_rows(measured))
        tensors, process = ([row for row in rows if row.what.endswith(what)] for what in ("tensors", "process"))
        lines.append(
            "### Memory of one update\n\n"
            + _table(rows)
            + f"\n\nTensors that are alive at the same time are off by {_range(tensors)}; the whole process, with Python, "
            f"libraries and what the C library's allocator keeps, by {_range(process)}. What the allocator keeps was "
            "measured on the first and third of these models and on one of 20M, so for their rows the second figure is "
            "no test. Small models in float32 on a CPU (torch "
            f"{measured['torch']}, transformers {measured['transformers']}), four micro-batches: `python "
            "scripts/measure_plan_memory.py`."
        )
    return "\n\n".join(lines)


def memory_rows(measured: Mapping[str, Any]) -> Iterator[Row]:
    """Updates of small models of several kinds, of docs/results/plan-memory.json."""
    for row in measured["rows"]:
        name = f"{row['run']}, {row['parameters'] / 1e6:.0f}M, {row['tokens']:,} tokens"
        yield Row(name, "MiB of tensors", row["tensors"] / 2**20, row["planned_tensors"] / 2**20)
        yield Row(name, "MiB of the process", row["process"] / 2**20, row["planned_process"] / 2**20)


def devices_block() -> str:
    """Write the table of devices with the sources of their figures."""
    head = ("device", "memory, GB", "bandwidth, TB/s", "bfloat16", "float32", "to a neighbour", "network", "source")

    def cells(d: Device) -> tuple[str, ...]:
        bf16 = _short(d.bf16 / TB) if d.bf16 else "–"
        links = f"{d.link / GB:g}", f"{d.network / GB:.3g}"
        return d.name, f"{d.memory / GB:g}", f"{d.bandwidth / TB:g}", bf16, _short(d.fp32 / TB), *links, d.source

    return table(head, (cells(device) for device in DEVICES.values() if device.name != "cpu"))


def own_rows(bench: Mapping[str, Any] | None = None) -> Iterator[Row]:
    """Ours, of docs/results/bench.json, in CPU seconds at one thread, float32; nothing without a calibration."""
    result = _calibration()
    if result is None:
        return
    bench = json.loads((RESULTS / "bench.json").read_text(encoding="utf-8")) if bench is None else bench
    for name, of, prompts in (("7m", SEVEN, 16), ("25m", TWENTY_FIVE, 8)):
        steps = [
            median(step["cpu"] for step in record["steps"][1:])
            for key, record in bench["measurements"].items()
            if key.startswith(f"{name}/policygrad-fp32/1/")
        ]
        if steps:
            plan = here(result, of, Workload(prompts, 8, 60, 252, 252))
            yield Row(f"{of.name}, {prompts} × 8 completions of 252", "CPU s, a step", median(steps), plan.step_seconds)
    component = bench.get("components", {}).get("matmul", {"rows": []})
    for name, _, seconds, *_ in component["rows"]:
        for of in (SEVEN, TWENTY_FIVE):
            if name == f"{of.name}, fp32":
                plan = here(result, of, Workload(4, 8, 100, 256, 256))
                run = f"{of.name}, 4 × 8 completions of 256"
                yield Row(run, "CPU s, forward and backward", seconds, plan.step_times.learning)
    for name, rate, *_ in bench.get("components", {}).get("rollout", {"rows": []})["rows"]:
        if name.startswith("128 of 16 to 1,024"):
            plan = here(result, SEVEN, Workload(16, 8, 100, 244.5, 1024))
            run = "7M, 128 completions of 16 to 1,024, drawn"
            yield Row(run, "tokens per CPU s", rate, plan.request.workload.sampled_tokens / plan.step_times.generation)


def here(result: Calibration, of: DenseShape, work: Workload) -> CapacityPlan:
    """Plan Dr. GRPO on one calibrated core."""
    device, reached = result.apply(DEVICES["cpu"], "fp32")
    layout = ParallelLayout(1, dtype="fp32", micro_tokens=MICRO_TOKENS_CPU)
    return CapacityPlan(
        PlanRequest(of, device, work, AlgorithmCost("dr_grpo", stale_scoring_passes=1), reached), layout
    )


def _calibration() -> Calibration | None:
    path = RESULTS / "calibration.json"
    return load_calibration(path) if path.exists() else None


def _describe(calibration: Calibration | None) -> str:
    assert calibration is not None
    reached, device, details = calibration.efficiency, calibration.device, calibration.details
    return (
        f"Calibrated afterwards on the same kind of machine ([calibration.json](results/calibration.json): "
        f"{details['threads']} "
        f"thread, torch {details['torch']}): {device.fp32 / 1e9:.0f} Gflop/s, {device.bandwidth / 1e9:.1f} GB/s; "
        f"{reached.training:.0%} of that when training, {reached.scoring:.0%} when scoring, {reached.sampling:.0%} when "
        f"sampling, "
        f"on another model, of {CPU.shape.parameters / 1e6:.1f}M parameters."
    )


def _table(rows: list[Row]) -> str:
    return table(HEAD, (row.cells() for row in rows))


def _range(rows: list[Row]) -> str:
    errors = [row.error for row in rows]
    return f"{min(errors):+.0%} to {max(errors):+.0%}"


def _short(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"
