"""Compare `policygrad.trl` with TRL itself: the weights after the same completions, and a script run with both.

    pip install --no-deps --target FOLDER trl==1.16.0
    python scripts/measure_trl.py FOLDER [--only numbers|script] [--steps 40] [--seeds 3] [--results FILE]

Numbers: two optimizer steps on one generation, from the same weights on the same completions, in float32 on one thread: for every
loss type and level, with adapters and without, and for what else changes the loss. The gradients of both steps are compared, as a
share of the largest one, and the weights, as a share of the largest change of one: after plain gradient steps (SGD), where a
weight near 1 is rounded to 6e-8, and after AdamW's, which are g/(|g| + eps) at first, so that rounding decides on weights whose
gradient is about eps.

Script: benchmarks/trl_script.py, one process each, in turn: CPU seconds of train(), memory, and the held-out reward.

Writes docs/results/trl.json, from which `make docs` makes tables in docs/from-other-libraries.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging

import policygrad.trl
from policygrad.models.loading import resolve_model
from policygrad.tasks import load_task
from policygrad.trl.config import LOSS_TYPES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "trl.json"
MODEL = str(resolve_model("tiny"))
STEPS, LENGTH = 2, 8


@dataclass(frozen=True)
class Case:
    """What a configuration changes in the usual one."""

    name: str
    kind: str = "GRPO"
    options: Mapping[str, Any] = field(default_factory=dict)
    has_adapters: bool = False
    num_rewards: int = 1


def list_cases() -> list[Case]:
    """Return every loss type with both levels, with adapters and without, and one case for what else changes a step."""
    cases = list[Case]()
    for loss in LOSS_TYPES:
        for level in ("token", "sequence"):
            options = {"loss_type": loss, "importance_sampling_level": level, "beta": 0.05}
            options |= {"epsilon_high": 5.0} if loss == "cispo" else {}
            cases += [Case(f"{loss}, {level}", options=options)]
            cases += [Case(f"{loss}, {level}, LoRA", options=options, has_adapters=True)]
    changes: dict[str, dict[str, Any]] = {
        "delta": {"delta": 1.5},
        "scale_rewards='batch'": {"scale_rewards": "batch"},
        "scale_rewards='none'": {"scale_rewards": "none"},
        "use_bias_correction_kl=False": {"beta": 0.1, "use_bias_correction_kl": False},
        "top_entropy_quantile": {"top_entropy_quantile": 0.3},
        "entropy_coef": {"entropy_coef": 0.1},
        "use_adaptive_entropy": {"entropy_coef": 0.1, "use_adaptive_entropy": True, "entropy_target": 3.0},
        "mask_truncated_completions": {"mask_truncated_completions": True, "loss_type": "grpo"},
        "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.01},
        "num_iterations": {"num_iterations": 2},
        "steps across generations": {"steps_per_generation": 3, "max_steps": 3},
        "one step per generation": {"steps_per_generation": 2},
        "sync_ref_model": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
    }
    cases += [Case(name, options=options) for name, options in changes.items()]
    cases += [Case("normalize_then_sum", options={"multi_objective_aggregation": "normalize_then_sum"}, num_rewards=2)]
    rloo: dict[str, dict[str, Any]] = {
        "RLOO": {},
        "RLOO, normalize_advantages": {"normalize_advantages": True},
        "RLOO, mask_truncated_completions": {"mask_truncated_completions": True},
        "RLOO, reward_clip_range": {"reward_clip_range": (0.2, 0.6)},
    }
    cases += [Case(name, "RLOO", options) for name, options in rloo.items()]
    return [*cases, Case("RLOO, LoRA", "RLOO", has_adapters=True)]


class Completions:
    """A `generate` that gives both trainers the same random completions."""

    def __init__(self, vocabulary: int, end: int, pad: int) -> None:
        self.vocabulary, self.end, self.pad = vocabulary, end, pad
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        size = (len(input_ids), LENGTH)
        tokens = torch.randint(3, self.vocabulary, size, generator=self.generator)
        lengths = torch.randint(2, LENGTH + 1, size[:1], generator=self.generator)
        for row, length in enumerate(lengths.tolist()):
            if length < LENGTH:
                tokens[row, length - 1], tokens[row, length:] = self.end, self.pad
        return torch.cat([input_ids, tokens.to(input_ids)], 1)


def score(completions: Sequence[str], **_: Any) -> list[float]:
    return [sum(map(ord, text)) * 7919 % 13 / 13 for text in completions]


def score_otherwise(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) * 104729 % 7) for text in completions]


class Gradients(TrainerCallback):
    """Keeps the gradients of each optimizer step, as they are after clipping."""

    def __init__(self) -> None:
        self.steps = list[dict[str, torch.Tensor]]()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        self.steps.append({name: g.detach().clone() for name, g in gradients.items() if g is not None})


def train(library: Any, case: Case, optimizer: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], Gradients]:
    """Return the weights before and after the steps, and the gradients."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    options: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": LENGTH,
        "max_steps": STEPS,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "weight_decay": 0.01,
        **optimizer,
        **case.options,
    }
    adapters = None
    if case.has_adapters:
        from peft import LoraConfig

        adapters = LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj", "down_proj"])
    with tempfile.TemporaryDirectory() as folder:
        args = getattr(library, f"{case.kind}Config")(folder, **options)
        trainer = getattr(library, f"{case.kind}Trainer")(
            model=model,
            reward_funcs=[score, score_otherwise][: case.num_rewards],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(5) for b in range(5)]}),
            processing_class=copy.deepcopy(tokenizer),
            peft_config=adapters,
            callbacks=[gradients := Gradients()],
        )
        if library is policygrad.trl:
            type(trainer)._shuffle = lambda self, size, number: torch.arange(size)
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        fake = Completions(model.config.vocab_size, tokenizer.eos_token_id, tokenizer.pad_token_id)
        with patch.object(trainer.model, "generate", side_effect=fake):
            trainer.train()
        after = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        return before, after, gradients


