"""Tables of docs/memory.md: memory from the registry, accuracy and seconds measured by scripts/measure_optimizers.py."""

from __future__ import annotations

from statistics import fmean

from measure_optimizers import SETTINGS

from pages.markdown import Data, load, table
from policygrad.learners.config import OptimizerConfig
from policygrad.learners.optimizers import OPTIMIZERS
from policygrad.planning.model_sizes import MASTER_BYTES

WEIGHT_BYTES = 2  # of a bf16 model


def memory_block() -> str:
    """Write the bytes per parameter of each optimizer."""
    rows = []
    for name, row in OPTIMIZERS.items():
        moments = row.count_moment_bytes(OptimizerConfig.momentum)
        others = row.count_moment_bytes(OptimizerConfig.momentum, hidden=False)
        note = f"{moments:.3g}" + (f" (embeddings and head {others:.3g})" if others != moments else "")
        if row.momentum_bytes:
            note += f", {row.count_moment_bytes(0.0):.3g} with `--optimizer.momentum 0`"
        totals = [f"{kept + WEIGHT_BYTES + moments:.3g}" for kept in (MASTER_BYTES, 0)]
        rows.append((f"`{name}`", note, *totals, f"{WEIGHT_BYTES}"))
    head = ("name", "moments", "with weights and masters", "with `masters none`", "on the GPU with `offload`")
    return table(head, rows)


def measured_block(report: Data | None = None) -> str:
    """Write held-out accuracy and CPU seconds by optimizer."""
    report = load("optimizers") if report is None else report
    if report is None:
        return "Not measured yet: `python scripts/measure_optimizers.py` runs it, and `make docs` writes this."
    facts, rows = report["facts"], []
    for name in (name for name in SETTINGS if name in report["runs"]):
        runs = report["runs"][name].values()
        gains = [run["after"] for run in runs]
        each = ", ".join(f"{gain:.3f}" for gain in gains)
        seconds = fmean(run["cpu_seconds"] for run in runs)
        tokens = fmean(run["tokens"] for run in runs)
        options = f"`{' '.join(SETTINGS[name])}`" if SETTINGS[name] else "the default"
        rows.append((name, options, f"{fmean(gains):.3f}", each, f"{seconds:.0f}", f"{tokens / 1000:.0f}k"))
    before = [run["before"] for run in report["runs"]["adamw"].values()]
    text = (
        f"`policygrad train grpo --steps {facts['steps']}` on the embedded task and model: held-out accuracy, {fmean(before):.3f} "
        "before training, and CPU seconds of the whole command, by `scripts/measure_optimizers.py` on "
        f"{facts['cores']} shared cores (torch {facts['torch']})."
    )
    head = ("optimizer", "options", "mean accuracy", "by seed", "CPU seconds", "sampled tokens")
    return f"{text}\n\n{table(head, rows)}"
