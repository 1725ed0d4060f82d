"""Models that are released with quantised weights: dequantised, frozen under adapters, or refused before they are loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from policygrad.errors import ConfigError, ModelError
from policygrad.models.lora_config import Lora

DEQUANTISED = {
    "mxfp4": ("Mxfp4Config", ()),
    "fp8": ("FineGrainedFP8Config", ("accelerate",)),
    "compressed-tensors": ("CompressedTensorsConfig", ("compressed_tensors", "accelerate")),
}
"""`quant_method` of config.json -> transformers' class of its settings, and the packages that reading it takes."""


@dataclass(frozen=True)
class ReleaseForm:
    """How the weights of a release are read."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `from_pretrained`."""
    stays_quantised: bool = False
    """The weights stay as they are, and only adapters are trained."""
    is_dequantised: bool = False


def read_release_form(
    config: Mapping[str, Any], lora: Lora | None, dtype: torch.dtype, what: str, *, has_adapter: bool = False
) -> ReleaseForm:
    """Return how a model is read, by the `quantization_config` of its config.json.

    Args:
        has_adapter: It is the base of an adapter.

    Raises:
        ModelError: It cannot be trained in this form.
        ConfigError: A package is missing, or the adapters' bits contradict the release.
    """
    settings = config.get("quantization_config")
    bits = lora.bits if lora is not None else None
    if not isinstance(settings, Mapping):
        return ReleaseForm()
    method = str(settings.get("quant_method", "?"))
    if method == "bitsandbytes":
        return _read_bitsandbytes(settings, lora is not None or has_adapter, what)
    if method not in DEQUANTISED:
        raise ModelError(
            f"{what} is released in {method}, which cannot be trained: give its release in bfloat16 (with --learner.lora bits=4 "
            f"its weights are quantised while loading). Read are {', '.join(DEQUANTISED)} and bitsandbytes"
        )
    if bits is not None:
        raise ConfigError(
            f"learner.lora bits={bits} quantises weights while loading, and {what} is released in {method}: leave bits out, or "
            "give its release in bfloat16"
        )
    kind, packages = DEQUANTISED[method]
    if missing := [package for package in packages if find_spec(package) is None]:
        names = " ".join(name.replace("_", "-") for name in missing)
        raise ConfigError(f"{what} is released in {method}, and reading that takes {names}: pip install {names}")
    import transformers

    precision = str(dtype).removeprefix("torch.")
    warnings.warn(
        f"{what} is released in {method}: its weights are dequantised to {precision}, trained and saved so",
        stacklevel=2,
    )
    return ReleaseForm({"quantization_config": getattr(transformers, kind)(dequantize=True)}, is_dequantised=True)


def _read_bitsandbytes(settings: Mapping[str, Any], has_adapters: bool, what: str) -> ReleaseForm:
    bits = 4 if settings.get("load_in_4bit") else 8
    if not has_adapters:
        raise ModelError(
            f"{what} is released in {bits} bits (bitsandbytes), in which only adapters can be trained: add --learner.lora rank=16, "
            "or give its release in bfloat16"
        )
    from policygrad.models.adapters import require_bitsandbytes

    require_bitsandbytes(f"{what}, which is released in {bits} bits,")
    return ReleaseForm(stays_quantised=True)


def load_dequantised(load: Callable[[str], tuple[Any, Any]], base: str, adapter: str, dtype: torch.dtype) -> Any:
    """Load the base of an adapter whose release stays quantised while it is trained, dequantise it and add the adapter.

    Args:
        load: Returns the model of a folder, and transformers' report.
    """
    model = load(base)[0].dequantize(dtype)
    model.is_quantized = False
    model.load_adapter(adapter)
    return model


def forget_quantisation(model: Any, dtype: torch.dtype) -> None:
    """Let a dequantised model be saved under its own names, and give its half-precision weights the run's precision, in place.

    transformers dequantises to bfloat16 in some forms, and would write the names of the release again.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    model._weight_conversions = get_model_conversion_mapping(model)
    for parameter in model.parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.to(dtype)
