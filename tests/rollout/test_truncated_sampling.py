"""Training under top-p and top-k: log-probabilities of the tokens that these left, in sampler, learner and gradient."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import policygrad as pg
from doubles import rewards
from doubles.architectures import CONFIGS
from doubles.batches import float_batch
from policygrad.core.batch import SamplingMask
from policygrad.core.divergences import Divergence
from policygrad.errors import ConfigError, EngineError
from policygrad.learners.base import LearnerSpec
from policygrad.learners.local.forward import build_evaluator, compute_exact
from policygrad.learners.local.learner import LocalLearner
from policygrad.learners.local.packing import pack_micro_batches
from policygrad.models.loading import load_model
from policygrad.samplers.base import Generation, Request, SamplingParams
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.samplers.local.sampling import log_probabilities
from policygrad.utils.async_runner import AsyncRunner

TOP_P = SamplingParams(temperature=0.8, top_p=0.7, max_tokens=6)
TOP_K = SamplingParams(top_k=3, max_tokens=6)


@pytest.fixture
def wait() -> Iterator[AsyncRunner]:
    with AsyncRunner() as waiter:
        yield waiter


def test_a_mask_knows_its_tokens() -> None:
    left = torch.tensor([[True, False, True, False], [False, True, False, False], [True, True, True, True]])
    mask = SamplingMask.of(left)
    assert mask.ids.tolist() == [0, 2, 1, 0, 1, 2, 3]
    assert mask.counts.tolist() == [2, 1, 4]
    logits = torch.zeros(3, 4)
    assert torch.equal(mask.apply_(logits.clone()) == 0, left)
    assert torch.equal(mask.apply_(logits[:2].clone(), start=1) == 0, left[1:])
    assert mask.select(torch.tensor([False, True, True])).ids.tolist() == [1, 0, 1, 2, 3]
    joined = SamplingMask.concat([mask, SamplingMask(mask.ids[:0], torch.zeros(2, dtype=torch.int32))])
    assert torch.equal(joined.apply_(torch.zeros(5, 4)) == 0, torch.cat([left, torch.ones(2, 4, dtype=torch.bool)]))


def sample(model: nn.Module, params: SamplingParams, wait: AsyncRunner, *, needs_mask: bool = True) -> list[Generation]:
    sampler = LocalSampler(model, frozenset({1}), 0)
    prompts = [torch.tensor([5, 70, 300]), torch.tensor([9, 4])]
    requests = [Request(prompts[i % 2], (1, i), params, params.max_tokens, needs_mask=needs_mask) for i in range(12)]
    return list(wait(sampler.generate(requests)))


@pytest.mark.parametrize("params", [TOP_P, TOP_K, replace(TOP_P, top_k=2)], ids=str)
def test_sampler_tells_what_it_left(params: SamplingParams, random_model: Path, wait: AsyncRunner) -> None:
    """Under the mask alone, without top-p and top-k, the log-probabilities are the same; and so are the tokens without masks."""
    model = load_model(str(random_model), dtype="fp32")
    generations = sample(model, params, wait)
    plain = sample(model, params, wait, needs_mask=False)
    for i, (generation, other) in enumerate(zip(generations, plain, strict=True)):
        assert torch.equal(generation.tokens, other.tokens)
        assert other.sampling_mask is None
        left = generation.sampling_mask
        assert left is not None
        prompt = (torch.tensor([5, 70, 300]), torch.tensor([9, 4]))[i % 2]
        with torch.no_grad():
            ids = torch.cat([prompt, generation.tokens])[None]
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        truth = log_probabilities(logits, params)
        masked = left.apply_(logits.clone() / params.temperature).log_softmax(-1)
        assert torch.equal(masked > -torch.inf, truth > -torch.inf)
        logp = masked.gather(-1, generation.tokens[:, None])[:, 0]
        assert torch.allclose(logp, generation.logp, atol=1e-5)


def with_masks(batch: pg.Batch, vocabulary: int) -> pg.Batch:
    """The batch with random masks, which leave each token itself; none for every fifth."""
    assert batch.tokens is not None
    generator = torch.Generator().manual_seed(3)
    left = torch.rand(*batch.mask.shape, vocabulary, generator=generator) < 0.1
    left.scatter_(-1, batch.tokens[..., None], True)
    ids, counts = list[Tensor](), torch.zeros(batch.mask.shape, dtype=torch.int32)
    for row in range(len(left)):
        shown = batch.mask[row] & (torch.arange(len(left[row])) % 5 != 4)
        mask = SamplingMask.of(left[row] & shown[:, None])
        counts[row] = mask.counts
        ids.append(mask.ids)
    return replace(batch, sampling_mask_counts=counts, sampling_mask_ids=tuple(ids))


def naive_logp(model: nn.Module, batch: pg.Batch, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """log π, the entropy and Σ π² [B, T] text by text, with the mask written out."""
    assert batch.tokens is not None
    assert batch.prompts is not None
    assert batch.sampling_mask_counts is not None
    logps, entropies, squares = list[Tensor](), list[Tensor](), list[Tensor]()
    for row, tokens in enumerate(batch.tokens):
        prompt = batch.prompts[int(batch.group[row])]
        logits = model(input_ids=torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1] / temperature
        at = 0
        excluded = torch.zeros(logits.shape, dtype=torch.bool)
        for t, count in enumerate(batch.sampling_mask_counts[row].tolist()):
            if count:
                excluded[t] = True
                excluded[t, batch.sampling_mask_ids[row][at : at + count].long()] = False
            at += count
        logp = logits.masked_fill(excluded, -torch.inf).log_softmax(-1)
        logps.append(logp.gather(-1, tokens[:, None])[:, 0])
        entropies.append(-(logp.exp() * logp.masked_fill(excluded, 0)).sum(-1))
        squares.append((2 * logp).exp().sum(-1))
    return torch.stack(logps), torch.stack(entropies), torch.stack(squares)


@pytest.mark.parametrize("name", ["qwen2 untied", "qwen3", "gemma2"])  # the last has its head in its own operations
@pytest.mark.parametrize(
    "needs", [frozenset(), frozenset({"entropy", "sum_pi_squared"})], ids=["loss", "entropy and squares"]
)
def test_learners_gradient_is_that_of_the_masked_distribution(name: str, needs: frozenset[str]) -> None:
    import transformers as tf

    temperature = 0.7
    torch.manual_seed(0)
    model: Any = tf.AutoModelForCausalLM.from_config(CONFIGS[name]()).double().eval()
    batch = float_batch()
    assert batch.tokens is not None
    batch = with_masks(replace(batch, tokens=batch.tokens % 50), model.config.vocab_size)
    evaluator = build_evaluator(model, temperature)
    weights = torch.randn(2, *batch.mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = []
    for kind in ("naive", "plain", "expected"):  # the last computes the gradient in the forward pass
        model.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        if kind == "naive":
            logp, entropy, squares = naive_logp(model, batch, temperature)
            loss = ((weights[0] * logp + (weights[1] * entropy if needs else 0)) * batch.mask).sum()
        else:
            for part in pack_micro_batches(batch, torch.arange(len(batch.mask)), 40):
                expected = weights[0][part.rows] * part.mask if kind == "expected" else None
                out = evaluator.forward(part, needs, expected=expected)
                loss = loss + (weights[0][part.rows] * out.logp).sum()
                if needs:
                    assert out.entropy is not None
                    assert out.sum_pi_squared is not None
                    close = torch.isclose(out.sum_pi_squared, squares[part.rows], rtol=1e-6)
                    assert bool(close[part.mask].all())
                    loss = loss + (weights[1][part.rows] * out.entropy * part.mask).sum()
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    naive, *others = gradients
    for other in others:
        for a, b in zip(naive, other, strict=True):
            assert float((a - b).abs().max()) < 1e-6 * float(a.abs().max() + 1)  # norms are in float32


def opsd_loss(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """siyan-zhao/OPSD, opsd_trainer.py (`generalized_jsd_loss`), β ½, per token: log-probabilities at the sampling temperature over
    the whole vocabulary, whatever top-p and top-k the tokens were sampled with."""
    total = torch.zeros(len(logits), dtype=logits.dtype)
    for row in range(len(logits)):
        p, q = ((x[row] / temperature).softmax(-1) for x in (logits, teacher))
        m = (p + q) / 2
        total[row] = 0.5 * (q * (q / m).log()).sum() + 0.5 * (p * (p / m).log()).sum()
    return total


def test_a_divergence_over_the_vocabulary_is_opsds_under_its_sampling() -> None:
    """Temperature 1.1, top-p and top-k: log π_θ is that of the tokens that are left, the divergence that of all."""
    generator = torch.Generator().manual_seed(5)
    logits, teacher = (2 * torch.randn(6, 30, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    left = torch.rand(6, 30, generator=generator) < 0.3
    masked = logits.masked_fill(~left, -torch.inf)
    how = Divergence(0.5, over="vocabulary")
    (value,) = compute_exact(masked, None, ["kl_ref"], 1.1, teacher, how, unmasked=logits)
    expected = opsd_loss(logits, teacher, 1.1)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    actual_gradient, gradient = (torch.autograd.grad(x.sum(), logits)[0] for x in (value, expected))
    torch.testing.assert_close(actual_gradient, gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("over", ["sampled", "vocabulary"])
def test_a_divergence_is_over_what_sampling_left_or_over_all_tokens(over: Literal["sampled", "vocabulary"]) -> None:
    import transformers as tf

    torch.manual_seed(0)
    model, teacher = (tf.AutoModelForCausalLM.from_config(CONFIGS["qwen2 untied"]()).double().eval() for _ in range(2))
    batch = float_batch()
    assert batch.tokens is not None
    batch = with_masks(replace(batch, tokens=batch.tokens % 50), model.config.vocab_size)
    evaluator, reference = (build_evaluator(x, 1.1) for x in (model, teacher))
    found = torch.zeros(batch.mask.shape, dtype=torch.float64)
    for part in pack_micro_batches(batch, torch.arange(len(batch.mask)), 40):
        out = evaluator.forward(part, frozenset({"kl_ref"}), reference=reference, divergence=Divergence(0.5, over=over))
        assert out.kl_ref is not None
        found[part.rows] = out.kl_ref.detach()
    without = replace(batch, sampling_mask_counts=None, sampling_mask_ids=())
    given = without if over == "vocabulary" else batch
    for row, part in ((int(p.rows[0]), p) for p in pack_micro_batches(given, torch.arange(len(batch.mask)), 1)):
        out = evaluator.forward(part, frozenset({"kl_ref"}), reference=reference, divergence=Divergence(0.5))
        assert out.kl_ref is not None
        torch.testing.assert_close(found[row], out.kl_ref[0].detach(), rtol=0, atol=1e-7)
    assert float(found.sum()) > 0


def test_unchanged_policy_has_ratio_one(random_model: Path, wait: AsyncRunner) -> None:
    """As without truncation: log π of the learner is log μ of the sampler, so that nothing is clipped or corrected."""
    model = load_model(str(random_model), dtype="fp32")
    generations = sample(model, TOP_P, wait)
    longest = max(len(g.tokens) for g in generations)
    masks = [g.sampling_mask for g in generations]
    batch = pg.Batch(
        mask=torch.stack([torch.arange(longest) < len(g.tokens) for g in generations]),
        group=torch.arange(12) % 2,
        reward=torch.arange(12.0) % 3,
        tokens=nn.utils.rnn.pad_sequence([g.tokens for g in generations], batch_first=True),
        prompts=(torch.tensor([5, 70, 300]), torch.tensor([9, 4])),
        logp_sampler=nn.utils.rnn.pad_sequence([g.logp for g in generations], batch_first=True),
        sampling_mask_counts=nn.utils.rnn.pad_sequence([m.counts for m in masks if m is not None], batch_first=True),
        sampling_mask_ids=tuple(m.ids for m in masks if m is not None),
    )
    learner = LocalLearner(model, LearnerSpec(pg.GRPO, lr=1e-3, steps=1, temperature=TOP_P.temperature))
    scored = learner.evaluate(batch, pg.GRPO.needs | {"logp_old"})
    assert scored.logp_old is not None
    assert batch.logp_sampler is not None
    assert ((scored.logp_old - batch.logp_sampler) * batch.mask).abs().max() < 1e-5
    metrics = learner.update(scored, pg.GRPO.compute_advantages(scored), pg.GRPO)
    assert metrics["ratio/max"].value == pytest.approx(1, abs=1e-5)


def test_batches_select_masks_with_their_rows() -> None:
    batch = float_batch()
    batch = with_masks(batch, 500)
    assert batch.sampling_mask_counts is not None
    for rows in (torch.tensor([2, 0]), torch.arange(len(batch.mask)) % 2 == 0):
        chosen = batch.select(rows)
        indices = rows.nonzero().squeeze(1) if rows.dtype == torch.bool else rows
        assert all(x is batch.sampling_mask_ids[i] for x, i in zip(chosen.sampling_mask_ids, indices, strict=True))
    bare = batch.without_texts()
    assert bare.sampling_mask_counts is None
    with pytest.raises(ConfigError, match=r"sampling_mask_ids has 0 entries, expected one for each"):
        replace(batch, sampling_mask_ids=())


@pytest.fixture
def run(small: pg.Run, tmp_path: Path) -> pg.Run:
    algorithm = pg.get_algorithm("dapo")  # which keeps groups for the next step
    ends = tuple("abcdefghij0123456789")  # what is cut off is not trained on
    sampling = SamplingParams(top_p=0.9, top_k=20, max_tokens=16, stop=ends)
    reward = (f"{rewards.__file__}:brief",)  # so that every group has a spread
    return replace(
        small, algorithm=algorithm, sampling=sampling, reward=reward, steps=3, output=str(tmp_path / "whole")
    )


@pytest.mark.full
def test_run_with_top_p_learns_under_the_mask_and_resumes_bit_for_bit(run: pg.Run, tmp_path: Path) -> None:
    whole = pg.train(run, display=False)
    pg.train(replace(run, output=str(tmp_path / "cut")), display=False, stop_after=1)
    resumed = pg.train(resume=tmp_path / "cut", display=False, allow_code=("/",))
    assert whole.steps == resumed.steps == 3
    a, b = (read_rows(tmp_path / name) for name in ("whole", "cut"))
    for first, second in zip(a, b, strict=True):
        assert first["mismatch/logp_max"] < 1e-4
        assert {k: v for k, v in first.items() if not is_time(k)} == {k: v for k, v in second.items() if not is_time(k)}


def is_time(name: str) -> bool:
    return name.startswith("time/") or name == "tokens_per_second"


def read_rows(folder: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [row for row in rows if "reward" in row]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sampler": pg.SamplerConfig(engine="sglang")},
            "which sglang does not tell: use --sampler.engine local or vllm",
        ),
        ({"algorithm": pg.get_algorithm("trpo")}, "evaluates the policy over the whole vocabulary"),
    ],
)
def test_what_cannot_compare_under_a_mask_is_refused(options: dict[str, Any], message: str, run: pg.Run) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(run, **options)


class Silent:
    """A sampler that does not tell what it left."""

    def __init__(self, inner: LocalSampler) -> None:
        self.inner = inner

    async def update(self, weights: pg.PublishedWeights) -> None:
        await self.inner.update(weights)

    async def generate(self, requests: list[Request]) -> list[Generation]:
        return [replace(g, sampling_mask=None) for g in await self.inner.generate(requests)]


def test_sampler_of_ones_own_that_returns_no_masks_is_refused(run: pg.Run) -> None:
    def silent(model: nn.Module, tokenizer: Any) -> Silent:
        return Silent(LocalSampler.from_tokenizer(model, tokenizer))

    with pytest.raises(EngineError, match=r"Silent.generate does not return the tokens that top-k and top-p left"):
        pg.train(run, sampler=silent, display=False)
