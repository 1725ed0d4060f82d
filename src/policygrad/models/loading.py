"""Loading a causal language model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from policygrad.errors import ConfigError, ModelError
from policygrad.models.adapters import (
    adapt,
    adapters_of,
    as_in_file,
    need_peft,
    only_they_train,
)
from policygrad.models.completeness import check_complete, unreported
from policygrad.models.four_bits import quantisation, settle_bits
from policygrad.models.hub import check_name, locate
from policygrad.models.lora import FILE, Lora, base_of, check_agrees, described, holds_model
from policygrad.models.precision import DTYPES, keep_few_primitives
from policygrad.models.trust import cannot_load, checked_config, refuse_pickles, weights

EMBEDDED = "tiny"
Loaded = Mapping[str, Any]
"""Names of tensors by what became of them, as transformers tells."""


def resolve(model: str) -> str:
    """A directory or hub id; `tiny` is the base model inside the package, a run's folder the model it trained."""
    if model == EMBEDDED:
        return str(Path(__file__).parents[1] / "models" / EMBEDDED)
    check_name(model)
    trained = Path(model) / "model"
    return str(trained) if holds_model(trained) else locate(model)


def load_model(
    model: str | nn.Module,
    *,
    dtype: str = "fp32",
    device: str = "cpu",
    trust_remote_code: bool = False,
    lora: Lora | None = None,
    seed: int = 0,
) -> nn.Module:
    """The model without dropout, in evaluation mode, so that an unchanged policy's ratio is 1.

    A module in a name's place is used as it is, in its own precision and with the parameters that require a gradient in it. Of
    the folder of an adapter, the model that it adapts with the adapter in it, which alone trains.
    trust_remote_code: whether Python code in the model's folder or repository may run. lora: adapters to put in, where there are
    none; their A is drawn by `seed`.

    Raises:
        ModelError: no such model, one that is a pickle or needs code that is not trusted, or an object that is no causal language
            model of transformers' kind.
        ConfigError: adapters that cannot be put in, or are others than those that are there.
    """
    if DTYPES[dtype] == torch.bfloat16 and device == "cpu":
        keep_few_primitives()
    if isinstance(model, str):
        loaded = _load(model, dtype, device, trust_remote_code, lora)
    else:
        loaded = _checked(model)
        if lora is not None and lora.bits is not None:
            raise ConfigError(
                "learner.lora bits=4 reads the weights in four bits, and the model is an object: leave bits out"
            )
    if not getattr(loaded, "is_quantized", False):
        loaded = loaded.to(device)
    if lora is not None and not (isinstance(model, str) and adapters_of(loaded)):
        loaded = adapt(loaded, lora, base=origin(model), seed=seed)
    for module in loaded.modules():
        without_dropout(module)
    return loaded.eval()


def origin(model: str | nn.Module) -> str:
    """What an adapter's folder is to name as the model it adapts: a hub id, or a folder wherever it is read from."""
    name = resolve(model) if isinstance(model, str) else str(getattr(model, "name_or_path", ""))
    return str(Path(name).resolve()) if name and Path(name).is_dir() else name


def _load(model: str, dtype: str, device: str, trust: bool, lora: Lora | None) -> nn.Module:
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    path = resolve(model)
    refuse_pickles(path, f"the model {model!r}")
    _refuse_encoder_decoder(checked_config(path, f"the model {model!r}"), model)
    adapted = base_of(path)
    if adapted is not None:
        need_peft(f"the model {model!r}, which is an adapter,")
        check_agrees(lora or Lora(), described(path), model)
        refuse_pickles(adapted, f"the model {adapted!r}, which {model!r} adapts,")
        checked_config(adapted, f"the model {adapted!r}, which {model!r} adapts,")
    bits = quantisation(lora, DTYPES[dtype])
    try:
        loaded, info, base = _pretrained(
            path, DTYPES[dtype], trust, adapted, bits | ({"device_map": device} if bits else {})
        )
    except Exception as error:  # of which class depends on what is wrong with which file
        lost = adapted is not None and not Path(adapted).is_dir() and Path(adapted).is_absolute()
        if lost:
            raise ModelError(
                f"{model!r} is an adapter of {adapted!r}, and there is no such folder: write where it is now into "
                f"{Path(path) / FILE}, as base_model_name_or_path"
            ) from error
        raise cannot_load(f"the model {model!r}", error, "config.json and safetensors", path) from error
    if base is not None:
        check_complete(*base, f"the model {model!r} adapts")
    check_complete(loaded, info, f"the model {model!r}")
    if bits:
        settle_bits(loaded)
    if not adapters_of(loaded):
        return loaded.requires_grad_(True) if not bits else loaded
    only_they_train(loaded)
    as_in_file(loaded, path)
    return loaded


def _refuse_encoder_decoder(config: Mapping[str, Any], model: str) -> None:
    """Half of such a model can be loaded as a causal one, and would read nothing of what its other half says."""
    if config.get("is_encoder_decoder") is True:
        raise ModelError(
            f"the model {model!r} ({config.get('model_type')}) is an encoder with a decoder, which reads its prompt apart: take a "
            "causal language model, a decoder alone"
        )


def _checked(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ModelError(f"a model is a folder, a hub id or a torch module, not {type(model).__name__}")
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise ModelError(
            f"{type(model).__name__} has no `config` as a causal language model of transformers has: give one of those, or "
            "the folder it was saved in"
        )
    return model


def _pretrained(
    path: str, dtype: torch.dtype, trust: bool, adapted: str | None, options: Mapping[str, Any]
) -> tuple[nn.Module, Loaded, tuple[nn.Module, Loaded] | None]:
    """The model and what was loaded of it; of an adapter alone also its base, without weights, and what would be loaded.

    With SDPA where the architecture has it, else (Gemma 2, BLOOM, Mamba) with what transformers chooses.
    """
    from transformers import AutoModelForCausalLM

    load: Any = partial(
        AutoModelForCausalLM.from_pretrained,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **weights(trust),
        **options,
    )
    with unreported():  # sizes that mismatch are refused by name, and not by transformers, which names none
        base = None
        if adapted is not None and not options:  # transformers tells of the adapter only
            base = load(adapted, device_map="meta")
        try:
            loaded, info = load(path, attn_implementation="sdpa")
        except ValueError as error:
            if "attention implementation" not in str(error):
                raise
            loaded, info = load(path)
    return loaded, info, base


def without_dropout(module: nn.Module) -> None:
    """Modules and plain numbers (`attention_dropout`, `resid_pdrop`, `layerdrop`): recomputed activations are in training mode."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        module.p = 0.0
    for name, value in list(vars(module).items()):
        if "drop" in name and isinstance(value, float):
            setattr(module, name, 0.0)


def context_length(model: nn.Module) -> int | None:
    """Positions the model was made for, in tokens; None when its configuration does not say."""
    config: Any = model.config
    config = config.get_text_config()  # that of the language model, where there is a vision tower beside it
    return getattr(config, "max_position_embeddings", None)
