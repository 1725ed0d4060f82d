"""Releases with quantised weights: they train, and what is saved is what was trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import policygrad as pg
from doubles.releases import write_bitsandbytes, write_fp8, write_mxfp4
from policygrad.models.loading import load_model
from policygrad.models.lora_config import Lora
from policygrad.models.releases import read_release_form
from policygrad.models.tokenizer import load_tokenizer
from policygrad.training.export import export_merged

WRITERS = {"mxfp4": write_mxfp4, "fp8": write_fp8}


@pytest.mark.parametrize("method", WRITERS)
def test_a_quantised_release_trains_and_is_saved_as_it_was_trained(method: str, small: pg.Run, tmp_path: Path) -> None:
    """Its weights are dequantised, said in one line; a fresh load of the saved model gives the trained one's log-probabilities."""
    release = WRITERS[method](tmp_path / method)
    sizes = {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 4, "output": str(tmp_path / "run")}
    with pytest.warns(UserWarning, match=rf"is released in {method}: its weights are dequantised to float32"):
        result = pg.train(replace(small, model=str(release), **sizes), display=False)  # type: ignore[arg-type]
    saved = Path(result.model)
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        trained = AutoModelForCausalLM.from_pretrained(saved)(input_ids=ids).logits
        loaded = load_model(str(saved))(input_ids=ids).logits
    assert torch.allclose(
        trained, loaded, rtol=0, atol=1e-5
    )  # gpt-oss has fused attention here, with sums in another order
    assert torch.isfinite(trained).all()


@pytest.mark.parametrize("method", WRITERS)
def test_adapters_are_trained_on_a_quantised_release(method: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    with pytest.warns(UserWarning, match="dequantised"):
        model = load_model(str(WRITERS[method](tmp_path / method)), lora=Lora(rank=2))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    model(input_ids=torch.arange(3, 20)[None]).logits.sum().backward()


def test_forms_that_cannot_be_trained_are_refused_before_they_are_loaded() -> None:
    def refuse(settings: dict[str, object], words: str, lora: Lora | None = None) -> None:
        with pytest.raises((pg.ModelError, pg.ConfigError), match=words):
            read_release_form({"quantization_config": settings}, lora, torch.float32, "the model 'x'")

    refuse({"quant_method": "gptq"}, "'x' is released in gptq, which cannot be trained: give its release in bfloat16")
    refuse({"quant_method": "awq"}, "awq, which cannot be trained")
    refuse({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"in 4 bits \(bitsandbytes\), .* add --learner.lora")
    refuse({"quant_method": "mxfp4"}, "leave bits out", Lora(rank=2, bits=4))
    assert not read_release_form({}, None, torch.float32, "x").options


def test_an_adapter_of_a_release_in_4_bits_is_read_again_and_merged(tmp_path: Path) -> None:
    """Read, its base stays as it is; merged, the base is dequantised, and the saved model gives the same log-probabilities."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    write_bitsandbytes(tmp_path / "base")
    model: Any = load_model(str(tmp_path / "base"), lora=Lora(rank=2))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path / "adapter")
    load_tokenizer(str(tmp_path / "base"), model).save_pretrained(tmp_path / "adapter")
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        assert torch.allclose(load_model(str(tmp_path / "adapter"))(input_ids=ids).logits, expected, atol=1e-4)
        merged = export_merged(str(tmp_path / "adapter"), tmp_path / "merged", dtype="fp32")
        assert "quantization_config" not in json.loads((Path(merged) / "config.json").read_text())
        fresh = AutoModelForCausalLM.from_pretrained(merged)(input_ids=ids).logits
    assert torch.allclose(fresh, expected, atol=2e-2)
