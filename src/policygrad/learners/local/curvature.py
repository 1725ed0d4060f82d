"""Curvature of the policy without a matrix: Fisher-vector products and the exact KL, micro-batch by micro-batch.

F = mean over the sampled tokens' states of Jᵀ(diag p − ppᵀ)J, with J the Jacobian of a state's logits and p their softmax: the
Hessian of mean KL(π_old‖π_θ) at θ_old. A product is a push through J (forward mode), the middle factor on a chunk of
tokens at a time, and a pull through Jᵀ (reverse mode). Source: Schulman et al. 2015 (TRPO), appendix C.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch, Forward
from policygrad.core.objective import objective
from policygrad.core.types import Batch, Forward
from policygrad.learners.local.forward import (
    CHUNK,
    Scorer,
    backbone,
    exact,
    inputs,
    predicting_states,
    scaled,
    selected_logp,
)
from policygrad.learners.local.optimizer import Optimizer
from policygrad.learners.local.packing import Merged, Pack


def middle(logits: Tensor, change: Tensor, tokens: Tensor, sampled: bool) -> Tensor:
    """[n, V] (diag p − ppᵀ) ż with p = softmax(logits [n, V]), ż = `change` [n, V]; `sampled`: (e_a − p)(e_a − p)ᵀ ż, where a
    is the token [n] taken and e_a − p the score of its logits."""
    p = logits.softmax(-1)
    mean = (p * change).sum(-1, keepdim=True)
    if not sampled:
        return p * (change - mean)
    taken = tokens[:, None]
    score = change.gather(-1, taken) - mean
    return (-score * p).scatter_add(-1, taken, score)


class Call(nn.Module):
    """A function of the model as a module of its own, for `functional_call` to put other parameters in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, f: Callable[..., Tensor], *args: Any) -> Tensor:
        return f(self.model, *args)


