"""A real model learns arithmetic on the device: a part of scripts/measure_gpu.py.

SmolLM2-135M-Instruct is trained with GRPO on sums, differences and stories of one or two steps that `make_problems` generates, and
asked, before and after, others of the generator and GSM8K's own test problems, where they are at hand. Three worked turns (`SHOTS`)
stand before every question, so that an answer is one short line. Nothing is downloaded and nothing of it belongs to the repository:

    POLICYGRAD_REAL_MODEL   the model's folder (.bring/smollm2); on a CPU the embedded model takes its place unless this is set
    POLICYGRAD_DATA         a folder with gsm8k/test.jsonl (.bring/data, or ../shared/data)

A machine without a network is brought the 4-bit file in pieces (scripts/pieces.py). By itself:

    python scripts/gpu_real_model.py convert FILE.gguf FOLDER   makes the model's folder of the 4-bit file; needs the package gguf
    python scripts/gpu_real_model.py begin FOLDER [PROBLEMS]    how many of the generator's problems it solves before it learns

`begin FOLDER 64` with the folder that is made of the 4-bit file gave 0.094 ± 0.072 of 64 problems on a CPU, at temperature 1.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRAIN_SECONDS = 360
PROBE_STEPS = 3  # from which the number of steps is chosen
CPU_STEPS = 2
SHOTS = (
    ("What is 7 + 5?", "7 + 5 = 12"),
    ("Lisa has 9 pens and loses 4. How many pens are left?", "9 - 4 = 5"),
    ("Carl has 6 coins, finds 3 more and spends 2. How many coins are left?", "6 + 3 - 2 = 7"),
)
REWARD = "gsm8k:last"
WORDS = f"train grpo --reward {REWARD} --plain --lr 1e-5 --verify 1 --checkpoint.every 1000000"
NAMES = ("Tom", "Anna", "Maya", "Ben", "Lena", "Omar", "Ines", "Raj")
THINGS = ("apples", "pencils", "books", "stickers", "coins", "cards", "shells", "marbles")
PROBLEMS: tuple[tuple[str, Callable[[int, int, int], int]], ...] = (
    ("What is {a} + {b}?", lambda a, b, c: a + b),
    ("What is {a} - {b}?", lambda a, b, c: a - b),
    ("{n} has {a} {t} and gets {b} more. How many {t} does {n} have now?", lambda a, b, c: a + b),
    ("{n} has {a} {t} and gives away {b}. How many {t} are left?", lambda a, b, c: a - b),
    ("{n} buys {b} boxes with {c} {t} each. How many {t} is that?", lambda a, b, c: b * c),
    ("{n} has {a} {t}, gets {b} more and then gives away {c}. How many {t} are left?", lambda a, b, c: a + b - c),
    ("{n} has {a} {t} and buys {b} boxes with {c} each. How many {t} does {n} have now?", lambda a, b, c: a + b * c),
)
"""Question, and its answer from 10 ≤ a ≤ 90 and 2 ≤ b, c ≤ 9."""


def make_problems(count: int, seed: int) -> list[dict[str, Any]]:
    """Return different problems as rows with `prompt` and `answer`."""
    draw, rows = random.Random(seed), dict[str, dict[str, Any]]()
    while len(rows) < count:
        text, solve = draw.choice(PROBLEMS)
        a, b, c = draw.randint(10, 90), draw.randint(2, 9), draw.randint(2, 9)
        question = text.format(n=draw.choice(NAMES), t=draw.choice(THINGS), a=a, b=b, c=c)
        rows[question] = _make_row(question, str(solve(a, b, c)))
    return list(rows.values())


def _make_row(question: str, answer: str) -> dict[str, Any]:
    turns = [(role, text) for shot in SHOTS for role, text in zip(("user", "assistant"), shot, strict=True)]
    return {"prompt": [{"role": role, "content": x} for role, x in (*turns, ("user", question))], "answer": answer}


def read_held_out(count: int) -> list[dict[str, Any]]:
    """Return GSM8K's first test problems; none where the file is not at hand."""
    places = [
        Path(os.environ.get("POLICYGRAD_DATA") or ROOT / ".bring/data"),
        ROOT / "../shared/data",
        Path("/work/shared/data"),
    ]
    file = next((path for place in places if (path := place / "gsm8k/test.jsonl").is_file()), None)
    lines = [] if file is None else file.read_text(encoding="utf-8").splitlines()[:count]
    rows = [json.loads(line) for line in lines]
    return [_make_row(row["question"], row["answer"].rpartition("####")[2].strip()) for row in rows]


