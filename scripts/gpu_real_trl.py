"""The same model, problems and seconds as in `gpu_real_model`, with TRL: a part of scripts/measure_gpu.py.

Prompts, completions and lengths of a step are the same, and so are learning rate, β and what is asked before and after, by
`policygrad eval`. TRL is found as in `gpu_versus`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_real_model import CPU_STEPS, REWARD, ROOT, SIZES, TRAIN_SECONDS, compare_on, find_model, write_problems

MICRO_BATCH = 128
"""Completions of a pass, at most."""


def train_with_trl(device: str) -> dict[str, Any]:
    """TRL's GRPOTrainer on the same problems for as long: curve, accuracy before and after, tokens a second."""
    if not os.environ.get("POLICYGRAD_PEERS") and find_spec("trl") is None:
        return {"left out": "TRL is not installed: POLICYGRAD_PEERS names folders with it and what it needs"}
    if (model := find_model(device)) is None:
        return {"left out": "no model's folder: scripts/gpu_real_model.py says how to bring one"}
    size = SIZES[device]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        held_out = write_problems(folder, size)
        report: dict[str, Any] = _train(device, folder, model)
        task = ["--task", "train.jsonl", "--reward", REWARD, "--max-tokens", str(size.max_tokens)]
        for data in held_out:
            report[data.removesuffix(".jsonl")] = compare_on(folder, data, ["trained", model, *task], device)
    return report


def _train(device: str, folder: Path, model: str) -> dict[str, Any]:
    """Train, and leave the model in `trained`."""
    sys.path[:0] = [path for path in os.environ.get("POLICYGRAD_PEERS", "").split(os.pathsep) if path]
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    start = time.perf_counter()

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop |= time.perf_counter() - start > TRAIN_SECONDS

    size, on_cpu = SIZES[device], device == "cpu"
    rows = size.prompts * size.samples_each
    batch = min(rows, MICRO_BATCH)
    place = ROOT / "src/policygrad/models/tiny" if model == "tiny" else Path(model)
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=on_cpu,
        bf16=not on_cpu,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=rows // batch,
        num_generations=size.samples_each,
        max_completion_length=size.max_tokens,
        max_steps=CPU_STEPS if on_cpu else 10**6,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        beta=0.04,
        loss_type="grpo",
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    problems = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(place)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=_score,
        args=arguments,
        train_dataset=Dataset.from_list(problems),
        callbacks=[Ends()],
    )
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    curve = [row for row in trainer.state.log_history if "reward" in row]
    trainer.model.save_pretrained(folder / "trained")
    tokenizer.save_pretrained(folder / "trained")
    drawn = sum(row["completions/mean_length"] * rows for row in curve)
    return {
        "steps": trainer.state.global_step,
        "tokens/s": drawn / seconds,
        "seconds of training": seconds,
        "curve": [[i + 1, round(row["reward"], 3)] for i, row in enumerate(curve)][:: max(1, -(-len(curve) // 24))],
    }


def _score(prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """Score as the run does: 1 where the last number is the answer."""
    from policygrad.rewards.math import Gsm8k

    reward = Gsm8k(policies=("last",))
    return [reward.score(turns[0]["content"], x) or 0.0 for turns, x in zip(completions, answer, strict=True)]


PARTS: dict[str, tuple[int, Callable[[str], dict[str, Any]]]] = {"real model: trl": (580, train_with_trl)}
