"""One forward pass: from a pack of tokens to log π [b, T], never holding more logits than a chunk of tokens needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from policygrad.core.types import Batch
from policygrad.rollout.draw import at_least_float32
from policygrad.training.packing import CAP, Pack, pack

CHUNK = 2**26
"""Logits held at a time, in elements (256 MiB in float32)."""
_WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "window_size")


def selected_logp(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log π(token) [n] from logits [n, V] at the sampling temperature, in float32 or better."""
    logits = at_least_float32(logits)
    logits = logits if temperature == 1 else logits / temperature
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
    cap: int = CAP
    """Tokens in a shared row. Within the window of local attention: transformers take a 4D mask as it is for every layer."""

    def packs(self, batch: Batch, rows: Tensor, budget: int) -> Iterator[Pack]:
        """The completions `rows` in micro-batches this model can be given."""
        return pack(batch, rows, budget, share=self.share_prompts, cap=self.cap)

    def __call__(self, batch: Pack) -> Tensor:
        """[b, T] nats with graph; 0 off the mask."""
        where, tokens = batch.predictor[batch.mask], batch.tokens[batch.mask]
        if self.split_head:
            logp = self._chunked(predicting_states(backbone(self.model), batch), tokens)
        else:
            logits = self.model(**inputs(batch), use_cache=False).logits
            logp = selected_logp(_rows(logits.flatten(0, 1), where), tokens, self.temperature)
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


def inputs(batch: Pack) -> dict[str, Tensor | None]:
    """What a transformers model is called with; without padding it needs no mask."""
    whole = batch.attention.ndim == 2 and bool(batch.attention.all())
    mask = None if whole else batch.attention
    return {"input_ids": batch.input_ids, "attention_mask": mask, "position_ids": batch.positions}


def predicting_states(network: nn.Module, batch: Pack) -> Tensor:
    """[n, H] last hidden states at the positions that predict the sampled tokens, in the order of `batch.mask`."""
    states = network(**inputs(batch), use_cache=False).last_hidden_state
    return _rows(states.flatten(0, 1), batch.predictor[batch.mask])


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index]. The backward pass of indexing adds up atomically, in the threads' order, where an index repeats (a shared
    prompt's last position does), so that a gradient would not be the same twice; that of `index_select` is, on the CPU."""
    return x.index_select(0, index)


def backbone(model: Any) -> nn.Module:
    """The model without its head."""
    return (
        model.get_decoder() if hasattr(model, "get_decoder") and model.get_decoder() is not None else model.base_model
    )


def _window(model: Any) -> int:
    """Tokens that the narrowest local attention of the model looks back, as its configuration says."""
    config = model.config.get_text_config() if hasattr(model, "config") else None
    widths = [getattr(config, name, None) for name in _WINDOWS]
    return min((w for w in widths if isinstance(w, int) and w > 0), default=CAP)


@torch.no_grad()
def probe(model: Any, temperature: float) -> Scorer:
    """Tries both short cuts on a small made-up group and keeps those that leave every log-probability as it was.

    "As it was" is measured against how much a prompt matters to this model, so that a model of small logits hides nothing.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    prompts = torch.randint(vocabulary, (2, 4), generator=generator)
    batch = Batch(
        mask=torch.ones(3, 5, dtype=torch.bool),
        group=torch.zeros(3, dtype=torch.int64),
        reward=torch.zeros(3),
        tokens=torch.randint(vocabulary, (3, 5), generator=generator),
        prompts=(prompts[0],),
    )
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype

    def scores(scorer: Scorer, batch: Batch) -> Tensor:
        out = torch.zeros(3, 5)
        for p in scorer.packs(batch, torch.arange(3), 10**6):
            out[p.rows] = scorer(p.to(device)).cpu().float()
        return out

    plain = Scorer(model, temperature, split_head=False, share_prompts=False)
    truth = scores(plain, batch)
    effect = float((scores(plain, replace(batch, prompts=(prompts[1],))) - truth).abs().max())
    tolerance = (0.05 if dtype == torch.bfloat16 else 1e-4) * effect

    def holds(scorer: Scorer) -> bool:
        try:
            return float((scores(scorer, batch) - truth).abs().max()) <= tolerance
        except Exception:  # whatever an architecture says to a call it does not take: the plain path remains
            return False

    split = replace(plain, split_head=True)
    best = split if holds(split) else plain
    shared = replace(best, share_prompts=True, cap=min(CAP, _window(model)))
    row = 4 + 3 * (5 - 1)  # a window that the made-up group does not fit into would leave sharing untried
    return shared if shared.cap >= row and holds(shared) else best
