"""The embedded model learns to call a calculator, to halve an interval, to write programs: three tasks, three seeds each.

    python scripts/measure_environments.py [--only products guess programs] [--seeds 0 1 2] [--folder comparisons/environments]

First demonstrations (`policygrad sft`, once per task), then GRPO from what they made, once per seed. What is finished is not run
again, and what was broken off is gone on with. Writes docs/results/environments.json, of which `make docs` makes the tables of
docs/environments.md. The programs of a policy run behind the sandbox's wall; without one that task is refused.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import policygrad as pg

Row = dict[str, Any]
HIGHEST, GUESSES = 15, 4
"""Of the number to be guessed, from 1; halving finds each of 15 within four guesses."""


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


def is_right(answer: str, example: pg.Example) -> float:
    return float(f"<answer>{example.columns['answer']}</answer>" in answer)


PRODUCTS = pg.ToolUse((multiply,), is_right, max_turns=3, tools_in_prompt=False)


class Guess:
    """A number from 1 to 15; four guesses, each answered by higher or lower. Worth 1 when it is found."""

    waits = False

    def __init__(self, example: pg.Example) -> None:
        self.example, self.turns = example, 0

    async def reset(self) -> pg.Observation:
        return pg.Observation(self.example.prompt)

    async def step(self, action: pg.Action) -> pg.Step:
        self.turns += 1
        number, message = int(str(self.example.columns["number"])), action.text.strip()
        if not message.isdecimal():
            return pg.Step(reward=0.0, stop_reason="malformed")
        if int(message) == number:
            return pg.Step(reward=1.0, stop_reason="found")
        if self.turns == GUESSES:
            return pg.Step(reward=0.0, stop_reason="turns")
        return pg.Step(pg.Observation(({"role": "user", "content": "higher" if int(message) < number else "lower"},)))


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def talk(message: list[str]) -> list[dict[str, str]]:
    """Turns of the assistant and, between them, what it is told."""
    return [{"role": ("assistant", "user")[k % 2], "content": text} for k, text in enumerate(message)]


def products(draw: Random, count: int) -> tuple[list[Row], list[Row]]:
    """(a product of numbers of three and two digits, which it cannot work out; every other time the tool is called, else guessed).
    There are more of them than it is shown, or it would learn them by heart instead of what the tool says."""
    rows, shown = [], []
    for i in range(count):
        a, b = draw.randrange(100, 1000), draw.randrange(10, 100)
        rows.append({"prompt": asked(f"{a} times {b} ="), "answer": str(a * b)})
        call, told = f"<tool_call>multiply({a}, {b})</tool_call>", f"<tool_response>\n{a * b}\n</tool_response>"
        answer = f"<answer>{a * b if i % 2 else draw.randrange(1000, 99999)}</answer>"
        shown.append({"messages": asked(f"{a} times {b} =") + talk([call, told, answer] if i % 2 else [answer])})
    return rows, shown


def guesses(draw: Random, count: int) -> tuple[list[Row], list[Row]]:
    """(a game; guesses at random, which every other player at least keeps within what it knows)."""
    rows, shown = [], []
    for i in range(count):
        number, text = draw.randint(1, HIGHEST), f"Game {draw.randrange(10**6)}: a number from 1 to {HIGHEST}"
        rows.append({"prompt": asked(text), "number": str(number)})
        low, high, message = 1, HIGHEST, list[str]()
        for _ in range(GUESSES):
            guess = draw.randint(low, high) if i % 2 else draw.randint(1, HIGHEST)
            message.append(str(guess))
            if guess == number:
                break
            low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
            message.append("higher" if guess < number else "lower")
        shown.append({"messages": asked(text) + talk(message if len(message) % 2 else message[:-1])})
    return rows, shown


def programs(draw: Random, count: int) -> tuple[list[Row], list[Row]]:
    """(a function to write, with its tests; a program of which one in three is right)."""
    signs = {"plus": "+", "minus": "-", "times": "*"}
    rows, shown = [], []
    for i in range(count):
        (first, second), n, m = draw.sample(sorted(signs), 2), draw.randint(2, 40), draw.randint(2, 40)
        text = f"Write f: x {first} {n}, then {second} {m}."
        right = f"(x {signs[first]} {n}) {signs[second]} {m}"
        tests = [f"assert f({x}) == {eval(right, {'x': x})}" for x in (2, 7, 11)]
        rows.append({"prompt": asked(text), "test_list": tests})
        wrong = (f"x {signs[first]} {n}", f"(x {signs[second]} {n}) {signs[first]} {m}")
        body = right if i % 3 == 0 else wrong[i % 2]
        shown.append({"messages": asked(text) + talk([f"def f(x): return {body}"])})
    return rows, shown


@dataclass(frozen=True)
class Task:
    """One of them, and what it takes to learn it."""

    name: str
    title: str
    made: Callable[[Random, int], tuple[list[Row], list[Row]]]
    rows: int
    shown: int
    """Demonstrations."""
    max_tokens: int
    steps: int
    epochs: int = 3
    prompts: int = 16
    samples: int = 8
    lr: float = 3e-4
    reward: tuple[str, ...] = ()
    environment: Any = None
    problems: int = 128
    """Held-out ones that are measured, two samples each."""


TASKS = (
    Task("products", "a calculator", products, 4000, 12000, 48, 60, epochs=2, lr=1e-4, environment=PRODUCTS),
    Task("guess", "a guessing game of four turns", guesses, 4000, 6000, 24, 80, environment=Guess),
    Task(
        "programs", "programs and their tests", programs, 1500, 6000, 40, 24, prompts=8, reward=("code",), problems=48
    ),
)


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
        for seed, message in found[task.name]["seeds"].items():
            print(f"{task.name}, seed {seed}: {message['before']:.3f} -> {message['after']:.3f}", flush=True)


if __name__ == "__main__":
    main()
