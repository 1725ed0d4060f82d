"""Weights as transformers reads and writes them: config.json, tokenizer, model.safetensors. vLLM and SGLang load it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policygrad.errors import EngineError
from policygrad.weight_sync.folder import Write


def safetensors_writer(model: Any, tokenizer: Any, *, head_too: bool = False) -> Write:
    """model: transformers' own, whose configuration is written; tokenizer: transformers' own. head_too: write an output head that
    is tied to the embeddings a second time, under its own name.

    Raises:
        EngineError: a model without a configuration, or one with adapters.
    """
    check_whole(model)
    head = tied_head(model) if head_too else None

    def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
        from safetensors.torch import save_file

        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        whole = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        if head is not None:
            name, embeddings = head
            whole.setdefault(name, whole[embeddings].clone())
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})

    return write


def tied_head(model: Any) -> tuple[str, str] | None:
    """(the head's name, that of the embeddings whose tensor it is); None where it has one of its own."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embeddings is None or head.weight is not embeddings.weight:
        return None
    names = {id(module): name for name, module in model.named_modules()}
    return f"{names[id(head)]}.weight", f"{names[id(embeddings)]}.weight"


def check_whole(model: Any) -> None:
    """Raises EngineError for a model whose parameters an engine does not know by their names."""
    if hasattr(model, "peft_config") or hasattr(model, "get_base_model"):
        raise EngineError(
            "a model with adapters cannot be published to an engine, which takes whole models: train without LoRA, or take "
            "--sampler.engine local"
        )
    if not hasattr(model, "config") or not isinstance(model, torch.nn.Module):
        raise EngineError(
            f"{type(model).__name__} has no configuration that an engine could be given: take a transformers model, or "
            "--sampler.engine local"
        )
