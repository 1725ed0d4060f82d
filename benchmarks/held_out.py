"""Held-out accuracy of the weights that a benchmark has kept, of either side: the embedded task's own problems.

python benchmarks/held_out.py FOLDER [--problems 256] [--samples 8]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import policygrad as pg
from bench.clock import MARK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--problems", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8)
    args = parser.parse_args()
    kept = sorted((int(path.name.removeprefix("step-")), path) for path in args.folder.glob("step-*"))
    sizes = pg.EvaluationConfig(problems=args.problems, samples_per_prompt=args.samples)
    options = pg.RunOptions(evaluation=sizes, learner=pg.LearnerConfig(device="cpu", dtype="fp32"))
    curve = [[step, pg.evaluate(replace(options, model=str(path))).mean] for step, path in kept]
    print(MARK + json.dumps({"curve": curve}), flush=True)


if __name__ == "__main__":
    main()
