"""Other architectures than Llama: what the sampler records and what the learner computes are the model's own numbers.

Learned positions, parallel blocks, sliding windows, soft-capped logits, untied heads, ALiBi, convolutions, state spaces.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import policygrad as pg
from doubles.architectures import CONFIGS, PLAIN, long_batch
from doubles.drawing import Context, sample
from policygrad.learners.base import LearnerSpec
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.loading import load_model
from policygrad.samplers.base import SamplingParams
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.samplers.local.sampling import log_probabilities


def naive_logp(model: nn.Module, prompt: Tensor, tokens: Tensor) -> Tensor:
    """One completion, nothing shared, nothing cached: the definition."""
    logits = model(input_ids=torch.cat([prompt, tokens])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return log_probabilities(logits, SamplingParams()).gather(-1, tokens[:, None]).squeeze(1)


def naive_batch(model: nn.Module, batch: pg.Batch) -> Tensor:
    assert batch.tokens is not None
    assert batch.prompts is not None
    rows = zip(batch.tokens, batch.group.tolist(), batch.lengths.tolist(), strict=True)
    logp = [naive_logp(model, batch.prompts[g], tokens[:n]) for tokens, g, n in rows]
    return nn.utils.rnn.pad_sequence(logp, batch_first=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_sampler_and_learner_equal_the_models_forward_pass(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tf.AutoModelForCausalLM.from_config(CONFIGS[name]()).save_pretrained(tmp_path)
    model, batch = load_model(str(tmp_path)), long_batch()
    algorithm = replace(pg.GRPO, update_rule=pg.GradientSteps(epochs=2))
    learner = LocalLearner(model, LearnerSpec(algorithm, lr=0.0, steps=1, config=LearnerConfig(micro_tokens=200)))

    scored = learner.evaluate(batch, algorithm.needs)
    with torch.no_grad():
        assert torch.allclose(scored.logp_old, naive_batch(model, batch), atol=1e-4)  # type: ignore[arg-type]

    batch = replace(scored, logp_ref=scored.logp_ref + 0.3)  # type: ignore[operator]
    psi = algorithm.compute_advantages(batch)
    learner.build_problem(batch, psi, algorithm).accumulate()
    got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    pg.surrogate(naive_batch(model, batch), batch, psi, algorithm).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    largest = max(float(e.abs().max()) for e in expected.values())
    assert got.keys() == expected.keys()
    assert all(float((got[n] - e).abs().max()) < 1e-4 * largest for n, e in expected.items())

    assert batch.prompts is not None
    prompts = [Context(p, (0, i)) for i, p in enumerate(batch.prompts)]
    groups = sample(LocalSampler(model, frozenset({1}), 0), prompts, 6, SamplingParams(max_tokens=16))
    assert len({len(c.tokens) for g in groups for c in g}) > 1  # rows left the batch on the way
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            with torch.no_grad():
                truth = naive_logp(model, prompt.tokens, completion.tokens)
            assert torch.allclose(completion.logp, truth, atol=1e-4)


def test_a_model_without_a_layered_cache_is_refused() -> None:
    model = tf.AutoModelForCausalLM.from_config(tf.RwkvConfig(**PLAIN, hidden_size=32, num_hidden_layers=2))
    with pytest.raises(ValueError, match="no cache made of layers"):
        sample(
            LocalSampler(model, frozenset({1}), 0), [Context(torch.tensor([3]), (0,))], 2, SamplingParams(max_tokens=2)
        )
