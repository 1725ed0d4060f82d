"""A learner in this process and one in several, on equal models, and what must be equal after a step of both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

import policygrad as pg
from doubles.batches import VOCABULARY, make_batch, naive_logp
from doubles.data_fields import by_tokens
from policygrad.core.metrics import Metrics
from policygrad.core.staleness import resolve_old_policy
from policygrad.learners.fsdp.controller import FsdpController
from policygrad.learners.fsdp.processes import WorkerGroup
from policygrad.learners.local.learner import LocalLearner

BATCH = make_batch(5, groups=5)
SIZES = {
    "n_embd": 12,
    "n_inner": 15,
    "n_layer": 3,
    "n_head": 2,
    "n_positions": 16,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
HOW: dict[str, Any] = {
    "lr": 1e-2,
    "steps": 4,
    "temperature": 0.7,
    "config": pg.LearnerConfig(micro_tokens=24),
    "optimizer": pg.OptimizerConfig(
        eps=1.0
    ),  # a step that is about linear in the gradient, so that rounding stays rounding
}


@contextmanager
def started(size: int) -> Iterator[WorkerGroup]:
    """So many processes, until the end of the block, and this one's threads as they were."""
    threads, found = torch.get_num_threads(), WorkerGroup.start(size)
    try:
        yield found
    finally:
        found.close(in_sync=False)
        torch.set_num_threads(threads)


def model(dtype: torch.dtype = torch.float64, seed: int = 0, **sizes: int) -> nn.Module:
    """15 rows, 12 columns and 3 layers: not everything can be halved. It rounds nothing to float32 on the way, as Llamas do."""
    torch.manual_seed(seed)
    config = tf.GPT2Config(
        **(SIZES | sizes), vocab_size=VOCABULARY, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, initializer_range=0.5
    )
    made: nn.Module = tf.GPT2LMHeadModel(config).to(dtype).eval()
    return made


def learned(learner: Any, algorithm: pg.Algorithm, batch: pg.Batch = BATCH) -> Metrics:
    """A step as the loop takes it."""
    if batch.logp_sampler is not None:
        algorithm, batch = resolve_old_policy(algorithm, batch, learner.version)
    batch = learner.evaluate(batch, algorithm.needs)
    shaped = algorithm.shape_rewards(batch)
    psi, batch = algorithm.compute_advantages(batch, shaped), algorithm.add_critic_targets(batch, shaped)
    found: Metrics = learner.update(batch, psi, algorithm)
    return found


def agree(local: LocalLearner, ranked: FsdpController, tolerance: float = 1e-12) -> None:
    """Weights and moments, which are the gradients' averages, relative to each tensor's largest number."""
    (expected, values), (found, said) = local.state(), ranked.state()
    assert values == said
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape
        bound = max(tolerance, 1e-6) if name.startswith("critic/") else tolerance  # whose values are float32
        assert float((found[name] - tensor).abs().max()) <= bound * max(1e-30, float(tensor.abs().max())), name


def values(metrics: Metrics) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


def pair(
    ranks: WorkerGroup, algorithm: pg.Algorithm, make: Any = model, **changes: Any
) -> tuple[LocalLearner, FsdpController, nn.Module]:
    """A learner in this process, one in all, and the model that the second publishes into. make: the model; a reference that the
    algorithm names is a smaller one."""
    how, one, whole = HOW | changes, make(), make()
    named = algorithm.reference is not None and algorithm.reference.model is not None
    teachers = [model(seed=7, n_embd=8, n_layer=2) if named else None for _ in range(2)]
    torch.manual_seed(1)  # of a critic's head
    local = LocalLearner(one, algorithm, reference=teachers[0], **how)
    torch.manual_seed(1)
    return local, FsdpController.of(ranks, whole, algorithm, reference=teachers[1], **how), whole


@cache
def _near() -> Tensor:
    """log μ [B, T], near the model's, of `SCORING_TIMEOUT`: equal completions have equal ones."""
    noise = torch.randn(BATCH.mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        near = naive_logp(model(), BATCH, HOW["temperature"]) + 0.1 * noise
    near[1::4] = near[::4]
    return near


def filled(algorithm: pg.Algorithm, dtype: torch.dtype = torch.float64) -> pg.Batch:
    """`SCORING_TIMEOUT` with all that the algorithm reads and no learner fills, after its filters."""
    near = _near().to(dtype)
    batch = replace(BATCH, reward=BATCH.reward.to(dtype), logp_old=near, logp_sampler=near)
    batch = by_tokens(replace(batch, truncated=batch.lengths == batch.mask.shape[1]), algorithm.all_needs)
    if "step_end" in algorithm.all_needs:
        batch = replace(batch, step_end=batch.mask, token_reward=(BATCH.tokens % 3).to(dtype) * batch.mask)  # type: ignore[operator]
        if algorithm.critic is None:  # V that a rollout has estimated
            batch = replace(batch, values=near / 9)
    return algorithm.apply_filters(replace(batch, logp_old=None))
