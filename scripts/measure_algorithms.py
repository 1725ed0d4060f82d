"""Compares every named algorithm, each at its best learning rate of a grid, and DAPO's ladder; writes docs/results/.

python scripts/measure_algorithms.py [--only NAME …] [-- further options of `policygrad compare`, --jobs 2 say]
python scripts/measure_algorithms.py --ladder dapo [-- further options]
python scripts/measure_algorithms.py --gates [-- further options]

The third trains the algorithms whose gates hardly act in the first, in a regime in which gates act: docs/results/gates.json.gz.

With --only the rows are put among those of docs/results/algorithms.json.gz, and all pairs and sentences are made anew; a row that
is in both is taken anew, and the page says whether its runs are the same.

A thin caller of `policygrad compare`: the runs lie in comparisons/, what is finished is not run again, so that it may be stopped
and started at will. Its report becomes docs/results/algorithms.json.gz (or ladder-dapo.json.gz), its page stands beside it, and
`make docs` makes docs/measured.md and the algorithms' pages from them. An algorithm that needs what the embedded task lacks is left
out, and the report's file says why.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from policygrad.algorithms import ALGORITHMS
from policygrad.commands import STOPPED
from policygrad.commands.compare import build_rows, compare
from policygrad.compare.page import render_comparison
from policygrad.compare.plan import LADDERS, ComparisonPlan, ComparisonRow, Job, RowDescription
from policygrad.compare.report import build_report
from policygrad.compare.runner import AXES, Results, RunOutcome
from policygrad.errors import PolicygradError
from results import RESULTS, load_result, write_packed_result

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "comparisons"
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
WITHOUT_ENVIRONMENT = {
    "observation": "it learns to predict what an environment writes, and the embedded tasks have single answers",
    "role": "it compares the roles of a game, which embedded tasks lack ([self-play](environments.md#self-play) measures it)",
}
"""Batch fields that only an environment's episodes fill -> why an algorithm that needs one is left out."""
CANNOT_READ_HINTS = (
    "the embedded model has not learned to read what its teacher reads, which is then no teacher "
    "([self-distillation](distillation.md#from-itself) measures it, before and after the model has learned to)"
)
MEASURED_LATER = "Measured later than the others"
"""How the caveat about rows begins that were put among those of another day."""
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
        if reason := describe_lack(name):
            left_out[name] = reason
            continue
        try:
            build_rows([name], None, (), (), lr_grid=(), delta_grid=(), tokens=TOKENS, overrides=True)
        except PolicygradError as error:
            left_out[name] = str(error).removeprefix(f"the row {name}: ")
        else:
            there.append(name)
    return there, left_out


def describe_lack(name: str) -> str:
    """Return what the embedded task lacks that an algorithm needs; "" if nothing."""
    algorithm = ALGORITHMS.get(name)
    if algorithm is None:
        return ""
    if algorithm.reference is not None and algorithm.reference.templates:
        return CANNOT_READ_HINTS
    return next((reason for field, reason in WITHOUT_ENVIRONMENT.items() if field in algorithm.all_needs), "")


def format_report(report: dict[str, Any]) -> str:
    """Write the report, a row and a pair on one line each; without the claims, which follow from pairs."""

    def lines(values: Sequence[Any]) -> str:
        return "[\n" + ",\n".join(json.dumps(value, ensure_ascii=False) for value in values) + "\n]"

    reported = {
        key: lines(value) if key in ("rows", "pairs") else json.dumps(value, ensure_ascii=False)
        for key, value in report.items()
        if key != "claims"
    }
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {text}" for key, text in reported.items()) + "\n}\n"


def main(args: Sequence[str], compare: Compare = compare, results: Path = RESULTS, work: Path = WORK) -> int:
    """Everything that is missing; compare's exit code. compare: what runs it; tests hand in another."""
    at = list(args).index("--") if "--" in args else len(args)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=ALGORITHMS,
        help="these algorithms, put among the committed results",
    )
    parser.add_argument("--ladder", choices=LADDERS, help="this ladder instead")
    parser.add_argument("--gates", action="store_true", help="the regime in which gates act instead")
    chosen = parser.parse_args(args[:at])
    if chosen.only and (chosen.ladder or chosen.gates):
        parser.error("--only puts rows among those of docs/results/algorithms.json.gz: omit --ladder and --gates")
    names, left_out = ([], {}) if chosen.ladder or chosen.gates else measurable(tuple(chosen.only or ALGORITHMS))
    for name, reason in left_out.items():
        print(f"{name} is left out: {reason}", flush=True)
    name = "gates" if chosen.gates else f"ladder-{chosen.ladder}" if chosen.ladder else "algorithms"
    folder = work / (name if not chosen.only else "-".join(["only", *chosen.only]))
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) and Path.cwd() == ROOT else folder
    more = args[at + 1 :]
    before = load_result(name, results) if chosen.only else None
    if before is not None:  # the budget and the seeds of the rows that they join
        numbers = {"--budget-tokens": before["tokens"], "--seeds": len(before["seeds"])}
        numbers["--tuning-seeds"] = len(before["tuning_seeds"])
        more = [*(str(word) for pair in numbers.items() for word in pair), *more]
    code = compare(gate_options(shown, more) if chosen.gates else options(names, chosen.ladder, shown, more))
    if code == STOPPED or not (folder / "comparison.json").exists():
        return code
    report = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    called = shlex.join(["python", "scripts/measure_algorithms.py", *args])
    if before is not None:
        report, page = merge_reports(before, report)
        called, left_out = f"{before['measured_by']}\n{called}", before["left_out"] | left_out
    else:
        page = (folder / "comparison.html").read_text(encoding="utf-8")
    report |= {"measured_by": called, "left_out": left_out}
    write_packed_result(f"{name}.json", format_report(report), results)
    write_packed_result(f"{name}.html", page, results)
    return code


