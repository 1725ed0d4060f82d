"""A second model with the same architecture and weights: a reference, π_old, or a critic's backbone."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from policygrad.errors import ModelError
from policygrad.models.loading import Float32Head, compute_head_in_float32, disable_dropout, load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.models.traits import adapter_configs, picture_parameters

ModelFactory = Callable[[], nn.Module]  # creates another instance of a model, whose weights are then replaced
_BUILD_HINT = "pass build=, a function that creates another instance of the model (its weights are copied)"


def clone_model(model: nn.Module, build: ModelFactory | None = None) -> nn.Module:
    """Return a frozen copy of a model: equal parameters and buffers, tied as in the model, no dropout, in evaluation mode.

    No random number is used. In a model with adapters only the adapters are copied; the frozen weights below share memory.

    Args:
        build: Creates the other instance; None = from the configuration of a transformers model, also under PEFT.

    Raises:
        ModelError: No configuration to build from, or the new model has different parameters, or the model's own.
    """
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        clone = _build_clone(model) if build is None else build().to(next(model.parameters()).device)
    if ({*map(id, model.parameters())} & {*map(id, clone.parameters())}) - shareable_parameter_ids(model):
        raise ModelError("build() returned the model's own parameters: it must create another instance each time")
    if odd := {n: t.shape for n, t in _tensors(model)}.items() ^ {n: t.shape for n, t in _tensors(clone)}.items():
        how = "its configuration" if build is None else "build()"
        raise ModelError(
            f"a second {type(model).__name__} made by {how} has different parameters (for example {min(odd)[0]})"
            + (f": {_BUILD_HINT}" if build is None else "")
        )
    heads = (getattr(x, "get_output_embeddings", lambda: None)() for x in (model, clone))
    if isinstance(next(heads), Float32Head):
        compute_head_in_float32(clone)
    copy_weights(model, disable_dropout(clone))
    return clone.eval().requires_grad_(False)


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy parameters and buffers one tensor at a time, so that neither model is gathered completely.

    Raises:
        ModelError: Two tensors of different precision.
    """
    targets = dict(_tensors(target))
    for name, tensor in _tensors(source):
        copied = targets[name]
        if copied is tensor:
            continue
        if copied.dtype != tensor.dtype:
            raise ModelError(f"{name} is {tensor.dtype} in the model and {copied.dtype} in its copy")
        copied.copy_(tensor if hasattr(copied, "full_tensor") else full_tensor(tensor))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def shareable_parameter_ids(model: nn.Module) -> set[int]:
    """Return ids of the parameters that a second model may share with this one: the frozen weights under adapters."""
    if not adapter_configs(model):
        return set()
    from policygrad.models.adapters import added_parameter_ids

    return {id(p) for p in model.parameters() if not p.requires_grad} - added_parameter_ids(model)


def _build_clone(model: nn.Module) -> nn.Module:
    """Build a model from the configuration on the meta device, then allocate tensors like the model's own."""
    shared = shareable_parameter_ids(model)
    if getattr(model, "is_quantized", False):  # it cannot be built from a configuration
        return copy.deepcopy(model, {id(p): p for p in model.parameters() if id(p) in shared})
    with torch.device("meta"):
        if adapter_configs(model):
            from policygrad.models.adapters import rebuild_with_adapters

            clone = rebuild_with_adapters(model, _build_from_config)
        else:
            clone = _build_from_config(model)
    memo: dict[Tensor, Tensor] = {p: p for p in model.parameters() if id(p) in shared}
    modules = dict(clone.named_modules())
    for name, module in model.named_modules():
        for kind in ("_parameters", "_buffers"):
            copies = getattr(modules.get(name), kind, {})
            for key, tensor in getattr(module, kind).items():
                if tensor is not None and copies.get(key) is not None:
                    empty = torch.empty_like(tensor, requires_grad=False)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    copies[key] = memo.setdefault(tensor, nn.Parameter(empty, False) if is_parameter else empty)
    return clone


def _build_from_config(model: Any) -> nn.Module:
    if not hasattr(type(model), "_from_config") or not hasattr(model, "config"):
        raise ModelError(f"{type(model).__name__} has no configuration to build a second one from: {_BUILD_HINT}")
    config = copy.deepcopy(model.config)
    parts = {name: part for name in config.sub_configs if (part := getattr(config, name, None)) is not None}
    attention: Any = {name: part._attn_implementation for name, part in parts.items()}
    attention = {"": config._attn_implementation} | attention if attention else config._attn_implementation
    return type(model)._from_config(  # type: ignore[no-any-return]
        config, dtype=model.dtype, attn_implementation=attention
    )


