"""Batches and losses of other frameworks, written literally, for the tests of the audit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from doubles.random_batches import Random

ROWS, WIDTH, SIZE, MICRO = 16, 12, 4, 4


def make_update(seed: int = 0, spread: float = 0.3, sampler: float = 0.0) -> dict[str, Any]:
    """One update: prompts in order, completions of random lengths in micro-batches that are not the prompts."""
    random = Random(seed)
    mask = torch.arange(WIDTH) < (2 + random.integers(WIDTH - 1, ROWS))[:, None]
    logp, reward = -random.normal(ROWS, WIDTH).abs(), random.normal(ROWS)
    by_prompt = reward.reshape(-1, SIZE)
    z = (by_prompt - by_prompt.mean(1, keepdim=True)) / (by_prompt.std(1, keepdim=True) + 1e-4)
    update = {
        "mask": mask,
        "group": torch.arange(ROWS) // SIZE,
        "reward": reward,
        "advantage": z.reshape(-1),
        "logp": logp,
        "logp_old": logp + spread * random.normal(ROWS, WIDTH),
        "micro_batch": torch.arange(ROWS) % MICRO,
    }
    if sampler:
        update["logp_sampler"] = update["logp_old"] + sampler * random.normal(ROWS, WIDTH)
    return update


def clip_loss(
    update: dict[str, Any],
    average: str = "tokens",
    low: float = 0.2,
    high: float = 0.2,
    mask: Tensor | None = None,
    old: str = "logp_old",
    scale: float = 1.0,
    correction: Tensor | None = None,
) -> dict[str, Any]:
    """Add the loss and the gradient of PPO's clip with one of the averages that libraries use."""
    logp = update["logp"].clone().requires_grad_()
    mask = (update["mask"] if mask is None else mask).double()
    r, psi = (logp - update[old]).exp(), update["advantage"][:, None]
    per_token = -torch.minimum(r * psi, r.clamp(1 - low, 1 + high) * psi)
    if correction is not None:
        per_token = per_token * correction
    if average == "tokens":
        loss = (per_token * mask).sum() / mask.sum()
    elif average == "sequences":
        loss = ((per_token * mask).sum(1) / mask.sum(1)).mean()
    elif average == "fixed":
        loss = (per_token * mask).sum() / (ROWS * 100)
    else:  # the token mean of each micro-batch or rank, averaged
        shares = [(per_token * mask)[rows].sum() / mask[rows].sum() for rows in split(update[average])]
        loss = torch.stack(shares).mean()
    loss = scale * loss
    [gradient] = torch.autograd.grad(loss, logp)
    return {**update, "loss": loss.detach(), "gradient": gradient}


def split(ids: Tensor) -> list[Tensor]:
    return [ids == i for i in torch.unique(ids)]
