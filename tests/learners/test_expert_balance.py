"""The load-balancing loss of a mixture of experts: transformers' own, over the whole update, however it is split and read."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import policygrad as pg
from doubles.batches import make_batch
from doubles.experts import built
from policygrad.learners.base import LearnerSpec
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.expert_balance import find_expert_balance
from policygrad.learners.local.learner import LocalLearner
from policygrad.learners.local.packing import WorkDivision
from policygrad.training.config.supervised import SFTConfig
from policygrad.training.sft import SFTExample, accumulate_sft_gradient, build_sft_batch
from policygrad.training.supervised import LocalSupervisedLearner

COEFFICIENT = 0.5


def asking(name: str, asks: bool = True) -> nn.Module:
    model = built(name)
    model.config.output_router_logits = asks
    model.config.router_aux_loss_coef = COEFFICIENT
    return model


def gradient(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def read_texts(batch: pg.Batch) -> list[Tensor]:
    """What a model reads: every text up to the token before its last sampled one."""
    assert batch.tokens is not None
    assert batch.prompts is not None
    texts = []
    for row in batch.mask.any(1).nonzero().flatten().tolist():
        extent = int(batch.mask[row].nonzero().max()) + 1
        texts.append(torch.cat([batch.prompts[int(batch.group[row])], batch.tokens[row, : extent - 1]]))
    return texts


def transformers_own(model: Any, texts: list[Tensor]) -> Tensor:
    """One padded batch of all texts, by the model's own function."""
    width = max(map(len, texts))
    ids = torch.stack([nn.functional.pad(text, (0, width - len(text))) for text in texts])
    mask = torch.stack([torch.arange(width) < len(text) for text in texts]).long()
    out = model(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False)
    function = importlib.import_module(type(model).__module__).load_balancing_loss_func
    layers = tuple(x.reshape(-1, x.shape[-1]) for x in out.router_logits)
    loss = function(layers, layers[0].shape[-1], model.config.num_experts_per_tok, mask)
    torch.testing.assert_close(loss, out.aux_loss)
    return loss  # type: ignore[no-any-return]


def learner_gradient(
    model: nn.Module, batch: pg.Batch, micro_tokens: int, recompute: bool = False
) -> tuple[dict[str, Tensor], float | None]:
    """What an update of GRPO with Ψ = 0 at half of the completions accumulates, and the loss that it reports."""
    config = LearnerConfig(micro_tokens=micro_tokens, gradient_checkpointing=recompute)
    algorithm = replace(pg.DR_GRPO, update_rule=pg.GradientSteps())
    learner = LocalLearner(model, LearnerSpec(algorithm, lr=0.0, steps=1, temperature=1.0, config=config))
    psi = torch.where(batch.mask & (torch.arange(len(batch.mask)) % 2 == 0)[:, None], 0.3, 0.0).double()
    model.zero_grad(set_to_none=True)
    metrics = learner.build_problem(batch, psi, algorithm).accumulate()
    masters = {n: p.grad.clone() for n, p in learner.optimizer.masters.items() if p.grad is not None}
    return masters or gradient(model), metrics["router_aux_loss"].value if "router_aux_loss" in metrics else None


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_the_gradient_is_that_of_transformers_loss_over_the_update(name: str) -> None:
    """In one micro-batch and in many; prompts that completions share, equal completions and those without an advantage count."""
    batch = make_batch(5)
    assert batch.tokens is not None
    prompts = tuple(ids.clamp(min=1) for ids in batch.prompts or ())
    # padding's id is zeros, where a norm's gradient is 1e3, and transformers drops the gradient of that row
    batch = replace(batch, tokens=batch.tokens.clamp(min=1), prompts=prompts)
    plain, nothing = learner_gradient(asking(name, asks=False), batch, 10_000)
    assert nothing is None
    model = asking(name)
    for micro_tokens, recompute in ((10_000, False), (30, False), (30, True)):
        found, reported = learner_gradient(model, batch, micro_tokens, recompute)
        reference = asking(name)
        loss = transformers_own(reference, read_texts(batch))
        torch.autograd.backward(COEFFICIENT * loss)
        expected = gradient(reference)
        assert reported == pytest.approx(float(loss.detach()), rel=1e-5)
        largest = max(float(x.abs().max()) for x in expected.values())
        assert largest > 1e-5
        for key, g in expected.items():
            difference = found[key] - plain.get(key, torch.zeros_like(found[key]))
            assert float((difference - g).abs().max()) <= 1e-5 * largest, (micro_tokens, key)


def test_sft_adds_it() -> None:
    rows = [
        SFTExample(torch.arange(3, 3 + p), torch.arange(5, 5 + n), torch.ones(n, dtype=torch.bool))
        for p, n in ((4, 3), (2, 7), (5, 1), (4, 3))
    ]
    batch, results = build_sft_batch(rows), []
    for asks in (False, True):
        for micro_tokens in (1000, 8):
            model = asking("qwen3", asks)
            config = SFTConfig(data="x", lr=0.0, learner=LearnerConfig(micro_tokens=micro_tokens))
            learner = LocalSupervisedLearner(model, config, 1)
            reported = accumulate_sft_gradient(learner, batch)
            assert ("router_aux_loss" in reported) is asks
            masters = {n: p.grad for n, p in learner.optimizer.masters.items() if p.grad is not None}
            results.append((masters or gradient(model), reported))
    (without, _), _, (one, reported), (many, _) = results
    reference = asking("qwen3")
    loss = transformers_own(reference, read_texts(batch))
    torch.autograd.backward(COEFFICIENT * loss)
    assert reported["router_aux_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    largest = max(float(g.abs().max()) for g in gradient(reference).values())
    for key, g in gradient(reference).items():
        for found in (one, many):
            difference = found[key] - without.get(key, torch.zeros_like(g))
            assert float((difference - g).abs().max()) <= 1e-5 * largest, key


def test_what_cannot_be_exact_is_refused() -> None:
    model, config, alone = asking("qwen3"), LearnerConfig(), WorkDivision()
    evaluator = LocalLearner(model, LearnerSpec(pg.DR_GRPO, lr=0.0, steps=1, temperature=1.0, config=config)).evaluator

    class Shared(WorkDivision):
        """Of several processes."""

    with pytest.raises(pg.ConfigError, match=r"several processes do not compute it.*output_router_logits to false"):
        find_expert_balance(evaluator, config, Shared())
    with pytest.raises(pg.ConfigError, match=r"unset learner\.compile"):
        find_expert_balance(evaluator, replace(config, compile=True), alone)
    trpo = replace(pg.TRPO, critic=pg.Critic(lr=1e-3))
    with pytest.raises(pg.ConfigError, match=r"TrustRegion compares surrogates without the load-balancing loss"):
        LocalLearner(model, LearnerSpec(trpo, lr=None, steps=1, temperature=1.0, config=config))
    other = asking("glm4")  # whose routers have groups, and whose model has no such loss
    spec = LearnerSpec(pg.DR_GRPO, lr=0.0, steps=1, temperature=1.0, config=config)
    with pytest.raises(pg.ConfigError, match=r"Glm4MoeForCausalLM is another than it is for Mixtral or Qwen"):
        LocalLearner(other, spec)
