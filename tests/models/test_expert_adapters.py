"""Adapters on stacked experts: what is merged, published, saved and read again is the model that was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from doubles.architectures import families
from policygrad.errors import ConfigError, EngineError
from policygrad.models.adapters import (
    add_adapters,
    describe_adapters,
    iter_merged_tensors,
    merge_adapters,
    outermost_peft_modules,
)
from policygrad.models.loading import load_model
from policygrad.models.lora_config import Lora
from policygrad.models.replica import clone_model
from policygrad.weight_sync import folder as weight_folder
from policygrad.weight_sync.base import LazyStateDict
from policygrad.weight_sync.folder import merge_adapters_lazily

pytest.importorskip("peft")

STACKED = ("mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3", "minimax_m2", "qwen3_next")
"""Of PEFT's table of stacked experts: without and with dense and shared MLPs, latent attention, hybrids."""
OTHERS = ("gpt_oss", "llama4", "qwen3_5_moe", "nemotron_h", "kimi_linear", "jetmoe")
"""Not in the table: their experts' tensors are named one by one."""
CONFIGS = {family.type: family.config for family in families()}


def built(kind: str) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = tf.AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
    return made


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    ids = torch.randint(3, 40, (2, 30), generator=torch.Generator().manual_seed(0))
    result: Tensor = model(input_ids=ids, use_cache=False).logits
    return result


def adapted(kind: str, targets: str | None = None, base: str = "") -> nn.Module:
    """A model whose adapters have all learned something."""
    model = add_adapters(built(kind), Lora(rank=2, targets=targets), base=base)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


def shapes(tensors: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in tensors}


@pytest.mark.parametrize("kind", [*STACKED, *OTHERS])
def test_what_is_published_and_exported_is_the_plain_models_tensors_with_the_adapted_models_logits(kind: str) -> None:
    model, plain = adapted(kind), built(kind)
    expected, before = logits(model), shapes(plain.named_parameters())
    assert float((logits(plain) - expected).abs().max()) > 0.1
    published = weight_folder.merge_adapters(model, dict(model.named_parameters()))
    assert shapes(published.items()) == before
    plain.load_state_dict(dict(published), strict=False)
    assert torch.allclose(logits(plain), expected, atol=1e-4)
    assert torch.equal(logits(model), expected)
    merged = merge_adapters(model)
    assert shapes(merged.named_parameters()) == before
    assert torch.allclose(logits(merged), expected, atol=1e-4)


@pytest.mark.parametrize("kind", STACKED)
def test_all_linear_adapts_every_layer_but_the_head_where_experts_are_stacked(kind: str) -> None:
    model = add_adapters(built(kind), Lora(rank=2))
    inside = [name for name, _ in outermost_peft_modules(model)]
    linear = {name for name, module in built(kind).named_modules() if isinstance(module, nn.Linear)}
    assert linear - {*inside} == {"lm_head"}
    assert any(name.endswith("experts") for name in inside)
    assert "no adapters" not in describe_adapters(model)


@pytest.mark.parametrize("kind", OTHERS)
def test_experts_of_every_architecture_get_adapters(kind: str) -> None:
    def adapted_tensors(targets: str | None) -> set[str]:
        model = add_adapters(built(kind), Lora(rank=2, targets=targets))
        assert describe_adapters(model).endswith("no adapters") == (targets == "q_proj")
        return {name for config in model.peft_config.values() for name in config.target_parameters or ()}

    tensors = {name for name, p in built(kind).named_parameters() if p.dim() == 3 and "conv" not in name}
    assert adapted_tensors(None) == tensors
    by_name = {name.rpartition(".")[2] for name in tensors}
    assert adapted_tensors("+".join(sorted(by_name))) == tensors
    if kind in ("llama4", "qwen3_5_moe"):  # a shared layer of that name is adapted too
        shared = add_adapters(built(kind), Lora(rank=2, targets="down_proj"))
        assert any(name.endswith("shared_expert.down_proj") for name, _ in outermost_peft_modules(shared))
    if kind != "jetmoe":  # which has no such layer
        assert adapted_tensors("q_proj") == set()


@pytest.mark.parametrize(("kind", "targets"), [("glm4_moe", "gate_proj+up_proj+down_proj"), ("gpt_oss", None)])
def test_an_adapter_of_experts_is_read_again_and_copied_as_it_was(
    kind: str, targets: str | None, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    load_model(built(kind)).save_pretrained(tmp_path / "base")
    model = load_model(adapted(kind, base=str(tmp_path / "base")))
    expected = logits(model)
    assert torch.equal(logits(clone_model(model)), expected)
    model.save_pretrained(tmp_path / "adapter")
    again = load_model(str(tmp_path / "adapter"), lora=Lora(rank=2, targets=targets))
    assert torch.equal(logits(again), expected)
    assert not [w for w in recwarn if "pattern" in str(w.message)]


def test_the_names_of_layers_reach_experts_dense_and_shared_layers_alike() -> None:
    model = adapted("glm4_moe", "gate_proj+up_proj+down_proj")
    names = {name.partition("layers.")[2] for name, _ in outermost_peft_modules(model)}
    parts = {f"{place}.{part}_proj" for place in ("0.mlp", "1.mlp.shared_experts") for part in ("gate", "up", "down")}
    assert names == parts | {"1.mlp.experts"}
    alone = adapted("minimax_m2", "w1+w2+w3")  # its experts' names, which no linear layer has
    assert {name.partition("layers.")[2][2:] for name, _ in outermost_peft_modules(alone)} == {"mlp.experts"}


def test_half_of_a_stacked_tensor_is_refused_with_the_missing_name() -> None:
    with pytest.raises(
        ConfigError, match=r"targets=up_proj.*stacked.*without also targeting gate_proj.*add the missing"
    ):
        add_adapters(built("glm4_moe"), Lora(rank=2, targets="up_proj"))


def test_experts_of_a_sharded_policy_are_merged_as_in_memory() -> None:
    full, model = adapted("glm4_moe"), adapted("glm4_moe")
    expected = dict(iter_merged_tensors(full))
    cached = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.to("meta")
    specs = {name: p.detach() for name, p in model.named_parameters()}
    lazy = LazyStateDict(specs, lambda name: cached[name].clone())
    result = merge_adapters_lazily(model, lazy)
    assert shapes(result.specs.items()) == shapes(expected.items())
    assert all(torch.equal(result[name], x) for name, x in expected.items())


def test_merged_tensors_of_other_names_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted("qwen3_moe")

    def with_layer_names(model: nn.Module) -> Any:
        return ((name.replace("experts.", "experts.base_layer."), x) for name, x in iter_merged_tensors(model))

    monkeypatch.setattr(weight_folder, "iter_merged_tensors", with_layer_names)
    with pytest.raises(EngineError, match=r"cannot be merged.*experts\.base_layer.*--sampler.engine local"):
        weight_folder.merge_adapters(model, dict(model.named_parameters()))
