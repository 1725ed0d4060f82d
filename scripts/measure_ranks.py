"""The default run on one process and on several: the same accuracy? docs/results/ranks.json, and a table in docs/many-processes.md.

    python scripts/measure_ranks.py [--ranks 1 2] [--seeds 0 1 2]

Prompts and random numbers are the same for any number of processes; what differs is rounding, which tips a draw over now and then.
What is in the file already is not run again: delete the file for that.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measure_default import HEAD, line, trained

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results" / "ranks.json"


def main() -> None:
    """One row per number and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    versions = {name: version(name) for name in ("policygrad", "torch", "transformers")}
    said: dict[str, Any] = {"runs": {}, "versions": versions}
    if args.results.is_file():
        said = json.loads(args.results.read_text())
        if said["versions"] != versions:
            sys.exit(f"{args.results} holds runs of other versions: delete it, or name another file by --results")
    print(f"ranks {HEAD}", flush=True)
    for ranks in args.ranks:
        runs = said["runs"].setdefault(str(ranks), {})
        for seed in args.seeds:
            if str(seed) not in runs:
                runs[str(seed)] = trained(seed, ["--learner.world-size", str(ranks)])
                args.results.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
            print(f"{ranks:5} {line(seed, runs[str(seed)])}", flush=True)


if __name__ == "__main__":
    main()
