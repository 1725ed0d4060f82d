"""Weights as transformers reads and writes them: config.json, tokenizer, model.safetensors. vLLM and SGLang load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policygrad.errors import EngineError
from policygrad.models.adapters import PREFIX, adapters_of
from policygrad.models.merging import merged_tensors
from policygrad.weight_sync.buckets import BUCKET, portions
from policygrad.weight_sync.folder import Write
from policygrad.weight_sync.gathered import Gathered, likes, with_another
from policygrad.weight_sync.merged import merged_one_by_one

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def safetensors_writer(model: Any, tokenizer: Any, *, head_too: bool = False) -> Write:
    """model: transformers' own, whose configuration is written, with the weights that are published; tokenizer: transformers' own.
    head_too: write an output head that is tied to the embeddings a second time, under its own name.

    Raises:
        EngineError: a model without a configuration, or one in four bits.
    """
    check_whole(model)
    head = tied_head(model) if head_too else None

    def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        every = without_adapters(model, tensors)
        write_weights(every if head is None else with_another(every, *head), folder)

    return write


def write_weights(tensors: Mapping[str, Tensor], folder: Path, most: int = BUCKET) -> None:
    """One file of safetensors, or where they are more than `most` bytes several and their index, as transformers names them. No
    more than a file's are held at a time."""
    from safetensors.torch import save_file

    parts = portions(tensors, most)
    single = len(parts) == 1
    files = [FILE if single else f"model-{i:05}-of-{len(parts):05}.safetensors" for i in range(1, len(parts) + 1)]
    for file, names in zip(files, parts, strict=True):
        own = {name: tensors[name].detach().to("cpu", copy=True).contiguous() for name in names}
        save_file(own, folder / file, metadata={"format": "pt"})
        del own  # before the next are gathered
    if single:
        return
    size = sum(tensor.nbytes for tensor in likes(tensors).values())
    places = {name: file for file, names in zip(files, parts, strict=True) for name in names}
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_gathered(model: Any, tensors: Gathered, folder: Path) -> None:
    """As `model.save_pretrained(folder)`, of a model without numbers: of one with adapters these alone, any other by its files."""
    if adapters_of(model):
        for module_name, module in model.named_modules():
            for key, p in module._parameters.items():
                if p is not None and p.requires_grad:
                    tensor = tensors[f"{module_name}.{key}"].detach().to("cpu", copy=True)
                    module._parameters[key] = torch.nn.Parameter(tensor)
        model.save_pretrained(folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    for about in (model.config, getattr(model, "generation_config", None)):
        if about is not None:
            about.save_pretrained(folder)
    write_weights(tensors, folder)


def tied_head(model: Any) -> tuple[str, str] | None:
    """(the head's name, that of the embeddings whose tensor it is); None where it has one of its own."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embeddings is None or head.weight is not embeddings.weight:
        return None
    names = {id(module): name.removeprefix(PREFIX) for name, module in model.named_modules()}
    return f"{names[id(head)]}.weight", f"{names[id(embeddings)]}.weight"


def without_adapters(model: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The whole model's by name; where it has adapters, W + (α/r)·B·A for W, of the model's own tensors, which are those that are
    published, or of such as are gathered."""
    if not adapters_of(model):
        return tensors
    return merged_one_by_one(model, tensors) if isinstance(tensors, Gathered) else dict(merged_tensors(model))


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
