"""Weights for servers: one folder per version, whole or not there, with a file beside them that names the one to serve.

One folder per version, because a server that reads the same path again may read what it has read before.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.errors import EngineError
from policygrad.models.adapters import ADAPTER_WEIGHTS, PEFT_PREFIX, adapter_configs, iter_merged_tensors
from policygrad.models.lora_config import ADAPTER_FILE
from policygrad.utils.filesystem import apply_default_permissions, fsync_path
from policygrad.weight_sync.base import (
    BUCKET_BYTES,
    LazyStateDict,
    PublishedWeights,
    merge_adapters_lazily,
    split_by_bytes,
    tensor_specs,
    with_alias,
)

CURRENT_FILE = "current.json"
"""Names the version to serve: {"name": …, "version": …}; servers that watch the folder read it."""
SERVER_LOG = "server.log"
"""What a server that was started here has said."""
_NAME = re.compile(r"(\.tmp-)?v\d{8,}-[0-9a-f]{8}")
WeightWriter = Callable[[Mapping[str, Tensor], Path], None]
"""Puts a policy's parameters into an empty folder, as an engine reads them."""


@dataclass(frozen=True)
class WeightVersion:
    """One version as it lies on the disk."""

    name: str
    """Of its folder: the version, and what no other run's publication has."""
    version: int
    path: Path
    bytes: int


