"""Compares every named algorithm, each at its best learning rate of a grid, and DAPO's ladder; writes docs/results/.

python scripts/measure_algorithms.py [--only NAME …] [-- further options of `policygrad compare`, --jobs 2 say]
python scripts/measure_algorithms.py --ladder dapo [-- further options]
python scripts/measure_algorithms.py --gates [-- further options]

The third trains the algorithms whose gates hardly act in the first, in a regime in which gates act: docs/results/gates.json.

A thin caller of `policygrad compare`: the runs lie in comparisons/, what is finished is not run again, so that it may be stopped
and started at will. Its report becomes docs/results/algorithms.json (or ladder-dapo.json), its page stands beside it, and `make
docs` makes docs/measured.md and the algorithms' pages from them. An algorithm that needs what the embedded task lacks is left out,
and the report's file says why.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from policygrad.algorithms import ALGORITHMS
from policygrad.commands import STOPPED
from policygrad.commands.compare import build_rows, compare
from policygrad.compare.plan import LADDERS
from policygrad.errors import PolicygradError

ROOT = Path(__file__).resolve().parents[1]
RESULTS, WORK = ROOT / "docs" / "results", ROOT / "comparisons"
TOKENS, SEEDS, TUNING_SEEDS = 250_000, 5, 2
LR_GRID, DELTA_GRID = "1e-4,3e-4,1e-3,3e-3", "0.003,0.01,0.03"
GATED = ("grpo", "dapo", "cispo", "gmpo", "dppo", "m2po", "scale_rl")
"""Rows whose gates hardly act at their own settings, with grpo and dapo to compare them with."""
UNGATED = "dapo_without_gate"
REGIME = (
    *(
        "--algorithm.update-rule.minibatches",
        "16",
        "--max-staleness",
        "4",
        "--algorithm.old-policy",
        "sampler",
        "--lr",
        "1e-3",
    ),
    *("--prompts-per-step", "32", "--evaluation.every", "8"),
)
"""Many updates on old samples at a high rate: π_old is the policy that sampled, so that the gate sees all of the difference."""
GATE_TOKENS, GATE_SEEDS = 60_000, 3
Compare = Callable[[list[str]], int]


def options(names: Sequence[str], ladder: str | None, folder: Path, more: Sequence[str]) -> list[str]:
    """What follows `policygrad compare`."""
    rows = ["--ladder", ladder] if ladder else [*names]
    given = ["--budget-tokens", str(TOKENS), "--seeds", str(SEEDS), "--tuning-seeds", str(TUNING_SEEDS)]
    grids = ["--lr-grid", LR_GRID, *([] if ladder else ["--delta-grid", DELTA_GRID])]
    return [*rows, *given, *grids, "--output", str(folder), *more]


def gate_options(folder: Path, more: Sequence[str]) -> list[str]:
    """Return what follows `policygrad compare` for the regime in which gates act: one rate for all rows, so nothing is tuned."""
    regime = shlex.join(REGIME)
    rows = [f"{name}={name} {regime}" for name in GATED]
    rows.append(f"{UNGATED}=dapo --algorithm.gate Importance {regime}")
    given = ["--budget-tokens", str(GATE_TOKENS), "--seeds", str(GATE_SEEDS)]
    return [*rows, *given, "--output", str(folder), *more]


@cache
def measurable(names: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """(those that run on the embedded task, why the others do not)."""
    there, left_out = [], {}
    for name in names:
        try:
            build_rows([name], None, (), (), lr_grid=(), delta_grid=(), tokens=TOKENS, overrides=True)
        except PolicygradError as error:
            left_out[name] = str(error).removeprefix(f"the row {name}: ")
        else:
            there.append(name)
    return there, left_out


def written(report: dict[str, Any], path: Path) -> None:
    """The report, a row and a pair on one line each, so that a changed row is a changed line."""

    def lines(values: Sequence[Any]) -> str:
        return "[\n" + ",\n".join(json.dumps(value, ensure_ascii=False) for value in values) + "\n]"

    reported = {
        key: lines(value) if key in ("rows", "pairs") else json.dumps(value, ensure_ascii=False)
        for key, value in report.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "{\n" + ",\n".join(f"{json.dumps(key)}: {text}" for key, text in reported.items()) + "\n}\n", encoding="utf-8"
    )


def main(args: Sequence[str], compare: Compare = compare, results: Path = RESULTS, work: Path = WORK) -> int:
    """Everything that is missing; compare's exit code. compare: what runs it; tests hand in another."""
    at = list(args).index("--") if "--" in args else len(args)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=ALGORITHMS, help="these algorithms, beside the committed results"
    )
    parser.add_argument("--ladder", choices=LADDERS, help="this ladder instead")
    parser.add_argument("--gates", action="store_true", help="the regime in which gates act instead")
    chosen = parser.parse_args(args[:at])
    names, left_out = ([], {}) if chosen.ladder or chosen.gates else measurable(tuple(chosen.only or ALGORITHMS))
    for name, reason in left_out.items():
        print(f"{name} is left out: {reason}", flush=True)
    name = "gates" if chosen.gates else f"ladder-{chosen.ladder}" if chosen.ladder else "algorithms"
    folder = work / (name if not chosen.only else "-".join(["only", *chosen.only]))
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) and Path.cwd() == ROOT else folder
    more = args[at + 1 :]
    code = compare(gate_options(shown, more) if chosen.gates else options(names, chosen.ladder, shown, more))
    if chosen.only or code == STOPPED or not (folder / "comparison.json").exists():
        return code
    report = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    called = shlex.join(["python", "scripts/measure_algorithms.py", *args])
    written(report | {"measured_by": called, "left_out": left_out}, results / f"{name}.json")
    shutil.copy(folder / "comparison.html", results / f"{name}.html")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
