"""Runs of TRL's GRPOTrainer on a small random model, offline, with one update recorded. Imported where TRL is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-not-found]
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

import policygrad as pg

CHARACTERS = ["<pad>", "<eos>", *"abcdefghij "]


def make_tokenizer() -> Any:
    """One token for each of a few characters."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(CHARACTERS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def train(folder: Path, step: int, **settings: Any) -> Path:
    """Train until an update and return its recording; the second update of a rollout has ratios other than 1."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    size = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    ids = {"vocab_size": len(CHARACTERS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    LlamaForCausalLM(LlamaConfig(**size, **ids, max_position_embeddings=64)).save_pretrained(folder / "model")
    model = LlamaForCausalLM.from_pretrained(folder / "model")  # TRL reads the reference from the same folder

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [text.count("a") + 0.1 * len(text) for text in completions]

    config = {
        "output_dir": str(folder / "output"),
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "num_iterations": 2,
        "max_steps": step,
        "max_completion_length": 12,
        "beta": 0.0,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 0,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
    }
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**(config | settings)),
        train_dataset=Dataset.from_list([{"prompt": "ab"[i % 2] * (1 + i % 3)} for i in range(32)]),
        processing_class=tokenizer,
    )
    recorder = pg.audit.trl(trainer, folder / "update.safetensors", step)
    trainer.train()
    return recorder.path
