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
from policygrad.learners.local.packing import Pack, pack
from policygrad.learners.local.tree_attention import Block, Tree, take_branches
from policygrad.models.adapters import adapt
from policygrad.models.lora_config import Lora


@contextmanager
def counting(held: dict[int, int], model: nn.Module) -> Iterator[None]:
    """Adds up, by storage, the bytes that operations within keep for their gradients, parameters left out."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in own:
            held[storage._cdata] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield


def kept_bytes(
    config: Any, dtype: torch.dtype, tokens: int, prompt: int, completion: int, group: int, lora: Lora | None = None
) -> int:
    """Of one micro-batch of about so many tokens, through the backbone of the architecture `config`: `group` completions to a
    prompt. lora: the adapters that train alone. Nothing is loaded, and nothing computed."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoModelForCausalLM

    part = _made_up(tokens, prompt, completion, group)
    make: Any = partial(
        cast(Any, AutoModelForCausalLM).from_config, copy.deepcopy(config), dtype=dtype, trust_remote_code=False
    )
    adapted: Any = None
    if lora is not None:  # PEFT moves what it makes, which tensors without memory do not let it
        with torch.device("meta"):
            adapted = adapt(make(), lora)
    with FakeTensorMode() as mode:
        model = make() if adapted is None else _in_shape(adapted)
        model.eval()
        network, held = Network(model, split_head=True, branches=take_branches(model)), dict[int, int]()
        with counting(held, model):
            states = network.hidden(_fake(part, mode))
        del states
    return sum(held.values())


def _in_shape(model: nn.Module) -> nn.Module:
    """The model with tensors of the kind that are made here, in the place of those on the meta device."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        kinds: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in kinds:
            for name, x in held.items():
                if x is not None and x not in made:
                    new = torch.empty(x.shape, dtype=x.dtype)
                    made[x] = nn.Parameter(new, x.requires_grad) if isinstance(x, nn.Parameter) else new
                held[name] = None if x is None else made[x]
    return model


def _made_up(tokens: int, prompt: int, completion: int, group: int) -> Pack:
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
    return next(pack(batch, torch.arange(rows), 10**12))


def _fake(part: Pack, mode: Any) -> Pack:
    def shape(x: Any) -> Any:
        return mode.from_tensor(x) if isinstance(x, Tensor) else x

    blocks = tuple(Block(*(shape(getattr(b, f.name)) for f in fields(Block))) for b in part.tree.blocks)
    there = {f.name: shape(getattr(part, f.name)) for f in fields(Pack) if f.name != "tree"}
    return Pack(**there, tree=Tree(blocks, shape(part.tree.place)))
