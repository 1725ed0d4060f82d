"""What is written for others is read back first: merged adapters and files compute what their source does, or are not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from policygrad.checkpoint.export_probe import TOLERANCE, check_file, compare_probes, round_weights, take_probe
from policygrad.checkpoint.model_export import write_model
from policygrad.errors import EngineError, ModelError
from policygrad.models.loading import load_model, model_origin
from policygrad.models.tokenizer import load_tokenizer
from policygrad.training.export import export_gguf, export_merged
from policygrad.weight_sync.folder import check_exportable
from policygrad.weight_sync.gguf import load_gguf

peft = pytest.importorskip("peft")


def write_random_adapter(folder: Path, **options: Any) -> Path:
    """Write an adapter on the embedded model, whose head is tied to its embedding."""
    model = peft.get_peft_model(
        load_model("tiny"), peft.LoraConfig(r=4, base_model_name_or_path=model_origin("tiny"), **options)
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(folder, save_embedding_layers=False)  # as `policygrad serve` writes it: A and B alone
    load_tokenizer("tiny", load_model("tiny")).save_pretrained(folder)
    return folder


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("part", ["lm_head", "embed_tokens", "modules_to_save"])
def test_one_of_two_tied_layers_is_merged_alone(part: str, tmp_path: Path) -> None:
    """The head, the embedding, or a head that was trained completely: the other one keeps its matrix, and the source is met."""
    options = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    folder = write_random_adapter(
        tmp_path / "adapter", **(options if part == "modules_to_save" else {"target_modules": ["q_proj", part]})
    )
    source = take_probe(load_model(str(folder)))
    before = load_model("tiny")
    assert (source.outputs - take_probe(before, source.ids).outputs).abs().max() > 100 * TOLERANCE
    merged = load_model(str(export_merged(str(folder), str(tmp_path / "merged"))))
    assert compare_probes(source, take_probe(merged, source.ids), "", "") < TOLERANCE
    assert not json.loads((tmp_path / "merged" / "config.json").read_text(encoding="utf-8"))["tie_word_embeddings"]
    kept = merged.get_output_embeddings() if part == "embed_tokens" else merged.get_input_embeddings()  # type: ignore[operator]
    assert torch.equal(kept.weight, before.get_input_embeddings().weight)  # type: ignore[operator]

    pytest.importorskip("gguf")
    file = export_gguf(str(folder), str(tmp_path / "model.gguf"))
    assert compare_probes(source, take_probe(load_gguf(str(file), merged), source.ids), "", "") < TOLERANCE


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_half_precision_is_compared_with_rounded_weights(tmp_path: Path) -> None:
    """Rounding to bfloat16 moves the log-probabilities by more than the tolerance, which is for other faults."""
    folder = write_random_adapter(tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    source = take_probe(load_model(str(folder)))
    half = load_model(str(export_merged(str(folder), str(tmp_path / "half"), dtype="bf16")))
    with pytest.raises(ModelError, match=r"rounding explains 0\.002"):
        compare_probes(source, take_probe(half, source.ids), "half", "")
    pytest.importorskip("gguf")
    export_gguf(str(folder), str(tmp_path / "half.gguf"), dtype="bf16")


def _tie_again(model: Any) -> None:
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    model.config.tie_word_embeddings = True


def _swap_rows(model: Any) -> None:
    weight = model.get_submodule("model.layers.0.self_attn.q_proj").weight
    weight.data = weight.data.roll(1, 0)


def _make_infinite(model: Any) -> None:
    model.get_input_embeddings().weight.data[:] = torch.nan


@pytest.mark.parametrize("spoil", [_tie_again, _swap_rows, _make_infinite])
def test_another_model_than_its_source_is_not_left_there(spoil: Callable[[nn.Module], None], tmp_path: Path) -> None:
    model: Any = load_model("tiny")
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach() + 0.01 * torch.randn(head.weight.shape))
    model.config.tie_word_embeddings = False
    probe = take_probe(model)
    spoil(model)
    final = tmp_path / "model"
    check = check_file(probe, load_model, str(final), "use the other", release=model)
    with pytest.raises(ModelError, match=r"model was not written: read back, .* nats off.* use the other"):
        write_model(final, model, load_tokenizer("tiny", load_model("tiny")), check=check)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_read_back_is_not_left_there(tmp_path: Path) -> None:
    def unreadable(path: str) -> nn.Module:
        raise KeyError("layers")

    model = load_model("tiny")
    with pytest.raises(ModelError, match="cannot be read back"):
        write_model(
            tmp_path / "model",
            model,
            load_tokenizer("tiny", model),
            check=check_file(take_probe(model), unreadable, "the model", ""),
        )
    assert not list(tmp_path.iterdir())


def test_what_is_written_is_released_and_read_as_it_was_rounded(tmp_path: Path) -> None:
    model = load_model("tiny")
    round_weights(model, torch.bfloat16)
    check = check_file(take_probe(model), partial(load_model), "the model", "", release=model)
    write_model(tmp_path / "model", model, load_tokenizer("tiny", load_model("tiny")), check=check)
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_an_engine_is_not_given_an_adapted_tied_head(tmp_path: Path) -> None:
    """Of which it would load one matrix for both."""
    folder = write_random_adapter(tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    with pytest.raises(EngineError, match=r"lm_head, and the model's configuration ties.* export --merge"):
        check_exportable(load_model(str(folder)))
    check_exportable(load_model(str(export_merged(str(folder), str(tmp_path / "merged")))))
