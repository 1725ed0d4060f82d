"""Held-out accuracy against `--max-staleness`, and the clock that it is for; writes docs/results/staleness.json and pipeline.json.

python scripts/measure_staleness.py [-- further options of `policygrad compare`, --jobs 2 say]
python scripts/measure_staleness.py --clock [--model FOLDER] [--steps N]

The first compares grpo, dapo, cispo, m2po and ppo at staleness 0, 1, 2, 4, 8 and 16, each at the learning rate that
docs/measured.md has found best for it, with π_old computed by the learner and the sampler's difference corrected for
(`behaviour = recomputed`), and with the sampler's own probabilities as π_old and no correction (`behaviour = sampler`). Runs lie in
comparisons/, and what is finished is not run again.

The second trains with a llama.cpp server beside the learner at several values of staleness, with whole answers and in pieces (seven
runs, in comparisons/clock/; those that are whole are not run again); the speeds of sampler and learner are fitted to the runs with
staleness 0 alone, and `policygrad.planning.pipeline` is asked how long the others take. It wants a machine on which
nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import policygrad as pg
from measure_algorithms import RESULTS, ROOT, WORK, written
from policygrad.commands import STOPPED
from policygrad.commands.compare import compare
from policygrad.planning.pipeline import LearnerSpeed, Lengths, SamplerSpeed, Timeline, simulate
from policygrad.samplers.config import SamplerConfig
from staleness_model import (
    find_best_staleness,
    fit_learner_speed,
    fit_sampler_speed,
    resample_lengths,
    smallest_sufficient,
)

MODEL, STEPS = "tiny", 24
SETTINGS = ((0, 0), (1, 0), (2, 0), (0, 8), (1, 8), (2, 8), (4, 8))
"""(staleness, tokens of a piece; 0 = whole answers). The first two without a piece and with one say how fast each is."""
PARALLEL = 16
WITHIN = 0.05
"""What is as fast as the fastest, as a share."""
LONG = 200
"""Steps of a run that is only simulated, its lengths drawn from the measured ones."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Seen:
    """One run."""

    lengths: list[list[int]]
    """Tokens of each completion, per step."""
    draws: list[float]
    """Seconds that the rollout took, where it was alone."""
    updates: list[float]
    publishes: list[float]
    step: float
    """Mean seconds of a step, evaluations and logs left out."""
    waited: float
    """Share of them in which the learner waited."""
    idle: float
    """Share of them in which nothing was drawn."""


def configured(model: str, steps: int, staleness: int, piece: int, folder: Path) -> pg.Run:
    """The run of one setting."""
    return pg.Run(
        algorithm=pg.get_algorithm("grpo"),
        model=model,
        steps=steps,
        max_staleness=staleness,
        prompts_per_step=32,
        samples_per_prompt=8,
        sampler=SamplerConfig(engine="llama_cpp", threads=1, max_concurrency=PARALLEL, chunk_tokens=piece),
        evaluation=pg.EvaluationConfig(problems=0),
        output=str(folder / f"{Path(model).name}-{steps}-steps-staleness-{staleness}-piece-{piece}"),
    )


def run(made: pg.Run, train: Callable[..., object] = pg.train) -> Seen:
    """Trains, unless that was done before; what was broken off begins anew, since a clock has to go through. train: tests hand in
    another."""
    assert made.output is not None
    output = Path(made.output)
    if not (output / "result.json").exists():
        train(made, display=True, overwrite=(output / "run.toml").exists())
    metrics, completions = (_rows(output / name) for name in ("metrics.jsonl", "completions.jsonl"))
    return seen([row for row in metrics if row["step"]], completions, made.max_staleness)


def seen(metrics: Sequence[Row], completions: Sequence[Row], staleness: int = 0) -> Seen:
    """Measurements from a run's logs, over the steps that resemble those of a long run, as in `Timeline.steady_state`."""
    lengths = [[row["tokens"] for row in completions if row["step"] == m["step"]] for m in metrics]
    draws = [m["time/rollout"] for m in metrics]
    publishes = [m["publication/seconds"] for m in metrics]
    updates = [m["time/update"] - p for m, p in zip(metrics, publishes, strict=True)]
    later = metrics[1 : len(metrics) - staleness] or metrics
    seconds = sum(m["time/rollout"] + m["time/update"] for m in later)
    idle = sum(m.get("time/sampler_idle", m["time/update"]) for m in later)
    waited = sum(m["time/rollout"] for m in later)
    return Seen(lengths, draws, updates, publishes, seconds / len(later), waited / seconds, idle / seconds)


