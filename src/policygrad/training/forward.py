"""One forward pass: from a pack of tokens to log π [b, T], never holding more logits than a chunk of tokens needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from policygrad.core.types import Batch
from policygrad.rollout.draw import at_least_float32
from policygrad.training.packing import Pack, pack

CHUNK = 2**26
"""Logits held at a time, in elements (256 MiB in float32)."""


def selected_logp(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log π(token) [n] from logits [n, V] at the sampling temperature, in float32 or better."""
    logits = at_least_float32(logits) / temperature
    return logits.gather(-1, tokens[:, None]).squeeze(1) - logits.logsumexp(-1)


@dataclass(frozen=True, eq=False)
class Scorer:
    """Log-probabilities under one model. Which short cuts the model allows was measured by `probe`, not assumed."""

    model: nn.Module
    temperature: float
    split_head: bool
    """The head applied to the last hidden states gives the model's logits, so it need only see predicted positions."""
    share_prompts: bool
    """The model takes a 4D mask, so a group's completions can share one row."""

    def __call__(self, batch: Pack) -> Tensor:
        """[b, T] nats with graph; 0 off the mask."""
        where, tokens = batch.predictor[batch.mask], batch.tokens[batch.mask]
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention, "position_ids": batch.positions}
        if batch.attention.ndim == 2 and bool(batch.attention.all()):
            inputs["attention_mask"] = None
        if self.split_head:
            hidden = backbone(self.model)(**inputs, use_cache=False).last_hidden_state
            logp = self._chunked(hidden.flatten(0, 1)[where], tokens)
        else:
            logits = self.model(**inputs, use_cache=False).logits
            logp = selected_logp(logits.flatten(0, 1)[where], tokens, self.temperature)
        return logp.new_zeros(batch.mask.shape).masked_scatter(batch.mask, logp)

    def _chunked(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        head = self.model.get_output_embeddings()

        def part(h: Tensor, t: Tensor) -> Tensor:
            return selected_logp(head(h), t, self.temperature)

        size = max(1, CHUNK // head.weight.shape[0])
        if len(hidden) <= size:
            return part(hidden, tokens)
        recompute: Callable[..., Tensor] = part
        if torch.is_grad_enabled():
            recompute = lambda h, t: checkpoint(part, h, t, use_reentrant=False)  # noqa: E731
        return torch.cat([recompute(h, t) for h, t in zip(hidden.split(size), tokens.split(size), strict=True)])


def backbone(model: Any) -> nn.Module:
    """The model without its head."""
    return (
        model.get_decoder() if hasattr(model, "get_decoder") and model.get_decoder() is not None else model.base_model
    )


@torch.no_grad()
def probe(model: nn.Module, temperature: float, vocabulary: int) -> Scorer:
    """Tries both short cuts on a small made-up group and keeps those that leave every log-probability as it was."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (3, 5), generator=generator)
    batch = Batch(
        mask=torch.ones(3, 5, dtype=torch.bool),
        group=torch.zeros(3, dtype=torch.int64),
        reward=torch.zeros(3),
        tokens=tokens,
        prompts=(torch.randint(vocabulary, (4,), generator=generator),),
    )
    device = next(model.parameters()).device
    plain = Scorer(model, temperature, split_head=False, share_prompts=False)
    tolerance = 0.2 if next(model.parameters()).dtype == torch.bfloat16 else 1e-3

    def scores(scorer: Scorer) -> Tensor:
        out = torch.zeros(3, 5)
        for p in pack(batch, torch.arange(3), 10**6, share=scorer.share_prompts):
            out[p.rows] = scorer(p.to(device)).cpu().float()
        return out

    truth = scores(plain)

    def holds(scorer: Scorer) -> bool:
        try:
            return torch.allclose(scores(scorer), truth, atol=tolerance)
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError):
            return False  # the model does not take such a call: the plain path remains

    split = holds(Scorer(model, temperature, True, False))
    return Scorer(model, temperature, split, holds(Scorer(model, temperature, split, True)))
