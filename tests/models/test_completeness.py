"""A file that lacks weights, or has them in another shape, is refused wherever a model is loaded; what may be absent is not."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor

from doubles.models import changed_copy
from policygrad.errors import ModelError
from policygrad.models.classifier import load_classifier
from policygrad.models.loading import load_model
from policygrad.models.replica import load_reference
from policygrad.models.tokenizer import load_tokenizer

Change = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


def with_tensors(folder: Path, change: Change) -> Path:
    """The folder, its file's tensors changed."""
    path = folder / "model.safetensors"
    save_file(dict(change(load_file(path))), path, metadata={"format": "pt"})
    return folder


def without(*names: str) -> Change:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.fixture
def copy(random_model: Path, tmp_path: Path) -> Callable[..., Path]:
    return lambda **files: changed_copy(random_model, tmp_path / "model", **files)


def test_missing_layers_are_refused(copy: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(str(copy(config={"num_hidden_layers": 3})))
    output = str(caught.value)
    assert "would have random weights: its file lacks 9 tensors (model.layers.2.input_layernorm.weight, " in output
    assert output.count("model.layers.2.") == 5
    assert " and 4 more). Use the config.json that it was saved with, or get the complete file" in output
    assert "LOAD REPORT" not in "".join(capfd.readouterr())


def test_a_missing_tensor_is_refused(copy: Callable[..., Path], random_model: Path) -> None:
    folder = with_tensors(copy(), without("model.layers.0.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"lacks 1 tensor \(model\.layers\.0\.mlp\.up_proj\.weight\)"):
        load_model(str(folder))
    policy = load_tokenizer(str(random_model), load_model(str(random_model)))
    with pytest.raises(ModelError, match=r"lacks 1 tensor \(model\.layers\.0"):  # a reference, a teacher
        load_reference(str(folder), policy)
    with pytest.raises(ModelError, match=r"lacks 1 tensor \(model\.layers\.0"):  # what a reward model begins with
        load_classifier(str(folder), new_head=True)


def test_one_tensor_of_another_shape(copy: Callable[..., Path]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    folder = with_tensors(copy(), lambda tensors: tensors | {name: tensors[name][:5].contiguous()})
    for load in (load_model, load_classifier):
        options: dict[str, Any] = {"new_head": True} if load is load_classifier else {}
        with pytest.raises(
            ModelError, match=r"another shape .* 1 tensor \(.*1\.mlp\.up_proj\.weight \[5, 32\] instead of"
        ):
            load(str(folder), **options)


def test_tied_embeddings_are_in_the_file_once(copy: Callable[..., Path]) -> None:
    folder = copy()
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model: Any = load_model(str(folder))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with_tensors(folder, lambda tensors: {n.replace("model.embed_tokens", "lm_head"): t for n, t in tensors.items()})
    other: Any = load_model(str(folder))  # the other one of the two
    assert torch.equal(other.model.embed_tokens.weight, model.model.embed_tokens.weight)
    with_tensors(folder, without("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lacks 2 tensors \(lm_head\.weight, model\.embed_tokens\.weight\)"):
        load_model(str(folder))


def test_a_missing_untied_head_is_refused(copy: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match=r"\(lm_head\.weight\)\. If its head .* set tie_word_embeddings to true"):
        load_model(str(copy(config={"tie_word_embeddings": False})))


def test_heads_of_other_tasks_are_ignored_and_other_tensors_warned_about(
    copy: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    known = {
        "score.weight": torch.zeros(1, 32),
        "v_head.summary.bias": torch.zeros(1),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    folder = with_tensors(copy(), lambda tensors: tensors | known)
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        load_model(str(folder))
    assert caplog.text == ""
    with_tensors(folder, lambda tensors: tensors | {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)})
    with pytest.warns(
        UserWarning, match=r"LlamaForCausalLM does not use 1 tensor \(.*up_proj\.weight_scale\) of its file"
    ):
        load_model(str(folder))


def test_unexpected_tensor_names_are_reported(copy: Callable[..., Path]) -> None:
    folder = with_tensors(copy(), lambda tensors: {n.replace("mlp.up", "ffn.w"): t for n, t in tensors.items()})
    with pytest.raises(
        ModelError, match=r"lacks 2 tensors .* The file has 2 tensors \(model\.layers\.0\.ffn\.w_proj\.weight"
    ):
        load_model(str(folder))


def test_a_buffer_missing_in_older_files_is_accepted(copy: Callable[..., Path]) -> None:
    """Computed, so absent from no model; a persistent buffer that is learnt is as bad as a missing weight."""
    from policygrad.models.loading import check_missing_weights

    model = load_model(str(copy()))
    info: dict[str, Any] = {"unexpected_keys": set(), "mismatched_keys": set()}
    check_missing_weights(model, info | {"missing_keys": {"model.rotary_emb.inv_freq", "h.0.attn.masked_bias"}}, "it")
    with pytest.raises(ModelError, match="e_score_correction_bias"):
        check_missing_weights(model, info | {"missing_keys": {"model.layers.0.mlp.gate.e_score_correction_bias"}}, "it")


WIDTH = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("gpt2", tf.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40)),
        ("bert", tf.BertConfig(**WIDTH, intermediate_size=16)),
        ("opt", tf.OPTConfig(**WIDTH, ffn_dim=16, word_embed_proj_dim=16)),
    ],
)
def test_a_new_head_on_other_families(tmp_path: Path, kind: str, config: tf.PretrainedConfig) -> None:
    """A classifier's new layers are meant to be new, BERT's pooler among them."""
    config.is_decoder = kind == "bert"
    tf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    load_model(str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load_classifier(str(tmp_path), new_head=True)


def test_missing_weights_of_an_adapter_and_its_base(
    copy: Callable[..., Path], random_model: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    base = copy()
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(tf.AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "adapter")
    load_model(str(tmp_path / "adapter"))
    with_tensors(base, without("model.norm.weight"))
    with pytest.raises(
        ModelError, match=r"the model '.*adapter' adapts would .* lacks 1 tensor \(model\.norm\.weight\)"
    ):
        load_model(str(tmp_path / "adapter"))
    with_tensors(base, lambda tensors: load_file(random_model / "model.safetensors"))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(dict(list(load_file(file).items())[1:]), file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"adapter' would have random weights: its file lacks 1 tensor \(.*lora_"):
        load_model(str(tmp_path / "adapter"))
