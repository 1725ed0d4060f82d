"""Weights for servers in a folder: one subfolder per version, which is complete or absent, and a file that names the current one.

Every version has its own path because a server that reads the same path again may serve what it has cached.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.errors import EngineError
from policygrad.models.adapters import (
    find_adapted_tied_layer,
    iter_merged_tensors,
    outermost_peft_modules,
    unwrap_layer,
)
from policygrad.models.lora_config import ADAPTER_FILE
from policygrad.models.replica import plain_parameters
from policygrad.models.traits import ADAPTER_WEIGHTS, PEFT_PREFIX, adapter_configs
from policygrad.utils.filesystem import apply_default_permissions, fsync_path
from policygrad.weight_sync.base import (
    BUCKET_BYTES,
    LazyStateDict,
    PublishedWeights,
    split_by_bytes,
    tensor_specs,
    with_alias,
)

SHARED_MEMORY = Path("/dev/shm")
"""A file system in memory, through which processes of one machine exchange files."""
VERSIONS_IN_MEMORY = 3  # room that must be free there: two versions and the one that is being written
CURRENT_FILE = "current.json"
"""Names the version to serve, {"name": …, "version": …}, for servers that watch the folder."""
_VERSION_NAME = re.compile(r"(\.tmp-)?v\d{8,}-[0-9a-f]{8}")
WeightWriter = Callable[[Mapping[str, Tensor], Path], None]
"""Writes a policy's parameters into an empty folder, in an engine's format."""


@dataclass(frozen=True)
class WeightVersion:
    """One published version."""

    name: str  # name of its folder: the version, and a suffix that no other run has
    version: int
    path: Path
    bytes: int


class VersionFolder:
    """The folder that servers read from. They must see it under the same path."""

    def __init__(self, root: Path, write: WeightWriter) -> None:
        self.root, self.write = root, write

    def publish(self, weights: PublishedWeights) -> WeightVersion:
        """Write a version and make it the current one; older ones stay until `remove_old_versions`. Raises EngineError
        if it cannot be written, for example because the disk is full."""
        name = f"v{weights.version:08d}-{uuid.uuid4().hex[:8]}"
        temporary, final = self.root / f".tmp-{name}", self.root / name
        try:
            temporary.mkdir(parents=True)
            self.write(weights.tensors, temporary)
            apply_default_permissions(temporary)  # a server may run as another user
            for file in _list_files(temporary):  # before the rename
                fsync_path(file)
            os.replace(temporary, final)
            current = self.root / f".{CURRENT_FILE}.tmp"
            current.write_text(json.dumps({"name": name, "version": weights.version}), encoding="utf-8")
            os.replace(current, self.root / CURRENT_FILE)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise EngineError(
                f"{final}: the weights for the engine cannot be written: {error}. Make room, or choose another place: "
                "--sampler.folder DIR"
            ) from error
        return WeightVersion(name, weights.version, final, sum(file.stat().st_size for file in _list_files(final)))

    def remove_old_versions(self, *kept: WeightVersion) -> None:
        """Remove every version but these, and what a killed process has left."""
        for path in self._list_versions():
            if path.name not in {version.name for version in kept}:
                shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """Remove all versions, and the folder if nothing else is in it. Called when the run is over."""
        for path in self._list_versions():
            shutil.rmtree(path, ignore_errors=True)
        (self.root / CURRENT_FILE).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.root.rmdir()

    def _list_versions(self) -> list[Path]:
        """Return the folders that `publish` makes; the folder may contain other files."""
        return [path for path in self.root.glob("*") if path.is_dir() and _VERSION_NAME.fullmatch(path.name)]


def choose_folder(folder: Path, num_bytes: int) -> Path:
    """Return where to write weights for servers of this machine: a new folder in shared memory where it has room, else `folder`.

    Args:
        num_bytes: Of one version.
    """
    try:
        if shutil.disk_usage(SHARED_MEMORY).free < VERSIONS_IN_MEMORY * num_bytes:
            return folder
        return Path(tempfile.mkdtemp(prefix="policygrad-", dir=SHARED_MEMORY))
    except OSError:  # there is none, or it is not ours to write to
        return folder


def copy_to_cpu(x: Tensor) -> Tensor:
    """Return a contiguous copy in this machine's memory."""
    return x.detach().to("cpu", copy=True).contiguous()


def _list_files(folder: Path) -> list[Path]:
    """List subfolders too: a tokenizer with several chat templates has one for them."""
    return [path for path in folder.rglob("*") if path.is_file()]


# An adapter alone, as PEFT saves it: adapter_config.json and adapter_model.safetensors, which vLLM and SGLang load by name.
#
# Names and fields: vllm-project/vllm 0.32, vllm/lora/{peft_helper,lora_model,utils}.py; sgl-project/sglang 0.5,
# python/sglang/srt/lora/{lora_config,lora}.py. Both compute B·A times lora_alpha / r, without DoRA, trained biases or full modules.

