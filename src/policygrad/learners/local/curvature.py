"""Curvature of the policy without a matrix: Fisher-vector products and the exact KL, one micro-batch at a time.

F = mean over the sampled tokens' states of Jᵀ(diag p − ppᵀ)J, with J the Jacobian of a state's logits and p their softmax: the
Hessian of mean KL(π_old‖π_θ) at θ_old. A product is J v in forward mode, the output Hessian on a chunk of tokens at a time, and
Jᵀ w in reverse mode. Source: Schulman et al. 2015 (TRPO), appendix C.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch, Forward
from policygrad.core.objective import objective
from policygrad.core.precision import move, widen
from policygrad.learners.local.forward import MAX_LOGITS, compute_exact, scale_logits
from policygrad.learners.local.logprobs import TokenPairs
from policygrad.learners.local.networks import TrainedNetworks
from policygrad.learners.local.packing import Pack, pack_micro_batches
from policygrad.models.loading import at_least_float32
from policygrad.models.replica import PlainAttention

# X with a tangent (forward mode); untyped in torch.
make_dual: Callable[[Tensor, Tensor], Tensor] = forward_ad.make_dual
_Function = Callable[..., Tensor]


def output_hessian_product(
    logits: Tensor, change: Tensor, index: Tensor, tokens: Tensor, weight: Tensor, sampled: bool
) -> Tensor:
    """Return [u, V] Σ weight·(diag p − ppᵀ) ż over the tokens [n] that each state predicts.

    Args:
        logits: [u, V], with p their softmax.
        change: [u, V] ż.
        index: [n] the state that predicts each token.
        sampled: Use (e_a − p)(e_a − p)ᵀ ż instead, with a the token taken and e_a − p the score of its logits.
    """
    p = logits.softmax(-1)
    mean = (p * change).sum(-1, keepdim=True)
    share = weight if not sampled else weight * (change[index, tokens] - mean.squeeze(-1)[index])
    total = share.new_zeros(len(p)).index_add_(0, index, share)[:, None]
    if not sampled:
        return total * p * (change - mean)
    return (-total * p).index_put_((index, tokens), share, accumulate=True)


def unpack_dual(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and its tangent, 0 if it has none."""
    value, tangent = forward_ad.unpack_dual(x)  # type: ignore[no-untyped-call]
    return value, torch.zeros_like(value) if tangent is None else tangent


