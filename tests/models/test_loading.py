"""Models and tokenizers as objects, where a run is made of objects and not of names."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from doubles.models import OUT, changed_copy
from policygrad.errors import ModelError
from policygrad.models import loading
from policygrad.models.loading import ONEDNN_CACHE, load_model
from policygrad.models.tokenizer import load_tokenizer


def test_a_module_is_used_in_place_without_dropout(random_model: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(random_model, attention_dropout=0.5, dtype=torch.bfloat16).train()
    network.model.embed_tokens.weight.requires_grad_(False)
    loaded = load_model(network)
    assert loaded is network
    assert not loaded.training
    assert network.model.layers[0].self_attn.attention_dropout == 0
    assert network.dtype == torch.bfloat16
    assert not network.model.embed_tokens.weight.requires_grad
    assert network.model.norm.weight.requires_grad


def test_a_tokenizer_object_is_used_with_the_model_s_end_tokens(random_model: Path) -> None:
    network, own = load_model(str(random_model)), AutoTokenizer.from_pretrained(random_model)
    result = load_tokenizer(own, network)
    assert result.hf is own
    assert result.end_ids == {own.eos_token_id}
    assert (result.name, result.context_length) == (str(random_model), 256)
    network.generation_config = GenerationConfig(eos_token_id=[3, 4])  # type: ignore[assignment]
    network.generation_config._from_model_config = False  # type: ignore[union-attr]
    assert load_tokenizer(own, network).end_ids == {own.eos_token_id, 3, 4}


def test_invalid_models_are_refused(random_model: Path) -> None:
    with pytest.raises(ModelError, match=r"a model is .*, not int"):
        load_model(3)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="Linear has no `config` like that of a causal language model"):
        load_model(torch.nn.Linear(1, 1))
    network = load_model(str(random_model))
    with pytest.raises(ModelError, match=r"a tokenizer is .*, not list"):
        load_tokenizer([], network)
    mute = AutoTokenizer.from_pretrained(random_model)
    mute.eos_token = None
    with pytest.raises(ModelError, match="names an end token"):
        load_tokenizer(mute, network)


def test_an_architecture_s_default_end_token_is_ignored(random_model: Path, tmp_path: Path) -> None:
    """A Llama's default is id 2, whatever token that is in this vocabulary."""
    ends = {"config": {"eos_token_id": OUT}, "generation_config": {"eos_token_id": OUT}}
    silent = changed_copy(random_model, tmp_path / "silent", **ends, tokenizer_config={"eos_token": OUT})
    network = load_model(str(silent))
    assert network.config.eos_token_id == 2
    with pytest.raises(ModelError, match="neither the tokenizer nor a configuration file of"):
        load_tokenizer(str(silent), network)
    tokenizer = changed_copy(random_model, tmp_path / "tokenizer", **ends)
    assert load_tokenizer(str(tokenizer), load_model(str(tokenizer))).end_ids == {1}
    file = changed_copy(
        random_model, tmp_path / "file", config={"eos_token_id": OUT}, generation_config={"eos_token_id": [1, 5]}
    )
    assert load_tokenizer(str(file), load_model(str(file))).end_ids == {1, 5}


def test_missing_files_of_a_model_or_tokenizer_are_reported(random_model: Path, tmp_path: Path) -> None:
    model = changed_copy(random_model, tmp_path / "model")
    network = load_model(str(model))
    for path in [*model.glob("token*"), *model.glob("*.jinja")]:
        path.unlink()
    with pytest.raises(ModelError, match=r"the tokenizer of .* needs tokenizer\.json and tok") as caught:
        load_tokenizer(str(model), network)
    assert "config.json and safetensors" not in str(caught.value)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(
        ModelError, match=r"the model .*, whose folder needs config\.json and safetensors: \w"
    ) as caught:
        load_model(str(empty))
    assert ".." not in str(caught.value).replace(str(empty), "")
    assert not str(caught.value).endswith(".")


def test_onednn_s_cache_is_limited_in_half_precision_on_a_cpu(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, few = ONEDNN_CACHE
    monkeypatch.delenv(name, raising=False)
    load_model(str(random_model))
    assert name not in os.environ
    load_model(str(random_model), dtype="bf16")
    assert os.environ[name] == few
    monkeypatch.setenv(name, "7")
    load_model(str(random_model), dtype="bf16")
    assert os.environ[name] == "7"


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_5_moe"])
def test_a_generic_tokenizer_of_a_qwen_model_uses_its_own_file(random_model: Path, kind: str, tmp_path: Path) -> None:
    """transformers would take a class of the model type's, which splits text in another way and adds a token."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((random_model / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "eos_token_id": 1}), encoding="utf-8")
    network = load_model(str(random_model))
    loaded, plain = load_tokenizer(str(tmp_path), network), load_tokenizer(str(random_model), network)
    text = "Solve for e: 5 - 8*e = -51\nSpell don't 4567"
    assert len(loaded.hf) == len(plain.hf)
    assert loaded.encode(text, 8).ids.tolist() == plain.encode(text, 8).ids.tolist()


@pytest.mark.parametrize(
    ("flags", "has_them"),
    [
        ("flags : fpu avx2 avx512f avx512_bf16", True),
        ("flags : avx512f amx_bf16 amx_tile", True),
        ("Features : fp asimd bf16 i8mm", True),
        ("flags : fpu avx2 avx512f", False),
    ],
)
def test_bf16_on_a_processor_without_its_instructions_is_warned_of(
    random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, has_them: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    assert loading.has_bf16_products(tmp_path / "cpuinfo") is has_them
    assert loading.has_bf16_products(tmp_path / "none")
    monkeypatch.setattr(loading, "has_bf16_products", lambda: has_them)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_model(str(random_model), dtype="bf16")
        load_model(str(random_model))
    told = [str(w.message) for w in caught if "bfloat16" in str(w.message)]
    assert len(told) == (not has_them)
    assert has_them or "--learner.dtype fp32" in told[0]
