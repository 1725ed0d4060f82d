"""Held-out accuracy and seconds per step against `--max-staleness`: docs/results/staleness.json.gz and staleness-seconds.json.

python scripts/measure_staleness.py [-- further options of `policygrad compare`, --jobs 2 say]
python scripts/measure_staleness.py --clock [--model FOLDER] [--steps N]

The first compares grpo, dapo, cispo, m2po and ppo at staleness 0, 1, 2, 4, 8 and 16, each at the learning rate that
docs/measured.md has found best for it, with π_old computed by the learner and the sampler's difference corrected for
(`behaviour = recomputed`), and with the sampler's own probabilities as π_old and no correction (`behaviour = sampler`). Runs lie in
comparisons/, and what is finished is not run again.

The second trains with a llama.cpp server beside the learner at several values of staleness, with full completions and in chunks
(seven runs, in comparisons/clock/; those that are complete are not run again). It needs a machine on which nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import policygrad as pg
from measure_algorithms import ROOT, WORK, format_report
from policygrad.commands import STOPPED
from policygrad.commands.compare import compare
from policygrad.samplers.config import SamplerConfig
from results import RESULTS, load_result, write_packed_result

MODEL, STEPS = "tiny", 24
SETTINGS = ((0, 0), (1, 0), (2, 0), (0, 8), (1, 8), (2, 8), (4, 8))
"""(staleness, tokens of a chunk; 0 = full completions)."""
PARALLEL = 16
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Seconds:
    """Times of one run, over the steps that resemble those of a long run."""

    step: float
    """Mean seconds of a step, without evaluations and logs."""
    learner_idle: float
    """Fraction of them in which the learner waited."""
    sampler_idle: float
    """Fraction of them in which nothing was sampled."""


def configure(model: str, steps: int, staleness: int, chunk_tokens: int, folder: Path) -> pg.Run:
    """Return the run of one setting."""
    return pg.Run(
        algorithm=pg.get_algorithm("grpo"),
        model=model,
        steps=steps,
        max_staleness=staleness,
        prompts_per_step=32,
        samples_per_prompt=8,
        sampler=SamplerConfig(engine="llama_cpp", threads=1, max_concurrency=PARALLEL, chunk_tokens=chunk_tokens),
        evaluation=pg.EvaluationConfig(problems=0),
        output=str(folder / f"{Path(model).name}-{steps}-steps-staleness-{staleness}-piece-{chunk_tokens}"),
    )


def train_once(run: pg.Run, train: Callable[..., object] = pg.train) -> Seconds:
    """Train, unless that was done before, and return the times. An interrupted run starts again: its seconds would not count.

    Args:
        train: Tests pass another one.
    """
    assert run.output is not None
    output = Path(run.output)
    if not (output / "result.json").exists():
        train(run, display=True, overwrite=(output / "run.toml").exists())
    return read_seconds([row for row in _rows(output / "metrics.jsonl") if row["step"]], run.max_staleness)


def read_seconds(metrics: Sequence[Row], staleness: int = 0) -> Seconds:
    """Return a run's times without its first step and the last ones, during which nothing is left to sample; over all steps of
    a run that has no others."""
    steady = metrics[1 : len(metrics) - staleness] or metrics
    seconds = sum(m["time/rollout"] + m["time/update"] for m in steady)
    learner_idle = sum(m["time/rollout"] for m in steady)
    sampler_idle = sum(m.get("time/sampler_idle", m["time/update"]) for m in steady)
    return Seconds(seconds / len(steady), learner_idle / seconds, sampler_idle / seconds)


def measure(model: str, steps: int, folder: Path, train: Callable[..., object] = pg.train) -> dict[str, Any]:
    """Return the times of every setting."""
    rows = []
    for number, (staleness, chunk_tokens) in enumerate(SETTINGS, 1):
        text = f"chunks of {chunk_tokens} tokens" if chunk_tokens else "full completions"
        print(f"run {number} of {len(SETTINGS)}: {steps} steps, staleness {staleness}, {text}", flush=True)
        seconds = train_once(configure(model, steps, staleness, chunk_tokens, folder), train)
        rows.append({"staleness": staleness, "chunk_tokens": chunk_tokens, **asdict(seconds)})
    return {"model": model, "steps": steps, "rows": rows}


def _rows(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


NAMES = ("grpo", "dapo", "cispo", "m2po", "ppo")
STALENESS = (0, 1, 2, 4, 8, 16)
BEHAVIOURS = {"corrected": "learner", "uncorrected": "sampler"}
TOKENS, SEEDS = 100_000, 3
Compare = Callable[[list[str]], int]


def best_rates(report: dict[str, Any]) -> dict[str, float]:
    """The rate that was found best for each, on seeds of their own.

    Raises:
        SystemExit: one has not been measured.
    """
    found = {row["label"]: row["option_value"] for row in report["rows"] if row["tuned_option"] == "--lr"}
    if missing := [name for name in NAMES if found.get(name) is None]:
        raise SystemExit(
            f"docs/results/algorithms.json.gz has no rate for {missing[0]}: scripts/measure_algorithms.py first"
        )
    return {name: found[name] for name in NAMES}


def label(name: str, staleness: int, behaviour: str) -> str:
    """Of a row; at staleness 0 there is nothing to correct for."""
    return f"{name}.{staleness}" + (f".{behaviour}" if staleness else "")


def specs(rates: dict[str, float]) -> list[str]:
    """The rows, as `policygrad compare` takes them."""
    found = []
    for name, rate in rates.items():
        for staleness in STALENESS:
            for behaviour, value in BEHAVIOURS.items():
                words = f"{name} --max-staleness {staleness} --lr {rate:g}"
                if staleness:
                    words += f" --algorithm.old-policy {value}"
                if staleness or behaviour == "corrected":
                    found.append(f"{label(name, staleness, behaviour)}={words}")
    return found


def main(args: Sequence[str], compare: Compare = compare, results: Path = RESULTS, work: Path = WORK) -> int:
    """Everything that is missing; compare's exit code. compare: what runs it; tests hand in another."""
    at = list(args).index("--") if "--" in args else len(args)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clock", action="store_true", help="seconds with a server beside the learner instead")
    parser.add_argument("--model", help=f"that the clock is measured with ({MODEL})")
    parser.add_argument("--steps", type=int, help=f"of each of its runs ({STEPS})")
    chosen = parser.parse_args(args[:at])
    if not chosen.clock and (chosen.model or chosen.steps):
        parser.error("--model and --steps are of --clock; what stands behind -- is compare's")
    called = shlex.join(["python", "scripts/measure_staleness.py", *args])
    if chosen.clock:
        found = measure(chosen.model or MODEL, chosen.steps or STEPS, work / "clock") | {"measured_by": called}
        (results / "staleness-seconds.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    folder = work / "staleness"
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) and Path.cwd() == ROOT else folder
    rates = best_rates(load_result("algorithms") or {})
    given = ["--budget-tokens", str(TOKENS), "--seeds", str(SEEDS), "--output", str(shown)]
    code = compare([*specs(rates), *given, *args[at + 1 :]])
    if code == STOPPED or not (folder / "comparison.json").exists():
        return code
    report = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    page = (folder / "comparison.html").read_text(encoding="utf-8")
    write_packed_result("staleness.json", format_report(report | {"measured_by": called}), results)
    write_packed_result("staleness.html", page, results)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
