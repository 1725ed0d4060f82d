"""Sampling: the distribution, the recorded log-probability, and random numbers that depend on the completion."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policygrad.samplers.base import SamplingParams
from policygrad.samplers.local.sampling import log_probabilities, philox_uniforms, sample_tokens

P = torch.tensor([[0.5, 0.25, 0.15, 0.1]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(), [0.5, 0.25, 0.15, 0.1]),
        (SamplingParams(top_k=2), [2 / 3, 1 / 3, 0, 0]),
        (SamplingParams(top_k=99), [0.5, 0.25, 0.15, 0.1]),
        (SamplingParams(top_p=0.6), [2 / 3, 1 / 3, 0, 0]),  # 0.5 is below 0.6, so the token that crosses it stays
        (SamplingParams(top_p=0.45), [1, 0, 0, 0]),
        (SamplingParams(top_p=0.6, top_k=1), [1, 0, 0, 0]),
        (SamplingParams(temperature=0), [1, 0, 0, 0]),
        (SamplingParams(temperature=0.5), [x * x / 0.345 for x in (0.5, 0.25, 0.15, 0.1)]),
    ],
)
def test_log_probabilities_match_the_analytic_distribution(sampling: SamplingParams, expected: list[float]) -> None:
    logits = P.log() + 3.0
    got = log_probabilities(logits, sampling).exp()
    assert torch.allclose(got, torch.tensor([expected], dtype=torch.float64), atol=1e-12)


def test_sampling_inverts_the_cumulative_distribution() -> None:
    u = torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76, 0.89, 0.91, 1 - 2**-53], dtype=torch.float64)
    token, logp = sample_tokens(P.log().expand(8, 4), u, SamplingParams())
    assert token.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert torch.allclose(logp, P.log()[0][token])


def test_tokens_of_probability_zero_are_never_sampled() -> None:
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]])
    u = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    token, logp = sample_tokens(logits.expand(2, 4), u, SamplingParams())
    assert token.tolist() == [1, 2]
    assert torch.isfinite(logp).all()


def test_sample_frequencies_match_the_probabilities() -> None:
    n = 20_000
    token, _ = sample_tokens(P.log().expand(n, 4), philox_uniforms([(7,)], n)[0], SamplingParams())
    counts = torch.bincount(token, minlength=4) / n
    assert torch.allclose(counts.double(), P[0], atol=4 * math.sqrt(0.25 / n))


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 5)), min_size=1, max_size=6, unique=True),
    st.integers(1, 9),
)
def test_uniforms_depend_on_the_key_alone(keys: list[tuple[int, ...]], n: int) -> None:
    batched = philox_uniforms(keys, n)
    assert torch.equal(batched, torch.cat([philox_uniforms([key], n) for key in keys]))
    assert torch.equal(philox_uniforms(keys, n + 3)[:, :n], batched)  # a longer row starts with the same numbers
    assert len({tuple(row.tolist()) for row in batched}) == len(keys)
    assert bool(((batched >= 0) & (batched < 1)).all())


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 2**70), max_size=7).map(tuple), min_size=1, max_size=5))
def test_uniforms_equal_numpys_philox(keys: list[tuple[int, ...]]) -> None:
    numpys = [np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).random(9) for key in keys]
    assert np.array_equal(philox_uniforms(keys, 9).numpy(), np.stack(numpys))


def test_negative_keys_are_refused() -> None:
    with pytest.raises(ValueError, match=r"not negative, not \(3, -1\)"):
        philox_uniforms([(3, -1)], 2)


@pytest.mark.parametrize("size", [487, 511, 512, 513, 576, 640, 1000, 8192])
def test_blockwise_inversion_equals_plain_inversion(size: int) -> None:
    """The result is the first token whose cumulative probability exceeds u, and log π is exact to the last digits."""
    g = torch.Generator().manual_seed(size)
    logits = 3 * torch.randn(256, size, generator=g, dtype=torch.float64)
    logits[:, ::3] = -math.inf
    logits[0, 1:], logits[1, :-1] = -math.inf, -math.inf  # all on the first token, all on the last
    logits[0, 0], logits[1, -1] = 2.0, -5.0
    u = torch.rand(256, generator=g, dtype=torch.float64)
    u[2:6] = torch.tensor([0.0, 1 - 2**-53, 0.0, 1 - 2**-53], dtype=torch.float64)
    token, logp = sample_tokens(logits, u, SamplingParams())
    cumulative = logits.softmax(-1).cumsum(-1)
    expected = (cumulative <= (u * cumulative[:, -1])[:, None]).sum(-1)
    usual = torch.ones(256, dtype=torch.bool)
    usual[2:6] = False  # at the ends of [0, 1) the plain rule may give a token of probability 0
    assert torch.equal(token[usual], expected[usual])
    assert token[:2].tolist() == [0, size - 1]
    truth = logits.log_softmax(-1).gather(-1, token[:, None]).squeeze(1)
    assert torch.isfinite(truth).all()
    assert torch.allclose(logp, truth, rtol=0, atol=1e-12)
    assert torch.allclose(sample_tokens(logits.float(), u, SamplingParams())[1].double(), truth, rtol=0, atol=3e-6)


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"max_tokens": 0}])
def test_invalid_sampling_params_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)  # type: ignore[arg-type]
