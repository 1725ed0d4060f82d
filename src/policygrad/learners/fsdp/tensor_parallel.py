"""Tensor parallelism: each layer's matrices divided between ranks that compute the same texts, by transformers' plan.

A plan names modules: `colwise` divides outputs (heads, the inner width); `rowwise` divides inputs and sums the outputs over the
ranks; `replicated_with_grad_allreduce` is complete in every rank but reads divided activations, so its gradient is summed.
Everything else (embeddings, norms, head) is replicated. PyTorch's `parallelize_module` divides; `fully_shard` then shards what
each rank holds over the ranks that read other texts.

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
from policygrad.models.traits import adapter_configs

COLUMNS, ROWS, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
_WHOLE = "embedding_rowwise"  # of embeddings, in transformers before 5.23: they are not divided here
_HINT = "set learner.tensor_parallel=1, which shards the weights too"


def resolve_tp_plan(model: Any) -> dict[str, str]:
    """Return the style of each module that transformers' plan names, by module name; {} if there is no plan."""
    config = model.config.get_text_config() if hasattr(model, "config") else None
    plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    styles = {}
    for name, _ in model.named_modules():
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
        style = next((style for key, style in plan.items() if pattern == key or pattern.endswith(f".{key}")), None)
        if style is not None and style != _WHOLE:
            styles[name] = style
    return styles


def check_tensor_parallel(model: Any, size: int, algorithm: Algorithm) -> None:
    """Check that the model's layers can be divided between `size` ranks. Raises ConfigError if the model has no plan or
    cannot follow it, or the algorithm reads gradients layer by layer."""
    if size == 1:
        return
    option, name, plan = f"learner.tensor_parallel={size}", type(model).__name__, resolve_tp_plan(model)
    if adapter_configs(model):
        raise ConfigError(f"{option}: transformers' plans do not cover adapters (learner.lora): {_HINT}")
    if not plan:
        raise ConfigError(f"{option}: transformers has no tensor-parallel plan for {name}: {_HINT}")
    if unknown := sorted(set(plan.values()) - {COLUMNS, ROWS, SUMMED}):
        raise ConfigError(
            f"{option}: transformers' plan for {name} uses {', '.join(unknown)}; supported are {COLUMNS}, {ROWS} and {SUMMED}: "
            f"{_HINT}"
        )
    config = model.config.get_text_config()
    sizes = {key: getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads")}
    for module_name, style in plan.items():
        module = model.get_submodule(module_name)
        if style == SUMMED:
            continue
        if not isinstance(module, nn.Linear):
            raise ConfigError(f"{option}: {module_name} is not an nn.Linear and cannot be divided: {_HINT}")
        side = "outputs" if style == COLUMNS else "inputs"
        sizes[f"{module_name}'s {side}"] = module.out_features if style == COLUMNS else module.in_features
    for what, n in sizes.items():
        if n is not None and n % size:
            raise ConfigError(f"{option} does not divide {what}, {n}: choose a divisor")
    unsupported = {
        type(algorithm.update_rule).__name__: not algorithm.update_rule.uses_lr,
        "OptimalBaseline(norm='exact')": "grad_logp_sq_norm" in algorithm.needs,
    }
    for part in (part for part, is_used in unsupported.items() if is_used):
        raise ConfigError(
            f"{option}: {part} reads gradients layer by layer, which divided layers do not allow: {_HINT}"
        )


def apply_tensor_parallel(
    unit: nn.Module, names: Mapping[nn.Module, str], plan: Mapping[str, str], mesh: DeviceMesh
) -> None:
    """Reduce a layer with full parameters to this rank's part of its matrices, which the ranks of `mesh` share."""
    styles: dict[str, Any] = {COLUMNS: ColwiseParallel, ROWS: RowwiseParallel}
    for module in unit.modules():
        style = plan.get(names.get(module, ""), "")
        if style in styles and not hasattr(module.weight, "device_mesh"):
            parallelize_module(module, mesh, styles[style](), src_data_rank=None)
        elif style == SUMMED:
            _all_reduce_gradients(module, mesh.get_group())


class _AllReduceGradient(torch.autograd.Function):
    """The identity, whose gradient is summed over the ranks."""

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
    """Wrap the module's parameters in `_AllReduceGradient` while it is called."""
    originals = dict[str, nn.Parameter]()

    def enter(module: Any, args: Any) -> None:
        for key, p in module._parameters.items():
            if p is not None:
                originals[key] = p
                module._parameters[key] = _AllReduceGradient.apply(p, group)  # type: ignore[no-untyped-call]

    def restore(module: nn.Module, args: Any, out: Any) -> None:
        module._parameters.update(originals)
        originals.clear()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(restore, always_call=True)
