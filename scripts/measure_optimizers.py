"""Held-out accuracy and CPU seconds of a short GRPO run with each optimizer, written to docs/results/optimizers.json.

python scripts/measure_optimizers.py [--seeds 0 1 2] [--steps 8] [--only muon ...]

Runs that the file holds already are not run again. The learning rate is the embedded model's default, which was chosen for AdamW;
sgd has none and gets 0.1, the better one of 0.1 and 0.5 with seed 0, so adamw and muon are also tried at three times theirs.
`docs/memory.md` is written from the file by make_docs.py.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from results import RESULTS

FILE = "optimizers.json"
SETTINGS: Mapping[str, Sequence[str]] = {
    "adamw": (),
    "adamw8bit": ("--optimizer.name", "adamw8bit"),
    "muon": ("--optimizer.name", "muon"),
    "sgd": ("--optimizer.name", "sgd", "--lr", "0.1"),
    "adamw, higher lr": ("--lr", "3e-3"),
    "muon, higher lr": ("--optimizer.name", "muon", "--lr", "3e-3"),
    "adamw, bf16": ("--learner.dtype", "bf16"),
    "adamw, bf16, no masters": ("--learner.dtype", "bf16", "--optimizer.masters", "none"),
}
"""Options by what a row is called."""


def measure(options: Sequence[str], seed: int, steps: int) -> dict[str, float]:
    """Train once; return held-out accuracy before and after, and seconds of CPU of the whole command."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        argv = [sys.executable, "-m", "policygrad", "train", "grpo", *options]
        argv += ["--steps", str(steps), "--seed", str(seed), "--output", str(output)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = json.loads((output / "result.json").read_text())
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        return {
            "before": result["eval_reward_before"],
            "after": result["eval_reward_after"],
            "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "tokens": sum(row.get("tokens/sampled") or 0 for row in rows),
        }


def main() -> None:
    """Run what is missing, one seed of every setting after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--results", type=Path, default=RESULTS / FILE)
    args = parser.parse_args()
    facts: dict[str, Any] = {name: version(name) for name in ("torch", "transformers")}
    facts |= {"steps": args.steps, "cores": os.cpu_count()}
    message: dict[str, Any] = {"facts": facts, "runs": {}}
    if args.results.is_file():
        message = json.loads(args.results.read_text())
        if message["facts"] != facts:
            sys.exit(f"{args.results} holds runs under other conditions: delete it, or name another file by --results")
    for seed in args.seeds:
        for name in args.only:
            runs = message["runs"].setdefault(name, {})
            if str(seed) not in runs:
                runs[str(seed)] = measure(SETTINGS[name], seed, args.steps)
                args.results.write_text(json.dumps(message, indent=1) + "\n", encoding="utf-8")
            print(f"{name:24} seed {seed}  {runs[str(seed)]}", flush=True)


if __name__ == "__main__":
    main()