# Fields of PEFT's LoraConfig that make an adapter more than B·A times lora_alpha / r for each module.
_UNSUPPORTED_FIELDS = (
    *("modules_to_save", "bias", "use_dora", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("trainable_token_indices", "target_parameters", "layer_replication", "lora_bias"),
)


def explain_unsupported_adapter(model: nn.Module) -> str:
    """Return the reason why servers cannot load the model's adapter by itself; empty if they can."""
    configs = adapter_configs(model)
    if not configs:
        return "the model has no adapter (--learner.lora adds one)"
    if len(configs) > 1:
        return f"the model has {len(configs)} adapters, and an engine samples with one"
    [config] = configs.values()
    if (kind := str(getattr(config.peft_type, "value", config.peft_type))) != "LORA":
        return f"the model's adapter is of type {kind}, and engines serve LORA"
    fields = [
        name for name in _UNSUPPORTED_FIELDS if getattr(config, name, None) not in (None, False, "none", {}, [], ())
    ]
    return f"the model's adapter has {', '.join(fields)}, which not every engine serves" if fields else ""


def make_adapter_writer(model: nn.Module) -> WeightWriter:
    """Return what writes the adapter of a model that has exactly one, from the published tensors.

    The writer raises EngineError if the learner publishes no adapter.
    """
    [(adapter, config)] = adapter_configs(model).items()

    def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
        from safetensors.torch import save_file

        # PEFT's files have …q_proj.lora_A.weight for …q_proj.lora_A.default.weight
        suffix = re.compile(rf"(\.lora_\w+)\.{re.escape(adapter)}(?=\.|$)")
        saved = {
            PEFT_PREFIX + suffix.sub(r"\1", name.removeprefix(PEFT_PREFIX)): copy_to_cpu(tensors[name])
            for name in tensors
            if ".lora_" in name
        }
        if not saved:
            raise EngineError(
                "the learner publishes no adapter. publish() must use its parameter names, or set --sampler.lora-sync merged"
            )
        save_file(saved, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        described = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": config.base_model_name_or_path or "",
            "r": config.r,
            "lora_alpha": config.lora_alpha,
            # by name, as in the file: not every engine reads a pattern or all-linear
            "target_modules": sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in saved}),
            "bias": "none",
            "use_dora": False,
            "use_rslora": False,
            "modules_to_save": None,
            "inference_mode": True,
        }
        (folder / ADAPTER_FILE).write_text(json.dumps(described, indent=2), encoding="utf-8")

    return write


# Full weights in transformers' format, which vLLM and SGLang read: config.json, tokenizer, model.safetensors.

MODEL_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def make_safetensors_writer(model: Any, tokenizer: Any, *, write_tied_head: bool = False) -> WeightWriter:
    """Return what writes published weights, with the model's configuration and tokenizer. Raises EngineError if there is no
    configuration, or the model is quantized to four bits.

    `write_tied_head`: write an output head tied to the embeddings a second time, under its own name.
    """
    check_exportable(model)
    head = find_tied_head(model) if write_tied_head else None

    def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        merged = merge_adapters(model, tensors)
        write_safetensors(merged if head is None else with_alias(merged, *head), folder)

    return write


