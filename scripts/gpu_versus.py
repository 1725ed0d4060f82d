"""A GRPO step beside TRL's, on the same device in the same run: parts of scripts/measure_gpu.py.

One side is one process, so that the peak of memory is its own. Both begin from the same random weights and the same prompts, whose
completions a model with random weights hardly ever ends: each has all of its tokens. What differs besides the library: TRL samples
with transformers' `generate` or its continuous batching, and each side has the micro-batch that it is quickest with among
`Step.micro_batches`. TRL is not installed here by itself: POLICYGRAD_PEERS names folders with it and what it needs, as
`pip install --target` fills them, separated as in PATH.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import policygrad as pg
from policygrad.training import calibration
from policygrad.training.trainer import train

GIB = 2**30
MEASURED_STEPS = 2
"""After a first one, in which kernels are chosen."""


@dataclass(frozen=True)
class Step:
    """One optimizer step of both sides."""

    prompts: int
    samples: int
    prompt_tokens: int
    completion_tokens: int
    micro_batches: tuple[int, ...]
    """Completions of a pass, the ones that are tried; 0 = what the library chooses."""

    @property
    def tokens(self) -> int:
        return self.prompts * self.samples * self.completion_tokens


def measure_step(device: str, side: str, step: Step, build: Callable[[], nn.Module]) -> dict[str, Any]:
    """Return seconds and peak memory of a step, for each micro-batch that fits, and the quickest.

    side: policygrad, trl, or trl with its continuous batching.
    """
    run = {"policygrad": _run_ours, "trl": _run_trl, "trl, continuous batching": _run_trl}[side]
    found: dict[str, Any] = {}
    with make_folder(build, step) as folder:
        for size in step.micro_batches:
            if device != "cpu":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                seconds = run(device, step, size, folder, continuous="continuous" in side)
            except torch.OutOfMemoryError:
                found[f"{size} completions at a time"] = {"out of memory": True}
                continue
            entry: dict[str, Any] = {"seconds a step": seconds, "tokens/s": step.tokens / seconds}
            if device != "cpu":
                entry["peak GiB"] = torch.cuda.max_memory_allocated() / GIB
            found[f"{size} completions at a time"] = entry
    fitted = {name: entry for name, entry in found.items() if "seconds a step" in entry}
    if not fitted:
        raise RuntimeError(f"no micro-batch of {side} fits: {', '.join(found)}")
    best = min(fitted, key=lambda name: fitted[name]["seconds a step"])
    return {"best": best, **fitted[best], "tried": found}


class _Clock(pg.Callback):
    """Notes when steps end."""

    def __init__(self, device: str) -> None:
        self.device, self.ends = device, list[float]()

    def step(self, trainer: Any, step: int, metrics: Any) -> None:
        self.note()

    def note(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def seconds(self) -> float:
        return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)


def _run_ours(device: str, step: Step, size: int, folder: Path, *, continuous: bool) -> float:
    """Run a few steps as `policygrad train` does, and return the seconds of one."""
    clock = _Clock(device)
    limits = {"micro_tokens": size * (step.prompt_tokens + step.completion_tokens)} if size else {}
    run = pg.Run(
        algorithm=pg.GRPO,
        model=str(folder / "model"),
        task=str(folder / "prompts.jsonl"),
        reward=(f"{folder / 'reward.py'}:even",),
        steps=1 + MEASURED_STEPS,
        prompts_per_step=step.prompts,
        samples_per_prompt=step.samples,
        lr=1e-6,
        sampling=pg.SamplingParams(max_tokens=step.completion_tokens),
        evaluation=pg.EvaluationConfig(problems=0),
        checkpoint=pg.CheckpointConfig(every=10**6),
        learner=pg.LearnerConfig(device=device, dtype="fp32" if device == "cpu" else "bf16", **limits),
        output=str(folder / f"ours-{size}"),
    )
    train(run, display=False, callbacks=[clock])
    return clock.seconds()


def _run_trl(device: str, step: Step, size: int, folder: Path, *, continuous: bool) -> float:
    """Run a few steps of TRL's GRPOTrainer, and return the seconds of one."""
    sys.path[:0] = [path for path in os.environ.get("POLICYGRAD_PEERS", "").split(os.pathsep) if path]
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    clock = _Clock(device)

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.note()

    rows = step.prompts * step.samples
    size = size or rows
    options: dict[str, Any] = {"use_transformers_continuous_batching": True} if continuous else {}
    on_cpu = device == "cpu"
    arguments = GRPOConfig(
        output_dir=str(folder / f"trl-{size}"),
        use_cpu=on_cpu,
        bf16=not on_cpu,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=rows // size,
        num_generations=step.samples,
        max_completion_length=step.completion_tokens,
        max_steps=1 + MEASURED_STEPS,
        learning_rate=1e-6,
        beta=0.04,
        loss_type="grpo",
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32 if on_cpu else torch.bfloat16, attn_implementation="sdpa"
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        reward_funcs=score_even,
        args=arguments,
        train_dataset=Dataset.from_list(prompts),
        callbacks=[Ends()],
    )
    trainer.train()
    return clock.seconds()


def score_even(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Score a completion by its first word: 1 for an even number, so that a group has both."""
    return [float(text.split()[0][1:].isdigit() and int(text.split()[0][1:]) % 2 == 0) for text in completions]


REWARD = """def even(prompts, completions, **columns):
    return [float(text.split()[0][1:].isdigit() and int(text.split()[0][1:]) % 2 == 0) for text in completions]
"""


@contextmanager
def make_folder(build: Callable[[], nn.Module], step: Step) -> Iterator[Path]:
    """Yield a folder with the model with a tokenizer of one word per token, prompts of the step's length, and our reward's file."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), build()
        size = model.config.vocab_size
        model.save_pretrained(folder / "model")
        words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t2"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1")
        tokenizer.save_pretrained(folder / "model")
        del model
        generator = torch.Generator().manual_seed(0)
        with (folder / "prompts.jsonl").open("w") as file:
            for _ in range(step.prompts * (2 + MEASURED_STEPS)):
                ids = torch.randint(2, size, (step.prompt_tokens,), generator=generator).tolist()
                file.write(json.dumps({"prompt": " ".join(f"t{i}" for i in ids)}) + "\n")
        (folder / "reward.py").write_text(REWARD)
        yield folder


def build_on_cpu(shape: Any, device: str) -> nn.Module:
    """Build the model that both sides load."""
    return calibration.build_model(shape, "fp32" if device == "cpu" else "bf16", "cpu")