def merge_reports(before: dict[str, Any], added: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a report of the rows of both, in the matrix's order, and its page; rows that are in both are the added ones.

    Raises:
        ValueError: Budget or seeds differ, so that the rows cannot be compared.
    """
    for setting in ("tokens", "seeds", "tuning_seeds"):
        if before[setting] != added[setting]:
            raise ValueError(
                f"{setting} of the rows before are {before[setting]}, and of the added ones {added[setting]}"
            )
    earlier, later = ({row["label"]: row for row in report["rows"]} for report in (before, added))
    rows, outcomes = list[ComparisonRow](), dict[Job, RunOutcome]()
    for label in sorted(earlier | later, key=list(ALGORITHMS).index):
        report, row = (added, later[label]) if label in later else (before, earlier[label])
        plan_row, runs = read_row(row, report)
        rows.append(plan_row)
        outcomes |= runs
    shared = {
        "tokens": before["tokens"],
        "seeds": tuple(before["seeds"]),
        "tuning_seeds": tuple(before["tuning_seeds"]),
    }
    plan = ComparisonPlan(tuple(rows), **shared, command=before["command"], version=added["version"], ladder={})
    chosen = {label: row["option_value"] for label, row in (earlier | later).items()}
    merged = build_report(plan, Results(outcomes, {}, chosen), before["share"])
    shares = [measure_processor_share(list(labelled.values())) for labelled in (later, earlier)]
    caveat = f"{MEASURED_LATER}, under another load of the machine, which their seconds show: {', '.join(later)}."
    caveat += f" These had a processor for {shares[0]:.0%} of a run's time, those before for {shares[1]:.0%}."
    for label in (label for label in later if label in earlier):
        pairs = zip(earlier[label]["runs"], later[label]["runs"], strict=True)
        change = max(abs(a["after"] - b["after"]) for a, b in pairs)
        text = f"differ by at most {change:.3f}" if change else "are the same"
        settings, now = earlier[label]["settings"], later[label]["settings"]
        changed = [f"{name} {settings.get(name)}, now {now[name]}" for name in now if settings.get(name) != now[name]]
        then = f"then ({'; '.join(changed)})" if changed else "then"
        caveat += f" {label} was measured {then.replace('_', ' ')} and now; the final scores of its seeds {text}."
    caveats = (*merged.caveats, *(text for text in before["caveats"] if text.startswith(MEASURED_LATER)), caveat)
    merged = replace(merged, caveats=caveats)
    return merged.to_dict(), render_comparison(merged)


def measure_processor_share(rows: Sequence[dict[str, Any]]) -> float:
    """Return the seconds of a processor that the runs of these rows took, in each second that passed."""
    costs = [run["cost"] for row in rows for run in row["runs"]]
    return float(sum(cost["cpu_seconds"] for cost in costs) / sum(cost["seconds"] for cost in costs))


def read_row(row: dict[str, Any], report: dict[str, Any]) -> tuple[ComparisonRow, dict[Job, RunOutcome]]:
    """Return a reported row as in a plan, and the outcomes of its runs."""
    label, value, argv = row["label"], row["option_value"], shlex.split(row["command"])
    if value is not None:
        argv = argv[:-2]  # the tuned option and its value
    grid = tuple(tried["value"] for tried in row["tuning"]) or (() if value is None else (value,))
    described = {f.name: row[f.name] for f in fields(RowDescription)}
    plan_row = ComparisonRow(**described, argv=tuple(argv), grid=grid, measure=report["kinds"][row["kind"]]["measure"])
    outcomes = {
        Job(label, tried["value"], seed): RunOutcome((0.0,), (0.0,), (0.0,), (score,), 0.0, 0)
        for tried in row["tuning"]
        for seed, score in zip(report["tuning_seeds"], tried["scores"], strict=True)
    }
    for run in row["runs"]:
        outcomes[Job(label, value, run["seed"])] = RunOutcome(
            **{axis: tuple(run["curve"][axis]) for axis in AXES},
            score=(run["before"], *run["curve"]["score"][1:-1], run["after"]),  # the ends are not rounded
            score_stderr=run["after_stderr"],
            **{name: run[name] for name in ("steps", "diagnostics", "cost")},
            gated_fraction=run.get("gated_fraction"),
        )
    return plan_row, outcomes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
