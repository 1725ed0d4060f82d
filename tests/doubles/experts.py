"""Small mixtures of experts, and the experts that drew a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

import policygrad as pg
from doubles.architectures import BASE
from policygrad.models.moe_routing import Routing

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPS: dict[str, Any] = EXPERTS | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
MODELS = {
    "qwen3": lambda: tf.Qwen3MoeConfig(**BASE, **EXPERTS, num_experts=8, head_dim=8),
    "mixtral": lambda: tf.MixtralConfig(**BASE, num_local_experts=4, num_experts_per_tok=2),
    "glm4": lambda: tf.Glm4MoeConfig(**BASE, **GROUPS, head_dim=8),
}
LAYERS = {"qwen3": 2, "mixtral": 2, "glm4": 1}


def built(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = MODELS[name]()
    config._experts_implementation = "eager"  # the grouped product has no float64
    return tf.AutoModelForCausalLM.from_config(config).double().eval()


@torch.no_grad()
def shaken(model: nn.Module) -> None:
    """Another policy: near enough to be an update of many, far enough to route otherwise."""
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p += 0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype)


def drawn(model: nn.Module, batch: pg.Batch) -> pg.Batch:
    """The batch's own texts with the experts that reading them takes, in float64 and one at a time."""
    assert batch.tokens is not None
    assert batch.prompts is not None
    routing, answers, prompts = Routing.for_model(model), list[Tensor](), list[Tensor]()
    for row, group in enumerate(batch.group.tolist()):
        prompt = batch.prompts[group]
        with torch.no_grad(), routing.recording():
            model(input_ids=torch.cat([prompt, batch.tokens[row]])[None])
            routes = routing.pop_recorded()
        answers.append(routes[len(prompt) :])
        if len(prompts) == group:
            prompts.append(routes[: len(prompt)])
    return replace(batch, routed_experts=torch.stack(answers), prompt_routed_experts=tuple(prompts))
