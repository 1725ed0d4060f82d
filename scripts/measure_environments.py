"""The embedded model learns to call a calculator, to halve an interval, to write programs: three tasks, three seeds each.

    python scripts/measure_environments.py [--only products guess programs] [--seeds 0 1 2] [--folder comparisons/environments]

First demonstrations (`policygrad sft`, once per task), then GRPO from what they made, once per seed. What is finished is not run
again, and what was broken off is gone on with. Writes docs/results/environments.json, of which `make docs` makes the tables of
docs/environments.md. The programs of a policy run behind the sandbox's wall; without one that task is refused.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import policygrad as pg
from episodes import TASKS, Row, Task

ROOT = Path(__file__).resolve().parents[1]
RESULTS, WORK = ROOT / "docs" / "results" / "environments.json", ROOT / "comparisons" / "environments"


def written(file: Path, rows: Sequence[Row]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def taught(task: Task, folder: Path) -> Path:
    """The folder of what demonstrations made of the embedded model. The rows of the task lie beside it."""
    output, draw = folder / "taught", Random(0)
    rows, _ = task.made(draw, task.rows)
    asked = {json.dumps(row["prompt"]) for row in rows}
    _, shown = task.made(draw, task.shown)
    apart = [row for row in shown if json.dumps(row["messages"][:1]) not in asked]  # nothing that is asked was shown
    written(folder / "task.jsonl", rows)
    config = pg.SFTConfig(
        data=str(written(folder / "shown.jsonl", apart)),
        epochs=task.epochs,
        batch_size=32,
        output=str(output),
    )
    if not (output / "result.json").exists():
        begun = (output / "sft.toml").exists()
        pg.train_sft(None if begun else config, resume=output if begun else None)
    return output


def learned(task: Task, folder: Path, seed: int) -> Path:
    """The folder of one run."""
    output = folder / f"seed-{seed}"
    if (output / "result.json").exists():
        return output
    run = pg.Run(
        algorithm=pg.GRPO,
        model=str(folder / "taught" / "model"),
        task=str(folder / "task.jsonl"),
        reward=task.reward,
        steps=task.steps,
        prompts_per_step=task.prompts,
        samples_per_prompt=task.samples,
        lr=task.lr,
        seed=seed,
        sampling=pg.SamplingParams(max_tokens=task.max_tokens),
        evaluation=pg.EvaluationConfig(problems=task.problems, samples_per_prompt=2, every=max(1, task.steps // 4)),
        checkpoint=pg.CheckpointConfig(every=10),
        output=str(output),
    )
    pg.train(run, resume=output if (output / "run.toml").exists() else None, environment=task.environment)
    return output


def told(output: Path) -> dict[str, Any]:
    """What a run came to."""
    result = json.loads((output / "result.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "reward" in row]
    kept = ("environment/turns", "environment/calls", "completions/mean_length")
    return {
        "before": result["eval_reward_before"],
        "after": result["eval_reward_after"],
        "tokens": result["tokens"],
        "eval/reward": [[row["step"], row["eval/reward"]] for row in rows if "eval/reward" in row],
        "ends": {name: [steps[0][name], steps[-1][name]] for name in kept if name in steps[0]},
    }


def example(output: Path, step: int) -> str:
    """What was said in a step's first completion."""
    lines = (output / "completions.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] == step]
    turns = rows[0].get("turns")
    return " / ".join(text.strip() for _, text in turns) if turns else str(rows[0]["completion"]).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=[task.name for task in TASKS], help="these; the others' results stay"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=WORK)
    args = parser.parse_args()
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    for task in (task for task in TASKS if not args.only or task.name in args.only):
        folder = args.folder / task.name
        taught(task, folder)
        runs = {str(seed): learned(task, folder, seed) for seed in args.seeds}
        one = next(iter(runs.values()))
        plain = {name: value for name, value in asdict(task).items() if isinstance(value, int | float | str)}
        found[task.name] = {
            **plain,
            "seeds": {seed: told(output) for seed, output in runs.items()},
            "said": [example(one, 1), example(one, task.steps)],
            "versions": {name: version(name) for name in ("policygrad", "torch", "transformers")},
        }
        RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        for seed, said in found[task.name]["seeds"].items():
            print(f"{task.name}, seed {seed}: {said['before']:.3f} -> {said['after']:.3f}", flush=True)


if __name__ == "__main__":
    main()
