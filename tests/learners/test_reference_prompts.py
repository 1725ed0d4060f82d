"""A reference that reads other prompts, follows the policy as a moving average, or is the policy: against the definition."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import policygrad as pg
from doubles.batches import as_read, branching, make_batch, naive_logp, with_reference_prompts
from policygrad.core.divergences import Divergence
from policygrad.learners.base import LearnerSpec
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.learner import LocalLearner
from policygrad.learners.local.packing import pack_with_reference
from policygrad.models.adapters import add_adapters
from policygrad.models.loading import load_model
from policygrad.models.lora_config import Lora

HINT = ("{answer} {prompt}",)
TAUGHT = replace(pg.SDPO, reference=pg.Reference(templates=HINT))
EXACT = replace(pg.OPSD, reference=pg.Reference(templates=HINT))
MOVING = replace(TAUGHT, reference=pg.Reference(ema=0.25, templates=HINT))
LIVE = replace(TAUGHT, reference=pg.Reference(live=True, templates=HINT))


@pytest.fixture
def model(random_model: Path) -> nn.Module:
    return load_model(str(random_model)).double()


def prepared(seed: int) -> pg.Batch:
    """A rollout whose old policy is a little off, as the sampler reports it."""
    batch = with_reference_prompts(make_batch(seed))
    noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return replace(batch, logp_old=-3 + 0.1 * noise, logp_sampler=-3 + 0.1 * noise)


def spec(algorithm: pg.Algorithm, lr: float = 1e-2, micro_tokens: int = 40) -> LearnerSpec:
    return LearnerSpec(algorithm, lr=lr, steps=4, temperature=0.7, config=LearnerConfig(micro_tokens=micro_tokens))


def take_step(learner: LocalLearner, algorithm: pg.Algorithm, batch: pg.Batch) -> pg.Batch:
    evaluated = learner.evaluate(batch, algorithm.needs)
    learner.update(evaluated, algorithm.compute_advantages(evaluated), algorithm)
    return evaluated


def weights(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("algorithm", [TAUGHT, EXACT, MOVING, LIVE], ids=["initial", "exact", "average", "live"])
def test_reference_scores_completions_after_its_own_prompts(model: nn.Module, algorithm: pg.Algorithm) -> None:
    batch = prepared(5)
    learner = LocalLearner(model, spec(algorithm))
    result = learner.evaluate(batch, algorithm.needs).logp_ref
    assert result is not None
    assert batch.has_reference is not None
    with torch.no_grad():
        expected = naive_logp(model, as_read(batch), 0.7)
    read = batch.mask & batch.has_reference[:, None]
    assert float((result - expected)[read].abs().max()) < 1e-6
    assert (result[~read] == 0).all()
    with torch.no_grad():  # or the prompts would not matter
        assert float((expected - naive_logp(model, batch, 0.7))[read].abs().max()) > 1e-2


@pytest.mark.parametrize(
    ("alpha", "top_k", "micro_tokens"),
    [
        (1.0, 0, 40),
        (0.5, 0, 40),
        (0.2, 0, 1),
        (0.2, 0, 40),
        (0.2, 0, 10_000),
        (0.0, 0, 40),
        (0.5, 9, 40),
        (1.0, 9, 10_000),
    ],
)
def test_exact_divergence_has_the_gradient_of_its_definition(
    model: nn.Module, alpha: float, top_k: int, micro_tokens: int
) -> None:
    """Autograd through the divergence of one completion at a time, each read twice, for any division into micro-batches."""
    algorithm = replace(EXACT, terms=(pg.ExactKLToReference(0.7, alpha, top_k=top_k),))
    batch, teacher = prepared(3), copy.deepcopy(model)
    learner = LocalLearner(model, spec(algorithm, micro_tokens=micro_tokens))
    batch = learner.evaluate(batch, algorithm.needs)
    learner.build_problem(batch, algorithm.compute_advantages(batch), algorithm).accumulate()
    result = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    assert batch.has_reference is not None
    assert batch.tokens is not None
    read, total = batch.mask & batch.has_reference[:, None], torch.zeros((), dtype=torch.float64)
    for i in range(len(batch.mask)):
        ours, theirs = (
            m(input_ids=torch.cat([prompt, batch.tokens[i]])[None])
            .logits[0, len(prompt) - 1 : -1]
            .div(0.7)
            .log_softmax(-1)
            for m, prompt in ((model, batch.prompts[int(batch.group[i])]), (teacher, batch.reference_prompts[i]))  # type: ignore[index]
        )
        p, q = ours.exp(), theirs.detach().exp()
        if top_k:
            chosen = p.topk(top_k).indices
            p, q = (
                torch.cat([x.gather(-1, chosen), 1 - x.gather(-1, chosen).sum(-1, keepdim=True)], -1) for x in (p, q)
            )
        m = alpha * q + (1 - alpha) * p
        kl = {
            1.0: (p * (p / q).log()).sum(-1),
            0.0: (q * (q / p).log()).sum(-1),
        }.get(alpha, alpha * (q * (q / m).log()).sum(-1) + (1 - alpha) * (p * (p / m).log()).sum(-1))
        total = total + 0.7 * (kl * read[i]).sum() / read.sum()
    torch.autograd.backward(total)
    largest = max(float(g.abs().max()) for g in result)
    assert largest > 1e-4
    for g, p in zip(result, model.parameters(), strict=True):
        assert float((g - p.grad).abs().max()) < 2e-7 * largest


def test_what_the_reference_reads_stays_within_the_micro_batch(model: nn.Module) -> None:
    batch = with_reference_prompts(make_batch(3, groups=4, size=4))
    packs = list(pack_with_reference(batch, torch.arange(len(batch.mask)), 40))
    assert len(packs) > 1
    for pack in packs:
        assert pack.reference is not None
        assert len(pack.reference.ids) <= 40
        assert torch.equal(pack.reference.rows, pack.rows)
        assert torch.equal(pack.reference.mask, pack.mask)
        assert torch.equal(pack.reference.tokens, pack.tokens)
    rows = torch.cat([pack.rows for pack in packs])
    assert torch.equal(rows.sort().values, batch.mask.any(1).nonzero().flatten())


def test_divergence_ignores_excluded_tokens() -> None:
    """A logit of −∞ in both, as under top-k: no NaN in the value or the gradient."""
    logits = torch.tensor([[0.3, -torch.inf, 1.0]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[1.0, -torch.inf, 0.0]], dtype=torch.float64).log_softmax(-1)
    bare = torch.tensor([[0.3, 1.0]], dtype=torch.float64)
    for alpha in (0.0, 0.3, 1.0):
        value = Divergence(alpha).compute(logits.log_softmax(-1), reference)
        expected = Divergence(alpha).compute(bare.log_softmax(-1), reference[:, [0, 2]])
        torch.testing.assert_close(value, expected, rtol=1e-14, atol=0)
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        assert torch.isfinite(gradient).all()


def test_moving_average_is_its_recursion(model: nn.Module) -> None:
    """π_ref ← 0.75·π_ref + 0.25·π_θ after each rollout, from the initial policy on."""
    expected, batch = weights(model), prepared(5)
    learner = LocalLearner(model, spec(MOVING))
    assert learner.reference is not None
    for _ in range(3):
        take_step(learner, MOVING, batch)
        expected = [0.75 * old + 0.25 * new for old, new in zip(expected, weights(model), strict=True)]
    for average, value in zip(weights(learner.reference.model), expected, strict=True):
        torch.testing.assert_close(average, value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_moving_average_resumes_bitwise(random_model: Path, dtype: torch.dtype) -> None:
    def make() -> LocalLearner:
        return LocalLearner(load_model(str(random_model)).to(dtype), spec(MOVING))

    batch, learner = prepared(5), make()
    take_step(learner, MOVING, batch)
    tensors, values = copy.deepcopy(learner.state())
    take_step(learner, MOVING, batch)
    resumed = make()
    resumed.restore(tensors, values)
    take_step(resumed, MOVING, batch)
    (expected, expected_values), (result, result_values) = learner.state(), resumed.state()
    assert expected_values == result_values
    assert expected.keys() == result.keys()
    assert any(name.startswith("reference/") for name in expected)
    assert all(torch.equal(expected[name], result[name]) for name in expected)


def test_moving_average_of_bf16_weights_is_kept_in_float32(random_model: Path) -> None:
    """Steps far below the precision of bf16 add up."""
    slow = replace(MOVING, reference=pg.Reference(ema=0.01, templates=HINT))
    learner = LocalLearner(load_model(str(random_model)).bfloat16(), spec(slow))
    assert learner.average is not None
    start = {name: x.clone() for name, x in learner.average.averages.items()}
    for _ in range(3):
        take_step(learner, slow, prepared(5))
    for name, average in learner.average.averages.items():
        assert average.dtype == torch.float32
        rounded = learner.average.parameters[name]
        assert rounded.dtype == torch.bfloat16
        assert torch.equal(rounded, average.bfloat16())
        master = learner.optimizer.masters[name]
        if not torch.equal(master, start[name]):
            assert not torch.equal(average, start[name])


def test_live_reference_takes_no_memory_and_follows_the_policy(model: nn.Module) -> None:
    batch, learner = prepared(5), LocalLearner(model, spec(LIVE))
    assert learner.reference_parameters == 0
    take_step(learner, LIVE, batch)
    after = learner.evaluate(batch, LIVE.needs).logp_ref
    assert after is not None
    assert batch.has_reference is not None
    with torch.no_grad():
        expected = naive_logp(model, as_read(batch), 0.7)
    assert float((after - expected)[batch.mask & batch.has_reference[:, None]].abs().max()) < 1e-6
    assert not any(name.startswith("reference/") for name in learner.state()[0])


def test_live_and_a_full_average_teach_the_same(random_model: Path) -> None:
    """ema=1 copies the policy after each rollout, which is what a live teacher is at the next."""
    results = []
    for reference in (pg.Reference(live=True, templates=HINT), pg.Reference(ema=1.0, templates=HINT)):
        algorithm = replace(EXACT, reference=reference)
        learner = LocalLearner(load_model(str(random_model)).double(), spec(algorithm))
        for seed in (5, 6):
            take_step(learner, algorithm, prepared(seed))
        results.append(weights(learner.model))
    for live, copied in zip(*results, strict=True):
        torch.testing.assert_close(live, copied, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("algorithm", [TAUGHT, EXACT, MOVING, LIVE], ids=["initial", "exact", "average", "live"])
def test_adapters_teach_themselves(random_model: Path, algorithm: pg.Algorithm) -> None:
    """The initial policy is the model without its adapters; an average is one of the adapters."""
    network = add_adapters(load_model(str(random_model)).double(), Lora(rank=2), seed=0)
    base = load_model(str(random_model)).double()
    batch, learner = prepared(5), LocalLearner(network, spec(algorithm))
    first = learner.evaluate(batch, algorithm.needs).logp_ref
    assert first is not None
    assert batch.has_reference is not None
    read = batch.mask & batch.has_reference[:, None]
    with torch.no_grad():
        expected = naive_logp(base, as_read(batch), 0.7)
    assert float((first - expected)[read].abs().max()) < 1e-6
    for _ in range(2):
        take_step(learner, algorithm, batch)
    second = learner.evaluate(batch, algorithm.needs).logp_ref
    assert second is not None
    is_fixed = algorithm in (TAUGHT, EXACT)
    assert (float((second - first)[read].abs().max()) < 1e-12) == is_fixed


def test_a_batch_without_the_prompts_is_refused(model: nn.Module) -> None:
    learner = LocalLearner(model, spec(TAUGHT))
    with pytest.raises(pg.ConfigError, match=r"Batch\.reference_prompts is empty.*templates=\(\)"):
        learner.evaluate(make_batch(3), TAUGHT.needs)
    with pytest.raises(pg.ConfigError, match=r"Batch\.positions counts tokens after the policy's prompt"):
        learner.evaluate(branching(prepared(3)), TAUGHT.needs)
