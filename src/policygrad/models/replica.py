"""A second model of the same architecture and weights, built from the configuration: a reference, π_old, a critic's backbone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from policygrad.errors import ModelError
from policygrad.models.adapters import (
    adapter_configs,
    copy_with_shared_weights,
    rebuild_with_adapters,
    shareable_parameter_ids,
)
from policygrad.models.loading import disable_dropout, load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer

ModelFactory = Callable[[], nn.Module]
"""Makes another instance of a model, whose weights are then replaced."""
_WAY_OUT = "pass build=, a function that makes another instance of the model (its weights are copied)"


def clone_model(model: nn.Module, build: ModelFactory | None = None) -> nn.Module:
    """The model once more: equal parameters and buffers of its own, tied where the model's are, no dropout, in evaluation mode
    and frozen. No random number is drawn. Of a model with adapters the adapters alone: what stands still under them is the same
    memory in both.

    build: makes the other instance; None = from the model's configuration, which a transformers model has, also under PEFT.

    Raises:
        ModelError: no configuration to build from; what was built has other parameters, or the model's own.
    """
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        made = _built(model) if build is None else build().to(next(model.parameters()).device)
    if ({*map(id, model.parameters())} & {*map(id, made.parameters())}) - shareable_parameter_ids(model):
        raise ModelError("build() gave back the model's own parameters: let it make another instance each time")
    other = {n: t.shape for n, t in _tensors(made)}
    wanted = {n: t.shape for n, t in _tensors(model)}
    if odd := wanted.items() ^ other.items():
        how = "its configuration" if build is None else "build()"
        raise ModelError(
            f"a second {type(model).__name__} made by {how} has other parameters ({min(odd)[0]}, say)"
            + (f": {_WAY_OUT}" if build is None else "")
        )
    for module in made.modules():
        disable_dropout(module)
    copy_weights(model, made)
    return made.eval().requires_grad_(False)


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Gives `target` the parameters and buffers of `source`, one tensor at a time, so that neither is ever held as a whole.

    Raises:
        ModelError: a tensor of another precision.
    """
    found = dict(_tensors(target))
    for name, tensor in _tensors(source):
        if found[name] is tensor:
            continue
        if found[name].dtype != tensor.dtype:
            raise ModelError(f"{name} is {tensor.dtype} in the model and {found[name].dtype} in its copy")
        found[name].copy_(tensor if hasattr(found[name], "full_tensor") else full_tensor(tensor))


def full_tensor(x: Tensor) -> Tensor:
    """The whole of a tensor that is spread over processes, each of which asks for it; any other as it is."""
    gather = getattr(x, "full_tensor", None)
    return x if gather is None else gather()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _built(model: nn.Module) -> nn.Module:
    """From the configuration, without weights until there is a place for each, like the model's own in precision and device."""
    shared = shareable_parameter_ids(model)
    if getattr(model, "is_quantized", False):
        return copy_with_shared_weights(model, shared)
    with torch.device("meta"):
        made = rebuild_with_adapters(model, _from_config) if adapter_configs(model) else _from_config(model)
    memo: dict[Tensor, Tensor] = {p: p for p in model.parameters() if id(p) in shared}
    others = dict(made.named_modules())
    for name, module in model.named_modules():
        for kind in ("_parameters", "_buffers"):
            own = getattr(others.get(name), kind, {})
            for key, tensor in getattr(module, kind).items():
                if tensor is not None and own.get(key) is not None:
                    own[key] = memo.setdefault(tensor, _empty(tensor))
    return made


def _empty(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, requires_grad=False)
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def _from_config(model: Any) -> nn.Module:
    make = getattr(type(model), "_from_config", None)
    if make is None or not hasattr(model, "config"):
        raise ModelError(f"{type(model).__name__} has no configuration to build a second one from: {_WAY_OUT}")
    config = copy.deepcopy(model.config)
    made: nn.Module = make(config, dtype=model.dtype, attn_implementation=config._attn_implementation)
    return made


def local_tensor(x: Tensor) -> Tensor:
    """This process's share of a tensor that is spread over processes; any other as it is."""
    share = getattr(x, "to_local", None)
    return x if share is None else share()


def redistribute_like(share: Tensor, x: Tensor) -> Tensor:
    """The tensor of x's shape, spread as x is, of which this process has `share`, in whatever shape."""
    if not hasattr(x, "to_local"):
        return share.view_as(x)
    like: Any = x  # a DTensor, which a torch without torch.distributed does not have
    mine = share.view_as(local_tensor(x.detach()))
    found: Tensor = type(like).from_local(
        mine, like.device_mesh, like.placements, run_check=False, shape=x.shape, stride=x.stride()
    )
    return found


def unshared_parameters(made: nn.Module, model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a second model that are not the first one's memory too."""
    theirs = {id(p) for p in model.parameters()}
    return {name: p for name, p in made.named_parameters() if id(p) not in theirs}


def trainable_parameters(made: nn.Module, model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a second model but those that stand still under the first one's adapters, which in one process are the same
    memory in both."""
    shared = shareable_parameter_ids(model)
    still = {name for name, p in model.named_parameters() if id(p) in shared}
    return {name: p for name, p in made.named_parameters() if name not in still}


def enable_gradients(made: nn.Module, model: nn.Module) -> nn.Module:
    """The second model, which trains: of one with adapters these alone."""
    for parameter in trainable_parameters(made, model).values():
        parameter.requires_grad_(True)
    return made


# Attention in plain operations, where the fused kernels have no forward mode, no double backward and no gradients in bulk.


class PlainAttention(TorchFunctionMode):
    """Inside, in this thread alone, `scaled_dot_product_attention` is what `sdpa_kernel(SDPBackend.MATH)` makes of it.

    That one switches the whole process: a sampler in another thread would compute in another order too, or not, as it happens.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _plain(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _plain(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """As `scaled_dot_product_attention`. What it hands a Boolean mask to adds it to the scores, as 0 and −∞."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
    found: Tensor = torch._scaled_dot_product_attention_math(query, key, value, attn_mask, *args, **kwargs)[0]
    return found


# Another model beside the policy, to compare it with: a reference that is not where it began, or a teacher.


def load_reference(
    name: str, policy: Tokenizer, *, dtype: str = "fp32", device: str = "cpu", trust_remote_code: bool = False
) -> nn.Module:
    """The model, frozen. It is given the token ids that the policy sampled, so both must mean the same by them.

    name: a folder, a hub id, a run's folder, `tiny`. policy: the policy's tokenizer.

    Raises:
        ModelError: no such model; a tokenizer with another vocabulary than the policy's, or than the model has embeddings for.
    """
    model = load_model(name, dtype=dtype, device=device, trust_remote_code=trust_remote_code).requires_grad_(False)
    tokenizer = load_tokenizer(name, model, trust_remote_code=trust_remote_code)
    ours, theirs = policy.hf.get_vocab(), tokenizer.hf.get_vocab()
    if odd := sorted(ours.items() ^ theirs.items(), key=lambda item: item[1]):
        text = odd[0][0]
        where = {model: ids.get(text, "no token") for model, ids in (("the policy", ours), (name, theirs))}
        raise ModelError(
            f"the reference {name!r} reads the policy's token ids, and its vocabulary is another: {len({t for t, _ in odd})} "
            f"tokens differ, {text!r} say, which is {where['the policy']} in the policy's and {where[name]} in its own. Take a "
            "model with the policy's tokenizer, of the same family say"
        )
    return model