def compare(trl: Any, case: Case, optimizer: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest difference between gradients, as a share of the largest one, and that between weights, of a change."""
    before, theirs, their_gradients = train(trl, case, optimizer)
    _, ours, our_gradients = train(policygrad.trl, case, optimizer)
    change = max(float((theirs[name] - before[name]).abs().max()) for name in theirs)
    difference = max(float((theirs[name] - ours[name]).abs().max()) for name in theirs)
    shares = [
        max(float((a[name] - b[name]).abs().max()) for name in a) / max(float(g.abs().max()) for g in a.values())
        for a, b in zip(their_gradients.steps, our_gradients.steps, strict=True)
    ]
    return {"gradients": max(shares), "weights": difference / change}


def measure_numbers(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Return the comparison of each case, by optimizer."""
    sys.path.insert(0, str(folder))
    import trl
    from trl.trainer import grpo_trainer, rloo_trainer

    for module in (grpo_trainer, rloo_trainer):  # the order in which a generation is divided is each library's own
        module.shuffle_sequence_dict = lambda batch: batch
    optimizers = {"sgd": {"optim": "sgd", "learning_rate": 0.3}, "adamw": {"learning_rate": 1e-3}}
    results: dict[str, dict[str, dict[str, float]]] = {}
    for case in list_cases():
        results[case.name] = {name: compare(trl, case, options) for name, options in optimizers.items()}
        shares = " ".join(f"{kind} {k} {x:.1e}" for kind, v in results[case.name].items() for k, x in v.items())
        print(f"{case.name:40s} {shares}", flush=True)
    return results


def measure_script(folder: Path, steps: int, seeds: int) -> dict[str, list[dict[str, float]]]:
    """Return what the script measures with each library, by seed."""
    results: dict[str, list[dict[str, float]]] = {"trl": [], "policygrad": []}
    with tempfile.TemporaryDirectory() as at:
        task = load_task("embedded")
        rows = {"train": [task.train_example(i) for i in range(2048)], "test": task.eval_examples(128)}
        for name, examples in rows.items():
            lines = [json.dumps({"prompt": e.prompt, "answer": e.columns["answer"]}) for e in examples]
            (Path(at) / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        script = str(ROOT / "benchmarks" / "trl_script.py")
        commands = {"trl": [sys.executable, script], "policygrad": [sys.executable, "-m", "policygrad.trl", script]}
        paths = {"trl": str(folder), "policygrad": ""}
        for seed in range(seeds):
            for name, command in commands.items():
                environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{paths[name]}", "OMP_NUM_THREADS": "1"}
                arguments = [MODEL, f"{at}/train.jsonl", f"{at}/test.jsonl", str(steps), str(seed)]
                done = subprocess.run(
                    [*command, *arguments], env=environment, check=True, capture_output=True, text=True, cwd=at
                )
                line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
                results[name].append(json.loads(line.removeprefix("RESULT ")))
                print(f"{name:12s} seed {seed}: {results[name][-1]}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where TRL is installed")
    parser.add_argument("--only", choices=("numbers", "script"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    results = json.loads(args.results.read_text(encoding="utf-8")) if args.results.exists() else {}
    results["trl"] = next((d.name.split("-")[1] for d in args.folder.glob("trl-*.dist-info")), "").removesuffix(".dist")
    if args.only != "script":
        results["numbers"] = measure_numbers(args.folder)
    if args.only != "numbers":
        results["script"] = {"steps": args.steps} | measure_script(args.folder, args.steps, args.seeds)
    args.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
