"""Runs `policygrad train` as a newcomer does, once per seed, and prints what README says of it.

python scripts/measure_default.py [--seeds 0 1 2] [further options of `policygrad train`]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    """One row per seed: held-out accuracy before and after, seconds of training and of the whole command, sampled tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    args, options = parser.parse_known_args()
    print("seed  before  after   gain  training  command  steps  sampled tokens", flush=True)
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "run"
            command = [
                sys.executable,
                "-m",
                "policygrad",
                "train",
                *options,
                "--seed",
                str(seed),
                "--output",
                str(output),
            ]
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - start
            result = json.loads((output / "result.json").read_text())
            rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
            tokens = sum(row.get("tokens/sampled") or 0 for row in rows)
            before, after = result["held_out_before"], result["held_out_after"]
            told = (
                f"{seed:4}  {before:6.3f} {after:6.3f} {after - before:+6.3f} {result['seconds']:9.1f} {seconds:8.1f}"
            )
            print(f"{told} {result['steps']:6} {tokens:15.0f}", flush=True)


if __name__ == "__main__":
    main()
