"""How many mathematical answers the reward workers judge a second: GSM8K's labelled solutions, MATH's references, right and wrong.

python benchmarks/answers.py DATA [--workers 2]

DATA is a folder with gsm8k/model_solutions.jsonl and math/problems.jsonl. Each set is judged twice: at first math-verify builds the
tables of its parser on the way. What the libraries remember of an answer, they remember.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

from policygrad.rewards.workers.pool import RewardPool

Case = tuple[str, str]  # completion, answer


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.open(encoding="utf-8")]


def gsm8k(folder: Path) -> list[Case]:
    """The labelled solutions of four models, in the words they were written in."""
    rows = lines(folder / "gsm8k" / "model_solutions.jsonl")
    return [
        (str(said["solution"]), str(row["ground_truth"]).rpartition("A:")[2].strip())
        for row in rows
        for said in row.values()
        if isinstance(said, dict)
    ]


def formulas(folder: Path) -> list[Case]:
    """Every reference as its own answer, and as that of the problem before it: most of these are wrong, and not at sight."""
    golds = [str(row["answer"]) for row in lines(folder / "math" / "problems.jsonl")]
    others = golds[1:] + golds[:1]
    return [
        (f"So it is $\\boxed{{{said}}}$.", gold)
        for gold, other in zip(golds, others, strict=True)
        for said in (gold, other)
    ]


def judge(pool: RewardPool, cases: list[Case]) -> float:
    start = time.perf_counter()
    pool.score([""] * len(cases), [text for text, _ in cases], {"answer": [gold for _, gold in cases]})
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    both = [("GSM8K's solutions", gsm8k(args.data)), ("MATH's formulas", formulas(args.data))]
    both.append(("both", both[0][1] + both[1][1]))
    for reward in ("gsm8k", "math"):
        for name, cases in both if reward == "math" else both[:1]:
            with RewardPool([reward], num_workers=args.workers) as pool:
                first, again = judge(pool, cases), judge(pool, cases)
            print(
                f"{reward:6} {name:18} {len(cases):5} answers, {args.workers} workers: "
                f"{len(cases) / first:7.0f}/s at first, with the start of the workers, {len(cases) / again:7.0f}/s then"
            )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"CPU seconds of all workers, their starts included: {used.ru_utime + used.ru_stime:.1f}")


if __name__ == "__main__":
    main()
