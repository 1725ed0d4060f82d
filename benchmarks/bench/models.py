"""Models of random weights, and rollouts that were never sampled: what the component benches compute with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bench.works import Shape
from policygrad.core.batch import Batch


def untrained(shape: Shape, *, end: int = 1, pad: int = 0) -> Any:
    """A Qwen3 of this shape, always the same one."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "attn_implementation": "sdpa",
    }
    config = Qwen3Config(**settings)
    model: Any = Qwen3ForCausalLM(config)
    with torch.no_grad():
        # padding may be sampled, and its row begins at 0, where a norm's gradient is a thousand times that of the others
        model.get_input_embeddings().weight.normal_(0.0, config.initializer_range)
    return model.eval()


def rollout(vocabulary: int, prompts: int, samples: int, lengths: Sequence[int], prompt: int = 100) -> Batch:
    """Random tokens, `prompt` of them before every completion, and a reward for each."""
    draw = torch.Generator().manual_seed(0)
    count = prompts * samples
    long = torch.tensor([lengths[i % len(lengths)] for i in range(count)])
    return Batch(
        mask=torch.arange(int(long.max())) < long[:, None],
        group=torch.arange(prompts).repeat_interleave(samples),
        reward=torch.rand(count, generator=draw),
        tokens=torch.randint(2, vocabulary, (count, int(long.max())), generator=draw),
        prompts=tuple(torch.randint(2, vocabulary, (prompt,), generator=draw) for _ in range(prompts)),
    )
