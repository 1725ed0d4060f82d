"""Low-rank adapters of several models on one frozen network: W·x + (α/r)·B·A·x, with the adapter that each row of a batch selects.

PEFT holds several adapters too, but a batch with rows of different ones goes through hooks that its own model class installs. Here
each linear layer asks one `AdapterSwitch`, so that learning (one adapter) and sampling (several) are the same code. The files are
PEFT's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from policygrad.errors import ConfigError, ModelError
from policygrad.models.adapters import EXPERT_NAMES, find_stacked_experts, find_unadaptable_layers
from policygrad.models.loading import at_least_float32
from policygrad.models.lora_config import ADAPTER_FILE
from policygrad.models.traits import ADAPTER_WEIGHTS, PEFT_PREFIX, picture_parameters

ALPHA = 32.0
"""α, which the Tinker API does not let clients choose: 32 at any rank (Schulman et al. 2025, LoRA Without Regret)."""


@dataclass(frozen=True)
class AdapterSpec:
    """A request for a new adapter: its rank, its seed and the layers that it changes."""

    rank: int
    seed: int = 0
    attention: bool = True
    mlp: bool = True
    head: bool = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"lora_config.rank must be at least 1, or 0 to train all weights, not {self.rank}")
        if not (self.attention or self.mlp or self.head):
            raise ConfigError("one of train_attn, train_mlp and train_unembed must be true")


class Adapter(nn.Module):
    """The trained matrices A [r, in] and B [out, r] of every adapted layer, by the layer's name. B is 0 at first."""

    def __init__(self, layers: Mapping[str, nn.Linear], spec: AdapterSpec) -> None:
        """
        Args:
            layers: The frozen layers to adapt, in the network's order, on which the random numbers depend.
        """
        super().__init__()
        self.spec, self.scale = spec, ALPHA / spec.rank
        self.pairs: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        generator = torch.Generator().manual_seed(spec.seed)
        for name, layer in layers.items():
            weight = at_least_float32(layer.weight.new_empty(0))
            a = torch.empty(spec.rank, layer.in_features, dtype=weight.dtype)
            nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
            b = torch.zeros(layer.out_features, spec.rank, dtype=weight.dtype)
            self.pairs[name] = nn.Parameter(a.to(weight.device)), nn.Parameter(b.to(weight.device))
            for matrix, parameter in zip("AB", self.pairs[name], strict=True):
                self.register_parameter(f"{name}/lora_{matrix}".replace(".", "/"), parameter)

    def tensors(self) -> dict[str, Tensor]:
        """Return the matrices by the names that PEFT's files have."""
        return {
            f"{PEFT_PREFIX}{name}.lora_{matrix}.weight": parameter.detach()
            for name, pair in self.pairs.items()
            for matrix, parameter in zip("AB", pair, strict=True)
        }

    def saved_tensors(self) -> dict[str, Tensor]:
        """Return the matrices, and the scale of each layer, as `checkpoint.read_back` names them."""
        scales = {f"{name}.scaling": torch.tensor(self.scale) for name in self.pairs}
        return {name.removeprefix(PEFT_PREFIX): x for name, x in self.tensors().items()} | scales

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy matrices from an adapter's file. Raises ModelError if they are not those of the same layers and rank."""
        expected = self.tensors()
        if odd := sorted(expected.keys() ^ tensors.keys()) or [
            n for n in expected if expected[n].shape != tensors[n].shape
        ]:
            raise ModelError(f"the saved adapter does not fit this model, for example in {odd[0]}")
        for name, parameter in expected.items():
            parameter.copy_(tensors[name])