@dataclass(frozen=True)
class Size:
    """How much is trained on and asked."""

    prompts: int  # of a step
    samples_each: int  # completions of each of them
    max_tokens: int
    train: int  # problems
    asked: int  # problems of each held-out set
    samples: int  # of each of them

    @property
    def words(self) -> list[str]:
        """What `policygrad train` is told of a step."""
        step = {
            "prompts-per-step": self.prompts,
            "samples-per-prompt": self.samples_each,
            "max-tokens": self.max_tokens,
        }
        return [word for name, value in step.items() for word in (f"--{name}", str(value))]


SIZES = {"cuda": Size(32, 16, 48, 4096, 256, 4), "cpu": Size(2, 4, 16, 16, 8, 2)}


def train_real_model(device: str) -> dict[str, Any]:
    """SmolLM2-135M learns generated problems: curve, accuracy before and after on problems that it has not seen."""
    model, size = find_model(device), SIZES[device]
    if model is None:
        return {"left out": "no model's folder: scripts/gpu_real_model.py says how to bring one"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        held_out = write_problems(folder, size)
        words = [*WORDS.split(), *size.words, "--model", model, "--learner.device", device]
        words += ["--task", "train.jsonl", "--eval-data", "generated.jsonl"]
        probe = ["--steps", str(PROBE_STEPS), "--evaluation.problems", "0", "--output", "probe"]
        call([*words, *probe], folder)
        steps = choose_steps(_read_rows(folder / "probe"), device)
        asked = ["--evaluation.problems", str(size.asked), "--evaluation.samples-per-prompt", str(size.samples)]
        start = time.perf_counter()
        call([*words, "--steps", str(steps), *asked, "--output", "run"], folder)
        report: dict[str, Any] = {"model": Path(model).name, "seconds of the command": time.perf_counter() - start}
        report |= _describe_run(folder / "run")
        if "gsm8k.jsonl" in held_out:
            report["GSM8K's test problems"] = compare_on(folder, "gsm8k.jsonl", ["run", model], device)
        checked = call(["verify", "run", "--json"], folder, allowed=(0, 1))
        report["verify"] = json.loads(checked.splitlines()[-1])["summary"]
        call(["report", "run", "--output", "report.html"], folder)
        report["report page, KiB"] = (folder / "report.html").stat().st_size >> 10
        if place := os.environ.get("OUT"):  # where a lent machine hands files back
            (Path(place) / "real-model.html").write_bytes((folder / "report.html").read_bytes())
    return report


def choose_steps(rows: list[dict[str, Any]], device: str) -> int:
    """Return how many steps fill the time, by the last one of the metrics' rows; on a CPU very few."""
    steps = max(PROBE_STEPS, int(TRAIN_SECONDS / (rows[-1]["time/rollout"] + rows[-1]["time/update"])))
    return min(steps, CPU_STEPS) if device == "cpu" else steps


def write_problems(folder: Path, size: Size) -> list[str]:
    """Write train.jsonl and the held-out sets: others of the generator, and GSM8K's where they are at hand. Return these names."""
    rows, held_out = make_problems(size.asked + size.train, seed=0), read_held_out(size.asked)
    sets = {"generated.jsonl": rows[: size.asked]} | ({"gsm8k.jsonl": held_out} if held_out else {})
    for name, problems in {"train.jsonl": rows[size.asked :], **sets}.items():
        write_rows(folder / name, problems)
    return list(sets)


def find_model(device: str) -> str | None:
    """Return the model's folder; where none is, the embedded model on a CPU and None on a GPU."""
    named = os.environ.get("POLICYGRAD_REAL_MODEL") or ("" if device == "cpu" else str(ROOT / ".bring/smollm2"))
    if named and (Path(named) / "model.safetensors").is_file():
        return str(Path(named).resolve())
    return "tiny" if device == "cpu" else None


def measure_beginning(model: Path, problems: int) -> str:
    """Return how many of the generator's problems a model solves before it learns, with a 95 % interval."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = make_problems(problems + 1, seed=0)
        write_rows(folder / "generated.jsonl", rows[1:])
        write_rows(folder / "train.jsonl", rows[:1])  # a task needs problems that are not asked
        words = ["eval", str(model.resolve()), "--task", "train.jsonl", "--eval-data", "generated.jsonl", "--json"]
        words += [
            "--reward",
            REWARD,
            "--problems",
            str(problems),
            "--samples",
            "1",
            "--max-tokens",
            str(SIZES["cuda"].max_tokens),
        ]
        found = json.loads(call(words, folder).splitlines()[-1])
    return f"{found['mean']:.3f} ± {1.96 * found['stderr']:.3f} of {problems} problems"


def _describe_run(run: Path) -> dict[str, Any]:
    """Return the curve, the held-out accuracies with 95 % intervals, and the tokens a second."""
    rows, result = _read_rows(run), json.loads((run / "result.json").read_text(encoding="utf-8"))
    steps = [row for row in rows if "reward" in row]
    measured = [_interval(row["eval/reward"], row["eval/reward_stderr"]) for row in rows if "eval/reward" in row]
    every = max(1, math.ceil(len(steps) / 24))
    return {
        "steps": result["steps"],
        "tokens/s": result["tokens"] / result["seconds"],
        "seconds of training": result["seconds"],
        "held out before": measured[0],
        "held out after": measured[-1],
        "curve": [[row["step"], round(row["reward"], 3)] for row in steps[::every]],
    }


def _interval(mean: float, stderr: float) -> list[float]:
    """Return [accuracy, low, high] of 95 %."""
    return [round(x, 4) for x in (mean, mean - 1.96 * stderr, mean + 1.96 * stderr)]


def compare_on(folder: Path, data: str, words: list[str], device: str) -> dict[str, Any]:
    """Return accuracies of the model as it was and as it is now, and the difference, each with its interval.

    Args:
        words: What `policygrad eval` is told of the two: the trained one, the other one, and where their task is.
    """
    size = SIZES[device]
    asked = [
        "--eval-data",
        data,
        "--problems",
        str(size.asked),
        "--samples",
        str(size.samples),
        "--device",
        device,
        "--json",
    ]
    dtype = [] if device == "cpu" else ["--dtype", "bf16"]
    found = json.loads(call(["eval", *words, *asked, *dtype], folder).splitlines()[-1])
    after, before = (_interval(row["mean"], row["stderr"]) for row in found["models"])
    gain = found["differences"][0]["mean"]
    return {"before": before, "after": after, "gain": [gain[x] for x in ("value", "low", "high")]}


def call(words: list[str], folder: Path, allowed: tuple[int, ...] = (0,)) -> str:
    """Call policygrad in a folder, and return what it printed. Raises RuntimeError with the end of its errors."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(x for x in sys.path if x)}
    done = subprocess.run(
        [sys.executable, "-m", "policygrad", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in allowed:
        raise RuntimeError(f"policygrad {words[0]} ended with {done.returncode}: {done.stderr[-800:]}")
    return done.stdout


def _read_rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def convert(file: Path, folder: Path) -> None:
    """Make a folder that transformers loads from a GGUF file of SmolLM2."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.bos_token_id, config.eos_token_id = 1, 2
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


PARTS: dict[str, tuple[int, Callable[[str], dict[str, Any]]]] = {"real model": (580, train_real_model)}

if __name__ == "__main__":
    match sys.argv[1:]:
        case ["convert", file, folder]:
            convert(Path(file), Path(folder))
        case ["begin", folder, *problems]:
            print(measure_beginning(Path(folder), int(problems[0]) if problems else 64))
        case _:
            sys.exit("usage: gpu_real_model.py convert FILE.gguf FOLDER | begin FOLDER [PROBLEMS]")