def build_plain_skeleton(model: Any) -> nn.Module:
    """Return the model without adapters and weights, on the meta device. Raises ModelError if it has no configuration."""
    with torch.device("meta"):
        return _build_from_config(model.get_base_model() if hasattr(model, "get_base_model") else model)


def plain_parameters(model: Any) -> dict[str, Tensor] | None:
    """Return the parameters, on the meta device, that the model has without adapters; None if it cannot be built a second time."""
    try:
        return dict(build_plain_skeleton(model).named_parameters())
    except ModelError:
        return None


def unshared_parameters(clone: nn.Module, model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a second model that do not share memory with the first."""
    shared = {id(p) for p in model.parameters()}
    return {name: p for name, p in clone.named_parameters() if id(p) not in shared}


def trainable_parameters(clone: nn.Module, model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a second model except the frozen weights under the first one's adapters.

    By name rather than by memory: in one process these weights are shared, but not across processes.
    """
    shared = shareable_parameter_ids(model)
    frozen = {name for name, p in model.named_parameters() if id(p) in shared}
    return {name: p for name, p in clone.named_parameters() if name not in frozen}


def enable_gradients(clone: nn.Module, model: nn.Module) -> nn.Module:
    """Make a second model trainable: all of it, or only its adapters if it has some.

    A vision tower that is frozen in the first model stays frozen.
    """
    pictures = picture_parameters(model)
    frozen = {name for name, p in model.named_parameters() if name in pictures and not p.requires_grad}
    for name, parameter in trainable_parameters(clone, model).items():
        parameter.requires_grad_(name not in frozen)
    return clone


def replace_parameters(
    modules: Iterable[nn.Module],
    make: Callable[[nn.Parameter], Tensor],
    created: dict[Tensor, nn.Parameter] | None = None,
) -> None:
    """Replace the modules' parameters by `make(parameter)`, tied ones by one; keep parameters that it returns as they are.

    `created` has the parameters made by earlier calls, by the one that they replace.
    """
    created = {} if created is None else created
    for module in modules:
        for key, p in module._parameters.items():
            if p is not None:
                if p not in created:
                    new = make(p)
                    created[p] = new if isinstance(new, nn.Parameter) else nn.Parameter(new, p.requires_grad)
                module._parameters[key] = created[p]


# Frozen weights in four bits (bitsandbytes): bytes of packed numbers, with their scales in an attribute. They are no numbers to
# convert, and have no rows to shard.


def is_packed(p: Tensor) -> bool:
    """Return whether a parameter is a weight in four bits."""
    return getattr(p, "quant_state", None) is not None


def copy_packed(p: Tensor, content: Tensor) -> nn.Parameter:
    """Return a parameter of the kind of a packed one, with its scales, on the device of its content."""
    return make_packed(type(p), content, {key: x for key, x in vars(p).items() if key != "module"})


def make_packed(kind: type[Tensor], content: Tensor, attributes: Mapping[str, Any]) -> nn.Parameter:
    """Return a packed parameter, frozen, from its content and its attributes, scales among them, which move to its device."""
    made: Any = torch.Tensor._make_subclass(kind, content, False)
    vars(made).update(attributes)
    if not content.is_meta:
        made.quant_state.to(content.device)
    return made  # type: ignore[no-any-return]


# Tensors that are sharded across processes (DTensor).


def full_tensor(x: Tensor) -> Tensor:
    """Gather a sharded tensor, a collective operation; return any other tensor as it is."""
    gather = getattr(x, "full_tensor", None)
    return x if gather is None else gather()


def local_tensor(x: Tensor) -> Tensor:
    """Return this process's shard of a sharded tensor; any other tensor as it is."""
    to_local = getattr(x, "to_local", None)
    return x if to_local is None else to_local()


Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offset, size) of a part of a tensor


