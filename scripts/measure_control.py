"""Train on CartPole-v1, three seeds per algorithm, and write docs/results/control.jsonl and a table of docs/lab.md.

python scripts/measure_control.py [--jobs 2] [--redo NAME …] [--table]

One process of one thread per run. A finished run is one line of the file and is not repeated, so the script may be stopped and
started again. It ends with code 1 if ppo or trpo stays below 475 with any seed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pages.markdown import fill_blocks

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "docs" / "results" / "control.jsonl", ROOT / "docs" / "lab.md"
ENV, STEPS, SEEDS, SOLVED = "CartPole-v1", 150_000, (0, 1, 2), 475.0
REQUIRED = ("ppo", "trpo")
NAMES = (*REQUIRED, "a2c", "reinforce", "ppo_penalty", "natural")


class MeasureError(RuntimeError):
    """A run failed, or the results cannot be read."""


def read_results(path: Path) -> list[dict[str, Any]]:
    """Read the finished runs.

    Raises:
        MeasureError: a line is not JSON.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else (), 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise MeasureError(
                f"{path}, line {number} is not JSON ({error.msg}): delete the line and run again"
            ) from error
    return rows


def append_result(row: dict[str, Any], path: Path) -> None:
    """Append a line in one write, so that two of these scripts may run at once; it is on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, (json.dumps(row, ensure_ascii=False) + "\n").encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_results(names: Sequence[str], path: Path) -> None:
    """Remove these algorithms' runs from the file."""
    kept = [json.dumps(row, ensure_ascii=False) + "\n" for row in read_results(path) if row["name"] not in names]
    if path.exists():
        new = path.with_suffix(".new")
        new.write_text("".join(kept), encoding="utf-8")
        new.replace(path)


def train(name: str, seed: int) -> dict[str, Any]:
    """Run `policygrad lab control` once and return its line of the results.

    Raises:
        MeasureError: it failed; the message quotes the end of its output.
    """
    argv = ["lab", "control", "--env", ENV, "--algorithm", name, "--steps", str(STEPS), "--seed", str(seed)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder) / "run.json", Path(folder) / "log"
        start = time.perf_counter()
        with log.open("wb") as stream:
            command = [sys.executable, "-m", "policygrad", *argv, "--output", str(output)]
            process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise MeasureError(f"policygrad {' '.join(argv)} ended with code {process.returncode}:\n{tail}")
        return summarize(json.loads(output.read_text(encoding="utf-8"))) | {
            "seconds": round(time.perf_counter() - start, 1),
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        }


def summarize(run: dict[str, Any]) -> dict[str, Any]:
    """Reduce what `policygrad lab control --output` wrote to a line of the results."""
    evaluation, curve = run["evaluation"], run["curve"]
    solved_at = (u["steps"] for u in curve if u["episodes"] >= 100 and u["mean_return"] >= SOLVED)
    return {
        "name": run["algorithm"],
        "seed": run["seed"],
        "env": run["env"],
        "steps": curve[-1]["steps"],
        "episodes": len(evaluation["returns"]),
        "mean": round(evaluation["mean"], 2),
        "standard_error": round(evaluation["standard_error"], 2),
        "min": min(evaluation["returns"]),
        "reached": next(solved_at, None),
    }


def make_table(rows: Sequence[dict[str, Any]]) -> str:
    """Write a table with one row per algorithm, its seeds in order."""
    lines = [
        "| | mean return, seeds 0, 1, 2 | worst episode | 475 reached at step | environment steps | CPU seconds a run |",
        "|---|---|---:|---|---|---:|",
    ]
    for name in NAMES:
        runs = sorted((row for row in rows if row["name"] == name), key=lambda row: row["seed"])
        if runs:
            means = ", ".join(f"{r['mean']:.1f} ± {r['standard_error']:.1f}" for r in runs)
            reached = ", ".join("never" if r["reached"] is None else f"{r['reached']:,}" for r in runs)
            steps = " to ".join(f"{n:,}" for n in dict.fromkeys(f([r["steps"] for r in runs]) for f in (min, max)))
            seconds = sum(r["cpu_seconds"] for r in runs) / len(runs)
            worst = min(r["min"] for r in runs)
            lines.append(f"| `{name}` | {means} | {worst:.0f} | {reached} | {steps} | {seconds:.0f} |")
    return "\n".join(lines)


def main() -> int:
    """Do the runs that are missing, write the table, and return 1 if a required algorithm did not solve the task."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--redo", nargs="*", default=(), metavar="NAME", choices=NAMES, help="repeat these")
    parser.add_argument("--table", action="store_true", help="only write the table from the results")
    options = parser.parse_args()
    remove_results(options.redo, RESULTS)
    done = {(row["name"], row["seed"]) for row in read_results(RESULTS)}
    missing = [] if options.table else [(n, s) for n in NAMES for s in SEEDS if (n, s) not in done]

    def run(name_and_seed: tuple[str, int]) -> None:
        row = train(*name_and_seed)
        append_result(row, RESULTS)
        print(json.dumps(row), flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, missing))
    rows = read_results(RESULTS)
    PAGE.write_text(fill_blocks(PAGE, control=make_table(rows)), encoding="utf-8")
    unsolved = [
        f"{r['name']} seed {r['seed']}: {r['mean']}" for r in rows if r["name"] in REQUIRED and r["mean"] < SOLVED
    ]
    if unsolved:
        print(f"below {SOLVED:g}: {'; '.join(unsolved)}", file=sys.stderr)
    return 1 if unsolved else 0


if __name__ == "__main__":
    sys.exit(main())
