"""Compare a saved model with what was trained, by reading it as other programs do.

A complete model is read by its class, into the host's memory, and an adapter by PEFT, onto a network without weights. All tensors
must be equal: a wrong, missing or renamed one, a head that is tied again, and an adapter on another layer are found on every
device, as nothing is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.errors import ModelError
from policygrad.models.loading import format_names, silence_load_report
from policygrad.models.lora_config import ADAPTER_FILE
from policygrad.models.traits import adapter_configs
from policygrad.utils.memory import measure_free_memory
from policygrad.weight_sync.base import tensor_specs

MEMORY_SHARE = 0.8
"""The share of the free memory that a copy may take. Of a larger model only names and shapes are compared, if accelerate, which
transformers needs for that, is installed."""


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return what saving a model saves: its parameters, or those of its adapter."""
    if not adapter_configs(model):
        return dict(model.named_parameters())
    from policygrad.models.adapters import adapter_tensors

    return adapter_tensors(model)


def describe_difference(folder: Path, model: nn.Module, trained: Mapping[str, Tensor]) -> str:
    """Return how what other programs read from a folder differs from what was trained; "" if it does not.

    Args:
        model: The network, whose weights are not used.
        trained: `saved_tensors`, or a complete model's parameters that are gathered one by one.
    """
    specs, is_adapter = tensor_specs(trained), bool(adapter_configs(model)) or (folder / ADAPTER_FILE).is_file()
    is_large = sum(x.nbytes for x in specs.values()) > MEMORY_SHARE * measure_free_memory()
    if is_large and not is_adapter and find_spec("accelerate") is None:
        return ""
    try:
        saved = _read_adapter(folder, model) if is_adapter else _read_model(folder, model, names_only=is_large)
    except ModelError as error:
        return str(error)
    except Exception as error:  # the class depends on what cannot be read
        return f"it cannot be read ({type(error).__name__}: {error})"
    common = specs.keys() & saved.keys()
    reshaped = {name for name in common if saved[name].shape != specs[name].shape}
    differences = {
        "lacks": specs.keys() - saved.keys(),
        "has beside them": saved.keys() - specs.keys(),
        "has in another shape": reshaped,
        "has with other values": (name for name in common - reshaped if not _is_equal(saved[name], trained[name])),
    }
    return ", ".join(f"it {what} {format_names(names)}" for what, x in differences.items() if (names := sorted(x)))


def _is_equal(saved: Tensor, trained: Tensor) -> bool:
    return saved.is_meta or torch.equal(saved, trained.detach().to("cpu", saved.dtype))


def _read_model(folder: Path, model: Any, *, names_only: bool) -> Mapping[str, Tensor]:
    """Return the tensors that a complete model's class reads from a folder, on the meta device if only their names matter.

    Raises:
        ModelError: Its configuration ties two of different values, of which some programs read one alone.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    place = {"device_map": "meta"} if names_only else {}
    with silence_load_report():
        loaded, info = type(model).from_pretrained(
            folder, dtype="auto", use_safetensors=True, output_loading_info=True, **place
        )
    ties = loaded.get_expanded_tied_weights_keys(all_submodels=True).items()
    if odd := [name for name, source in ties if loaded.get_parameter(name) is not loaded.get_parameter(source)]:
        raise ModelError(f"its config.json ties {format_names(odd)}, which the file has with values of its own")
    return {name: p.detach() for name, p in loaded.named_parameters() if name not in info["missing_keys"]}


def _read_adapter(folder: Path, model: nn.Module) -> Mapping[str, Tensor]:
    """Return the tensors and scales that PEFT reads from an adapter's folder."""
    from policygrad.models.adapters import read_adapter_tensors
    from policygrad.models.replica import build_plain_skeleton

    return read_adapter_tensors(folder, build_plain_skeleton(model))
