"""Frozen weights in four bits, under adapters (Dettmers et al. 2023, QLoRA), by bitsandbytes where it is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from policygrad.errors import ConfigError, ModelError, install_command
from policygrad.models.adapters import need_peft
from policygrad.models.lora import Lora


def quantisation(lora: Lora | None, dtype: torch.dtype) -> dict[str, Any]:
    """What `from_pretrained` is told of four bits; {} where they are not asked for.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    if lora is None or lora.bits is None:
        return {}
    need_peft("learner.lora bits=4", "qlora")
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"learner.lora bits=4 needs bitsandbytes, which is not installed: {install_command('qlora')}, or leave bits out "
            "for the weights as they are"
        )
    from transformers import BitsAndBytesConfig

    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **options)}  # type: ignore[no-untyped-call]


def settle_bits(model: nn.Module) -> None:
    """Makes sure of four bits that gradients pass through them.

    bitsandbytes packs weights on some processors anew, for inference, when they are first read in evaluation mode, in which a
    policy always is here; and what was packed gives wrong gradients without a word (seen with 0.50.2).

    Raises:
        ModelError: a layer whose way back is not the transpose of its way there.
    """
    layer: Any = None
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
            layer = layer or module
        layer = layer or (module if type(module).__name__ == "Linear4bit" else None)
    if layer is None:
        return
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    generator, device = torch.Generator().manual_seed(0), layer.weight.device
    x, y = (torch.randn(3, n, generator=generator).to(device, dtype) for n in (layer.in_features, layer.out_features))
    with torch.no_grad():
        there = float(((layer(x) - layer(torch.zeros_like(x))).double() * y.double()).sum())
    x.requires_grad_()
    (pulled,) = torch.autograd.grad((layer(x) * y).sum(), x)
    back = float((pulled.double() * x.detach().double()).sum())
    size = float(y.double().norm() * layer(x).detach().double().norm())
    if not abs(there - back) <= (0.02 if dtype == torch.bfloat16 else 1e-3) * size:
        raise ModelError(
            "learner.lora bits=4: this version of bitsandbytes gives wrong gradients on this device: take another one, or leave "
            "bits out"
        )
