"""Texts in segments in several processes: the weights are those of whole texts in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import policygrad as pg
from doubles.algorithms import runnable
from doubles.long_texts import built, make_batch, make_branching_batch
from doubles.ranked import agree, fill, learned, model, started, values
from policygrad.algorithms import ALGORITHMS
from policygrad.learners.base import LearnerSpec
from policygrad.learners.config import LearnerConfig
from policygrad.learners.fsdp.controller import FsdpController
from policygrad.learners.fsdp.distributed_ops import FsdpWorkDivision
from policygrad.learners.fsdp.processes import WorkerGroup
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.adapters import add_adapters
from policygrad.models.lora_config import Lora

MODEL = partial(model, n_positions=512)
PACKED = {"completions/computed", "routing/busiest", "routing/unused"}
"""Metrics that count what is read: what texts have in common, once in each process."""


def compare(
    ranks: WorkerGroup,
    algorithm: pg.Algorithm,
    make: Callable[[], nn.Module] = MODEL,
    make_batch: Callable[[], pg.Batch] = make_batch,
    bound: float = 1e-12,
    **changes: Any,
) -> None:
    """Take two steps with whole texts in one process, and with passes of 50 tokens in several."""
    algorithm = algorithm.with_max_tokens(140)
    spec = LearnerSpec(algorithm, 1e-2, 4, 0.7, LearnerConfig(**changes), pg.OptimizerConfig(eps=1.0))
    specs = [replace(spec, config=replace(spec.config, micro_tokens=n)) for n in (10**6, 50)]
    torch.manual_seed(1)  # for a critic's head
    local = LocalLearner(make(), specs[0])
    torch.manual_seed(1)
    ranked = FsdpController(ranks, make(), specs[1])
    drawn = make_batch()
    near = -3.5 + 0.1 * torch.randn(drawn.mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = fill(drawn, algorithm, near)
    for _ in range(2):
        expected, found = (values(learned(learner, algorithm, batch)) for learner in (local, ranked))
        for key in expected.keys() - PACKED:
            assert found[key] == pytest.approx(expected[key], rel=1e-6, abs=1e-9), key
    agree(local, ranked, bound)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)])
def test_weights_are_those_of_whole_texts_in_one_process(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    divided, divide = list[Any](), FsdpWorkDivision._divide_paths

    def observe(division: FsdpWorkDivision, *args: Any) -> Any:
        divided.append(division)
        return divide(division, *args)

    monkeypatch.setattr(FsdpWorkDivision, "_divide_paths", observe)
    with started(size) as ranks:
        compare(ranks, pg.PPO, bound=1e-6)  # values are in float32
        assert divided  # else this would compare whole texts
        compare(ranks, pg.GRPO, make_batch=make_branching_batch)


def adapted() -> nn.Module:
    with_adapters = add_adapters(MODEL(), Lora(rank=3))
    for name, p in with_adapters.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.2, generator=torch.Generator().manual_seed(len(name)))
    return with_adapters


@pytest.mark.full
def test_adapters_and_recomputed_activations_read_segments_too() -> None:
    with started(2) as ranks:
        compare(ranks, pg.GRPO, make=adapted, lora="rank=3")
        compare(ranks, pg.GRPO, make_batch=make_branching_batch, gradient_checkpointing=True)


@pytest.mark.full
def test_every_gradient_algorithm_reads_segments_in_two_processes() -> None:
    others = ("opsd", "sdpo", "sdft", "clip_cov", "kl_cov", "high_entropy")
    """Teachers read a second prompt, so texts are whole; where the policy has not moved, rounding decides which tokens the last
    three choose."""
    parts = {
        "a critic that is a head alone": replace(pg.PPO, critic=pg.Critic(backbone="policy", hidden=5)),
        "exact KL to the reference": replace(pg.DR_GRPO, terms=(pg.ExactKLToReference(0.2),)),
    }
    with started(2) as ranks:
        for algorithm in parts.values():
            compare(ranks, algorithm, bound=1e-6)
        for name in ALGORITHMS:
            algorithm = runnable(name)
            is_alone = algorithm.reference is None or algorithm.reference.model is None
            if name not in others and is_alone and algorithm.update_rule.uses_lr:
                compare(ranks, algorithm, bound=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_5", "falcon_h1", "lfm2"])
def test_families_with_a_tree_or_a_cache_read_segments_in_two_processes(kind: str) -> None:
    """Of some layers, gradients are computed in float32: those of a decay differ by 4e-4 of their largest."""
    with started(2) as ranks:
        compare(ranks, pg.GRPO, make=partial(built, kind), bound=1e-3 if kind == "qwen3_5" else 2e-6)
