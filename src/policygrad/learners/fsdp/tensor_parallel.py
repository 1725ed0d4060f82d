"""Each layer's matrices cut between processes that compute the same texts (tensor parallel), as transformers' plan for it says.

A plan names modules: `colwise`, whose outputs are cut (heads, the inner width); `rowwise`, whose inputs are cut and whose outputs
are summed over the processes; and `replicated_with_grad_allreduce`, whole in each, which looks at cut activations, so that its
gradient is summed. The rest, embeddings, norms and head, is the same in all of them, and computed in all of them. PyTorch's
`parallelize_module` cuts; then `fully_shard` cuts what is left over the processes that read other texts.

Source: transformers 5, src/transformers/integrations/tensor_parallel.py (`ALL_PARALLEL_STYLES`) and each configuration's
`base_model_tp_plan`; Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053, section 3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from policygrad.core.algorithm import Algorithm
from policygrad.errors import ConfigError
from policygrad.models.adapters import adapter_configs

COLUMNS, ROWS, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
_HINT = "set learner.tensor_parallel to 1, which spreads the weights too"


def resolve_tp_plan(model: Any) -> dict[str, str]:
    """How each module of a model that the plan names is cut, by the module's name; {} where transformers has no plan."""
    config = model.config.get_text_config() if hasattr(model, "config") else None
    plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    styles = {}
    for name, _ in model.named_modules():
        plain = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
        style = next((style for key, style in plan.items() if plain == key or plain.endswith(f".{key}")), None)
        if style is not None:
            styles[name] = style
    return styles


def check_tensor_parallel(model: Any, size: int, algorithm: Algorithm) -> None:
    """size: processes that a layer's matrices are cut between.

    Raises:
        ConfigError: a model without a plan, or that is not to be cut so; an algorithm that looks at gradients in ways of its own.
    """
    if size == 1:
        return
    name, plan = type(model).__name__, resolve_tp_plan(model)
    if adapter_configs(model):
        raise ConfigError(
            f"learner.tensor_parallel {size}: adapters (learner.lora) are not cut by transformers' plans: {_HINT}"
        )
    if not plan:
        raise ConfigError(
            f"learner.tensor_parallel {size}: transformers has no plan for cutting a {name}'s layers: {_HINT}"
        )
    if odd := sorted(set(plan.values()) - {COLUMNS, ROWS, SUMMED}):
        raise ConfigError(
            f"learner.tensor_parallel {size}: transformers' plan for a {name} cuts by {', '.join(odd)}, and here it is done by {COLUMNS}, "
            f"{ROWS} and {SUMMED} alone: {_HINT}"
        )
    config = model.config.get_text_config()
    heads = {word: getattr(config, word, None) for word in ("num_attention_heads", "num_key_value_heads")}
    sides = {f"{name}'s {side}": n for name, side, n in _split_sizes(model, plan)}
    for what, n in {**heads, **sides}.items():
        if n is not None and n % size:
            raise ConfigError(f"learner.tensor_parallel {size} does not divide {what}, {n}: give a divisor of it")
    ways = {
        type(algorithm.update_rule).__name__: not algorithm.update_rule.uses_lr,
        "OptimalBaseline(norm='exact')": "grad_logp_sq_norm" in algorithm.needs,
    }
    for way in (way for way, holds in ways.items() if holds):
        raise ConfigError(
            f"learner.tensor_parallel {size}: {way} looks at gradients in ways of its own, layer by layer: {_HINT}"
        )


def _split_sizes(model: nn.Module, plan: Mapping[str, str]) -> list[tuple[str, str, int]]:
    """(module, what is cut of it, how much there is)."""
    linear = [(name, style, model.get_submodule(name)) for name, style in plan.items() if style != SUMMED]
    if odd := [name for name, _, module in linear if not isinstance(module, nn.Linear)]:
        raise ConfigError(f"learner.tensor_parallel: {odd[0]} is no nn.Linear, and is not cut here: {_HINT}")
    return [
        (name, "outputs", module.out_features) if style == COLUMNS else (name, "inputs", module.in_features)
        for name, style, module in linear
        if isinstance(module, nn.Linear)
    ]


def apply_tensor_parallel(
    unit: nn.Module, names: Mapping[nn.Module, str], plan: Mapping[str, str], mesh: DeviceMesh
) -> None:
    """Leaves this process its part of the matrices in a layer whose parameters are here as a whole. names: of the model's modules.
    mesh: of the processes that share them."""
    styles: dict[str, Any] = {COLUMNS: ColwiseParallel, ROWS: RowwiseParallel}
    for module in unit.modules():
        style = plan.get(names.get(module, ""), "")
        if style in styles and not hasattr(module.weight, "device_mesh"):
            parallelize_module(module, mesh, styles[style](), src_data_rank=None)
        elif style == SUMMED:
            _all_reduce_gradients(module, mesh.get_group())


class _AllReduceGradient(torch.autograd.Function):
    """x; its gradient is summed over the processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def _all_reduce_gradients(module: nn.Module, group: Any) -> None:
    """While the module is called its parameters are such that their gradients are summed."""
    originals = dict[str, nn.Parameter]()

    def enter(module: Any, args: Any) -> None:
        for key, p in module._parameters.items():
            if p is not None:
                originals[key], module._parameters[key] = p, _AllReduceGradient.apply(p, group)  # type: ignore[no-untyped-call]

    def restore(module: nn.Module, args: Any, out: Any) -> None:
        module._parameters.update(originals)
        originals.clear()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(restore, always_call=True)
