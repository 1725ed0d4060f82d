"""Configurations of small models of many architectures, and a rollout longer than their windows."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import transformers as tf

import policygrad as pg

VOCABULARY, WINDOW, WIDTH = 40, 17, 20


BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
}


PLAIN = {key: BASE[key] for key in ("vocab_size", "initializer_range", "eos_token_id", "pad_token_id")}


GEMMA = BASE | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW}


CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: tf.GPT2Config(**PLAIN, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "qwen2 untied": lambda: tf.Qwen2Config(**BASE, tie_word_embeddings=False),
    "qwen3": lambda: tf.Qwen3Config(**BASE, head_dim=8, tie_word_embeddings=True),
    "gemma2": lambda: tf.Gemma2Config(**GEMMA, final_logit_softcapping=3.0),
    "gemma3": lambda: tf.Gemma3TextConfig(**GEMMA),
    "mistral": lambda: tf.MistralConfig(**BASE, sliding_window=WINDOW),
    "phi": lambda: tf.PhiConfig(**BASE),
    "gpt-neox": lambda: tf.GPTNeoXConfig(**BASE),
    "granite": lambda: tf.GraniteConfig(**BASE, logits_scaling=4.0),
    "falcon": lambda: tf.FalconConfig(**PLAIN, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    "bloom": lambda: tf.BloomConfig(**PLAIN, hidden_size=32, n_layer=2, n_head=4),
    "lfm2": lambda: tf.Lfm2Config(**BASE, layer_types=["conv", "full_attention"]),
    "mamba": lambda: tf.MambaConfig(**PLAIN, hidden_size=32, num_hidden_layers=2, state_size=4),
}


def long_batch() -> pg.Batch:
    """Equal completions, prompts of several lengths, and sequences longer than the window."""
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, WIDTH + 1, (9,), generator=g)
    lengths[::3] = WIDTH
    mask, tokens = torch.arange(WIDTH) < lengths[:, None], torch.randint(3, VOCABULARY, (9, WIDTH), generator=g)
    mask[1], tokens[1] = mask[0], tokens[0]
    return pg.Batch(
        mask=mask,
        group=torch.arange(3).repeat_interleave(3),
        reward=torch.tensor([1.0, 1.0, 0.0] * 3),
        tokens=tokens,
        prompts=tuple(torch.randint(3, VOCABULARY, (n,), generator=g) for n in (2, 9, 5)),
    )


FILE = Path(__file__).parents[1] / "architectures.toml"


@dataclass(frozen=True)
class Family:
    """One entry of tests/architectures.toml."""

    type: str
    layers: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    nested: bool = False
    sampling: str = "once"
    learning: str = "tree"
    left_out: tuple[str, ...] = ()
    refused: str = ""
    short: bool = False
    has_ties: bool = False

    @property
    def name(self) -> str:
        return f"{self.type}-{self.layers.replace(' ', '-').replace(',', '')}"

    def config(self) -> Any:
        """A configuration of this type with what it knows of the settings."""
        settings = {**_read()["base"], **self.settings}
        text = tf.AutoConfig.for_model(f"{self.type}_text" if self.nested else self.type).__class__
        known = set(inspect.signature(text.__init__).parameters) | {f.name for f in fields(text)}
        mine = {key: value for key, value in settings.items() if key in known or key in self.settings}
        return tf.AutoConfig.for_model(self.type, text_config=mine) if self.nested else text(**mine)


def _read() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def families() -> list[Family]:
    """Every entry, in the file's order."""
    return [Family(**entry | {"left_out": tuple(entry.get("left_out", ()))}) for entry in _read()["family"]]
