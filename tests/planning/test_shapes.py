"""Shapes: as many parameters as transformers makes of them, names, and what is refused."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from doubles.architectures import Family, families
from policygrad.errors import ConfigError
from policygrad.models.loading import load_model
from policygrad.planning.model_shapes import KNOWN_SHAPES, MODEL_TYPES, MODELS_FILE, load_shape, read_shape
from policygrad.planning.shapes import DenseShape
from policygrad.training.shape_counting import count_shape, count_total

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


SMALL = DenseShape("small", 24, 40, 2, 4, 2, 8, 50)


def made(kind: str, of: DenseShape, **more: Any) -> dict[str, Any]:
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


MODELS = {model["name"]: model["config"] for model in tomllib.loads(MODELS_FILE.read_text(encoding="utf-8"))["model"]}


def test_named_shapes_have_as_many_parameters_as_the_models() -> None:
    for name, published in PUBLISHED.items():
        assert KNOWN_SHAPES[name].parameters == published, name
    for name in ("Qwen3-8B", "Qwen2.5-0.5B", "SmolLM3-3B"):
        assert KNOWN_SHAPES[name].parameters == counted(MODELS[name]), name


@pytest.mark.full
def test_every_named_shape_has_as_many_parameters_as_the_models() -> None:
    for name, config in MODELS.items():
        assert KNOWN_SHAPES[name].parameters == count_total(config), name


def test_named_shapes_have_the_size_of_their_names() -> None:
    """Qwen3.5-35B-A3B: 35B parameters, of which 3B are active, within a few percent and what rounding the name hides."""
    assert set(KNOWN_SHAPES) <= set(MODELS)
    told = {"gpt-oss-120b": 117, "gpt-oss-20b": 21, "Gemma-4-E2B": 4.6, "Gemma-4-E4B": 7.5, "Llama-3.1-70B": 70.6}
    told |= {"Qwen2.5-7B": 7.6, "Qwen3-14B": 14.8, "Nemotron-3-Nano-30B-A3B": 31.6}  # as their cards say more exactly
    for name, shape in KNOWN_SHAPES.items():
        for is_active, digits, unit in re.findall(r"-(A?)([\d.]+)([BMb])(?=-|$)", name):
            size = (float(digits) if is_active else told.get(name, float(digits))) * (1e6 if unit == "M" else 1e9)
            embeddings = 0 if shape.tied else shape.head_weights  # a token reads one row of them
            count = shape.active_parameters - embeddings if is_active else shape.parameters
            assert abs(count - size) < max(0.05 * size, 0.6e9 if is_active or size > 2e9 else 0.06e9), (name, count)
    for name, total, active in (
        ("GLM-4.5-Air", 106, 12),
        ("GLM-5", 744, 40),
        ("DeepSeek-V3", 671, 37),
        ("Kimi-K2", 1026, 33),
        ("MiniMax-M2", 230, 10),
    ):
        assert KNOWN_SHAPES[name].parameters == pytest.approx(total * 1e9, rel=0.02)
        assert KNOWN_SHAPES[name].active_parameters == pytest.approx(active * 1e9, rel=0.12)


UNCOUNTED = {"jetmoe", "longcat_flash", "rwkv", "recurrent_gemma"}
"""Families whose code reads values on the host, or that have no cache."""


def check_family(family: Family) -> None:
    config = family.config().to_dict()
    if family.type in UNCOUNTED:
        with pytest.raises(ConfigError, match=f"layers of '{family.type}"):
            count_shape(config, family.type, "here")
        return
    shape = count_shape(config, family.type, "here")
    assert shape.parameters == count_total(config), family.name
    assert 0 < shape.active_parameters <= shape.parameters
    assert (shape.active_parameters < shape.parameters) == ("experts" in family.layers), family.name
    has_keys = any(layer.cache_numbers for layer in shape.layer_shapes)
    assert has_keys == ("ttention" in family.layers.replace("Lightning attention", "")), family.name
    recurrent = ("Mamba", "delta rule", "onvolution", "Lightning", "compressed")
    assert shape.has_states == any(word in family.layers for word in recurrent), family.name
    assert (
        bool(shape.windows) == any(word in family.layers for word in ("windows", "chunks"))
        or not has_keys
        or (family.type in WINDOWED)
    ), family.name
    for layer in shape.layer_shapes:
        for dtype in ("bf16", "fp32"):
            assert layer.saved_bytes(dtype, 1, 1) > 0, (family.name, layer.kind)
            assert layer.saved_bytes(dtype, 1, 1, only_adapters=True) > 0, (family.name, layer.kind)


WINDOWED = {"mistral", "ministral3", "phi3", "starcoder2", "exaone4", "mixtral", "phimoe", "qwen2_moe", "deepseek_v4"}
"""Families without windows in the table, to whose small model the common settings give some."""


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "gpt_oss"])
def test_some_families_are_counted(kind: str) -> None:
    check_family(next(family for family in families() if family.type == kind))


@pytest.mark.full
@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_every_family_is_counted_or_refused_by_name(family: Family) -> None:
    check_family(family)


def test_what_is_counted_of_a_dense_model_is_what_follows_from_its_sizes() -> None:
    for kind in ("llama", "qwen3"):
        dense = replace(SMALL, qk_norm=kind == "qwen3")
        shape = count_shape(made(kind, dense), "m", "here")
        (layer,), (known,) = shape.layer_shapes, dense.layer_shapes
        for name in (
            "count",
            "parameters",
            "matmul_weights",
            "pair_width",
            "cache_numbers",
            "linear_parameters",
            "adapters",
        ):
            assert getattr(layer, name) == getattr(known, name), (kind, name)
        assert shape.parameters == dense.parameters
        for dtype in ("bf16", "fp32"):
            for adapted in (False, True):
                counted_bytes = layer.saved_bytes(dtype, 1, 1, only_adapters=adapted)
                tolerance = 0.35 if not adapted else 0.3
                assert known.saved_bytes(dtype, 1, 1, only_adapters=adapted) == pytest.approx(
                    counted_bytes, rel=tolerance
                )


def test_latent_attention_caches_less_in_an_engine_and_windows_are_bounded_there() -> None:
    latent = KNOWN_SHAPES["DeepSeek-V3"]
    assert latent.cached_numbers(1000, engine=True) == 1000 * 61 * (512 + 64)
    assert latent.cached_numbers(1000, engine=False) == 1000 * 61 * 128 * (128 + 64 + 128)
    windows = KNOWN_SHAPES["gpt-oss-20b"]
    assert windows.cached_numbers(1000, engine=True) == 2 * 8 * 64 * 12 * (1000 + 128)
    assert windows.cached_numbers(1000, engine=False) == 2 * 8 * 64 * 24 * 1000
    hybrid = KNOWN_SHAPES["Qwen3.5-4B"]
    growth = hybrid.cached_numbers(1001, engine=False) - hybrid.cached_numbers(1000, engine=False)
    assert growth == 8 * 2 * 4 * 256  # one layer in four has keys
    assert hybrid.cached_numbers(0, engine=False) > 24 * 32 * 128 * 128  # the others have a state


def test_experts_that_no_row_is_sent_to_are_not_read() -> None:
    layer = next(x for x in KNOWN_SHAPES["Qwen3-30B-A3B"].layer_shapes)
    assert layer.read_weights(1) == pytest.approx(layer.matmul_weights)
    assert layer.read_weights(2) == pytest.approx(layer.matmul_weights + layer.routed_parameters * 8 / 128 * 120 / 128)
    assert layer.read_weights(2000) == pytest.approx(layer.parameters, rel=0.01)


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
    of = DenseShape("", 4, 8, layers=2, heads=2, kv_heads=1, head_dim=2, vocabulary=10)
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
        load_shape("Qwen/Qwen3-8")
    with pytest.raises(ConfigError, match=r"known names: Qwen3.5-0.8B.*download its config\.json"):
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
