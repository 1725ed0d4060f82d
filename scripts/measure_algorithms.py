"""Trains every named algorithm on the embedded task with an equal token budget, and writes docs/results/algorithms.jsonl.

python scripts/measure_algorithms.py [--threads 1] [--jobs 2] [--only NAME …] [--redo NAME …] [--tokens N] [--seeds 0 1 2]

One process per run. A finished run is one line of the file; what is there is not run again, so the script may be stopped
and started at will. `make docs` makes docs/measured.md and the algorithms' pages from the file.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import policygrad
from policygrad.algorithms import ALGORITHMS

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results" / "algorithms.jsonl"
TOKENS = 250_000
"""Sampled tokens per run: about 40 seconds on an idle machine of two cores."""
STEPS = 1000
"""More than any run takes, so that the tokens end it; the learning rate is constant."""
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Override:
    """Options that a row needs on answers of about ten tokens, and why."""

    options: tuple[str, ...]
    reason: str


OVERRIDES: dict[str, Override] = {
    "distill": Override(
        ("--teacher", "runs/distill/teacher"),
        "it needs a teacher: the one that scripts/measure_distill.py makes, the base model with twice its layers, trained by grpo.",
    ),
    "vapo": Override(
        ("--algorithm.psi.length-adaptive-gae.alpha", "0.5"),
        "λ = max(0, 1 − 1/(α·l)) is 0 up to 20 tokens at the paper's α = 0.05; at 0.5 an answer of 10 tokens has λ = 0.8.",
    ),
    "iterative_grpo": Override(
        ("--algorithm.reference.every", "20"),
        "a run here has fewer rollouts than the default's 100, so that the reference would never be taken anew.",
    ),
    "prorl": Override(
        ("--algorithm.reference.every", "20"),
        "a run here has fewer rollouts than the default's 200, so that reference and optimiser would never be reset.",
    ),
    "grpo_process": Override(
        ("--task", "embedded_steps"),
        "a reward for every step says more only where an answer has several: this task is what of the embedded one does.",
    ),
    "vineppo": Override(
        ("--task", "embedded_steps", "--prompts-per-step", "16", "--samples-per-prompt", "4"),
        "a value per step needs answers of several steps, as above; fresh completions of every step's prefix are most of the "
        "tokens, so that fewer answers a step leave as many steps as the others take.",
    ),
}


class MeasureError(RuntimeError):
    """A run that failed, with what it said."""


def results(path: Path = RESULTS) -> list[dict[str, Any]]:
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


def append(row: dict[str, Any], path: Path = RESULTS) -> None:
    """One line in one write, so that two of these scripts may run at a time; on disk when it returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, (json.dumps(row, ensure_ascii=False) + "\n").encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def forget(names: Sequence[str], path: Path = RESULTS) -> None:
    """Takes these algorithms' runs out of the file."""
    kept = [json.dumps(row, ensure_ascii=False) + "\n" for row in results(path) if row["name"] not in names]
    if path.exists():
        new = path.with_suffix(".new")
        new.write_text("".join(kept), encoding="utf-8")
        new.replace(path)


def options(name: str, seed: int, tokens: int) -> list[str]:
    """What follows `policygrad`."""
    override = OVERRIDES.get(name)
    more = override.options if override is not None else ()
    return ["train", name, "--tokens", str(tokens), "--steps", str(STEPS), *more, "--seed", str(seed)]


def measure(name: str, seed: int, tokens: int, threads: int) -> dict[str, Any]:
    """One run in a process of its own.

    Raises:
        MeasureError: the run failed; with the end of what it said.
    """
    words = options(name, seed, tokens)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder) / "run", Path(folder) / "log"
        command = [sys.executable, "-m", "policygrad", *words, "--plain", "--output", str(output)]
        began = time.perf_counter()
        with log.open("wb") as said:
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment)
            _, status, usage = os.wait4(process.pid, 0)  # this child's own CPU seconds, its reward workers' included
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise MeasureError(f"policygrad {shlex.join(words)} ended with code {process.returncode}:\n{tail}")
        if not (output / "result.json").exists():
            raise MeasureError(f"policygrad {shlex.join(words)} was stopped before its end")
        outcome = read(output)
    outcome.setdefault("peak_mib", usage.ru_maxrss / 1024)
    return {
        "name": name,
        "seed": seed,
        "command": f"policygrad {shlex.join(words)}",
        **outcome,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_mib": round(outcome["peak_mib"]),
        "threads": threads,
        "version": policygrad.__version__,
    }


def read(folder: Path) -> dict[str, Any]:
    """What a run's folder says of it."""
    result = json.loads((folder / "result.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    errors = [row["held_out_stderr"] for row in rows if row.get("held_out_stderr") is not None]
    tokens = result.get("tokens", sum(row.get("tokens/sampled") or 0 for row in rows))
    peak = {"peak_mib": result["peak_memory_mib"]} if result.get("peak_memory_mib") else {}
    return {
        "before": result["held_out_before"],
        "before_stderr": errors[0],
        "after": result["held_out_after"],
        "after_stderr": errors[-1],
        "steps": result["steps"],
        "tokens": round(tokens),
        **peak,
    }


def main() -> None:
    """Everything that is missing, some at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=ALGORITHMS, help="these algorithms")
    parser.add_argument("--redo", nargs="+", metavar="NAME", choices=ALGORITHMS, default=[], help="forget these first")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--results", type=Path, default=RESULTS, help="another file, to try the script")
    args = parser.parse_args()
    forget(args.redo, args.results)
    done = {(row["name"], row["seed"]) for row in results(args.results)}
    names = args.only or (args.redo or list(ALGORITHMS))
    todo = [(name, seed) for seed in args.seeds for name in names if (name, seed) not in done]
    print(f"{len(todo)} runs to do, {len(done)} there", flush=True)
    failed: list[MeasureError] = []

    def one(job: tuple[str, int]) -> None:
        try:
            row = measure(*job, args.tokens, args.threads)
        except MeasureError as error:
            failed.append(error)
            print(error, flush=True)
            return
        append(row, args.results)
        figures = f"{row['before']:.3f} -> {row['after']:.3f}  {row['tokens']} tokens  {row['seconds']:.0f} s"
        print(f"{row['name']:16} {row['seed']}  {figures}", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, todo))
    if failed:
        sys.exit(f"{len(failed)} runs failed; the others are in {args.results}")


if __name__ == "__main__":
    main()
