"""Which fields of a configuration are honoured, refused, or without effect here."""

from __future__ import annotations

import tomllib
import warnings
from dataclasses import MISSING, Field, fields
from functools import cache
from importlib.resources import files
from typing import Any

_SET_BY_CHECKS = frozenset(
    {"bf16", "steps_per_generation", "generation_batch_size", "activation_checkpointing", "dataloader_pin_memory"}
)
"""Fields that a configuration's own checks fill."""
_MODES_WITHOUT_MINIMUM = ("token_truncate", "sequence_truncate")


@cache
def load_table() -> dict[str, dict[str, str]]:
    """Return the tables `honoured` (kind of field -> names), `refused` and `idle` (name -> reason)."""
    return tomllib.loads(files("policygrad.trl").joinpath("fields.toml").read_text(encoding="utf-8"))


def check_fields(config: Any) -> None:
    """Refuse what cannot be honoured, all of it at once, and say in one note what has no effect.

    Raises:
        ValueError: Fields that are refused have another value than their default, or several processes would each learn alone.
    """
    table, changed = load_table(), list_changed_fields(config)
    refused = [f"{name}={changed[name]!r}: {table['refused'][name]}" for name in changed if _is_refused(config, name)]
    if config.world_size > 1:
        refused.append(
            f"WORLD_SIZE={config.world_size}: every process would learn alone. Start the script with python, or train on several "
            "GPUs with `policygrad train --learner.world-size N`"
        )
    if config.n_gpu > 1:
        refused.append(f"{config.n_gpu} GPUs are visible, and one is trained on: choose it with CUDA_VISIBLE_DEVICES=0")
    if refused:
        raise ValueError("not supported here:\n  " + "\n  ".join(refused))
    idle = [f"{name} ({table['idle'][name]})" for name in changed if name in table["idle"]]
    if idle:
        warnings.warn("without effect here: " + "; ".join(idle), stacklevel=4)


def list_changed_fields(config: Any) -> dict[str, Any]:
    """Return the fields that somebody has set, with their values."""
    return {
        field.name: value
        for field in fields(config)
        if field.init
        and field.name not in _SET_BY_CHECKS
        and (value := getattr(config, field.name)) != _default(field)
        and not _is_filled(field.name, value)
    }


def _is_refused(config: Any, name: str) -> bool:
    if name == "vllm_importance_sampling_clip_min":
        return config.vllm_importance_sampling_mode in _MODES_WITHOUT_MINIMUM
    return name in load_table()["refused"]


def _is_filled(name: str, value: Any) -> bool:
    """Return True for a value that transformers puts in a field's place: a settled path, an object for None, text for a name."""
    empty: dict[str, Any] = {"fsdp": ([], "", None), "fsdp_config": (None, {}), "debug": ([], "")}
    if name in empty:
        plain = (
            {k: v for k, v in value.items() if v not in (None, False, 0, [], "")} if isinstance(value, dict) else value
        )
        return plain in empty[name]
    return False


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else None
