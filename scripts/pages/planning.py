"""Part of docs/planning.md: predictions of `policygrad plan`, compared with published runs and with "
"docs/results/bench.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from pages.markdown import table
from policygrad.planning.cost_model import MICRO_TOKENS_CPU, AlgorithmCost, ParallelLayout, Workload, learner_memory
from policygrad.planning.hardware import DEVICES, GB, TB, Calibration, Device, Efficiency, load_calibration
from policygrad.planning.model_shapes import KNOWN_SHAPES
from policygrad.planning.planner import CapacityPlan, PlanRequest
from policygrad.planning.render import GIB
from policygrad.planning.shapes import DenseShape
from policygrad.training.calibration import CPU
from results import RESULTS, load_result

NEMO = AlgorithmCost("grpo", frozen_models=1, scoring_passes=2, recomputes_head=True, updates=4)
"""Its GRPO scores every rollout twice, for log π_old and log π_ref, and makes four updates of 512 completions."""
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
    nemo, prime, own = list(nemo_rows()), list(prime_rows()), list(own_rows(bench))
    steps = [row for row in nemo if row.what == "s, a step"]
    memory = [row for row in prime if row.what.startswith("GiB")]
    rates = [row for row in prime if row not in memory]
    sentence = (
        f"Full steps are off by {_range(steps)}. The assumed efficiencies were chosen with these figures in view, above "
        f"all the first "
        "run's, so this is not a test of them. Publishing counts only the transfer of the weights, not the time an "
        "engine needs to "
        "load them and wake up."
    )
    lines = [
        "### Full steps: NeMo-RL\n\n" + _table(nemo) + "\n\n" + sentence,
        "### A learner alone: prime-rl\n\n"
        + _table(prime)
        + f"\n\nRates are off by {_range(rates)}, memory by {_range(memory)}.",
    ]
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


def nemo_rows() -> Iterator[Row]:
    """Published by NeMo-RL: https://nvidia-nemo.github.io/blog/2025/07/21/nemo-rl-v0.3/ (its figures also in issue 959 of
    NVIDIA-NeMo/RL), and docs/about/performance-summary.md of version 0.4."""
    plan = plan_nemo("Llama-3.1-8B", 8, 1, 795)
    phases, run = plan.step_times, "Llama-3.1-8B, 8 × H100 (0.3)"
    yield Row(run, "s, sampling", 58, phases.generation)
    yield Row(run, "s, learning", 28, phases.learning + phases.optimizer)
    yield Row(run, "s, log π_old and log π_ref", 18, phases.scoring)
    yield Row(run, "s, publishing", 5, phases.publishing)
    yield Row(run, "s, a step", 112, plan.step_seconds)
    plan = plan_nemo("Llama-3.1-70B", 64, 4, 398)
    phases, run = plan.step_times, "Llama-3.1-70B, 64 × H100 (0.3)"
    yield Row(run, "s, sampling", 84, phases.generation)
    yield Row(run, "s, learning", 28, phases.learning + phases.optimizer)
    yield Row(run, "s, log π_old and log π_ref", 18, phases.scoring)
    yield Row(run, "s, publishing", 14, phases.publishing)
    yield Row(run, "s, a step", 147, plan.step_seconds)
    yield Row("Llama-3.1-8B, 16 × H100 (0.4)", "s, a step", 97.7, plan_nemo("Llama-3.1-8B", 16, 1, 1060).step_seconds)
    yield Row("Qwen3-32B, 32 × H100 (0.4)", "s, a step", 393, plan_nemo("Qwen3-32B", 32, 4, 3206).step_seconds)


def plan_nemo(model: str, gpus: int, tensor: int, completion: float) -> CapacityPlan:
    """Its recipe: 64 prompts × 32 completions, texts of at most 4,096 tokens, all devices in turns. Prompts of 132 tokens, as
    follows from version 0.4's tokens a second, seconds and mean length."""
    work = Workload(64, 32, 132, completion, 4096 - 132)
    layout = ParallelLayout(gpus, tensor_parallel=tensor, shares_prompts=False, keeps_full_policy=False)
    return CapacityPlan(PlanRequest(KNOWN_SHAPES[model], DEVICES["H100"], work, NEMO, Efficiency()), layout)


def prime_rows() -> Iterator[Row]:
    """Published by prime-rl: benchmarks/results/BENCHMARKS.md of 2026-02-07 (PrimeIntellect-ai/prime-rl at 30bf494), "
    ""RL Full",
    activations recomputed, two micro-batches of one text a step."""
    for model, gpus, length, rate, peak in (
        ("Qwen3-0.6B", 1, 16384, 11900, 12.5),
        ("Qwen3-0.6B", 1, 65536, 10150, 19.6),
        ("Qwen3-4B", 8, 16384, 26030, 17.1),
        ("Qwen3-4B", 8, 65536, 28970, 36.1),
    ):
        work = Workload(2 * gpus, 1, 1, length - 1, length - 1)
        cost = AlgorithmCost("grpo", recomputes_head=True)
        layout = ParallelLayout(gpus, checkpointing=True, keeps_full_policy=False, micro_tokens=length)
        plan = CapacityPlan(PlanRequest(KNOWN_SHAPES[model], DEVICES["H100"], work, cost, Efficiency()), layout)
        seconds = plan.step_times.learning + plan.step_times.optimizer
        run = f"{model}, {gpus} × H100, texts of {length:,}"
        yield Row(run, "tokens/s", rate, work.num_completions * length / seconds)
        memory = learner_memory(KNOWN_SHAPES[model], work, cost, layout, DEVICES["H100"])
        yield Row(run, "GiB at most", peak, (sum(memory.static.values()) + sum(memory.training.values())) / GIB)


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