def speeds(alone: Seen) -> tuple[SamplerSpeed, LearnerSpeed]:
    """Of a run in which each waits for the other, fitted to its steps from the second on, since the first one warms up."""
    later = slice(1, None) if len(alone.lengths) > 1 else slice(None)
    lengths, draws, updates = (x[later] for x in (alone.lengths, alone.draws, alone.updates))
    return (
        fit_sampler_speed(lengths, draws, PARALLEL),
        fit_learner_speed(lengths, updates, statistics.median(alone.publishes[later])),
    )


def predicted(lengths: Sequence[Lengths], alone: Seen, staleness: int, piece: int) -> Timeline:
    sampler, learner = speeds(alone)
    return simulate(lengths, sampler, learner, staleness, in_flight=piece > 0)


def measure(model: str, steps: int, folder: Path) -> dict[str, Any]:
    """Every setting: what was seen and what was predicted from the run of staleness 0 with the same pieces."""
    runs = dict[tuple[int, int], Seen]()
    for number, (staleness, piece) in enumerate(SETTINGS, 1):
        message = f"answers in pieces of {piece} tokens" if piece else "whole answers"
        print(f"run {number} of {len(SETTINGS)}: {steps} steps, staleness {staleness}, {message}", flush=True)
        runs[staleness, piece] = run(configured(model, steps, staleness, piece, folder))
    return compared(model, steps, runs)


def compared(model: str, steps: int, runs: Mapping[tuple[int, int], Seen]) -> dict[str, Any]:
    """Every setting that was run: what was seen and what is predicted."""
    rows = []
    for (staleness, piece), found in runs.items():
        alone = runs[(0, piece)]
        reported = predicted(alone.lengths, alone, staleness, piece)
        rows.append(
            {
                "staleness": staleness,
                "piece": piece,
                "seen": {"step": found.step, "learner_idle": found.waited, "sampler_idle": found.idle},
                "predicted": {
                    "step": reported.step_seconds,
                    "learner_idle": reported.learner_idle,
                    "sampler_idle": reported.sampler_idle,
                },
            }
        )
    pieces = [row for row in rows if row["piece"]]
    return {
        "model": model,
        "steps": steps,
        "rows": rows,
        "enough": {
            kind: pieces[smallest_sufficient([row[kind]["step"] for row in pieces], tolerance=WITHIN)]["staleness"]
            for kind in ("seen", "predicted")
        },
        "best": {str(piece): best(runs[0, piece], piece) for piece in sorted({piece for _, piece in runs})},
        "speeds": {str(p): [asdict(x) for x in speeds(runs[0, p])] for p in sorted({piece for _, piece in runs})},
    }


def best(alone: Seen, piece: int) -> int:
    """The smallest staleness that is as fast as any, of a long run with lengths like these."""
    lengths = [n for rollout in alone.lengths for n in rollout]
    rollouts = resample_lengths(lengths, LONG, len(lengths) // len(alone.lengths))
    return find_best_staleness(rollouts, *speeds(alone), in_flight=piece > 0, tolerance=WITHIN)


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
            f"docs/results/algorithms.json has no rate for {missing[0]}: scripts/measure_algorithms.py first"
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
        (results / "pipeline.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    folder = work / "staleness"
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) and Path.cwd() == ROOT else folder
    rates = best_rates(json.loads((RESULTS / "algorithms.json").read_text(encoding="utf-8")))
    given = ["--budget-tokens", str(TOKENS), "--seeds", str(SEEDS), "--output", str(shown)]
    code = compare([*specs(rates), *given, *args[at + 1 :]])
    if code == STOPPED or not (folder / "comparison.json").exists():
        return code
    report = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    written(report | {"measured_by": called}, results / "staleness.json")
    shutil.copy(folder / "comparison.html", results / "staleness.html")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