class CallModule(nn.Module):
    """A module that calls functions of the model inside it, so that `functional_call` and FSDP see one root."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, f: _Function, *args: Any) -> Tensor:
        return f(*args)


@dataclass(frozen=True, eq=False)
class Curvature:
    """θ as one vector, the optimizer's masters in order, and the policy's behaviour around it.

    The model's parameters change only by the optimizer's `move`; a bf16 model is evaluated at the masters rounded to bf16, as it
    would be after the move.
    """

    networks: TrainedNetworks
    forward_mode: bool = True
    """Compute J v in forward mode; otherwise as the derivative of reverse mode, which is slower and always consistent with Jᵀ."""

    def verify(self) -> Curvature:
        """Return self, with forward mode only if J v agrees with reverse mode on a synthetic text.

        An operation may have a gradient of its own (an embedding that leaves out its padding token does), and a product with two
        different J is no Fisher product.
        """
        optimizer, part = self.networks.optimizer, self._synthetic_pack()
        generator = torch.Generator().manual_seed(0)
        tangents = {
            n: (torch.randn(p.shape, generator=generator) * (float(p.detach().std(correction=0)) + 1e-3)).to(p)
            for n, p in optimizer.parameters.items()
        }
        with PlainAttention():
            try:
                with torch.no_grad():
                    _, forward = self._jvp(tangents, self._states, part)
            except NotImplementedError:
                return replace(self, forward_mode=False)
            _, reverse = self._jvp_by_reverse(tangents, part)
        tolerance = 1e-3 if forward.dtype in (torch.float32, torch.float64) else 0.1
        return replace(self, forward_mode=float((forward - reverse).norm()) <= tolerance * float(reverse.norm()))

    def _synthetic_pack(self) -> Pack:
        """Make a text that contains the padding token."""
        policy = self.networks.policy
        pad = getattr(getattr(policy.model, "config", None), "pad_token_id", None)
        tokens = torch.tensor([[*range(min(8, policy.network.vocabulary)), pad or 0]])
        one, size = torch.zeros(1, dtype=torch.int64), tokens.shape[1]
        batch = Batch(mask=tokens >= 0, group=one, reward=torch.zeros(1), tokens=tokens, prompts=(tokens[0, :1],))
        return next(pack_micro_batches(batch, one, size)).to(self.networks.device)

    def fisher(self, batch: Batch, v: Tensor, sampled: bool) -> Tensor:
        """Return [P] F v, a mean over the batch's sampled tokens. Accumulated gradients are lost."""
        optimizer = self.networks.optimizer
        optimizer.clear_gradients()
        tangents = {name: t.to(optimizer.parameters[name].dtype) for name, t in optimizer.split(v).items()}

        def dummy_pass(part: Pack) -> None:
            self._product(part, tangents, 0 * widen(part.mask), sampled)

        def work() -> None:
            for part, weight in self._micro_batches(batch, dummy_pass):
                self._product(part, tangents, weight, sampled)
                optimizer.accumulate_master_grads()

        self.networks.division.memory.run(work, optimizer.clear_gradients)
        return optimizer.pop_flat_gradient()

    def _product(self, part: Pack, tangents: Mapping[str, Tensor], weight: Tensor, sampled: bool) -> None:
        """Add a micro-batch's share of F v to the gradients: the head's chunk by chunk, then the backbone's at once."""
        states, change = self._jvp_states(part, tangents)
        with self.networks.backward_mode():
            traced = self._states(part)
            leaf, weights = traced.detach().requires_grad_(), weight[part.mask]
            for which, index, tokens, order in self._chunks(part, states):
                with torch.no_grad():
                    logits, tangent = self._jvp(tangents, self._head, states[which], change[which])
                    chunk_weight = weights[order].to(logits.dtype)
                    cotangent = output_hessian_product(logits, tangent, index, tokens, chunk_weight, sampled)
                torch.autograd.backward(self._head(leaf[which]), cotangent)
            if traced.requires_grad:  # otherwise only the head trains
                torch.autograd.backward(traced, leaf.grad)

    @torch.no_grad()
    def evaluate(self, batch: Batch, psi: Tensor, algorithm: Algorithm, delta: Tensor) -> tuple[float, float]:
        """Return (surrogate objective, mean KL(π_old‖π_θ) in nats per sampled token, exact over the vocabulary) at θ + delta."""
        coefficients = algorithm.all_coefficients(batch)
        bare = batch.without_texts()

        def measure(compare: Callable[[Pack], Forward]) -> Tensor:
            totals = torch.zeros(2, dtype=torch.float64)
            for part, weight in self._micro_batches(batch, compare, algorithm.gate.requires_full_groups):
                rows, device = part.rows.cpu(), weight.device
                coef = tuple(move(c[rows], device) for c in coefficients)
                share, row_psi = bare.select(rows).to(device), move(psi[rows], device)
                out = compare(part)
                assert out.kl_old is not None
                totals[0] += float(objective(replace(out, logp=widen(out.logp)), share, row_psi, algorithm, coef))
                totals[1] += float((weight * out.kl_old).sum())
            return totals

        with self._shifted(delta) as compare:
            totals = self.networks.division.memory.run(lambda: measure(compare))
        surrogate, divergence = self.networks.division.all_reduce(totals).tolist()
        return surrogate, divergence

    @contextmanager
    def _shifted(self, delta: Tensor) -> Iterator[Callable[[Pack], Forward]]:
        """Yield a comparison of the policy at θ + delta with the current one: logp, entropy and KL(π_old‖π_θ), each [b, T]."""
        optimizer = self.networks.optimizer
        parameters, masters = optimizer.parameters, optimizer.masters
        moved = {n: (masters[n] + change).to(parameters[n].dtype) for n, change in optimizer.split(delta).items()}

        def compare(part: Pack) -> Forward:
            before, after = self._states(part), self._call_with(moved, self._states, part)
            values = at_least_float32(before.new_empty(3, int(part.mask.sum())))
            for which, index, tokens, order in self._chunks(part, before):
                old_logits, logits = self._head(before[which]), self._call_with(moved, self._head, after[which])
                entropy, kl = compute_exact(logits, old_logits, ("entropy", "kl_old"), temperature=1.0)
                logp = logits[index, tokens] - logits.logsumexp(-1)[index]
                values[:, order] = torch.stack((logp, entropy[index], kl[index]))
            filled = (x.new_zeros(part.mask.shape).masked_scatter(part.mask, x) for x in values)
            return Forward(next(filled), entropy=next(filled), kl_old=next(filled))

        yield compare

    def _micro_batches(
        self, batch: Batch, dummy_pass: Callable[[Pack], object] | None = None, keep_groups: bool = False
    ) -> Iterator[tuple[Pack, Tensor]]:
        """Iterate over all completions with a sampled token, whatever their Ψ, with each token's share [b, T] of the mean."""
        tokens, device = max(1, int(batch.mask.sum())), self.networks.device
        for part in self.networks.micro_batches(batch, dummy_pass, keep_groups=keep_groups):
            yield part.to(device), move(part.mask.double() / tokens, device)

    def _head(self, states: Tensor) -> Tensor:
        """Return [n, V] logits at the sampling temperature, in float32 or better."""
        policy = self.networks.policy
        return scale_logits(policy.network.logits(states), policy.temperature)

    def _call_with(self, parameters: Mapping[str, Tensor], f: _Function, *args: Any) -> Tensor:
        """Return f(*args) with other parameters in the model."""
        named = {f"model.{n}": p for n, p in parameters.items()}
        return functional_call(CallModule(self.networks.policy.model), named, (f, *args))  # type: ignore[no-any-return]

    def _chunks(self, part: Pack, states: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Iterate over chunks of at most `MAX_LOGITS` logits: which states, and of each token that they predict the index of its
        state in the chunk, the token, and its number among the mask's tokens."""
        pairs = TokenPairs.of(part.predictor[part.mask], part.tokens[part.mask])
        size = max(1, MAX_LOGITS // self.networks.policy.network.width(states))
        for which, pair in pairs.chunks(len(states), size):
            yield which, pairs.index[pair] - which.start, pairs.tokens[pair], pairs.order[pair]

    def _states(self, part: Pack) -> Tensor:
        return replace(self.networks.policy.network_for(part), reads_prefixes=False).states(part)

    def _jvp_states(self, part: Pack, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the states [u, H] and their change along the tangents, without a graph."""
        with PlainAttention():
            if not self.forward_mode:
                return self._jvp_by_reverse(tangents, part)
            with torch.no_grad():
                return self._jvp(tangents, self._states, part)

    def _jvp(
        self, tangents: Mapping[str, Tensor], f: _Function, x: Any, change: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return f(x) and its change along the parameters' tangents and x's `change`."""
        parameters = self.networks.optimizer.parameters
        with forward_ad.dual_level():
            duals = {n: make_dual(parameters[n].detach(), t) for n, t in tangents.items()}
            return unpack_dual(self._call_with(duals, f, x if change is None else make_dual(x, change)))

    def _jvp_by_reverse(self, tangents: Mapping[str, Tensor], part: Pack) -> tuple[Tensor, Tensor]:
        """Return the states and J v as the derivative in w of ⟨Jᵀw, v⟩, which is linear in w."""
        copies = {n: p.detach().requires_grad_() for n, p in self.networks.optimizer.parameters.items()}
        value = self._call_with(copies, self._states, part)
        if not value.requires_grad:  # only the head trains
            return value, torch.zeros_like(value)
        w = torch.zeros_like(value, requires_grad=True)
        pulled = torch.autograd.grad(value, list(copies.values()), w, create_graph=True, allow_unused=True)
        product = sum((g * t).sum() for g, t in zip(pulled, tangents.values(), strict=True) if g is not None)
        (change,) = torch.autograd.grad(product, w)  # type: ignore[arg-type]
        return value.detach(), change
