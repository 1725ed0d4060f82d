"""`learner.head=fp32`: logits in float32 from bf16 weights, in learner and sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import policygrad as pg
from doubles.batches import float_batch
from policygrad.learners.base import LearnerSpec
from policygrad.learners.local.learner import LocalLearner
from policygrad.learners.local.packing import pack_micro_batches
from policygrad.models.loading import Float32Head, compute_head_in_float32, load_model


def learner_for(folder: Path, head: str, algorithm: pg.Algorithm = pg.DR_GRPO) -> LocalLearner:
    config = pg.LearnerConfig(dtype="bf16", head=head)
    return LocalLearner(load_model(str(folder), dtype="bf16"), LearnerSpec(algorithm, 1e-3, 4, config=config))


def test_logits_are_those_of_float32_products(random_model: Path) -> None:
    """Of the same states and weights; in bf16 they are rounded to three digits."""
    for head, spread in (("fp32", 1e-6), ("model", 1e-3)):
        model: Any = learner_for(random_model, head).model
        ids = torch.tensor([[3, 4, 5, 6]])
        with torch.no_grad():
            logits, states = model(ids).logits, model.model(ids).last_hidden_state
            exact = states.double() @ model.lm_head.weight.double().T
        assert logits.dtype == (torch.float32 if head == "fp32" else torch.bfloat16)
        error = float((logits.double() - exact).abs().max() / exact.abs().max())
        assert error < spread if head == "fp32" else error > spread


def test_the_learners_log_probabilities_too(random_model: Path) -> None:
    batch = float_batch()
    for head, spread in (("fp32", 1e-5), ("model", 1e-3)):
        learner = learner_for(random_model, head)
        evaluator = learner.evaluator
        for part in pack_micro_batches(batch, torch.arange(len(batch.mask)), 10**6):
            with torch.no_grad():
                states, logp = evaluator.network.states(part), evaluator(part)
                logits = states.double() @ learner.model.lm_head.weight.double().T  # type: ignore[union-attr, operator]
                exact = logits.log_softmax(-1)[part.predictor].gather(-1, part.tokens[..., None]).squeeze(-1)
            error = float((logp - exact)[part.mask].abs().max())
            assert error < spread if head == "fp32" else error > spread


def test_its_gradient_is_that_of_the_plain_model_in_autograd(random_model: Path) -> None:
    learner, batch = learner_for(random_model, "fp32"), float_batch()
    psi = torch.where(batch.mask, torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0)), 0.0)
    problem = learner.build_problem(batch, psi, pg.REINFORCE)
    problem.accumulate()
    gradient = learner.optimizer.pop_flat_gradient()
    model: Any = load_model(str(random_model), dtype="bf16")
    compute_head_in_float32(model)
    model.model.embed_tokens.padding_idx = None  # as a learner has it
    loss = torch.zeros(())
    assert batch.tokens is not None
    assert batch.prompts is not None
    for row, group in enumerate(batch.group.tolist()):
        prompt, tokens = batch.prompts[group], batch.tokens[row]
        logits = model(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]
        logp = logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(1)
        loss = loss - (logp * psi[row])[batch.mask[row]].sum()
    expected = torch.cat([g.float().flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    scale = (gradient @ expected) / (expected @ expected)  # the objective is a mean over completions
    assert float((gradient - scale * expected).norm() / gradient.norm()) < 0.02


def test_scale_rl_has_it_by_default_and_a_second_policy_too(random_model: Path) -> None:
    for algorithm, head, kind in (
        (pg.SCALE_RL, "auto", Float32Head),
        (pg.SCALE_RL, "model", nn.Linear),
        (pg.GRPO, "auto", nn.Linear),
        (pg.GRPO, "fp32", Float32Head),
    ):
        learner = learner_for(random_model, head, algorithm)
        assert type(learner.model.get_output_embeddings()) is kind  # type: ignore[operator]
        learner.snapshot_old_policy()
        assert learner.networks.old is not None
        assert type(learner.networks.old.network.head) is kind
    run = pg.Run(algorithm=pg.SCALE_RL).resolve()
    assert run.learner.head == "fp32"
    assert pg.Run().resolve().learner.head == "model"


def test_float32_weights_need_nothing_and_other_heads_are_refused(random_model: Path) -> None:
    model: Any = load_model(str(random_model))
    compute_head_in_float32(model)
    assert type(model.lm_head) is nn.Linear
    model = load_model(str(random_model), dtype="bf16")
    model.set_output_embeddings(nn.Sequential(model.lm_head))
    with pytest.raises(
        pg.ModelError, match=r"plain matrix, and this model's is a torch\.nn\.modules\.container\.Sequential"
    ):
        compute_head_in_float32(model)
    with pytest.raises(pg.ConfigError, match=r"learner\.head must be auto, model or fp32, not 'bf16'"):
        pg.LearnerConfig(head="bf16")
