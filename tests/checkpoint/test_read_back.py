"""A saved model is read as other programs read it, and every tensor compared: what differs is named, and its files stay."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import policygrad as pg
from doubles.architectures import families
from policygrad.checkpoint import read_back
from policygrad.checkpoint.read_back import describe_difference, saved_tensors
from policygrad.errors import ModelError
from policygrad.models.adapters import add_adapters
from policygrad.models.loading import load_model
from policygrad.models.lora_config import ADAPTER_FILE, Lora
from policygrad.models.traits import ADAPTER_WEIGHTS
from policygrad.utils.memory import measure_free_memory
from policygrad.weight_sync.base import LazyStateDict
from policygrad.weight_sync.folder import save_lazy_model

MODEL_FILE = "model.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj"


def rename(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q_PROJ}.kernel"] = tensors.pop(f"{Q_PROJ}.weight")


def change(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q_PROJ}.weight"][0, 0] += 1


def rewrite(file: Path, spoil: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(file)
    spoil(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def rewrite_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | values), encoding="utf-8")


def untied(base: Path) -> Any:
    """A model with a head of its own."""
    model: Any = load_model(str(base))
    model.get_output_embeddings().weight = nn.Parameter(model.get_output_embeddings().weight.detach() + 0.01)
    model.config.tie_word_embeddings = False
    return model


def adapted(base: str) -> nn.Module:
    """The model in a folder with an adapter that has learned something."""
    model = add_adapters(load_model(base), Lora(rank=2), base=base)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


def difference(folder: Path, model: nn.Module) -> str:
    return describe_difference(folder, model, saved_tensors(model))


def test_wrong_tensors_of_a_complete_model_are_named(
    random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = untied(random_model)

    def saved(name: str) -> Path:
        model.save_pretrained(tmp_path / name)
        return tmp_path / name

    assert difference(saved("same"), model) == ""
    rewrite(saved("renamed") / MODEL_FILE, rename)
    assert difference(tmp_path / "renamed", model) == f"it lacks 1 tensor ({Q_PROJ}.weight)"
    rewrite(saved("changed") / MODEL_FILE, change)
    assert difference(tmp_path / "changed", model) == f"it has with other values 1 tensor ({Q_PROJ}.weight)"
    rewrite_json(saved("tied") / "config.json", tie_word_embeddings=True)
    tied = "its config.json ties 1 tensor (lm_head.weight), which the file has with values of its own"
    assert difference(tmp_path / "tied", model) == tied
    rewrite_json(saved("shorter") / "config.json", num_hidden_layers=1)
    assert difference(tmp_path / "shorter", model).startswith("it lacks ")
    (saved("unreadable") / MODEL_FILE).write_bytes(b"{")
    assert difference(tmp_path / "unreadable", model).startswith("it cannot be read (")

    pytest.importorskip("accelerate")
    monkeypatch.setattr(read_back, "measure_free_memory", lambda: 0.0)
    assert difference(tmp_path / "same", model) == ""
    assert difference(tmp_path / "renamed", model) == f"it lacks 1 tensor ({Q_PROJ}.weight)"
    assert difference(tmp_path / "changed", model) == ""  # names and shapes alone
    assert difference(tmp_path / "tied", model) == tied


def test_wrong_tensors_targets_and_scales_of_an_adapter_are_named(random_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = adapted(str(random_model))

    def saved(name: str) -> Path:
        model.save_pretrained(tmp_path / name)
        return tmp_path / name

    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors[f"base_model.model.{Q_PROJ}.lora_A.weight"]

    assert difference(saved("same"), model) == ""
    rewrite(saved("dropped") / ADAPTER_WEIGHTS, drop)
    assert difference(tmp_path / "dropped", model) == f"it lacks 1 tensor ({Q_PROJ}.lora_A.weight)"
    rewrite_json(saved("elsewhere") / ADAPTER_FILE, target_modules=["q_proj"])
    assert difference(tmp_path / "elsewhere", model).startswith("it lacks 36 tensors")
    rewrite_json(saved("scaled") / ADAPTER_FILE, lora_alpha=1)
    assert difference(tmp_path / "scaled", model).startswith("it has with other values 14 tensors")


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "glm4_moe", "mixtral", "qwen3_next", "mamba"])
def test_what_every_way_of_saving_writes_is_read_as_it_was(kind: str, tmp_path: Path) -> None:
    """Tied and untied heads, experts that files have one by one, hybrids; from memory, gathered, and adapters."""
    pytest.importorskip("peft")
    config = next(family.config() for family in families() if family.type == kind)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "saved")
    assert difference(tmp_path / "saved", model) == ""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gathered = LazyStateDict({name: p.to("meta") for name, p in parameters.items()}, parameters.__getitem__)
    save_lazy_model(model, gathered, tmp_path / "gathered")
    assert describe_difference(tmp_path / "gathered", model, gathered) == ""
    add_adapters(model, Lora(rank=2)).save_pretrained(tmp_path / "adapter")
    assert difference(tmp_path / "adapter", model) == ""


def test_a_run_whose_model_is_saved_wrong_says_so_and_keeps_it(
    small: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(small, steps=1, output=str(tmp_path / "run"))
    save = pg.Trainer.write_weights

    def write_weights(self: pg.Trainer, folder: Path) -> None:
        save(self, folder)
        rewrite(folder / MODEL_FILE, change)

    monkeypatch.setattr(pg.Trainer, "write_weights", write_weights)
    with pytest.raises(ModelError, match=rf"run/model was written, but .*other values 1 tensor \({Q_PROJ}"):
        pg.train(run, display=False)
    assert load_file(tmp_path / "run" / "model" / MODEL_FILE)
    assert (tmp_path / "run" / "result.json").is_file()
    monkeypatch.undo()
    assert pg.train(run, resume=tmp_path / "run", display=False).model == tmp_path / "run" / "model"


def test_free_memory_is_that_of_the_container(tmp_path: Path) -> None:
    assert measure_free_memory(tmp_path / "none") > 0
    for name, value in {
        "max": "1000",
        "current": "900",
        "stat": "anon 500\nactive_file 150\ninactive_file 200",
    }.items():
        (tmp_path / f"memory.{name}").write_text(f"{value}\n", encoding="utf-8")
    assert measure_free_memory(tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n", encoding="utf-8")
    assert measure_free_memory(tmp_path) > 450
