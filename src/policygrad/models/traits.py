"""Tell what a model has beside a plain decoder: adapters, a vision tower, experts whose load is to be balanced.

These questions are asked of every model. What handles such a model is imported only for one that has it.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # prefix of the names in an adapter's file and in a PEFT model


def adapter_configs(model: nn.Module) -> dict[str, Any]:
    """Return PEFT's configurations by name, of a PEFT model or a transformers model with adapters; {} for any other."""
    return dict(getattr(model, "peft_config", None) or {})


def base_network(model: Any) -> Any:
    """Return the model of transformers that an adapter may be around."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def placeholder_id(model: Any) -> int | None:
    """Return the id of the token that stands for a part of a picture; None for a model that does not see."""
    config = getattr(model, "config", None)
    if config is None or getattr(config, "vision_config", None) is None:
        return None
    number = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    return None if number is None else int(number)


def picture_parameters(model: nn.Module) -> dict[str, bool]:
    """Return the parameters that only pictures pass through, by name: True for those of the projector between the vision tower and
    the language model, False for the tower's. Empty for a model that does not see."""
    if placeholder_id(model) is None:
        return {}
    base = base_network(model)
    language = {id(p) for part in (base.get_decoder(), base.get_output_embeddings()) for p in part.parameters()}
    projector = re.compile(r"connector|projector|merger|aligner|embed_vision")
    return {name: bool(projector.search(name)) for name, p in model.named_parameters() if id(p) not in language}


def is_language_module(model: nn.Module, name: str) -> bool:
    """Return whether a module is part of the language model, not of what only pictures pass through."""
    module = model.get_submodule(name)
    pictures, names = picture_parameters(model), {id(p): full for full, p in model.named_parameters()}
    return not any(names[id(p)] in pictures for p in module.parameters())


def has_experts(model: nn.Module) -> bool:
    """Return whether the model looks like a mixture of experts: a module or a tensor of it has that name."""
    return any("expert" in name for name, _ in model.named_parameters())


def read_balance_coefficient(model: nn.Module) -> float:
    """Return the coefficient of the load-balancing loss of its experts that a model's config asks for; 0 = it asks for none."""
    config: Any = getattr(model, "config", None)
    text = None if config is None else config.get_text_config()
    return (
        float(getattr(text, "router_aux_loss_coef", 0.0) or 0.0)
        if getattr(text, "output_router_logits", False)
        else 0.0
    )
