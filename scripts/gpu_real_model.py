"""A real model learns word problems on the device: a part of scripts/measure_gpu.py.

SmolLM2-135M-Instruct is trained with GRPO on problems that `make_problems` generates, worded as GSM8K's are, and asked GSM8K's own
test problems before and after, where they are at hand. Nothing is downloaded and nothing of it belongs to the repository:

    POLICYGRAD_REAL_MODEL   the model's folder (.bring/smollm2); without one the embedded model takes its place, for a rehearsal
    POLICYGRAD_DATA         a folder with gsm8k/test.jsonl (.bring/data, or ../shared/data)

A machine without a network is brought the 4-bit file in pieces (scripts/pieces.py), and `python scripts/gpu_real_model.py FILE.gguf
FOLDER` makes the model's folder of it; that needs the package gguf.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRAIN_SECONDS = 360
PROBE_STEPS = 3  # from which the number of steps is chosen
ASK = "{} Think step by step, and write the final number after ####."
WORDS = "train grpo --reward gsm8k:last --plain --lr 1e-5 --verify 1 --checkpoint.every 1000000"
GPU_WORDS = "--prompts-per-step 32 --samples-per-prompt 16 --max-tokens 160"
CPU_WORDS = "--prompts-per-step 2 --samples-per-prompt 2 --max-tokens 8"
NAMES = ("Tom", "Anna", "Maya", "Ben", "Lena", "Omar", "Ines", "Raj")
THINGS = ("apples", "pencils", "books", "stickers", "coins", "cards", "shells", "marbles")
PROBLEMS: tuple[tuple[str, Callable[[int, int, int], int]], ...] = (
    (
        "{n} has {a} {t}. A friend gives {n} {b} more, and {n} loses {c}. How many {t} are left?",
        lambda a, b, c: a + b - c,
    ),
    (
        "{n} buys {b} boxes with {c} {t} each, and has {a} {t} already. How many {t} are there?",
        lambda a, b, c: a + b * c,
    ),
    (
        "Each of {n}'s {b} shelves holds {a} {t}. {n} gives away {c} of them. How many {t} remain?",
        lambda a, b, c: a * b - c,
    ),
    (
        "{n} sells {a} {t} for {b} dollars each and spends {c} dollars. How many dollars are left?",
        lambda a, b, c: a * b - c,
    ),
    ("{n} finds {a} {t} on Monday and {b} more than that on Tuesday. How many {t} in all?", lambda a, b, c: 2 * a + b),
)


def make_problems(count: int, seed: int) -> list[dict[str, Any]]:
    """Return different word problems as rows with `prompt` and `answer`."""
    draw, rows = random.Random(seed), dict[str, dict[str, Any]]()
    while len(rows) < count:
        text, solve = draw.choice(PROBLEMS)
        a, b, c = draw.randint(10, 60), draw.randint(2, 9), draw.randint(2, 9)
        question = text.format(n=draw.choice(NAMES), t=draw.choice(THINGS), a=a, b=b, c=c)
        rows[question] = _make_row(question, str(solve(a, b, c)))
    return list(rows.values())


def _make_row(question: str, answer: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": ASK.format(question)}], "answer": answer}


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


def train_real_model(device: str) -> dict[str, Any]:
    """SmolLM2-135M learns generated word problems: curve, accuracy before and after on problems that it has not seen."""
    model = Path(os.environ.get("POLICYGRAD_REAL_MODEL") or ROOT / ".bring/smollm2")
    on_cpu, is_real = device == "cpu", (model / "model.safetensors").is_file()
    if not is_real and not on_cpu:
        return {"left out": f"no model in {model}: scripts/gpu_real_model.py says how to bring one"}
    count = 8 if on_cpu else 256
    rows = make_problems(count + (16 if on_cpu else 4096), seed=0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sets = {"train": rows[count:], "generated": rows[:count]} | (
            {"gsm8k": g} if (g := read_held_out(count)) else {}
        )
        for kind, problems in sets.items():
            (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems), encoding="utf-8")
        where = str(model) if is_real and not on_cpu else "tiny"
        words = [
            *WORDS.split(),
            *(CPU_WORDS if on_cpu else GPU_WORDS).split(),
            "--model",
            where,
            "--task",
            "train.jsonl",
        ]
        words += ["--eval-data", "generated.jsonl", "--learner.device", device]
        steps = 1
        if not on_cpu:
            _call([*words, "--steps", str(PROBE_STEPS), "--evaluation.problems", "0", "--output", "probe"], folder)
            seconds = _read_rows(folder / "probe")[-1]["time/step"]
            steps = max(PROBE_STEPS, int(TRAIN_SECONDS / seconds))
        held_out = ["--evaluation.problems", str(count), "--evaluation.samples-per-prompt", "2" if on_cpu else "4"]
        start = time.perf_counter()
        _call([*words, "--steps", str(steps), *held_out, "--output", "run"], folder)
        seconds = time.perf_counter() - start
        report = {"model": where if where == "tiny" else model.name, "seconds of the command": seconds}
        report |= _describe_run(folder / "run")
        for kind in sorted(set(sets) & {"gsm8k"}):
            report["GSM8K's test problems"] = _measure(folder, where, kind, device, count)
        checked = _call(["verify", "run", "--json"], folder, allowed=(0, 1))
        report["verify"] = json.loads(checked.splitlines()[-1])["summary"]
        _call(["report", "run", "--output", "report.html"], folder)
        report["report page, KiB"] = (folder / "report.html").stat().st_size >> 10
        if place := os.environ.get("OUT"):  # where a lent machine hands files back
            (Path(place) / "real-model.html").write_bytes((folder / "report.html").read_bytes())
    return report


def _describe_run(run: Path) -> dict[str, Any]:
    """Return the curve, the held-out accuracies with 95 % intervals, and the tokens a second."""
    rows, result = _read_rows(run), json.loads((run / "result.json").read_text(encoding="utf-8"))
    steps = [row for row in rows if "reward" in row]
    measured = [row for row in rows if "eval/reward" in row]
    every = max(1, math.ceil(len(steps) / 24))
    return {
        "steps": result["steps"],
        "tokens/s": result["tokens"] / result["seconds"],
        "seconds of training": result["seconds"],
        "held out before": _interval(measured[0]),
        "held out after": _interval(measured[-1]),
        "curve": [[row["step"], round(row["reward"], 3)] for row in steps[::every]],
    }


def _interval(row: dict[str, Any]) -> list[float]:
    """Return [accuracy, low, high]."""
    mean, wide = row["eval/reward"], 1.96 * row["eval/reward_stderr"]
    return [round(x, 4) for x in (mean, mean - wide, mean + wide)]


def _measure(folder: Path, model: str, kind: str, device: str, count: int) -> dict[str, Any]:
    """Return accuracies of the model as it was and as it is now, and the difference with its interval."""
    words = [
        "eval",
        "run",
        model,
        "--eval-data",
        f"{kind}.jsonl",
        "--problems",
        str(count),
        "--device",
        device,
        "--json",
    ]
    words += ["--samples", "2"] + ([] if device == "cpu" else ["--dtype", "bf16"])
    found = json.loads(_call(words, folder).splitlines()[-1])
    after, before = (row["mean"] for row in found["models"])
    gain = found["differences"][0]["mean"]
    return {"before": before, "after": after, "gain": [gain[x] for x in ("value", "low", "high")]}


def _call(words: list[str], folder: Path, allowed: tuple[int, ...] = (0,)) -> str:
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
    if len(sys.argv) != 3:
        sys.exit("usage: gpu_real_model.py FILE.gguf FOLDER")
    convert(*map(Path, sys.argv[1:]))
