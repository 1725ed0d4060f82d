"""Draws what the terminal shows during a run, from the run's files, as an SVG.

python scripts/make_picture.py RUN [--step N] [--output docs/train.svg]
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

from rich.console import Console

from policygrad.trackers import RunInfo
from policygrad.trackers.rich_display import TerminalTracker
from policygrad.training.config.run import Run
from policygrad.training.config.serialization import load_config


def main() -> None:
    """Feeds a run's files to the tracker, step by step, and saves the last picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, default=10**9, help="stop the picture at this step")
    parser.add_argument("--output", type=Path, default=Path("docs/train.svg"))
    args = parser.parse_args()
    run = load_config(args.run / "run.toml", Run())
    clock = [0.0]
    tracker = TerminalTracker(Console(file=io.StringIO(), width=100, force_terminal=True), lambda: clock[0])
    tracker.start(RunInfo("", steps=run.steps, token_budget=run.tokens))
    samples: dict[int, list[dict[str, object]]] = {}
    for line in (args.run / "completions.jsonl").open(encoding="utf-8"):
        row = json.loads(line)
        samples.setdefault(row["step"], []).append(row)
    for line in (args.run / "metrics.jsonl").open(encoding="utf-8"):
        row = json.loads(line)
        if "reward" in row and row["step"] <= args.step:
            clock[0] += row["time/rollout"] + row["time/update"]
            tracker.log(row["step"], row, samples[row["step"]])
    tracker.close()
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    console.print(f"[bold]policygrad · {run.algorithm.name} on {run.task}[/bold]")
    console.print(tracker)
    console.save_svg(str(args.output), title="policygrad train")


if __name__ == "__main__":
    main()
