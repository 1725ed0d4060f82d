"""SmolLM2-135M-Instruct learns sums on a CPU: docs/results/smollm2.json, of which docs/small-models.md and its picture are made.

python scripts/measure_smollm2.py [--model ID|DIR] [--folder DIR] [--steps N] [--weights TEXT]

The problems are the sums of a number below 100 and a digit, as chat messages. Those whose question's hash says so, a fifth, are
held out; the base model and the trained one are measured on the same of them, with the same random numbers. A run that was
stopped goes on when the script is started again, and one that is done is not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results" / "smollm2.json"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ASK = "What is {} + {}? Reply with the number only."
HELD_OUT = 5
"""One question of so many is held out."""
OPTIONS = (
    "--reward gsm8k:last --lr 1e-5 --prompts-per-step 16 --samples-per-prompt 8 --max-tokens 12 "
    "--evaluation.problems 128 --evaluation.samples-per-prompt 4 --checkpoint.every 10 --checkpoint.keep 1"
)
SHOWN = 4
"""Answers of the first step and of the last that the results keep."""


def problems() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(trained on, held out): rows with `prompt` and `answer`, no question in both."""
    rows: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for a in range(100):
        for b in range(10):
            text = ASK.format(a, b)
            held_out = int.from_bytes(sha256(text.encode()).digest()) % HELD_OUT == 0
            rows[held_out].append({"prompt": [{"role": "user", "content": text}], "answer": str(a + b)})
    return rows


def write(folder: Path) -> None:
    """train.jsonl and test.jsonl, in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "test"), problems(), strict=True):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def words(model: str, steps: int) -> list[str]:
    """What `policygrad` is called with, in the folder that holds the problems."""
    data = ["--task", "train.jsonl", "--eval-data", "test.jsonl"]
    return ["train", "dr_grpo", "--model", model, *data, *OPTIONS.split(), "--steps", str(steps), "--output", "run"]


def train(folder: Path, model: str, steps: int) -> float | None:
    """The run, or what is left of it. Seconds of processor time, where all of it was done by this call."""
    if (folder / "run" / "result.json").exists():
        return None
    began = (folder / "run" / "run.toml").exists()
    asked = ["train", "--resume", "run", "--steps", str(steps)] if began else words(model, steps)
    subprocess.run([sys.executable, "-m", "policygrad", *asked, "--plain"], cwd=folder, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return None if began else round(used.ru_utime + used.ru_stime)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def told(run: Path, command: str) -> dict[str, Any]:
    """What a finished run has to say: curve, held-out scores with standard errors, some answers."""
    metrics, result = lines(run / "metrics.jsonl"), json.loads((run / "result.json").read_text(encoding="utf-8"))
    steps = [row for row in metrics if "reward" in row]
    measured = [row for row in metrics if "eval/reward" in row]
    message = lines(run / "completions.jsonl")
    return {
        "command": command,
        "steps": result["steps"],
        "tokens": result["tokens"],
        "eval/reward": [
            [row["step"], round(row["eval/reward"], 4), round(row["eval/reward_stderr"], 4)] for row in measured
        ],
        "curve": [[row["step"], round(row["reward"], 4)] for row in steps],
        "lengths": [[row["step"], round(row["completions/mean_length"], 2)] for row in steps],
        "answers": [*answers(message, 1), *answers(message, result["steps"])],
    }


def answers(message: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """Some of a step's, evenly apart."""
    here = [row for row in message if row["step"] == step]
    return [
        {"step": step, "prompt": row["prompt"][-1]["content"], "completion": row["completion"], "reward": row["reward"]}
        for row in here[:: max(1, len(here) // SHOWN)][:SHOWN]
    ]


def main() -> None:
    """Problems, run, file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="a hub id, or a folder that holds it")
    parser.add_argument("--folder", type=Path, default=Path("runs/smollm2"), help="where problems and the run go")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--weights", default="", help="a remark on the weights, where they are not the hub's own")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    model = str(Path(args.model).resolve()) if Path(args.model).is_dir() else args.model
    write(args.folder)
    seconds = train(args.folder, model, args.steps)
    found = told(args.folder / "run", f"policygrad {shlex.join(words(MODEL, args.steps))}")
    rows = [len(part) for part in problems()]
    found |= {
        "made_by": f"python scripts/measure_smollm2.py --steps {args.steps}",
        "weights": args.weights,
        "problems": {"trained_on": rows[0], "eval/reward": rows[1]},
        "versions": {name: version(name) for name in ("policygrad", "torch", "transformers")},
        "machine": f"{platform.machine()}, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')}",
        "processor_seconds": seconds,
    }
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.results.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    (before, after) = found["eval/reward"][0], found["eval/reward"][-1]
    print(f"held out: {before[1]:.3f} ± {before[2]:.3f} -> {after[1]:.3f} ± {after[2]:.3f}")


if __name__ == "__main__":
    main()