def local_box(x: Tensor) -> Box:
    """Return the box that this process holds of a tensor; all of one that is not sharded.

    A `_StridedShard` splits after the others: tensor parallelism has divided the rows first, and FSDP divides the part of the ranks
    that hold the same.
    """
    offset, size = [0] * x.ndim, list(x.shape)
    if not hasattr(x, "to_local"):
        return tuple(offset), tuple(size)
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    sharded: Any = x
    splits = zip(sharded.placements, sharded.device_mesh.get_coordinate() or (), sharded.device_mesh.shape, strict=True)
    for p, at, count in sorted(splits, key=lambda split: isinstance(split[0], _StridedShard)):
        if isinstance(p, (Shard, _StridedShard)):  # before torch 2.12 the second is a subclass of the first
            each = -(-size[p.dim] // count)
            begin = min(at * each, size[p.dim])
            offset[p.dim] += begin
            size[p.dim] = min(each, size[p.dim] - begin)
    return tuple(offset), tuple(size)


def redistribute_like(shard: Tensor, x: Tensor) -> Tensor:
    """Return a tensor sharded like x, given this process's shard of it, in any shape."""
    if not hasattr(x, "to_local"):
        return shard.view_as(x)
    like: Any = x  # a DTensor, which does not exist in a torch without torch.distributed
    local = shard.view_as(local_tensor(x.detach()))
    return type(like).from_local(  # type: ignore[no-any-return]
        local, like.device_mesh, like.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def redistribute_rows(shard: Tensor, x: Tensor) -> Tensor:
    """Return a matrix whose rows are sharded as those of x are, given this process's rows [r, n]; the same if x is not sharded."""
    if not hasattr(x, "to_local"):
        return shard
    like: Any = x
    shape = torch.Size((x.shape[0], shard.shape[1]))
    return type(like).from_local(  # type: ignore[no-any-return]
        shard, like.device_mesh, like.placements, run_check=False, shape=shape, stride=(shape[1], 1)
    )


def take_shard(complete: Tensor, x: Tensor) -> Tensor:
    """Return this process's part of a complete tensor, which every process has, as x is sharded; no process waits for another."""
    if not hasattr(x, "to_local"):
        return complete
    from torch.distributed.tensor import Replicate

    like: Any = x
    everywhere = type(like).from_local(
        complete, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False
    )
    return local_tensor(everywhere.redistribute(placements=like.placements))


# Attention in plain operations: the fused kernels lack forward mode, double backward and batched gradients.


class PlainAttention(TorchFunctionMode):
    """Replace `scaled_dot_product_attention` by its math implementation, and FlexAttention too, in this thread only.

    `sdpa_kernel(SDPBackend.MATH)` switches the entire process, so that a sampler in another thread would compute in another order
    at unpredictable times.
    """

    _thread = threading.local()

    @classmethod
    def is_active(cls) -> bool:
        """Return whether this thread is within such a block."""
        return getattr(cls._thread, "depth", 0) > 0

    def __enter__(self) -> Self:
        self._thread.depth = getattr(self._thread, "depth", 0) + 1
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: object) -> None:
        self._thread.depth -= 1
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _math_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _math_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Compute `scaled_dot_product_attention`. The math kernel adds its mask to the scores, so a Boolean one becomes 0 and −∞."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
    return torch._scaled_dot_product_attention_math(query, key, value, attn_mask, *args, **kwargs)[0]


def load_reference(
    name: str, policy: Tokenizer, *, dtype: str = "fp32", device: str = "cpu", trust_remote_code: bool = False
) -> nn.Module:
    """Load a frozen model to compare the policy with: another reference, or a teacher. It reads the policy's token ids.

    Args:
        name: A folder, a hub id, a run's folder, or `tiny`.
        policy: The tokenizer whose ids it reads: the policy's, or that of `Reference.tokenizer`.

    Raises:
        ModelError: No such model; or its vocabulary differs from the policy's, or exceeds its embeddings.
    """
    model = load_model(name, dtype=dtype, device=device, trust_remote_code=trust_remote_code).requires_grad_(False)
    tokenizer = load_tokenizer(name, model, trust_remote_code=trust_remote_code)
    ours, theirs = policy.hf.get_vocab(), tokenizer.hf.get_vocab()
    if odd := sorted(ours.items() ^ theirs.items(), key=lambda item: item[1]):
        token = odd[0][0]
        count, ids = len({t for t, _ in odd}), [vocabulary.get(token, "no token") for vocabulary in (ours, theirs)]
        raise ModelError(
            f"the reference {name!r} reads the token ids of {policy.name!r}, but its vocabulary differs in {count} tokens: "
            f"{token!r}, for example, is {ids[0]} there and {ids[1]} in its own. Use a model with that tokenizer, for example of "
            f"the same family, or compare spans of text: --algorithm.reference.tokenizer {name}"
        )
    return model
