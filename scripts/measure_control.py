"""Trains on CartPole-v1 with three seeds each, and writes docs/results/control.jsonl and the table of docs/control.md.

python scripts/measure_control.py [--jobs 2] [--redo NAME …] [--table]

One process of one thread per run. A finished run is one line of the file; what is there is not run again, so the script may
be stopped and started at will. It ends with code 1 where ppo or trpo stays below 475 with any seed.
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

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "docs" / "results" / "control.jsonl", ROOT / "docs" / "control.md"
ENV, STEPS, SEEDS, SOLVED = "CartPole-v1", 150_000, (0, 1, 2), 475.0
REQUIRED = ("ppo", "trpo")
NAMES = (*REQUIRED, "a2c", "reinforce", "ppo_penalty", "natural")
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


class MeasureError(RuntimeError):
    """A run that failed, with what it said."""


def results(path: Path) -> list[dict[str, Any]]:
    """The finished runs.

    Raises:
        MeasureError: a line that is not a run, by number.
    """
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise MeasureError(
                f"{path}, line {number} is no JSON ({error.msg}): delete the line, and run again"
            ) from error
    return rows


def append(row: dict[str, Any], path: Path) -> None:
    """One line in one write, so that two of these scripts may run at a time; on disk when it returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, (json.dumps(row, ensure_ascii=False) + "\n").encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def forget(names: Sequence[str], path: Path) -> None:
    """Takes these algorithms' runs out of the file."""
    kept = [json.dumps(row, ensure_ascii=False) + "\n" for row in results(path) if row["name"] not in names]
    if path.exists():
        new = path.with_suffix(".new")
        new.write_text("".join(kept), encoding="utf-8")
        new.replace(path)


def measure(name: str, seed: int) -> dict[str, Any]:
    """One run.

    Raises:
        MeasureError: it failed; with the end of what it said.
    """
    words = ["lab", "control", "--env", ENV, "--algorithm", name, "--steps", str(STEPS), "--seed", str(seed)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder) / "run.json", Path(folder) / "log"
        began = time.perf_counter()
        with log.open("wb") as said:
            command = [sys.executable, "-m", "policygrad", *words, "--output", str(output)]
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise MeasureError(f"policygrad {' '.join(words)} ended with code {process.returncode}:\n{tail}")
        found = json.loads(output.read_text(encoding="utf-8"))
        return row(found) | {
            "seconds": round(time.perf_counter() - began, 1),
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        }


def row(found: dict[str, Any]) -> dict[str, Any]:
    """A run's line, from what `policygrad lab control --output` wrote."""
    returns, curve = found["evaluation"]["returns"], found["curve"]
    above = [u["steps"] for u in curve if u["episodes"] >= 100 and u["mean_return"] >= SOLVED]
    return {
        "name": found["algorithm"],
        "seed": found["seed"],
        "env": found["env"],
        "steps": curve[-1]["steps"],
        "episodes": len(returns),
        "mean": round(found["evaluation"]["mean"], 2),
        "standard_error": round(found["evaluation"]["standard_error"], 2),
        "min": min(returns),
        "reached": above[0] if above else None,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line per algorithm, its seeds in order."""
    lines = [
        "| | mean return, seeds 0, 1, 2 | worst episode | 475 reached at step | environment steps | CPU seconds a run |",
        "|---|---|---:|---|---|---:|",
    ]
    for name in NAMES:
        of = sorted((r for r in rows if r["name"] == name), key=lambda r: r["seed"])
        if of:
            means = ", ".join(f"{r['mean']:.1f} ± {r['standard_error']:.1f}" for r in of)
            reached = ", ".join("never" if r["reached"] is None else f"{r['reached']:,}" for r in of)
            taken = sorted({r["steps"] for r in of})
            steps = f"{taken[0]:,}" if len(taken) == 1 else f"{taken[0]:,} to {taken[-1]:,}"
            seconds = sum(r["cpu_seconds"] for r in of) / len(of)
            worst = min(r["min"] for r in of)
            lines.append(f"| `{name}` | {means} | {worst:.0f} | {reached} | {steps} | {seconds:.0f} |")
    return "\n".join(lines)


def write(rows: Sequence[dict[str, Any]], page: Path = PAGE) -> None:
    """Puts the table between its marks."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--redo", nargs="*", default=(), metavar="NAME", choices=NAMES, help="forget these first")
    parser.add_argument("--table", action="store_true", help="only write the table from the results")
    options = parser.parse_args()
    forget(options.redo, RESULTS)
    done = {(r["name"], r["seed"]) for r in results(RESULTS)}
    todo = [] if options.table else [(n, s) for n in NAMES for s in SEEDS if (n, s) not in done]

    def run(what: tuple[str, int]) -> None:
        found = measure(*what)
        append(found, RESULTS)
        print(json.dumps(found), flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, todo))
    rows = results(RESULTS)
    write(rows)
    short = [f"{r['name']} seed {r['seed']}: {r['mean']}" for r in rows if r["name"] in REQUIRED and r["mean"] < SOLVED]
    if short:
        print(f"below {SOLVED:g}: {'; '.join(short)}", file=sys.stderr)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
