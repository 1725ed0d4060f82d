"""How much a micro-batch keeps for its way back, found without weights: the model runs on tensors of a shape and no memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from policygrad.core.batch import Batch
from policygrad.learners.local.forward import Network
from policygrad.learners.local.packing import Pack, pack_micro_batches
from policygrad.learners.local.tree_attention import AttentionBlock, AttentionTree, enable_tree_attention
from policygrad.models.adapters import add_adapters
from policygrad.models.lora_config import Lora


@contextmanager
def count_saved_tensors(storages: dict[int, int], model: nn.Module) -> Iterator[None]:
    """Adds up, by storage, the bytes that operations within keep for their gradients, parameters left out."""
    parameter_storages = {p.untyped_storage()._cdata for p in model.parameters()}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in parameter_storages:
            storages[storage._cdata] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield


def saved_activation_bytes(
    config: Any, dtype: torch.dtype, tokens: int, prompt: int, completion: int, group: int, lora: Lora | None = None
) -> int:
    """Of one micro-batch of about so many tokens, through the backbone of the architecture `config`: `group` completions to a
    prompt. lora: the adapters that train alone. Nothing is loaded, and nothing computed."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoModelForCausalLM

    part = _synthetic_pack(tokens, prompt, completion, group)
    make: Any = partial(
        cast(Any, AutoModelForCausalLM).from_config, copy.deepcopy(config), dtype=dtype, trust_remote_code=False
    )
    adapted: Any = None
    if lora is not None:  # PEFT moves what it makes, which tensors without memory do not let it
        with torch.device("meta"):
            adapted = add_adapters(make(), lora)
    with FakeTensorMode() as mode:
        model = make() if adapted is None else _materialise_shapes(adapted)
        model.eval()
        network, storages = Network(model, split_head=True, use_tree=enable_tree_attention(model)), dict[int, int]()
        with count_saved_tensors(storages, model):
            states = network.hidden(_fake_pack(part, mode))
        del states
    return sum(storages.values())


def _materialise_shapes(model: nn.Module) -> nn.Module:
    """The model with tensors of the kind that are made here, in the place of those on the meta device."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        kinds: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in kinds:
            for name, x in tensors.items():
                if x is not None and x not in made:
                    new = torch.empty(x.shape, dtype=x.dtype)
                    made[x] = nn.Parameter(new, x.requires_grad) if isinstance(x, nn.Parameter) else new
                tensors[name] = None if x is None else made[x]
    return model


def _synthetic_pack(tokens: int, prompt: int, completion: int, group: int) -> Pack:
    """Whole groups, at least one completion, until there are as many tokens."""
    rows = max(1, round(tokens / (prompt / group + completion)))
    groups = -(-rows // group)
    batch = Batch(
        mask=torch.ones(rows, completion, dtype=torch.bool),
        group=torch.arange(rows) // group,
        reward=torch.zeros(rows),
        tokens=torch.arange(rows)[:, None].expand(-1, completion).contiguous(),
        prompts=tuple(torch.full((max(1, prompt),), rows + g) for g in range(groups)),
    )
    return next(pack_micro_batches(batch, torch.arange(rows), 10**12))


def _fake_pack(part: Pack, mode: Any) -> Pack:
    def shape(x: Any) -> Any:
        return mode.from_tensor(x) if isinstance(x, Tensor) else x

    blocks = tuple(
        AttentionBlock(*(shape(getattr(b, f.name)) for f in fields(AttentionBlock))) for b in part.tree.blocks
    )
    tensors = {f.name: shape(getattr(part, f.name)) for f in fields(Pack) if f.name != "tree"}
    return Pack(**tensors, tree=AttentionTree(blocks, shape(part.tree.output_index)))
