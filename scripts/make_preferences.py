"""Makes data for the whole RLHF path out of the embedded model's own answers to the embedded task.

python scripts/make_preferences.py [FOLDER] [--problems 600] [--samples 16] [--seed 0]

FOLDER/sft.jsonl     {"prompt", "completion"}: of each problem that the model solved, its longest right answer (worked out)
FOLDER/pairs.jsonl   {"prompt", "chosen", "rejected"}: right answers against wrong ones, at most two pairs per problem

The problems are training problems: what `policygrad eval` measures on is in neither file.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from policygrad.rollout.scoring import score_groups
from policygrad.rollout.trajectory import TRAIN, EpisodeSpec
from policygrad.samplers.base import SamplingParams
from policygrad.training.config.run import RunOptions
from policygrad.training.setup import load_resources

PORTION = 64  # problems sampled at a time
PAIRS = 2  # per problem


def make(folder: Path, problems: int = 600, samples: int = 16, seed: int = 0, model: str = "tiny") -> tuple[int, int]:
    """Writes both files; (demonstrations, pairs)."""
    demonstrations: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    for prompt, right, wrong in answers(model, problems, samples, seed):
        if right:
            demonstrations.append({"prompt": prompt, "completion": max(right, key=lambda text: (len(text), text))})
        both = zip(right[:PAIRS], wrong[:PAIRS], strict=False)
        pairs += [{"prompt": prompt, "chosen": good, "rejected": bad} for good, bad in both]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("sft.jsonl", demonstrations), ("pairs.jsonl", pairs)):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / name).write_text(text, encoding="utf-8")
    return len(demonstrations), len(pairs)


def answers(model: str, problems: int, samples: int, seed: int) -> list[tuple[str, list[str], list[str]]]:
    """(prompt, different right answers, different wrong ones) of each problem, sampled at temperature 1."""
    sampling = SamplingParams()
    out = []
    with ExitStack() as stack:
        result = load_resources(stack, RunOptions(model=model, seed=seed, sampling=sampling))
        for start in range(0, problems, PORTION):
            numbers = range(start, min(start + PORTION, problems))
            starts = [
                EpisodeSpec(result.task.train_example(i), (seed, TRAIN, 0, i), sampling.max_tokens) for i in numbers
            ]
            groups, _ = score_groups(result.rollouter.play(starts, samples, sampling), result.rollouter.score)
            for group in groups:
                right = dict.fromkeys(t.text for t in group.trajectories if t.reward == 1.0)
                wrong = dict.fromkeys(t.text for t in group.trajectories if t.reward == 0.0)
                out.append((str(group.spec.example.prompt), list(right), list(wrong)))
    return out


def main() -> None:
    """Writes the files and says how many rows they have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("rlhf-data"))
    parser.add_argument("--problems", type=int, default=600)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    demonstrations, pairs = make(args.folder, args.problems, args.samples, args.seed)
    print(f"{args.folder}/sft.jsonl: {demonstrations} demonstrations; {args.folder}/pairs.jsonl: {pairs} pairs")


if __name__ == "__main__":
    main()
