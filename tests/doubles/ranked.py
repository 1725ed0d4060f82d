"""A learner in one process and one in several, on equal models, and the comparison after a step of both."""

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
from doubles.batches import VOCABULARY, make_batch, naive_logp, with_reference_prompts
from doubles.data_fields import by_tokens
from doubles.forked_ranks import ForkedWorker
from policygrad.core.metrics import Metrics
from policygrad.core.staleness import resolve_old_policy
from policygrad.learners.fsdp.controller import FsdpController
from policygrad.learners.fsdp.processes import WorkerGroup, WorkerLauncher
from policygrad.learners.local.learner import LocalLearner

BATCH = make_batch(5, groups=5)
SIZES = {
    "n_embd": 12,
    "n_inner": 15,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
TEMPERATURE = 0.7


def make_spec(algorithm: pg.Algorithm, **changes: Any) -> pg.LearnerSpec:
    """The specification of both learners. With a large eps a step is about linear in the gradient, so rounding is not amplified."""
    config, optimizer = pg.LearnerConfig(micro_tokens=24), pg.OptimizerConfig(eps=1.0)
    spec = pg.LearnerSpec(algorithm, 1e-2, 4, TEMPERATURE, config, optimizer)
    return replace(spec, **changes)


@contextmanager
def started(size: int) -> Iterator[WorkerGroup]:
    """Fork ranks for the block, and restore this process's number of threads."""
    threads, workers = torch.get_num_threads(), WorkerGroup.start(size, WorkerLauncher(ForkedWorker))
    try:
        yield workers
    finally:
        workers.close(in_sync=False)
        torch.set_num_threads(threads)


def model(dtype: torch.dtype = torch.float64, seed: int = 0, **sizes: int) -> nn.Module:
    """A model whose sizes (15 rows, 12 columns) are not all even. Unlike Llama it computes nothing in float32."""
    torch.manual_seed(seed)
    config = tf.GPT2Config(
        **(SIZES | sizes), vocab_size=VOCABULARY, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, initializer_range=0.5
    )
    network: nn.Module = tf.GPT2LMHeadModel(config).to(dtype).eval()
    return network


def learned(learner: Any, algorithm: pg.Algorithm, batch: pg.Batch = BATCH) -> Metrics:
    """Take a step as the loop does."""
    if batch.logp_sampler is not None:
        algorithm, batch = resolve_old_policy(algorithm, batch, learner.version)
    batch = learner.evaluate(batch, algorithm.needs)
    shaped = algorithm.shape_rewards(batch)
    psi, batch = algorithm.compute_advantages(batch, shaped), algorithm.add_critic_targets(batch, shaped)
    metrics: Metrics = learner.update(batch, psi, algorithm)
    return metrics


def agree(local: LocalLearner, ranked: FsdpController, tolerance: float = 1e-12) -> dict[str, Tensor]:
    """Compare weights and moments (averages of the gradients) relative to each tensor's largest number; return the ranks'."""
    (expected, expected_values), (tensors, values) = local.state(), ranked.state()
    assert values == expected_values
    assert expected.keys() == tensors.keys()
    for name, tensor in expected.items():
        assert tensors[name].shape == tensor.shape
        bound = max(tolerance, 1e-6) if name.startswith("critic/") else tolerance  # its values are float32
        assert float((tensors[name] - tensor).abs().max()) <= bound * max(1e-30, float(tensor.abs().max())), name
    return dict(tensors)


def values(metrics: Metrics) -> dict[str, float]:
    """Without the number of tokens that were read, which depends on what is read at a time."""
    return {name: metric.value for name, metric in metrics.items() if name != "tokens/computed"}


def pair(
    workers: WorkerGroup, algorithm: pg.Algorithm, make: Any = model, **changes: Any
) -> tuple[LocalLearner, FsdpController, nn.Module]:
    """Return a learner in this process, one in all, and the model that the second publishes into.

    Args:
        make: Makes the model; a reference that the algorithm names is a smaller one.
    """
    spec, one, full = make_spec(algorithm, **changes), make(), make()
    named = algorithm.reference is not None and algorithm.reference.model is not None
    teachers = [model(seed=7, n_embd=8, n_layer=2) if named else None for _ in range(2)]
    torch.manual_seed(1)  # for a critic's head
    local = LocalLearner(one, spec, reference=teachers[0])
    torch.manual_seed(1)
    return local, FsdpController(workers, full, spec, reference=teachers[1]), full


@cache
def _near() -> Tensor:
    """log μ [B, T] of `BATCH`, close to the model's and equal for equal completions."""
    noise = torch.randn(BATCH.mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        near = naive_logp(model(), BATCH, TEMPERATURE) + 0.1 * noise
    near[1::4] = near[::4]
    return near


def filled(algorithm: pg.Algorithm, dtype: torch.dtype = torch.float64) -> pg.Batch:
    """Return `BATCH` with all fields that the algorithm reads and no learner fills, after its filters."""
    return fill(BATCH, algorithm, _near().to(dtype))


def fill(batch: pg.Batch, algorithm: pg.Algorithm, near: Tensor) -> pg.Batch:
    """Return a batch with these fields; `near` [B, T]: log μ of its tokens."""
    dtype = near.dtype
    batch = replace(batch, reward=batch.reward.to(dtype), logp_old=near, logp_sampler=near)
    batch = by_tokens(replace(batch, truncated=batch.lengths == batch.mask.shape[1]), algorithm.all_needs)
    if "step_end" in algorithm.all_needs:
        batch = replace(batch, step_end=batch.mask, token_reward=(batch.tokens % 3).to(dtype) * batch.mask)  # type: ignore[operator]
        if algorithm.critic is None:  # V that a rollout has estimated
            batch = replace(batch, values=near / 9)
    if algorithm.reference is not None and algorithm.reference.templates:
        batch = with_reference_prompts(batch)
    return algorithm.apply_filters(replace(batch, logp_old=None))
