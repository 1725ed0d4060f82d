"""Weights as transformers reads and writes them: config.json, tokenizer, model.safetensors. vLLM and SGLang load it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policygrad.errors import EngineError
from policygrad.models.adapters import PREFIX, adapters_of
from policygrad.models.merging import merged_tensors
from policygrad.weight_sync.folder import Write


def safetensors_writer(model: Any, tokenizer: Any, *, head_too: bool = False) -> Write:
    """model: transformers' own, whose configuration is written, with the weights that are published; tokenizer: transformers' own.
    head_too: write an output head that is tied to the embeddings a second time, under its own name.

    Raises:
        EngineError: a model without a configuration, or one in four bits.
    """
    check_whole(model)
    head = tied_head(model) if head_too else None

    def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
        from safetensors.torch import save_file

        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        every = without_adapters(model, tensors)
        whole = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in every}
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
    names = {id(module): name.removeprefix(PREFIX) for name, module in model.named_modules()}
    return f"{names[id(head)]}.weight", f"{names[id(embeddings)]}.weight"


def without_adapters(model: Any, tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    """(name, tensor) of the whole model; where it has adapters, W + (α/r)·B·A for W, of the model's own tensors, which are those
    that are published."""
    return merged_tensors(model) if adapters_of(model) else tensors.items()


def check_whole(model: Any) -> None:
    """Raises EngineError for a model whose weights an engine cannot be given."""
    if getattr(model, "is_quantized", False):
        raise EngineError(
            "weights in four bits cannot be published whole, as what is trained is not rounded like them: train without bits=4, "
            "send the adapter alone to a server that has the same weights, --sampler.publish adapter, or take --sampler.engine "
            "local"
        )
    if not hasattr(model, "config") or not isinstance(model, torch.nn.Module):
        raise EngineError(
            f"{type(model).__name__} has no configuration that an engine could be given: take a transformers model, or "
            "--sampler.engine local"
        )
