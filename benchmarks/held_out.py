"""Held-out accuracy of the weights that a benchmark has kept, of either side: the embedded task's own problems.

python benchmarks/held_out.py FOLDER [--problems 256] [--samples 8]
"""

from __future__ import annotations

import argparse
import json
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
    sizes = {"problems": args.problems, "samples": args.samples}
    curve = [[step, pg.evaluate(str(path), "embedded", device="cpu", **sizes).mean] for step, path in kept]
    print(MARK + json.dumps({"curve": curve}), flush=True)


if __name__ == "__main__":
    main()
