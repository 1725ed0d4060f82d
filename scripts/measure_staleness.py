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
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import clocked
from measure_algorithms import RESULTS, ROOT, WORK, written
from policygrad.commands import STOPPED
from policygrad.commands.compare import compare

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
    parser.add_argument("--model", help=f"that the clock is measured with ({clocked.MODEL})")
    parser.add_argument("--steps", type=int, help=f"of each of its runs ({clocked.STEPS})")
    chosen = parser.parse_args(args[:at])
    if not chosen.clock and (chosen.model or chosen.steps):
        parser.error("--model and --steps are of --clock; what stands behind -- is compare's")
    called = shlex.join(["python", "scripts/measure_staleness.py", *args])
    if chosen.clock:
        found = clocked.measure(chosen.model or clocked.MODEL, chosen.steps or clocked.STEPS, work / "clock") | {
            "measured_by": called
        }
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
