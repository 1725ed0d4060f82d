"""The measurements in docs/engines.md: what scripts/measure_engines.py has left."""

from __future__ import annotations

import statistics
from typing import Any

from pages.markdown import table
from pages.reports import Data, load

HEAD = (
    "drawn by",
    "held-out accuracy after",
    "mean",
    "largest probe",
    "100 steps: probes",
    "largest",
    "median",
    "s each",
    "MiB each",
)


def engines_block(found: Data | None = None) -> str:
    """The block. found: another report than the committed one."""
    found = load("engines") if found is None else found
    runs = {name: found[name] for name in ("local", "llama_cpp", "vllm") if found and name in found} if found else {}
    if found is None or not runs:
        return "Not measured yet: `python scripts/measure_engines.py` does it, and `make docs` writes this."
    lines = [
        "`policygrad train grpo` with its default options, a run per seed; weights are published to disk after every step. The "
        "probe is the largest difference between a log-probability of the server and the learner's own, in nats."
    ]
    lines.append(table(HEAD, [_row(name, run) for name, run in runs.items()]))
    if "throughput" in found:
        lines.append(_throughput(found["throughput"]))
    commands = dict.fromkeys(run["command"] for run in [*runs.values(), *filter(None, [found.get("throughput")])])
    return "\n\n".join([*lines, "By " + ", ".join(f"`{command}`" for command in commands) + "."])


def _row(name: str, run: dict[str, Any]) -> tuple[str, ...]:
    seeds, long = run["seeds"].values(), run.get("long")
    after = [seed["eval_reward_after"] for seed in seeds]
    probes = [seed["probe_max"] for seed in seeds if "probe_max" in seed]
    told = (
        "this process" if name == "local" else name,
        ", ".join(f"{x:.3f}" for x in after),
        f"{statistics.mean(after):.3f}",
    )
    if long is None:
        return (*told, *("–",) * 6)
    nats = [max(probes), long["probe_max"], long["probe_median"]]
    largest, further, median = (f"{x:.1e}" for x in nats)
    return (*told, largest, str(long["publications"]), further, median, f"{long['seconds']:.2f}", f"{long['mib']:.1f}")


def _throughput(found: dict[str, Any]) -> str:
    each = {name: statistics.median(values) for name, values in found["tokens_per_second"].items()}
    told = ", ".join(f"{name} {value:,.0f}" for name, value in each.items())
    turns = len(next(iter(found["tokens_per_second"].values())))
    return (
        f"Tokens a second of one vLLM server, medians of {turns} turns, with answers that do not end before their budget: {told} "
        f"(a share of {found['share']:.2f})."
    )
