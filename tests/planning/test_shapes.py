"""Shapes: as many parameters as transformers makes of them, names, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from policygrad.errors import ConfigError
from policygrad.models.loading import load_model
from policygrad.planning.model_shapes import KNOWN_SHAPES, MODEL_TYPES, ModelShape, load_shape, read_shape

PUBLISHED = {
    "SmolLM2-135M": 134_515_008,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
}


def made(kind: str, of: ModelShape, **more: Any) -> dict[str, Any]:
    """A configuration of that shape."""
    return {
        "model_type": kind,
        "hidden_size": of.hidden,
        "intermediate_size": of.intermediate,
        "num_hidden_layers": of.layers,
        "num_attention_heads": of.heads,
        "num_key_value_heads": of.kv_heads,
        "head_dim": of.head_dim,
        "vocab_size": of.vocabulary,
        "tie_word_embeddings": of.tied,
        "pad_token_id": 0,
        **more,
    }


def counted(config: dict[str, Any]) -> int:
    """Parameters of the model that transformers makes of it."""
    values = dict(config)
    with torch.device("meta"):
        model: Any = tf.AutoModelForCausalLM.from_config(tf.AutoConfig.for_model(values.pop("model_type"), **values))
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", KNOWN_SHAPES)
def test_named_shapes_have_as_many_parameters_as_the_models(name: str) -> None:
    of = KNOWN_SHAPES[name]
    kind = "qwen3" if name.startswith("Qwen3") else "llama"
    assert of.parameters == PUBLISHED[name] == counted(made(kind, of))


SMALL = ModelShape("small", 24, 40, 2, 4, 2, 8, 50)


@pytest.mark.parametrize("kind", MODEL_TYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_kind_is_counted(kind: str, tied: bool, tmp_path: Path) -> None:
    config = made(kind, SMALL, tie_word_embeddings=tied)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_shape(str(tmp_path)).parameters == counted(config)
    if kind in ("llama", "qwen3"):
        biased = config | {"attention_bias": True} | ({"mlp_bias": True} if kind == "llama" else {})
        (tmp_path / "config.json").write_text(json.dumps(biased))
        assert load_shape(str(tmp_path)).parameters == counted(biased) > counted(config)


def test_by_hand() -> None:
    of = ModelShape("", 4, 8, layers=2, heads=2, kv_heads=1, head_dim=2, vocabulary=10)
    assert of.qkv_width == 8
    assert of.layer_matmul_weights == 4 * (8 + 4) + 3 * 4 * 8 == 144
    assert of.parameters == 2 * (144 + 8) + 2 * 40 + 4
    assert of.cache_numbers_per_token == 2 * 2 * 1 * 2


def test_the_model_inside_the_package() -> None:
    model = load_model("tiny")
    assert load_shape("tiny").parameters == sum(p.numel() for p in model.parameters())


def test_names_with_owners_and_of_what_was_trained_further() -> None:
    for name in ("Qwen/Qwen3-8B", "qwen3-8b", "Qwen/Qwen3-8B-Base"):
        assert load_shape(name) is KNOWN_SHAPES["Qwen3-8B"]
    assert load_shape("Qwen/Qwen3-4B-Instruct-2507") is KNOWN_SHAPES["Qwen3-4B"]
    assert load_shape("meta-llama/Llama-3.1-70B-Instruct") is KNOWN_SHAPES["Llama-3.1-70B"]


def test_a_runs_folder_is_the_model_that_it_trained(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(made("llama", SMALL)))
    assert load_shape(str(tmp_path)).hidden == load_shape(str(tmp_path / "model" / "config.json")).hidden == 24


def test_what_is_not_known_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'Qwen3-8B'"):
        load_shape("Qwen/Qwen3-9B")
    with pytest.raises(ConfigError, match=r"known names: SmolLM2-135M.*download its config\.json"):
        load_shape("something")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "qwen3_moe"}', "not qwen3_moe"),
        ('{"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}', "lacks .intermediate_size"),
        ('{"model_type": "llama", "hidden_size": 8, "num_attention_heads": 0}', "num_attention_heads must be"),
        ("[]", "has no model_type"),
        ("{", "cannot be read as a configuration"),
    ],
)
def test_other_configurations_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_shape(file, "m")