@dataclass
class AdapterSwitch:
    """The adapters that the layers of a network add at present."""

    active: Sequence[tuple[Tensor | None, Adapter]] = ()
    """Adapters with the rows of the batch that use them; None = all rows."""
    layers: dict[str, AdaptedLinear] = field(default_factory=dict)

    @contextmanager
    def using(self, *active: tuple[Tensor | None, Adapter]) -> Iterator[None]:
        """Enclose passes with these adapters."""
        before, self.active = self.active, active
        try:
            yield
        finally:
            self.active = before

    def select_rows(self, adapters: Sequence[Adapter | None], device: torch.device) -> None:
        """Give row i of the batches that follow `adapters[i]`, None for the network alone."""
        rows: dict[int, list[int]] = {}
        for i, adapter in enumerate(adapters):
            rows.setdefault(id(adapter), []).append(i)
        distinct = {id(x): x for x in adapters}
        self.active = [
            (None if len(index) == len(adapters) else torch.tensor(index, device=device), adapter)
            for key, index in rows.items()
            if (adapter := distinct[key]) is not None
        ]

    def choose_layers(self, spec: AdapterSpec) -> dict[str, nn.Linear]:
        """Return the layers that a specification adapts, by name."""
        adapts = {"attention": spec.attention, "mlp": spec.mlp, "head": spec.head}
        return {name: layer.base for name, layer in self.layers.items() if adapts[layer.kind]}


class AdaptedLinear(nn.Module):
    """A frozen linear layer and what the active adapters add to it."""

    def __init__(self, base: nn.Linear, name: str, kind: str, switch: AdapterSwitch) -> None:
        """
        Args:
            kind: attention, mlp or head.
        """
        super().__init__()
        self.base, self.name, self.kind, self.switch = base, name, kind, switch

    @property
    def weight(self) -> Tensor:
        """The frozen matrix [out, in], whose shape others ask for."""
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        for rows, adapter in self.switch.active:
            if (pair := adapter.pairs.get(self.name)) is None:
                continue
            a, b = pair
            chosen = x if rows is None else x.index_select(0, rows)
            change = (F.linear(F.linear(chosen.to(a.dtype), a), b) * adapter.scale).to(out.dtype)
            out = out + change if rows is None else out.index_add(0, rows, change)
        return out


def make_adaptable(model: Any) -> AdapterSwitch:
    """Freeze a model and let its linear layers take adapters, in place.

    What only pictures pass through takes none, as in training: its rows are pictures, not texts that select adapters.

    Raises:
        ModelError: It has no linear layer that can.
    """
    switch, head = AdapterSwitch(), model.get_output_embeddings()
    model.requires_grad_(False)
    unadaptable, of_pictures = find_unadaptable_layers(model), picture_parameters(model)
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or name in unadaptable or f"{name}.weight" in of_pictures:
            continue
        is_attention = any("attn" in part or "attention" in part for part in name.split("."))
        kind = "head" if module is head else "attention" if is_attention else "mlp"
        switch.layers[name] = AdaptedLinear(module, name, kind, switch)
    if not switch.layers:
        raise ModelError(
            f"{type(model).__name__} has no linear layers that take adapters: train all its weights, with rank=0"
        )
    for name, layer in switch.layers.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer)
    return switch


def write_adapter(folder: Path, adapter: Adapter, model: nn.Module, base_model: str) -> None:
    """Write the adapter as PEFT does.

    Args:
        model: The network that it adapts.
        base_model: That network's folder or hub id.
    """
    # Where experts are stacked, PEFT would adapt them in place of a dense or shared layer that has one of their names, unless the
    # layer's weight is named as a parameter.
    reserved = EXPERT_NAMES if find_stacked_experts(model) else frozenset[str]()
    as_parameters = {name for name in adapter.pairs if name.rpartition(".")[2] in reserved}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.spec.rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(adapter.pairs.keys() - as_parameters),
        "target_parameters": sorted(f"{name}.weight" for name in as_parameters) or None,
        "inference_mode": True,
        "fan_in_fan_out": False,
        "modules_to_save": None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADAPTER_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {name: x.cpu().contiguous() for name, x in adapter.tensors().items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


@torch.no_grad()
def merge_adapter(model: nn.Module, switch: AdapterSwitch, adapter: Adapter) -> dict[str, Tensor]:
    """Return all tensors of the network with W + (α/r)·B·A in place of each adapted W, under the names of the original layers.

    A head that shares its matrix with the embedding becomes one of its own.
    """
    merged = {name.replace(".base.", "."): p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    for name, (a, b) in adapter.pairs.items():
        weight = switch.layers[name].base.weight
        merged[f"{name}.weight"] = (at_least_float32(weight) + adapter.scale * (b @ a)).to(weight.dtype)
    return merged
