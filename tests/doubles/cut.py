"""Models whose layers transformers has a plan for cutting."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

from doubles.batches import VOCABULARY

WIDTH = 4
"""Of a head."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


class Rotary(nn.Module):
    """Cosines and sines of positions, in the precision of the model: in float32 they hang on where a token stands in a pack."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        rates = 10000.0 ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
        angles = position_ids[..., None].double() * torch.cat([rates, rates])
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _exact(model: Any) -> None:
    """Norms and positions that round nothing to float32 on the way."""
    model.model.rotary_emb = Rotary()
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            above, _, last = name.rpartition(".")
            setattr(model.get_submodule(above), last, nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon))


class ExactLlama(tf.LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        _exact(self)


class ExactQwen3(tf.Qwen3ForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        _exact(self)


def llama(dtype: torch.dtype = torch.float64, **sizes: Any) -> nn.Module:
    """With biases, and a head of its own."""
    return _drawn(ExactLlama, tf.LlamaConfig(**(SIZES | sizes), attention_bias=True, mlp_bias=True), dtype)


def qwen3(dtype: torch.dtype = torch.float64, **sizes: Any) -> nn.Module:
    """With norms of every head's queries and keys, which every process has whole, and a head that is the embeddings."""
    config = tf.Qwen3Config(**(SIZES | sizes), head_dim=WIDTH, tie_word_embeddings=True)
    return _drawn(ExactQwen3, config, dtype)


def _drawn(kind: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    made = kind(config)
    for name, p in made.named_parameters():
        if p.ndim == 1:
            nn.init.normal_(p, 1.0 if "norm" in name else 0.0, 0.2)
    result: nn.Module = made.to(dtype).eval()
    return result
