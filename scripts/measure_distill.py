"""Does a larger teacher, trained by reinforcement, teach the base model faster than reinforcement does? docs/results/distill.json.

python scripts/measure_distill.py [--folder DIR] [--tokens N] [--seeds 0 1 2] [--grid PROMPTS:LR …]

1. The teacher: the embedded base model with twice its layers. The new layers add nothing at first (their output projections
   are 0), so that it begins as the same function, and GRPO trains all of it.
2. From the base model `grpo`; `distill` from that teacher; and distill with the reverse KL exact over the vocabulary in the
   place of the sampled one. Eight samples a prompt; prompts per step and learning rate are those of the grid that have the
   best mean reward over the second half of a run of equally many tokens, on a seed that is not reported.
3. Curves of the training reward over sampled tokens, for each seed; held-out accuracy before and after.

A run whose folder holds a result is not run again, so the script may be stopped and started at will.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results" / "distill.json"
TUNING_SEED = 100
THRESHOLDS = (0.5, 0.7, 0.8)
WINDOW = 4000
"""Sampled tokens that a reward is a mean over; about one step of 64 prompts."""


def deepen(folder: Path) -> dict[str, int]:
    """Saves the embedded model with twice its layers, the same function; parameters of both."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    from policygrad.models.loading import resolve_model

    source = resolve_model("tiny")
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = LlamaConfig.from_pretrained(source)
    layers, config.num_hidden_layers = config.num_hidden_layers, 2 * config.num_hidden_layers
    torch.manual_seed(0)
    deep = type(base)(config)
    deep.load_state_dict(base.state_dict(), strict=False)
    with torch.no_grad():
        for layer in deep.model.layers[layers:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    ids = torch.arange(64)[None]
    if not torch.equal(base(ids).logits, deep(ids).logits):
        raise RuntimeError("the deeper model is another function than the base model")
    deep.generation_config = base.generation_config
    deep.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return {"base": base.num_parameters(), "teacher": deep.num_parameters()}


def run(folder: Path, words: list[str]) -> dict[str, Any]:
    """One run in a process of its own, or what its folder holds already."""
    if not (folder / "result.json").exists():
        command = [sys.executable, "-m", "policygrad", "train", *words, "--plain", "--output", str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    result = json.loads((folder / "result.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve, tokens = list[list[float]](), 0.0
    for row in rows:
        if "tokens/sampled" in row:
            tokens += row["tokens/sampled"]
            curve.append([round(tokens), round(row["reward"], 4)])
    known = {"before": result["eval_reward_before"], "after": result["eval_reward_after"], "steps": result["steps"]}
    return {"command": f"policygrad train {shlex.join(words)}", **known, "tokens": round(tokens), "curve": curve}


def setting(point: str) -> list[str]:
    """PROMPTS:LR as options."""
    prompts, _, lr = point.partition(":")
    return ["--prompts-per-step", prompts, "--lr", lr]


def late(found: dict[str, Any]) -> float:
    """Mean training reward of the second half of a run."""
    half = found["curve"][len(found["curve"]) // 2 :]
    return sum(reward for _, reward in half) / len(half)


def area(found: dict[str, Any]) -> float:
    """Mean training reward over a run's tokens: the area under its curve."""
    total, before = 0.0, 0.0
    for tokens, reward in found["curve"]:
        total, before = total + reward * (tokens - before), tokens
    return total / before


def until(found: dict[str, Any], threshold: float) -> int | None:
    """Tokens sampled when the reward, a mean over the last `WINDOW` tokens at least, first reached the threshold: small steps
    are noisy, and would reach it by luck."""
    curve = [[0, 0.0], *found["curve"]]
    for end in range(1, len(curve)):
        start = max((k for k in range(end) if curve[end][0] - curve[k][0] >= WINDOW), default=None)
        if start is None:
            continue
        steps = zip(curve[start:end], curve[start + 1 : end + 1], strict=True)
        mean = sum((b[0] - a[0]) * b[1] for a, b in steps) / (curve[end][0] - curve[start][0])
        if mean >= threshold:
            return int(curve[end][0])
    return None


def table(runs: list[dict[str, Any]], chosen: dict[str, str]) -> list[str]:
    """Markdown, a line per row: what was chosen, then seed by seed the tokens until each threshold, the area, the accuracy."""
    heads = ["prompts:lr", *(f"tokens until {t}" for t in THRESHOLDS), "mean reward", "held-out after"]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name in dict.fromkeys(run["name"] for run in runs):
        mine = [run for run in runs if run["name"] == name]
        reached = [[run["tokens_until"][str(t)] for run in mine] for t in THRESHOLDS]
        cells = [", ".join("never" if x is None else f"{x / 1000:.1f}k" for x in row) for row in reached]
        cells += [", ".join(f"{run[key]:.2f}" for run in mine) for key in ("area", "after")]
        lines.append(f"| `{name}` | {chosen[name]} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Teacher, grid, seeds, file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/distill"), help="where the runs go")
    parser.add_argument("--tokens", type=int, default=60_000, help="sampled tokens per reported run")
    parser.add_argument("--grid-tokens", type=int, default=50_000, help="sampled tokens per run of the grid")
    parser.add_argument("--teacher-steps", type=int, default=60)
    parser.add_argument(
        "--teacher-only", action="store_true", help="make the teacher that `policygrad compare distill` needs"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--grid", nargs="+", default=["64:3e-4", "64:1e-3", "64:3e-3", "16:1e-3", "16:3e-3", "4:1e-3"])
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    parameters = deepen(folder / "deep")
    measured = ["--evaluation.problems", "128"]
    words = ["grpo", "--model", str(folder / "deep"), "--lr", "1e-3", "--steps", str(args.teacher_steps), *measured]
    teacher = run(folder / "teacher", words)
    print(f"teacher: {teacher['before']:.2f} -> {teacher['after']:.2f}", flush=True)
    if args.teacher_only:
        return
    taught = ["distill", "--teacher", str(folder / "teacher"), "--samples-per-prompt", "8"]
    exact = ["--algorithm.terms", "ExactKLToReference", "--algorithm.advantage.teacher-log-ratio.coefficient", "0"]
    rows = {"grpo": ["grpo"], "distill": taught, "distill_exact": [*taught, *exact]}
    runs, tuning, chosen = list[dict[str, Any]](), list[dict[str, Any]](), dict[str, str]()
    message = {
        "made_by": shlex.join(["python", "scripts/measure_distill.py", *sys.argv[1:]]),
        "parameters": parameters,
        "teacher": teacher,
        "chosen": chosen,
        "tuning": tuning,
        "runs": runs,
    }

    def told() -> None:
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.write_text(json.dumps(message, ensure_ascii=False) + "\n", encoding="utf-8")

    for name, row in rows.items():
        grid = {}
        for point in args.grid:
            short = [*setting(point), "--steps", "1000", "--tokens", str(args.grid_tokens), "--seed", str(TUNING_SEED)]
            found = run(folder / f"grid-{name}-{point.replace(':', '-')}", [*row, *short, "--evaluation.problems", "0"])
            grid[point] = late(found)
            tuning.append({"name": name, "point": point, "late_reward": round(grid[point], 4), **found})
            print(f"grid {name} {point}: {grid[point]:.3f}", flush=True)
        chosen[name] = max(grid, key=lambda point: grid[point])
    for seed in args.seeds:
        for name, row in rows.items():
            options = [*setting(chosen[name]), "--steps", "1000", "--tokens", str(args.tokens), "--seed", str(seed)]
            found = run(folder / f"{name}-{seed}", [*row, *options, *measured, "--evaluation.samples-per-prompt", "4"])
            reached = {str(t): until(found, t) for t in THRESHOLDS}
            runs.append({"name": name, "seed": seed, "area": round(area(found), 4), "tokens_until": reached, **found})
            print(
                f"{name} {seed}: area {area(found):.3f}, {found['before']:.2f} -> {found['after']:.2f}, {reached}",
                flush=True,
            )
            told()
    print("\n".join(table(runs, chosen)))


if __name__ == "__main__":
    main()