def write_safetensors(tensors: Mapping[str, Tensor], folder: Path, max_bytes: int = BUCKET_BYTES) -> None:
    """Write safetensors files of at most `max_bytes`, named as by transformers, with one file's tensors in memory at a time."""
    from safetensors.torch import save_file

    parts = split_by_bytes(tensors, max_bytes)
    files = [f"model-{i:05}-of-{len(parts):05}.safetensors" for i in range(1, len(parts) + 1)]
    files = files if len(files) > 1 else [MODEL_FILE]
    for file, names in zip(files, parts, strict=True):
        part = {name: copy_to_cpu(tensors[name]) for name in names}
        save_file(part, folder / file, metadata={"format": "pt"})
        del part  # before the next one is gathered
    if len(files) == 1:
        return
    size = sum(spec.nbytes for spec in tensor_specs(tensors).values())
    weight_map = {name: file for file, names in zip(files, parts, strict=True) for name in names}
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_lazy_model(model: Any, tensors: LazyStateDict, folder: Path) -> None:
    """Save a model on the meta device as `model.save_pretrained(folder)` would: only the adapters if it has any."""
    if adapter_configs(model):
        for module_name, module in model.named_modules():
            for key, p in module._parameters.items():
                if p is not None and p.requires_grad:
                    tensor = tensors[f"{module_name}.{key}"].detach().to("cpu", copy=True)
                    module._parameters[key] = torch.nn.Parameter(tensor)
        model.save_pretrained(folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    for config in (model.config, getattr(model, "generation_config", None)):
        if config is not None:
            config.save_pretrained(folder)
    write_safetensors(tensors, folder)


def find_tied_head(model: Any) -> tuple[str, str] | None:
    """Return the name of the output head's weight and that of the embeddings it is tied to; None if it is not tied."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embeddings is None or head.weight is not embeddings.weight:
        return None
    names = {id(module): name.removeprefix(PEFT_PREFIX) for name, module in model.named_modules()}
    return f"{names[id(head)]}.weight", f"{names[id(embeddings)]}.weight"


def merge_adapters(model: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the full model's tensors with adapters merged, W + (α/r)·B·A. `tensors` must be the model's own, or gathered.

    Raises:
        EngineError: They are not those that the model has without adapters: a server would ignore them, and sample with old ones.
    """
    if not adapter_configs(model):
        return tensors
    lazy = isinstance(tensors, LazyStateDict)
    merged = merge_adapters_lazily(model, tensors) if lazy else dict(iter_merged_tensors(model))  # type: ignore[arg-type]
    _check_merged_names(model, tensor_specs(merged))
    return merged


def merge_adapters_lazily(model: nn.Module, tensors: LazyStateDict) -> LazyStateDict:
    """Return what `iter_merged_tensors` returns, for a model on the meta device whose parameters are gathered. An access
    raises ModelError if a sum is not finite."""
    adapted = outermost_peft_modules(model)
    adapted_parameters = {id(p) for _, module in adapted for p in module.parameters()}
    names = {id(p): name for name, p in model.named_parameters()}
    specs: dict[str, Tensor] = {}
    unchanged: dict[str, str] = {}
    merged: dict[str, tuple[str, nn.Module, str]] = {}  # to the module, by name, and its parameter without PEFT
    for name, parameter in model.named_parameters():
        if id(parameter) not in adapted_parameters:
            unchanged[name.removeprefix(PEFT_PREFIX)] = name
            specs[name.removeprefix(PEFT_PREFIX)] = tensors.specs[name]
    for name, module in adapted:
        base: Any = module.get_base_layer() if hasattr(module, "get_base_layer") else None
        result = module.modules_to_save[module.active_adapters[0]] if base is None else base
        for key, parameter in result.named_parameters():
            merged_name = f"{name}.{key}".removeprefix(PEFT_PREFIX)
            specs[merged_name] = tensors.specs[names[id(parameter)]]
            merged[merged_name] = name, module, key

    def gather(name: str) -> Tensor:
        if name in unchanged:
            return tensors.gather(unchanged[name])
        module_name, module, key = merged[name]
        module_copy = copy.deepcopy(module)
        for path, parameter in module.named_parameters(remove_duplicate=False):
            parent, _, attribute = path.rpartition(".")
            gathered = nn.Parameter(tensors.gather(names[id(parameter)]), requires_grad=False)
            module_copy.get_submodule(parent)._parameters[attribute] = gathered
        return unwrap_layer(module_copy, module_name).get_parameter(key).detach()

    return LazyStateDict(specs, gather)


def _check_merged_names(model: Any, merged: Mapping[str, Tensor]) -> None:
    """Raise EngineError unless names and shapes are those of the model without adapters."""
    shapes: Any = model.__dict__.get(_SHAPES)
    if shapes is None:
        plain = plain_parameters(model)
        shapes = model.__dict__[_SHAPES] = (
            None if plain is None else {name: tuple(p.shape) for name, p in plain.items()}
        )
    found = {name: tuple(x.shape) for name, x in merged.items()}
    odd = sorted(n for n in found if ".base_layer" in n or ".lora_" in n)
    if shapes is not None:
        odd = sorted(name for name, _ in found.items() ^ shapes.items())
    if odd:
        raise EngineError(
            f"the adapters of this {type(model).__name__} cannot be merged into what servers load: {odd[0]!r} is not in the model "
            "without adapters. Train other layers (--learner.lora targets=q_proj+v_proj), or set --sampler.engine local"
        )


_SHAPES = (
    "_policygrad_plain_shapes"  # attribute of a model with adapters: what `_check_merged_names` expects, made once
)


def check_exportable(model: Any) -> None:
    """Raise EngineError for a model whose full weights an engine cannot be given: in four bits, without a configuration, or with an
    adapter on a tied head or embedding."""
    if getattr(model, "is_quantized", False):
        raise EngineError(
            "weights in four bits cannot be published in full, because the trained part is not rounded like them. Train without "
            "bits=4, send the adapter alone to a server with the same weights (--sampler.lora-sync adapter), or set "
            "--sampler.engine local"
        )
    if not hasattr(model, "config") or not isinstance(model, torch.nn.Module):
        raise EngineError(
            f"{type(model).__name__} has no configuration for an engine. Use a transformers model, or --sampler.engine local"
        )
    if name := find_adapted_tied_layer(model):
        raise EngineError(
            f"the adapter changes {name}, and the model's configuration ties head and embedding to one matrix, so that an engine "
            "would change both. Merge the adapter first (policygrad export --merge), which gives each a matrix of its own, and "
            "train the result; or set --sampler.engine local"
        )
