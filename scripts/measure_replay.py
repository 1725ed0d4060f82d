"""Does a replay buffer pay? Held-out accuracy with one and without, over the same sampled tokens: docs/results/replay.json.gz.

python scripts/measure_replay.py [-- further options of `policygrad compare`, --jobs 2 say]

grpo with 4 samples for each prompt, of which many groups have equal rewards: as it is; with `ReplayBuffer`, for 8 steps, for 2, and
with each group drawn once; and with the other things that can be done about such groups, `DropZeroVariance` in its three ways. Each
row has the best learning rate of a grid, chosen on a seed that is not reported. Runs lie in comparisons/, and what is finished is
not run again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from measure_algorithms import ROOT, WORK, format_report
from policygrad.commands import STOPPED
from policygrad.commands.compare import compare
from results import RESULTS, write_packed_result

TOKENS, SEEDS, TUNING_SEEDS, LR_GRID = 60_000, 5, 1, "3e-4,1e-3,3e-3"
SHAPE = ("--samples-per-prompt", "4", "--prompts-per-step", "16")
FILTERS = {  # row -> its filter, and settings of it
    "none": "",
    "replay": "ReplayBuffer",
    "replay_2_steps": "ReplayBuffer --algorithm.filters.replay-buffer.max-age 2",
    "replay_once": "ReplayBuffer --algorithm.filters.replay-buffer.no-reuse",
    "drop": "DropZeroVariance --algorithm.filters.drop-zero-variance.mode drop",
    "reweight": "DropZeroVariance --algorithm.filters.drop-zero-variance.mode reweight",
    "refill": "DropZeroVariance",
}
Compare = Callable[[list[str]], int]


def specs() -> list[str]:
    """The rows, as `policygrad compare` takes them."""
    return [f"{name}=grpo" + f" --algorithm.filters {words}" * bool(words) for name, words in FILTERS.items()]


def main(args: Sequence[str], compare: Compare = compare, results: Path = RESULTS, work: Path = WORK) -> int:
    """Everything that is missing; compare's exit code. compare: what runs it; tests hand in another."""
    at = list(args).index("--") if "--" in args else len(args)
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        args[:at]
    )
    folder = work / "replay"
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) and Path.cwd() == ROOT else folder
    given = ["--budget-tokens", str(TOKENS), "--seeds", str(SEEDS), "--tuning-seeds", str(TUNING_SEEDS)]
    given += ["--lr-grid", LR_GRID, "--output", str(shown)]
    code = compare([*specs(), *given, *args[at + 1 :], "--", *SHAPE])
    if code == STOPPED or not (folder / "comparison.json").exists():
        return code
    report = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    called = shlex.join(["python", "scripts/measure_replay.py", *args])
    write_packed_result("replay.json", format_report(report | {"measured_by": called}), results)
    write_packed_result("replay.html", (folder / "comparison.html").read_text(encoding="utf-8"), results)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