@dataclass(frozen=True, eq=False)
class Curvature:
    """θ as one vector, the optimiser's masters one after another, and what the policy does around it.

    The model's parameters stay what they are until `move`; a bf16 model is asked at the masters rounded to bf16, as it would
    be after the move.
    """

    scorer: Scorer
    optimizer: Optimizer
    micro_tokens: int
    differentiating: Callable[[], AbstractContextManager[None]]
    """Puts the model into the mode for backward passes (recomputed activations)."""
    forward_mode: bool = True
    """J v by forward mode; otherwise as the derivative of reverse mode, which is slower and agrees with Jᵀ by construction."""

    def checked(self) -> Curvature:
        """With forward mode only if ⟨w, Jv⟩ = ⟨Jᵀw, v⟩ on a made-up text: an operation may have a gradient of its own (an
        embedding that leaves out its padding token has), and a product with two different J is no Fisher product."""
        vocabulary = self.scorer.model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
        pad = getattr(getattr(self.scorer.model, "config", None), "pad_token_id", None)
        tokens = torch.tensor([[*range(min(8, vocabulary)), pad or 0]])
        one, size = torch.zeros(1, dtype=torch.int64), tokens.shape[1]
        made_up = Batch(mask=torch.ones(1, size, dtype=torch.bool), group=one, reward=torch.zeros(1), tokens=tokens,
                        prompts=(tokens[0, :1],))  # fmt: skip
        part, _ = next(self._parts(made_up))
        generator = torch.Generator().manual_seed(0)
        tangents = {
            n: (torch.randn(p.shape, generator=generator) * (float(p.detach().std(correction=0)) + 1e-3)).to(p)
            for n, p in self.optimizer.parameters.items()
        }
        with sdpa_kernel(SDPBackend.MATH):
            try:
                with torch.no_grad():
                    _, forward = self._jvp(tangents, self._states, part)
            except NotImplementedError:
                return replace(self, forward_mode=False)
            _, reverse = self._jvp_by_reverse(tangents, part)
        coarse = forward.dtype not in (torch.float32, torch.float64)
        same = float((forward - reverse).norm()) <= (0.1 if coarse else 1e-3) * float(reverse.norm())
        return replace(self, forward_mode=same)

    def take_gradient(self) -> Tensor:
        """[P] the gradients that were added up, which are cleared; 0 where there is none."""
        masters = self.optimizer.masters.values()
        flat = torch.cat([(torch.zeros_like(m) if m.grad is None else m.grad).flatten() for m in masters])
        self.optimizer.adam.zero_grad(set_to_none=True)
        return flat

    @torch.no_grad()
    def move(self, delta: Tensor) -> None:
        """θ ← θ + delta [P]."""
        for master, change in zip(self.optimizer.masters.values(), self._split(delta).values(), strict=True):
            master.add_(change)
        self.optimizer.show()

    def fisher(self, batch: Batch, v: Tensor, sampled: bool) -> Tensor:
        """[P] F v, a mean over the batch's sampled tokens. Whatever gradient had been added up is gone."""
        self.optimizer.adam.zero_grad(set_to_none=True)
        parameters = self.optimizer.parameters
        tangents = {name: t.to(parameters[name].dtype) for name, t in self._split(v).items()}
        for part, weight in self._parts(batch):
            states, change = self._push(part, tangents)
            with self.differentiating():
                self._pull(part, states, change, tangents, weight, sampled)
            self.optimizer.collect()
        return self.take_gradient()

    @torch.no_grad()
    def evaluate(self, batch: Batch, psi: Tensor, algorithm: Algorithm, delta: Tensor) -> tuple[float, float]:
        """(surrogate objective, mean KL(π_old‖π_θ) in nats a sampled token, exact over the vocabulary) at θ + delta."""
        parameters, masters = self.optimizer.parameters, self.optimizer.masters
        moved = {n: (masters[n] + change).to(parameters[n].dtype) for n, change in self._split(delta).items()}
        rows = batch.mask.any(1).nonzero().squeeze(1)
        merged = Merged.of(batch, psi, rows, algorithm.needs)
        coefficients = tuple(map(merged.summed, algorithm.all_coefficients(batch)))
        bare = replace(batch, prompts=None, tokens=None)
        total, divergence = 0.0, 0.0
        for part, weight in self._parts(batch, merged):
            chosen, device = part.rows.cpu(), weight.device
            coef = tuple(c[merged.place[chosen]].to(device) for c in coefficients)
            share, ours = bare.select(chosen).to(device), psi[chosen].to(device)
            out = self._compare(part, moved)
            assert out.kl_old is not None
            total += float(objective(replace(out, logp=out.logp.double()), share, ours, algorithm, coef))
            divergence += float((weight * out.kl_old).sum())
        return total, divergence

    def _split(self, v: Tensor) -> dict[str, Tensor]:
        """The vector's share of every parameter, by name and in its shape."""
        masters = self.optimizer.masters
        shares = v.split([m.numel() for m in masters.values()])
        return {name: share.view_as(master) for (name, master), share in zip(masters.items(), shares, strict=True)}

    def _parts(self, batch: Batch, merged: Merged | None = None) -> Iterator[tuple[Pack, Tensor]]:
        """Micro-batches of all completions with a sampled token, whatever their Ψ, equal ones once; and what share of the
        mean each token [b, T] stands for."""
        merged = merged or Merged.of_texts(batch)
        count = merged.count.double()
        tokens = max(1, int(batch.mask.sum()))
        device = next(iter(self.optimizer.parameters.values())).device
        for part in self.scorer.packs(batch, merged.unique, self.micro_tokens):
            share = torch.where(part.mask, count[merged.place[part.rows]][:, None] / tokens, 0.0)
            yield part.to(device), share.to(device)

    def _states(self, model: nn.Module, part: Pack) -> Tensor:
        """[n, H] what the head is given at the positions that predict; of a model whose head is not apart, its logits."""
        if self.scorer.split_head:
            return predicting_states(backbone(model), part)
        logits = model(**inputs(part), use_cache=False).logits
        return logits.flatten(0, 1).index_select(0, part.predictor[part.mask])

    def _head(self, model: Any, states: Tensor) -> Tensor:
        """[n, V] logits at the sampling temperature, in float32 or better."""
        logits = model.get_output_embeddings()(states) if self.scorer.split_head else states
        return scaled(logits, self.scorer.temperature)

    def _with(self, parameters: Mapping[str, Tensor], f: Callable[..., Tensor], *args: Any) -> Tensor:
        """f(model, *args) with other parameters in the model."""
        return functional_call(Call(self.scorer.model), {f"model.{n}": p for n, p in parameters.items()}, (f, *args))

    def _chunks(self, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """As many tokens at a time as `CHUNK` logits allow."""
        vocabulary = self.scorer.model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
        return zip(*(x.split(max(1, CHUNK // vocabulary)) for x in rows), strict=True)

    def _push(self, part: Pack, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(states [n, H], their change along the tangents), without graph. Only the math back-end of attention has forward
        mode, and double backward for what has no forward mode of its own."""
        with sdpa_kernel(SDPBackend.MATH):
            if not self.forward_mode:
                return self._jvp_by_reverse(tangents, part)
            with torch.no_grad():
                return self._jvp(tangents, self._states, part)

    def _jvp(
        self, tangents: Mapping[str, Tensor], f: Callable[..., Tensor], x: Any, change: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """f(model, x) and its change along the parameters' tangents and x's `change`."""
        parameters = self.optimizer.parameters
        with forward_ad.dual_level():
            duals = {n: forward_ad.make_dual(parameters[n].detach(), t) for n, t in tangents.items()}
            x = x if change is None else forward_ad.make_dual(x, change)
            value, moved = forward_ad.unpack_dual(self._with(duals, f, x))
            return value, torch.zeros_like(value) if moved is None else moved

    def _jvp_by_reverse(self, tangents: Mapping[str, Tensor], part: Pack) -> tuple[Tensor, Tensor]:
        """J v as the derivative of ⟨Jᵀw, v⟩ in w, which it is linear in."""
        copies = {n: p.detach().requires_grad_() for n, p in self.optimizer.parameters.items()}
        value = self._with(copies, self._states, part)
        if not value.requires_grad:  # only the head trains
            return value, torch.zeros_like(value)
        w = torch.zeros_like(value, requires_grad=True)
        pulled = torch.autograd.grad(value, list(copies.values()), w, create_graph=True, allow_unused=True)
        product = sum((g * t).sum() for g, t in zip(pulled, tangents.values(), strict=True) if g is not None)
        (moved,) = torch.autograd.grad(product, w)  # type: ignore[arg-type]
        return value.detach(), moved

    def _pull(
        self, part: Pack, states: Tensor, change: Tensor, tangents: Mapping[str, Tensor], weight: Tensor, sampled: bool
    ) -> None:
        """Adds Jᵀ(middle)J v to the gradients: the head's chunk by chunk, then the backbone's at once."""
        traced = self._states(self.scorer.model, part)
        leaf = traced.detach().requires_grad_()
        rows = (states, change, leaf, part.tokens[part.mask], weight[part.mask])
        for h, moved, above, tokens, share in self._chunks(*rows):
            with torch.no_grad():
                logits, tangent = self._jvp(tangents, self._head, h, moved)
                cotangent = middle(logits, tangent, tokens, sampled) * share[:, None].to(logits.dtype)
            self._head(self.scorer.model, above).backward(cotangent)
        if traced.requires_grad:  # otherwise only the head trains
            traced.backward(leaf.grad)

    def _compare(self, part: Pack, moved: Mapping[str, Tensor]) -> Forward:
        """At other parameters: logp, entropy and KL(π_old‖π_θ), each [b, T], where π_old is the model as it is."""
        before, after = self._states(self.scorer.model, part), self._with(moved, self._states, part)
        columns: list[tuple[Tensor, Tensor, Tensor]] = []
        for h, new, tokens in self._chunks(before, after, part.tokens[part.mask]):
            old_logits, logits = self._head(self.scorer.model, h), self._with(moved, self._head, new)
            entropy, kl = exact(logits, old_logits, ("entropy", "kl_old"), temperature=1.0)
            columns.append((selected_logp(logits, tokens, 1.0), entropy, kl))
        logp, entropy, kl = (torch.cat(column) for column in zip(*columns, strict=True))
        filled = (x.new_zeros(part.mask.shape).masked_scatter(part.mask, x) for x in (logp, entropy, kl))
        return Forward(next(filled), entropy=next(filled), kl_old=next(filled))
