"""Random ragged batches: unequal groups, holes (tool tokens), empty completions, NaN wherever nothing was sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

import policygrad as pg
from doubles.data_fields import FILL, READ_BY
from policygrad.core.divergences import REVERSE_KL

VOCABULARY = 4
NAN = float("nan")


@dataclass(frozen=True)
class Shape:
    """What hypothesis draws; everything else follows from the seed."""

    groups: tuple[int, ...]
    width: int
    seed: int
    binary: bool


def shapes(max_groups: int = 3, max_size: int = 4, max_width: int = 5) -> st.SearchStrategy[Shape]:
    return st.builds(
        Shape,
        groups=st.lists(st.integers(1, max_size), min_size=1, max_size=max_groups).map(tuple),
        width=st.integers(1, max_width),
        seed=st.integers(0, 2**32 - 1),
        binary=st.booleans(),
    )


class Random:
    """Float64 draws from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)


def ragged_mask(random: Random, rows: int, width: int) -> Tensor:
    """Rows of random length with holes; about one row in eight is empty."""
    lengths = random.integers(width + 1, rows)
    mask = torch.arange(width) < lengths[:, None]
    mask &= random.uniform(rows, width) > 0.2
    return mask & (random.uniform(rows) > 0.05)[:, None]


def policy(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """log π_θ [B, T] of a bigram softmax policy with parameters `logits` [V + 1, V]; NaN where nothing was sampled."""
    previous = torch.cat([torch.full_like(tokens[:, :1], VOCABULARY), tokens[:, :-1]], dim=1)
    logp = torch.log_softmax(logits[previous], -1).gather(-1, tokens[..., None]).squeeze(-1)
    return torch.where(mask, logp, NAN)


def passed(logp: Tensor, batch: pg.Batch, algorithm: pg.Algorithm = pg.OPSD) -> pg.Forward:
    """A forward pass of the policy, with its entropies where the batch has some: they stand still here."""
    ours, theirs = distributions(logp, batch)
    divergence = next(
        (term.divergence for term in algorithm.terms if isinstance(term, pg.ExactKLToReference)), REVERSE_KL
    )
    kl = torch.where(batch.mask, divergence.compute(ours, theirs), NAN)
    return pg.Forward(logp, entropy=batch.entropy, kl_ref=kl)


def distributions(logp: Tensor, batch: pg.Batch) -> tuple[Tensor, Tensor]:
    """log π_θ(·), with the graph of log π_θ, and log π_ref(·) over three tokens, the first of which was sampled; [B, T, 3]."""
    sampled = torch.where(batch.mask, logp, -1.0).clamp(max=-1e-3)[..., None]
    left = torch.log(-torch.expm1(sampled))
    ours = torch.cat([sampled, left + math.log(0.3), left + math.log(0.7)], -1)
    x = sampled.detach()
    return ours, torch.cat([torch.sin(7 * x), torch.cos(11 * x), torch.sin(13 * x)], -1).mul(2).log_softmax(-1)


def make(shape: Shape, off_policy: float | None = None, extra: str | None = None) -> tuple[pg.Batch, Tensor]:
    """(batch, logits): `move_off_policy` is the spread of log π_θ − log π_old, None = on-policy.

    `extra` names a field to fill, or "steps": step ends and their rewards; or what `data_fields` fills.
    """
    random = Random(shape.seed)
    rows = sum(shape.groups)
    mask = ragged_mask(random, rows, shape.width)
    tokens = random.integers(VOCABULARY, rows, shape.width)
    logits = random.normal(VOCABULARY + 1, VOCABULARY).requires_grad_()
    logp = policy(logits, tokens, mask).detach()
    reward = random.integers(2, rows).double() if shape.binary else random.normal(rows)
    order = torch.argsort(random.uniform(rows))
    batch = pg.Batch(
        mask=mask,
        group=torch.arange(len(shape.groups)).repeat_interleave(torch.tensor(shape.groups))[order],
        reward=torch.where(mask.any(1), reward, NAN),
        tokens=tokens,
        logp_ref=logp + 0.3 * random.normal(rows, shape.width),
        truncated=random.uniform(rows) < 0.25,
        values=torch.where(mask, random.normal(rows, shape.width), NAN),
        logp_sampler=logp + 0.5 * random.normal(rows, shape.width),
        implicit_reward=torch.where(mask, Random(shape.seed + 1).normal(rows, shape.width), NAN),
    )
    greedy = Random(shape.seed + 1).normal(len(shape.groups))  # from draws of its own: what else is drawn stays
    batch = replace(batch, baseline=greedy[batch.group], example_id=100 + 3 * batch.group)
    if off_policy is not None:
        batch = replace(batch, logp_old=logp + off_policy * random.normal(rows, shape.width))
    if extra == "steps":
        batch = with_steps(batch, random)
    elif extra in FILL:
        batch = FILL[extra](batch, random)
    elif extra is not None:
        batch = replace(batch, **{extra: torch.where(mask, random.normal(rows, shape.width), NAN)})
    return batch, logits


def extra_of(algorithm: pg.Algorithm) -> str | None:
    """What `make` is to fill for it."""
    if "step_end" in algorithm.all_needs:
        return "steps"
    if any(isinstance(link, pg.DivideByGroupMean) for link in algorithm.advantage):
        return "successes"
    if "entropy" in algorithm.selection_needs | algorithm.forward_needs:
        return "entropy"
    return next((extra for field, extra in READ_BY.items() if field in algorithm.all_needs), None)


def with_steps(batch: pg.Batch, random: Random) -> pg.Batch:
    """Steps that end at random, each with a reward; the last sampled token ends one, and what is off the mask is not read."""
    mask = batch.mask
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    end = (random.uniform(*mask.shape) < 0.4) | last
    reward = torch.where(end, random.normal(*mask.shape), 0.0)
    return replace(batch, step_end=end, token_reward=torch.where(mask, reward, NAN))


def gradients(loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """∂loss/∂leaf, zeros where the loss does not depend on it."""
    if not loss.requires_grad:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    result = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    return tuple(torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, result, strict=True))


def close(actual: Tensor, expected: Tensor, scale: Tensor | None = None, tolerance: float = 1e-12) -> None:
    """|actual − expected| ≤ tolerance × the largest entry of `scale` (default: of `expected`); no NaN."""
    largest = float((expected if scale is None else scale).abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * largest)
