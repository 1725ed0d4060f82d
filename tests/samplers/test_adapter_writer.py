"""Weights of a model with an adapter as engines read them: the adapter alone, in PEFT's format, or merged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import policygrad as pg
from doubles.files import weights
from policygrad.errors import EngineError
from policygrad.models.adapters import add_adapters, merge_adapters
from policygrad.models.loading import load_model
from policygrad.models.lora_config import Lora
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.weight_sync.base import PublishedWeights
from policygrad.weight_sync.folder import (
    VersionFolder,
    explain_unsupported_adapter,
    make_adapter_writer,
    make_safetensors_writer,
)

peft = pytest.importorskip("peft")
IDS = torch.arange(4, 14)[None]


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    result: Tensor = model(input_ids=IDS).logits
    return result


def moved(model: nn.Module) -> nn.Module:
    """Set B to values other than 0."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name:
            nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(len(name)))
    return model


def of_transformers(folder: Path) -> nn.Module:
    return moved(add_adapters(load_model(str(folder)), Lora(rank=3, alpha=6.0), base=str(folder)))


def of_peft(folder: Path) -> nn.Module:
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=r".*\.(q_proj|down_proj)", task_type="CAUSAL_LM")
    made: nn.Module = peft.get_peft_model(load_model(str(folder)), config)
    return moved(made).eval()


@pytest.mark.parametrize("make", [of_transformers, of_peft])
def test_written_adapter_loads_in_peft_with_the_same_logits(make: Any, random_model: Path, tmp_path: Path) -> None:
    model = make(random_model)
    publication = VersionFolder(tmp_path, make_adapter_writer(model)).publish(
        PublishedWeights(3, dict(model.named_parameters()))
    )
    tensors = load_file(publication.path / "adapter_model.safetensors")
    trained = [p for name, p in model.named_parameters() if "lora_" in name]
    assert sum(t.numel() for t in tensors.values()) == sum(p.numel() for p in trained)
    assert all(
        name.startswith("base_model.model.model.layers.") and name.endswith((".lora_A.weight", ".lora_B.weight"))
        for name in tensors
    )
    message = json.loads((publication.path / "adapter_config.json").read_text())
    assert message["r"] == 3
    assert {"q_proj", "down_proj"} <= {*message["target_modules"]}
    read = peft.PeftModel.from_pretrained(load_model(str(random_model)), publication.path).eval()
    assert torch.allclose(logits(read), logits(model), atol=1e-5)
    assert not torch.allclose(logits(load_model(str(random_model))), logits(model), atol=1e-2)


@pytest.mark.parametrize("make", [of_transformers, of_peft])
def test_merged_weights_contain_the_adapter_and_leave_the_model_unchanged(
    make: Any, random_model: Path, tmp_path: Path
) -> None:
    model = make(random_model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    tokenizer = load_tokenizer(str(random_model), model)
    writer = make_safetensors_writer(model, tokenizer.hf, write_tied_head=True)
    publication = VersionFolder(tmp_path, writer).publish(PublishedWeights(3, dict(model.named_parameters())))
    plain = load_model(str(random_model))
    written = load_file(publication.path / "model.safetensors")
    assert {*written} == {*dict(plain.named_parameters()), "lm_head.weight"}
    assert torch.allclose(logits(load_model(str(publication.path))), logits(model), atol=1e-4)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_merged_weights_equal_an_exported_model(random_model: Path, tmp_path: Path) -> None:
    model = of_transformers(random_model)
    tokenizer = load_tokenizer(str(random_model), model)
    writer = make_safetensors_writer(model, tokenizer.hf)
    path = VersionFolder(tmp_path, writer).publish(PublishedWeights(0, dict(model.named_parameters()))).path
    exported = dict(merge_adapters(model).named_parameters())
    written = load_file(path / "model.safetensors")
    assert {*written} == {*exported}
    assert all(torch.equal(written[name], p) for name, p in exported.items())


def test_adapter_writer_refuses_weights_without_adapter(random_model: Path, tmp_path: Path) -> None:
    model = of_transformers(random_model)
    base = {name: p for name, p in model.named_parameters() if "lora_" not in name}
    with pytest.raises(EngineError, match=r"publishes no adapter.*--sampler.lora-sync merged"):
        make_adapter_writer(model)(base, tmp_path)


def test_full_modules_and_other_adapter_types_are_not_sent_as_adapter(random_model: Path) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    assert "modules_to_save" in explain_unsupported_adapter(peft.get_peft_model(load_model(str(random_model)), config))
    other = peft.get_peft_model(load_model(str(random_model)), peft.IA3Config(task_type="CAUSAL_LM"))
    assert explain_unsupported_adapter(other) == "the model's adapter is of type IA3, and engines serve LORA"


class Writing(LocalSampler):
    """Samples in this process, and writes the weights for an engine."""

    versions: VersionFolder
    written: list[Path]

    async def update(self, weights: PublishedWeights) -> None:
        await super().update(weights)
        self.written.append(self.versions.publish(weights).path)


@pytest.mark.full
@pytest.mark.parametrize("staleness", [0, 1])
def test_two_process_learner_publishes_its_adapter(staleness: int, small: pg.Run, tmp_path: Path) -> None:
    """The last published adapter is the saved one: the last update is published like the others."""
    made = list[Writing]()

    def sampler(model: nn.Module, tokenizer: Tokenizer) -> Writing:
        result = Writing.from_tokenizer(model, tokenizer)
        assert isinstance(result, Writing)
        result.versions, result.written = VersionFolder(tmp_path / "weights", make_adapter_writer(model)), []
        made.append(result)
        return result

    learner = pg.LearnerConfig(lora="rank=4", world_size=2, micro_tokens=64)
    run = replace(small, learner=learner, steps=2, lr=1e-2, max_staleness=staleness, output=str(tmp_path / "run"))
    saved = weights(pg.train(run, display=False, sampler=sampler).output)
    first, *_, last = found_in(made[0].written)
    assert {*last} == {*saved}
    assert all(torch.equal(last[name], saved[name]) for name in saved)
    assert not any(bool(t.any()) for name, t in first.items() if "lora_B" in name)
    assert any(bool(t.any()) for name, t in last.items() if "lora_B" in name)


def found_in(paths: Sequence[Path]) -> list[dict[str, Tensor]]:
    return [load_file(path / "adapter_model.safetensors") for path in paths]
