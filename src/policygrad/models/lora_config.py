"""What is said of adapters without loading any: the option's words, and the folder that holds one."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from policygrad.errors import ConfigError, ModelError

ADAPTER_FILE = "adapter_config.json"
DEFAULT_RANK, DEFAULT_ALPHA, DEFAULT_TARGETS = 16, 32.0, "all-linear"
LORA_LR_FACTOR = 10.0
"""Factor on the default learning rate: the best rate of adapters is about ten times that of all weights, in fine-tuning and in
reinforcement learning, with α = 32 at any rank (Schulman and Thinking Machines 2025, LoRA Without Regret)."""


@dataclass(frozen=True)
class Lora:
    """W + (α/r)·B·A in the place of a frozen W, with A [r, in] drawn and B [out, r] = 0 at first (Hu et al. 2021, sec. 4.1).

    None = not said: the default, or what the adapter has that the model's folder holds.
    """

    rank: int | None = None
    """r; 16."""
    alpha: float | None = None
    """α; 32."""
    targets: str | None = None
    """all-linear = each linear layer that an adapter fits, but the head; or names of layers with + between (q_proj+v_proj)."""
    bits: int | None = None
    """4 = the frozen weights in four bits, NF4 with double quantisation (Dettmers et al. 2023, QLoRA)."""

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ConfigError(f"learner.lora: rank must be at least 1, not {self.rank}")
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise ConfigError(f"learner.lora: alpha must be above 0 and finite, not {self.alpha}")
        if self.targets is not None and not all(self.targets.split("+")):
            raise ConfigError(
                f"learner.lora: targets are names with + between them, or all-linear, not {self.targets!r}"
            )
        if self.bits not in (None, 4):
            raise ConfigError(f"learner.lora: bits must be 4, or left out for weights as they are, not {self.bits}")


def parse_lora(text: str) -> Lora | None:
    """`rank=16,alpha=32,targets=all-linear`; None of an empty text.

    Raises:
        ConfigError: another word, a value that is none.
    """
    if not text:
        return None
    kinds = {"rank": int, "alpha": float, "targets": str, "bits": int}
    found: dict[str, Any] = {}
    for item in text.split(","):
        name, equals, value = item.strip().partition("=")
        if name not in kinds or not equals or name in found:
            near = difflib.get_close_matches(name, kinds, n=1)
            hint = (
                f"did you mean {near[0]}=…?" if near and near[0] != name else f"there are {', '.join(kinds)}, once each"
            )
            raise ConfigError(
                f"learner.lora {text!r}: {item.strip()!r} says nothing: {hint} (rank=16,alpha=32,targets=all-linear)"
            )
        try:
            found[name] = kinds[name](value)
        except ValueError:
            raise ConfigError(f"learner.lora {text!r}: {name} must be a number, not {value!r}") from None
    return Lora(**found)


def is_model_folder(folder: Path) -> bool:
    """Whether there is a model in it, whole or as an adapter."""
    return (folder / "config.json").is_file() or (folder / ADAPTER_FILE).is_file()


def read_adapter_config(path: str | Path) -> Mapping[str, Any] | None:
    """What the folder of an adapter says of it; None of any other folder, of a whole model with an adapter beside it among them.

    Raises:
        ModelError: a configuration that cannot be read, or names no model.
    """
    file = Path(path) / ADAPTER_FILE
    if not file.is_file() or (Path(path) / "config.json").is_file():
        return None
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is no JSON ({error}); put the adapter's own back") from error
    if not isinstance(found, dict) or not isinstance(found.get("base_model_name_or_path"), str):
        raise ModelError(
            f"{file} names no model that it adapts: write its folder or hub id there, as base_model_name_or_path"
        )
    return found


def adapter_base(path: str | Path) -> str | None:
    """The model that the adapter in this folder adapts; None of a folder that holds no adapter."""
    found = read_adapter_config(path)
    return None if found is None else str(found["base_model_name_or_path"])


def read_lora(path: str | Path) -> Lora:
    """Rank, α and targets of the adapter in a folder, as far as its configuration says."""
    found = read_adapter_config(path) or {}
    targets = found.get("target_modules")
    return Lora(
        rank=found.get("r"),
        alpha=found.get("lora_alpha"),
        targets="+".join(sorted(targets)) if isinstance(targets, list) else targets,
    )


def check_same_adapter(asked: Lora, has: Lora, what: str) -> None:
    """Raises ConfigError where the option says another adapter than the one that is there."""
    for f in fields(Lora):
        said, is_ = getattr(asked, f.name), getattr(has, f.name)
        if f.name == "bits" or said is None:
            continue
        if f.name == "targets" and (
            said == DEFAULT_TARGETS or (is_ is not None and set(said.split("+")) == set(is_.split("+")))
        ):
            continue
        if said != is_:
            raise ConfigError(
                f"learner.lora says {f.name}={said}, and {what} is an adapter with {f.name}={is_}, which goes on training: leave "
                f"{f.name} out, or begin a new one from the merged model, `policygrad export {what} --merge`"
            )
