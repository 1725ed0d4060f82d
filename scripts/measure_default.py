"""Runs `policygrad train` as a newcomer does, once per seed, and prints the table of docs/index.md.

python scripts/measure_default.py [--seeds 0 1 2] [further options of `policygrad train`]
python scripts/measure_default.py --ranks 1 2 [--seeds 0 1 2]

With --ranks, train on several processes and write docs/results/ranks.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

HEAD = "seed  before  after   gain  training  command  steps  sampled tokens"


def trained(seed: int, options: Sequence[str]) -> dict[str, Any]:
    """Held-out accuracy before and after, seconds of training and of the whole command, steps, sampled tokens."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        words = [sys.executable, "-m", "policygrad", "train", *options, "--seed", str(seed), "--output", str(output)]
        start = time.perf_counter()
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        result = json.loads((output / "result.json").read_text())
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        return {
            "before": result["eval_reward_before"],
            "after": result["eval_reward_after"],
            "training": result["seconds"],
            "command": seconds,
            "steps": result["steps"],
            "tokens": sum(row.get("tokens/sampled") or 0 for row in rows),
        }


def line(seed: int, found: dict[str, Any]) -> str:
    """A row under HEAD."""
    before, after = found["before"], found["after"]
    report = (
        f"{seed:4}  {before:6.3f} {after:6.3f} {after - before:+6.3f} {found['training']:9.1f} {found['command']:8.1f}"
    )
    return f"{report} {found['steps']:6} {found['tokens']:15.0f}"


def main() -> None:
    """One row per seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    args, options = parser.parse_known_args()
    print(HEAD, flush=True)
    for seed in args.seeds:
        print(line(seed, trained(seed, options)), flush=True)


RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results" / "ranks.json"


def compare_world_sizes() -> None:
    """One row per number and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    versions = {name: version(name) for name in ("policygrad", "torch", "transformers")}
    message: dict[str, Any] = {"runs": {}, "versions": versions}
    if args.results.is_file():
        message = json.loads(args.results.read_text())
        if message["versions"] != versions:
            sys.exit(f"{args.results} holds runs of other versions: delete it, or name another file by --results")
    print(f"ranks {HEAD}", flush=True)
    for ranks in args.ranks:
        runs = message["runs"].setdefault(str(ranks), {})
        for seed in args.seeds:
            if str(seed) not in runs:
                runs[str(seed)] = trained(seed, ["--learner.world-size", str(ranks)])
                args.results.write_text(json.dumps(message, indent=1) + "\n", encoding="utf-8")
            print(f"{ranks:5} {line(seed, runs[str(seed)])}", flush=True)


if __name__ == "__main__":
    compare_world_sizes() if "--ranks" in sys.argv else main()
