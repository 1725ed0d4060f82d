"""What a calibration measures: a made-up model, completions that were never drawn, and how much of everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.core.batch import Batch
from policygrad.models.precision import DTYPES
from policygrad.planning.shapes import Shape
from policygrad.planning.work import Work


@dataclass(frozen=True)
class Trial:
    """What is measured."""

    shape: Shape
    work: Work
    """That is learned, and read."""
    products: tuple[int, ...]
    """Widths of square matrices, of which the fastest counts."""
    copied: int
    """Bytes that are copied, to measure the memory's bandwidth."""
    rows: tuple[int, int]
    """Completions drawn at once: few and many."""
    drawn: int
    """Tokens of each."""
    repeats: int = 3


CPU = Trial(
    Shape("made up", 256, 1024, 4, 4, 2, 64, 6144, tied=True, qk_norm=True),
    Work(4, 8, 64, 192, 192),
    (512, 1024, 2048),
    2**28,
    (16, 128),
    96,
)
GPU = Trial(
    Shape("made up", 2048, 8192, 4, 16, 8, 128, 32768, tied=True, qk_norm=True),
    Work(16, 8, 256, 1024, 1024),
    (4096, 8192),
    2**32,
    (16, 256),
    128,
)


def model_of(shape: Shape, dtype: str, device: str) -> nn.Module:
    """A Qwen3 of random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "attn_implementation": "sdpa",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = Qwen3ForCausalLM(Qwen3Config(**settings))
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(0.0, 0.02)  # padding too, which is drawn here
    made: nn.Module = model.to(device=device, dtype=DTYPES[dtype]).eval()
    return made


def batch_of(shape: Shape, work: Work) -> Batch:
    """Completions that were never drawn, with a reward for each."""
    draw, count = torch.Generator().manual_seed(0), work.completions
    longest = torch.tensor(work.lengths)

    def tokens(*size: int) -> Tensor:
        return torch.randint(2, shape.vocabulary, size, generator=draw)

    return Batch(
        mask=torch.arange(work.budget) < longest[:, None],
        group=torch.arange(work.prompts).repeat_interleave(work.samples),
        reward=torch.rand(count, generator=draw),
        tokens=tokens(count, work.budget),
        prompts=tuple(tokens(work.prompt) for _ in range(work.prompts)),
    )
