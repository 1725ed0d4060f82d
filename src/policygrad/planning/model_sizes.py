"""Names of the models inside the package, limits of models' sizes, and bytes of a trained parameter, for what reads no shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

GRADIENT_BYTES, MASTER_BYTES = 4, 4
"""Bytes per trained parameter: its gradient, which is summed in float32, and its float32 master where the model is bf16."""
ADAMW_MOMENT_BYTES = 8
"""Bytes per trained parameter of AdamW's two moments, in float32."""
MOMENT_BLOCK = 256
"""Numbers that share a scale in moments of 8 bits."""
EIGHT_BIT_MOMENT_BYTES = 2 * (1 + 4 / MOMENT_BLOCK)
SMALL_MODEL_PARAMETERS = 5_000_000  # below, a matrix product is finished before a second thread has woken up
EMBEDDED_MODEL = "tiny"
VISION_MODEL = "shapes"
EMBEDDED_MODELS = (EMBEDDED_MODEL, VISION_MODEL)
"""The models inside the package: one of text, one that also sees."""
MAX_SIZES = dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), 1_000) | dict.fromkeys(
    ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"), 2**24
)
"""Upper limits of the numbers in a config.json, several times those of any real model; larger ones would take hours to build."""


def check_sizes(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a number in a config.json beyond `MAX_SIZES`; nothing else is checked."""
    for key, most in MAX_SIZES.items():
        if isinstance(value := config.get(key), int) and value > most:
            raise ValueError(f"{key} must be at most {most:,}, not {shorten_value(value)}")


def shorten_value(value: Any) -> str:
    """Return a value of a config.json for a message, in at most 41 characters."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
