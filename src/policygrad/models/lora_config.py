"""LoRA settings, and the configuration files of adapter folders; nothing is loaded."""

from __future__ import annotations

import difflib
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policygrad.errors import ConfigError, ModelError

ADAPTER_FILE = "adapter_config.json"
DEFAULT_RANK, DEFAULT_ALPHA, DEFAULT_TARGETS = 16, 32.0, "all-linear"
LORA_LR_FACTOR = 10.0
"""Factor on the default learning rate: the best rate for adapters is about ten times that for all weights, in fine-tuning and in
reinforcement learning, with α = 32 at any rank (Schulman and Thinking Machines 2025, LoRA Without Regret)."""


@dataclass(frozen=True)
class Lora:
    """W + (α/r)·B·A in place of a frozen W, with random A [r, in] and initially B [out, r] = 0 (Hu et al. 2021, sec. 4.1).

    None = unset: the default, or the value of the adapter in the model's folder.
    """

    rank: int | None = None  # r; 16
    alpha: float | None = None  # α; 32
    targets: str | None = None
    """all-linear = every linear layer that supports an adapter, except the head; or layer names joined by + (q_proj+v_proj)."""
    bits: int | None = None
    """4 = quantize the frozen weights to four bits, NF4 with double quantization (Dettmers et al. 2023, QLoRA)."""

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ConfigError(f"learner.lora: rank must be at least 1, not {self.rank}")
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise ConfigError(f"learner.lora: alpha must be above 0 and finite, not {self.alpha}")
        if self.targets is not None and not all(self.targets.split("+")):
            raise ConfigError(f"learner.lora: targets must be names joined by +, or all-linear, not {self.targets!r}")
        if self.bits not in (None, 4):
            raise ConfigError(f"learner.lora: bits must be 4, or left out for unquantized weights, not {self.bits}")


def parse_lora(text: str) -> Lora | None:
    """Parse `rank=16,alpha=32,targets=all-linear`; None for an empty text.

    Raises:
        ConfigError: An unknown setting, or an invalid value.
    """
    if not text:
        return None
    types = {"rank": int, "alpha": float, "targets": str, "bits": int}
    settings: dict[str, Any] = {}
    for item in text.split(","):
        name, equals, value = item.strip().partition("=")
        if name not in types or not equals or name in settings:
            near = difflib.get_close_matches(name, types, n=1)
            hint = f"did you mean {near[0]}=…?" if near and near[0] != name else f"give {', '.join(types)}, once each"
            raise ConfigError(
                f"learner.lora {text!r}: {item.strip()!r} is not a setting: {hint} (rank=16,alpha=32,targets=all-linear)"
            )
        try:
            settings[name] = types[name](value)
        except ValueError:
            raise ConfigError(f"learner.lora {text!r}: {name} must be a number, not {value!r}") from None
    return Lora(**settings)


def is_model_folder(folder: Path) -> bool:
    """Return True when a folder contains a model, either complete or as an adapter."""
    return (folder / "config.json").is_file() or (folder / ADAPTER_FILE).is_file()


def read_adapter_config(path: str | Path) -> Mapping[str, Any] | None:
    """Read the configuration of an adapter folder; None for other folders, such as a complete model that also has an adapter.

    Raises:
        ModelError: A configuration that cannot be read, or names no base model.
    """
    file = Path(path) / ADAPTER_FILE
    if not file.is_file() or (Path(path) / "config.json").is_file():
        return None
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON ({error}); restore the adapter's own file") from error
    if not isinstance(config, dict) or not isinstance(config.get("base_model_name_or_path"), str):
        raise ModelError(f"{file} names no base model: write its folder or hub id there, as base_model_name_or_path")
    return config


def adapter_base(path: str | Path) -> str | None:
    """Return the base model of an adapter folder; None for any other folder."""
    config = read_adapter_config(path)
    return None if config is None else str(config["base_model_name_or_path"])


def read_lora(path: str | Path) -> Lora:
    """Read rank, α and targets of an adapter folder, None where its configuration has none.

    The targets of stacked experts are names of tensors there, which `Lora.targets` does not have.
    """
    config = read_adapter_config(path) or {}
    targets = None if config.get("target_parameters") else config.get("target_modules")
    return Lora(
        rank=config.get("r"),
        alpha=config.get("lora_alpha"),
        targets="+".join(sorted(targets)) if isinstance(targets, list) else targets,
    )


def check_same_adapter(option: Lora, adapter: Lora, model: str) -> None:
    """Raise ConfigError when the option contradicts the adapter in the model's folder."""
    for name in ("rank", "alpha", "targets"):
        value, existing = getattr(option, name), getattr(adapter, name)
        if value in (None, existing) or (name == "targets" and existing is None):
            continue
        if name == "targets" and (value == DEFAULT_TARGETS or {*value.split("+")} == {*(existing or "").split("+")}):
            continue
        raise ConfigError(
            f"learner.lora has {name}={value}, but {model} is an adapter with {name}={existing}, whose training continues: leave "
            f"{name} out, or begin a new adapter on the merged model, `policygrad export {model} --merge`"
        )


@contextmanager
def suppress_pattern_warning() -> Iterator[None]:
    """Hide PEFT's warning about patterns for stacked experts, which transformers adds even if no experts are adapted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
        yield
