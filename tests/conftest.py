"""What tests share: a tiny random model on disk, with the embedded tokenizer; nothing is fetched."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # before torch: threads that wait must not take the other tests' core

import pytest
import torch

torch.set_num_threads(2)


def build_model(folder: Path, *, hidden: int = 32, layers: int = 2, seed: int = 0) -> Path:
    """A random Llama of some 30k parameters, saved with the embedded model's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from policygrad.models.loading import resolve

    tokenizer = AutoTokenizer.from_pretrained(resolve("tiny"))
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model."""
    return build_model(tmp_path_factory.mktemp("model"))
