"""Log-probabilities and entropies through the head, whose gradient is written down, against autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from policygrad.learners.local import logprobs
from policygrad.learners.local.logprobs import fused_log_probability

STATES, WIDTH, VOCABULARY = 7, 5, 11


def example(dtype: torch.dtype, bias: bool) -> tuple[Tensor, nn.Linear, Tensor, Tensor]:
    """States, a head, and which states predict which tokens: some twice the same, one nothing at all."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(STATES, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    linear = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
    for p in linear.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
    index = torch.tensor([3, 0, 3, 3, 6, 1, 2, 0, 5])
    tokens = torch.tensor([2, 10, 2, 7, 0, 0, 4, 9, 1])
    return states, linear, index, tokens


def plain(states: Tensor, linear: nn.Linear, index: Tensor, tokens: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """The definition."""
    logp = (linear(states) / tau).log_softmax(-1)
    return logp[index, tokens], -(logp.exp() * logp).sum(-1)[index]


@pytest.mark.parametrize("chunk", [16 * VOCABULARY, 2**21])
@pytest.mark.parametrize("room", [0, 20 * VOCABULARY, 2**24])
@pytest.mark.parametrize("tau", [1.0, 0.7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_fused_head_equals_autograd(
    monkeypatch: pytest.MonkeyPatch, chunk: int, room: int, tau: float, bias: bool, entropy: bool
) -> None:
    monkeypatch.setattr(logprobs, "BUFFER_CPU", chunk)
    monkeypatch.setattr(logprobs, "MAX_CACHED", room)
    states, linear, index, tokens = example(torch.float64, bias)
    many = torch.cat([states, states.detach().flip(0), states.detach() * 2]).requires_grad_()  # more than one chunk
    index = torch.cat([index, index + STATES, index + 2 * STATES])
    tokens = tokens.repeat(3)
    g, h = torch.randn(2, len(index), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result, seen, squares = fused_log_probability(
        many, linear, index, tokens, tau, entropy=entropy, sum_pi_squared=entropy
    )
    logp, exact = plain(many, linear, index, tokens, tau)
    assert torch.allclose(result, logp, atol=1e-12)
    loss, truth = (g * result).sum(), (g * logp).sum()
    if entropy:
        assert seen is not None
        assert torch.allclose(seen, exact, atol=1e-12)
        assert squares is not None
        assert not squares.requires_grad
        assert torch.allclose(squares, (linear(many) / tau).softmax(-1).square().sum(-1)[index], atol=1e-12)
        loss, truth = loss + (h * seen).sum(), truth + (h * exact).sum()
    leaves = [many, *linear.parameters()]
    for got, expected in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, leaves), strict=True):
        assert torch.allclose(got, expected, atol=1e-12)


@pytest.mark.parametrize("right", [True, False])
def test_a_predicted_gradient_saves_a_matmul_and_a_wrong_one_costs_one(
    monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    monkeypatch.setattr(logprobs, "MAX_CACHED", 0)
    states, linear, index, tokens = example(torch.float64, True)
    products = []
    monkeypatch.setattr(logprobs._Logits, "__call__", counted(logprobs._Logits.__call__, products))
    g = torch.linspace(-1, 1, len(index), dtype=torch.float64)
    result, *_ = fused_log_probability(states, linear, index, tokens, 0.7, expected=g if right else g + 1e-9)
    leaves = [states, *linear.parameters()]
    got = torch.autograd.grad((g * result).sum(), leaves)
    expected = torch.autograd.grad((g * plain(states, linear, index, tokens, 0.7)[0]).sum(), leaves)
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-12)
    assert len(products) == (1 if right else 2)


@pytest.mark.parametrize(("room", "expected"), [(0, 4), (16 * VOCABULARY, 3), (21 * VOCABULARY, 2)])
def test_logits_that_fit_in_memory_are_not_recomputed(
    monkeypatch: pytest.MonkeyPatch, room: int, expected: int
) -> None:
    """Two chunks of states; and what waited is gone after the way back, so that a second one computes all again."""
    states, linear, index, tokens = example(torch.float64, True)
    many = torch.cat([states.detach()] * 3).requires_grad_()
    monkeypatch.setattr(logprobs, "BUFFER_CPU", 16 * VOCABULARY)
    monkeypatch.setattr(logprobs, "MAX_CACHED", room)
    products = []
    monkeypatch.setattr(logprobs._Logits, "__call__", counted(logprobs._Logits.__call__, products))
    result, *_ = fused_log_probability(many, linear, index, tokens, 0.7)
    first = torch.autograd.grad(result.sum(), [many, *linear.parameters()], retain_graph=True)
    assert len(products) == expected
    rerun = torch.autograd.grad(result.sum(), [many, *linear.parameters()])
    assert len(products) == expected + 2
    assert all(torch.equal(a, b) for a, b in zip(first, rerun, strict=True))


def counted(call, calls):  # type: ignore[no-untyped-def]
    def made(self, which, **how):  # type: ignore[no-untyped-def]
        calls.append(which)
        return call(self, which, **how)

    return made


def test_tokens_of_probability_zero_are_ignored() -> None:
    """0·∞ = 0: the entropy and all gradients stay finite."""
    states, linear, index, tokens = example(torch.float64, True)
    with torch.no_grad():
        linear.bias[5] = -torch.inf
    logp, entropy, _ = fused_log_probability(states, linear, index, tokens, 1.0, entropy=True)
    assert entropy is not None
    for gradient in torch.autograd.grad(logp.sum() + entropy.sum(), [states, *linear.parameters()]):
        assert bool(gradient.isfinite().all())


def test_frozen_inputs_get_no_gradient_and_no_graph() -> None:
    states, linear, index, tokens = example(torch.float64, True)
    linear.requires_grad_(False)
    logp, *_ = fused_log_probability(states, linear, index, tokens, 1.0)
    logp.sum().backward()
    assert states.grad is not None
    assert linear.weight.grad is None
    with torch.no_grad():
        assert not fused_log_probability(states, linear, index, tokens, 1.0)[0].requires_grad


def test_half_precision_sums_in_float32() -> None:
    states, linear, index, tokens = example(torch.bfloat16, False)
    logp, *_ = fused_log_probability(states, linear, index, tokens, 1.0)
    assert logp.dtype == torch.float32
    logp.sum().backward()
    double = linear.weight.detach().double().requires_grad_()
    truth = (states.detach().double() @ double.T).log_softmax(-1)[index, tokens]
    truth.sum().backward()
    assert double.grad is not None
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == torch.bfloat16
    assert torch.allclose(logp.double(), truth, atol=0.05)
    assert torch.allclose(linear.weight.grad.double(), double.grad, atol=0.05)
