"""Measures how many bytes of activations a micro-batch saves for its backward pass, on fake tensors: nothing is loaded or
computed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.core.batch import Batch
from policygrad.learners.local.forward import Network
from policygrad.learners.local.packing import Pack, pack_micro_batches
from policygrad.learners.local.tree_attention import enable_tree_attention
from policygrad.models.adapters import add_adapters
from policygrad.models.lora_config import Lora
from policygrad.models.replica import replace_parameters


def saved_activation_bytes(
    config: Any, dtype: torch.dtype, tokens: int, prompt: int, completion: int, group: int, lora: Lora | None = None
) -> int:
    """Return the bytes that one micro-batch of about so many `tokens` saves in the backbone of transformers' `config`.

    It has groups of completions with so many tokens each; `lora` are the adapters, if they alone train.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoModelForCausalLM

    part = make_synthetic_pack(tokens, prompt, completion, group)
    causal: Any = AutoModelForCausalLM
    make = partial(causal.from_config, copy.deepcopy(config), dtype=dtype, trust_remote_code=False)
    if lora is not None:  # PEFT moves the adapters it makes, which fake tensors do not support
        with torch.device("meta"):
            model: Any = add_adapters(make(), lora)
    with FakeTensorMode() as mode:
        if lora is None:
            model = make()
        else:  # new tensors in this mode instead of those on the meta device
            replace_parameters(model.modules(), lambda p: torch.empty(p.shape, dtype=p.dtype))
            for module in model.modules():
                for name, x in module._buffers.items():
                    module._buffers[name] = None if x is None else torch.empty(x.shape, dtype=x.dtype)
        model.eval()
        use_tree = enable_tree_attention(model)
        network = Network(model, split_head=True, use_tree=use_tree)
        storages = dict[int, int]()
        with count_saved_tensors(storages, model):
            states = network.hidden(part.map(mode.from_tensor))
        del states
    return sum(storages.values())


@contextmanager
def count_saved_tensors(storages: dict[int, int], model: nn.Module) -> Iterator[None]:
    """Record the bytes of each storage that operations save for their gradients, parameters excluded."""
    parameter_storages = {p.untyped_storage()._cdata for p in model.parameters()}

    def record(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in parameter_storages:
            storages[storage._cdata] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        yield


def make_synthetic_pack(tokens: int, prompt: int, completion: int, group: int) -> Pack:
    """Make a pack of about so many tokens: groups of completions, at least one completion."""
    rows = max(1, round(tokens / (prompt / group + completion)))
    batch = Batch(
        mask=torch.ones(rows, completion, dtype=torch.bool),
        group=torch.arange(rows) // group,
        reward=torch.zeros(rows),
        tokens=torch.arange(rows)[:, None].expand(-1, completion).contiguous(),
        prompts=tuple(torch.full((max(1, prompt),), rows + g) for g in range(-(-rows // group))),
    )
    return next(pack_micro_batches(batch, torch.arange(rows), 10**12))
