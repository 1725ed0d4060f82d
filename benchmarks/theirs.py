"""One measurement of TRL: trains on a work's folder, and prints what every step took. Runs in TRL's own environment.

.bench/trl/bin/python benchmarks/theirs.py FOLDER --micro 16 [--dtype bf16] [--part] [--seed 0] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

from bench import rewards
from bench.clock import Clock, Moved, say, sum_turns
from bench.keeping import Keeping
from bench.lengths import EndAt
from bench.works import Work, from_dict, part_of


def converse(work: Work, observation: list[int]) -> Any:
    """A `rollout_func` that has conversations as TRL's own loop of tool calls has them: a call of `generate` for each turn, over
    the whole text so far. Nothing is looked for in what was sampled."""

    def roll_out(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        prompt_ids, *_ = trainer._tokenize_prompts(prompts)
        texts, masks = [list(ids) for ids in prompt_ids], [list[int]() for _ in prompt_ids]
        for turn in range(work.turns):
            sampled, _ = trainer._generate_single_turn(texts, None, {}, num_generations=1)
            answer = observation if turn < work.turns - 1 else []
            for text, mask, ids in zip(texts, masks, sampled, strict=True):
                text += [*ids, *answer]
                mask += [1] * len(ids) + [0] * len(answer)
        completions = [text[len(ids) :] for text, ids in zip(texts, prompt_ids, strict=True)]
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None, "env_mask": masks}

    return roll_out


def watch(model: Any, work: Work, end: int) -> dict[str, list[int]]:
    """Facts of every call of `generate`; where lengths are given, each completion has its own."""
    facts: dict[str, list[int]] = {"completions": [], "prompt_tokens": [], "tokens": []}
    plain = model.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        ids, mask = kwargs["input_ids"], kwargs["attention_mask"]
        if work.lengths is not None:
            kwargs["logits_processor"] = [EndAt(work.lengths, len(ids), ids.shape[1], end)]
        facts["completions"].append(len(ids))
        facts["prompt_tokens"].append(int(mask.sum()))
        return plain(*args, **kwargs)

    model.generate = generate
    return facts


class Timer(TrainerCallback):
    """Follows the run."""

    def __init__(self, model: Any, tokenizer: Any, keeping: Keeping) -> None:
        self.clock, self.model, self.moved, self.updates = Clock(), model, 0.0, 0
        self.tokenizer, self.keeping = tokenizer, keeping

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._moved = Moved(self.model)
        self.clock.mark()
        self.keeping(0, self.model, self.tokenizer, self.clock)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.clock.mark()
        self.moved, self.updates = self._moved(), state.global_step
        self.keeping(state.global_step, self.model, self.tokenizer, self.clock)


def configuration(work: Work, micro: int, dtype: str, seed: int, output: str) -> GRPOConfig:
    """One optimiser step per rollout, Dr. GRPO without KL, AdamW as policygrad has it, and what makes TRL faster and is not on."""
    return GRPOConfig(
        output_dir=output,
        use_cpu=True,
        seed=seed,
        bf16=dtype == "bf16",
        gradient_checkpointing=False,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=work.completions // micro,
        num_generations=work.samples,
        num_iterations=1,
        max_steps=work.steps + 1,
        max_completion_length=work.turns * work.max_tokens + work.observed,
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
        epsilon=0.2,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        learning_rate=work.lr,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        use_vllm=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--micro", type=int, required=True, help="completions per forward and backward pass")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--part", action="store_true", help="a quarter of the prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="where weights are kept, for a work that has some kept")
    args = parser.parse_args()
    written = json.loads((args.folder / "work.json").read_text(encoding="utf-8"))
    reward = getattr(rewards, written.pop("reward"))
    source, observation = written.pop("data"), written.pop("observation")
    work = part_of(from_dict(written)) if args.part else from_dict(written)
    model = AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype=torch.float32, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(args.folder / "model")
    facts = watch(model, work, tokenizer.eos_token_id)
    timer = Timer(model, tokenizer, Keeping(args.keep, work.keep))

    def counted(prompts: Any, completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        facts["tokens"].append(sum(len(ids) - work.observed for ids in completion_ids))
        return list(reward(prompts, completions, **columns))

    rows = [json.loads(line) for line in (args.folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=counted,
            args=configuration(work, args.micro, args.dtype, args.seed, output),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[timer],
            rollout_func=converse(work, tokenizer(observation)["input_ids"]) if work.turns > 1 else None,
        )
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    learned = {name: [float(entry[name]) for entry in logged] for name in ("loss", "grad_norm")}
    versions = {name: version(name) for name in ("trl", "torch", "transformers")}
    versions["threads"] = str(torch.get_num_threads())
    tokens = facts.pop("tokens")  # of a step already
    facts = {**sum_turns(facts, work.turns), "tokens": tokens}
    say(timer.clock, source, {**facts, **learned, "moved": timer.moved, "updates": timer.updates}, versions)


if __name__ == "__main__":
    main()