class VersionFolder:
    """The folder that servers read from; they see it under the same path."""

    def __init__(self, root: Path, write: WeightWriter) -> None:
        self.root, self.write = root, write

    def publish(self, weights: PublishedWeights) -> WeightVersion:
        """Writes a version and names it as the current one; older ones stay until `sweep`.

        Raises:
            EngineError: a disk that is full, say.
        """
        name = f"v{weights.version:08d}-{uuid.uuid4().hex[:8]}"
        temporary, final = self.root / f".tmp-{name}", self.root / name
        try:
            temporary.mkdir(parents=True)
            self.write(weights.tensors, temporary)
            apply_default_permissions(temporary)  # a server may be another user's
            for file in _files(temporary):  # before its name is
                fsync_path(file)
            os.replace(temporary, final)
            _replace(self.root / CURRENT_FILE, json.dumps({"name": name, "version": weights.version}))
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise EngineError(
                f"{final}: the weights for the engine cannot be written: {error}. See to it, or put them elsewhere, "
                "--sampler.folder DIR"
            ) from error
        return WeightVersion(name, weights.version, final, sum(file.stat().st_size for file in _files(final)))

    def remove_old_versions(self, current: WeightVersion) -> None:
        """Removes every version but this one, and what a killed process has left."""
        for path in self._versions():
            if path.name != current.name:
                shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """All that was published, and the folder where nothing else is in it: the run is over, and its model saved elsewhere."""
        for path in self._versions():
            shutil.rmtree(path, ignore_errors=True)
        for name in (CURRENT_FILE, SERVER_LOG):
            (self.root / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.root.rmdir()

    def _versions(self) -> list[Path]:
        """Folders that `publish` has made; what else is there is somebody's."""
        return [path for path in self.root.glob("*") if path.is_dir() and _NAME.fullmatch(path.name)]


def _files(folder: Path) -> list[Path]:
    """Below it too: a tokenizer with several chat templates has a folder for them."""
    return [path for path in folder.rglob("*") if path.is_file()]


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


# An adapter alone, as PEFT saves one: adapter_config.json and adapter_model.safetensors, which vLLM and SGLang load by a name.
#
# Names and fields: vllm-project/vllm 0.32, vllm/lora/{peft_helper,lora_model,utils}.py; sgl-project/sglang 0.5,
# python/sglang/srt/lora/{lora_config,lora}.py. Both take B·A times lora_alpha / r, without DoRA, trained biases or whole modules.

_ODD = (
    "modules_to_save",
    "bias",
    "use_dora",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "lora_bias",
)
"""Fields of PEFT's LoraConfig that make of an adapter more than B·A times lora_alpha / r for each module."""


def explain_unsupported_adapter(model: nn.Module) -> str:
    """Why no adapter of the model's can be given to an engine alone; "" = one can."""
    configs = adapter_configs(model)
    if not configs:
        return "the model has no adapters, which --learner.lora puts in"
    if len(configs) > 1:
        return f"the model has {len(configs)} adapters, and an engine draws with one"
    [config] = configs.values()
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        return f"the model's adapters are of the kind {kind}, and engines serve LORA"
    odd = [name for name in _ODD if getattr(config, name, None) not in (None, False, "none", {}, [], ())]
    return f"the model's adapters have {', '.join(odd)}, which not every engine serves" if odd else ""


def make_adapter_writer(model: nn.Module) -> WeightWriter:
    """model: with one adapter that is fit; what is written are its tensors among those that are published.

    Raises:
        EngineError: when it writes, for a learner that publishes no adapter.
    """
    [(adapter, config)] = adapter_configs(model).items()

    def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
        from safetensors.torch import save_file

        found = {
            _name(name, adapter): tensors[name].detach().to("cpu", copy=True).contiguous()
            for name in tensors
            if ".lora_" in name
        }
        if not found:
            raise EngineError(
                "the learner publishes no adapter: let publish() name its parameters, or take --sampler.lora-sync whole"
            )
        save_file(found, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (folder / ADAPTER_FILE).write_text(json.dumps(_described(config, found), indent=2), encoding="utf-8")

    return write


def _name(name: str, adapter: str) -> str:
    """In PEFT's file: …q_proj.lora_A.weight for …q_proj.lora_A.default.weight."""
    plain = re.sub(rf"(\.lora_\w+)\.{re.escape(adapter)}(?=\.|$)", r"\1", name.removeprefix(PEFT_PREFIX))
    return PEFT_PREFIX + plain


def _described(config: Any, names: Iterable[str]) -> dict[str, Any]:
    """adapter_config.json. Modules are named as they are in the file: a pattern, or all-linear, is not for every engine."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base_model_name_or_path or "",
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "target_modules": sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in names}),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


# Weights as transformers reads and writes them: config.json, tokenizer, model.safetensors. vLLM and SGLang load it.

MODEL_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def make_safetensors_writer(model: Any, tokenizer: Any, *, write_tied_head: bool = False) -> WeightWriter:
    """model: transformers' own, whose configuration is written, with the weights that are published; tokenizer: transformers' own.
    head_too: write an output head that is tied to the embeddings a second time, under its own name.

    Raises:
        EngineError: a model without a configuration, or one in four bits.
    """
    check_exportable(model)
    head = find_tied_head(model) if write_tied_head else None

    def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        every = merge_adapters(model, tensors)
        write_safetensors(every if head is None else with_alias(every, *head), folder)

    return write


def write_safetensors(tensors: Mapping[str, Tensor], folder: Path, most: int = BUCKET_BYTES) -> None:
    """One file of safetensors, or where they are more than `most` bytes several and their index, as transformers names them. No
    more than a file's are held at a time."""
    from safetensors.torch import save_file

    parts = split_by_bytes(tensors, most)
    single = len(parts) == 1
    files = [MODEL_FILE if single else f"model-{i:05}-of-{len(parts):05}.safetensors" for i in range(1, len(parts) + 1)]
    for file, names in zip(files, parts, strict=True):
        own = {name: tensors[name].detach().to("cpu", copy=True).contiguous() for name in names}
        save_file(own, folder / file, metadata={"format": "pt"})
        del own  # before the next are gathered
    if single:
        return
    size = sum(tensor.nbytes for tensor in tensor_specs(tensors).values())
    places = {name: file for file, names in zip(files, parts, strict=True) for name in names}
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_lazy_model(model: Any, tensors: LazyStateDict, folder: Path) -> None:
    """As `model.save_pretrained(folder)`, of a model without numbers: of one with adapters these alone, any other by its files."""
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
    for about in (model.config, getattr(model, "generation_config", None)):
        if about is not None:
            about.save_pretrained(folder)
    write_safetensors(tensors, folder)


def find_tied_head(model: Any) -> tuple[str, str] | None:
    """(the head's name, that of the embeddings whose tensor it is); None where it has one of its own."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embeddings is None or head.weight is not embeddings.weight:
        return None
    names = {id(module): name.removeprefix(PEFT_PREFIX) for name, module in model.named_modules()}
    return f"{names[id(head)]}.weight", f"{names[id(embeddings)]}.weight"


def merge_adapters(model: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The whole model's by name; where it has adapters, W + (α/r)·B·A for W, of the model's own tensors, which are those that are
    published, or of such as are gathered."""
    if not adapter_configs(model):
        return tensors
    return (
        merge_adapters_lazily(model, tensors)
        if isinstance(tensors, LazyStateDict)
        else dict(iter_merged_tensors(model))
    )


def check_exportable(model: Any) -> None:
    """Raises EngineError for a model whose weights an engine cannot be given."""
    if getattr(model, "is_quantized", False):
        raise EngineError(
            "weights in four bits cannot be published whole, as what is trained is not rounded like them: train without bits=4, "
            "send the adapter alone to a server that has the same weights, --sampler.lora-sync adapter, or take --sampler.engine "
            "local"
        )
    if not hasattr(model, "config") or not isinstance(model, torch.nn.Module):
        raise EngineError(
            f"{type(model).__name__} has no configuration that an engine could be given: take a transformers model, or "
            "--sampler.engine local"
        )
