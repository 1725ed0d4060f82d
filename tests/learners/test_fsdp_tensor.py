"""Layers that are cut between processes: the same gradients, metrics and checkpoints as in one, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

import policygrad as pg
from doubles.algorithms import runnable
from doubles.architectures import CONFIGS, PLAIN
from doubles.batches import branching
from doubles.cut import llama, qwen3
from doubles.ranked import agree, filled, learned, model, pair, started, values
from policygrad.algorithms import ALGORITHMS
from policygrad.learners.fsdp.processes import WorkerGroup
from policygrad.learners.fsdp.tensor_parallel import check_tensor_parallel, resolve_tp_plan


def compared(
    ranks: WorkerGroup,
    algorithm: pg.Algorithm,
    make: Callable[..., nn.Module],
    tolerance: float = 1e-12,
    dtype: torch.dtype = torch.float64,
    *,
    several: bool = False,
    **changes: Any,
) -> tuple[Any, Any, nn.Module]:
    """Metrics, and all that a checkpoint holds, after a step."""
    algorithm = algorithm.with_max_tokens(6).with_state(algorithm.with_max_tokens(6).init_state())
    config = pg.LearnerConfig(micro_tokens=24, world_size=ranks.size, tensor_parallel=2)
    local, ranked, full = pair(ranks, algorithm, make, **({"config": config} | changes))
    batch = branching(filled(algorithm, dtype)) if several else filled(algorithm, dtype)
    expected, result = (values(learned(learner, algorithm, batch)) for learner in (local, ranked))
    assert result.pop("completions/computed", 0) >= expected.pop("completions/computed", 0)
    coarse = max(1e-9, tolerance) if algorithm.critic is None else 1e-6
    assert result == pytest.approx(expected, rel=coarse, abs=max(1e-12, tolerance))
    agree(local, ranked, tolerance)
    ranked.publish()
    state, _ = ranked.state()
    assert all(torch.equal(p, state[f"weights/{n}"].to(p.dtype)) for n, p in full.named_parameters())
    return local, ranked, full


def test_two_tensor_parallel_processes_equal_one() -> None:
    with started(2) as ranks:
        local, ranked, _ = compared(ranks, pg.GRPO, llama)
        ranked.restore(*local.state())
        agree(local, ranked, 0.0)
        for learner in (local, ranked):
            learned(learner, pg.GRPO.with_max_tokens(6))
        agree(local, ranked)
        _, other, _ = compared(ranks, pg.GRPO, qwen3)
        assert (
            ranked._learner._place.mesh is other._learner._place.mesh
        )  # of two equal ones, ranks may use different groups


TWICE = pg.GradientSteps(epochs=2, minibatches=2)
PARTS = {
    "exact KLs": replace(pg.DR_GRPO, terms=(pg.ExactKLToOld(0.3), pg.ExactKLToReference(0.2)), update_rule=TWICE),
    "exact entropy": replace(pg.DR_GRPO, terms=(pg.ExactEntropy(0.1),)),
    "ppo, a head alone": replace(pg.PPO, critic=pg.Critic(backbone="policy", hidden=5)),
    "a reference that is renewed": replace(pg.GRPO, reference=pg.Reference(refresh_every=1, reset_optimizer=True)),
}


TABLE = {name: runnable(name) for name in ALGORITHMS} | {"kl_cov": replace(pg.KL_COV, old_policy="sampler")} | PARTS
"""Of the sign of log r see `test_fsdp_matrix.py`."""


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_equals_one_process_for_every_gradient_algorithm(size: int) -> None:
    """Two processes that share each layer; two pairs of such for some. A reference that is a model of its own is not cut."""
    cases = {
        name: algorithm
        for name, algorithm in TABLE.items()
        if algorithm.update_rule.uses_lr and "grad_logp_sq_norm" not in algorithm.needs
    }
    assert len(cases) > 0.8 * len(TABLE)
    if size == 4:
        cases = {name: cases[name] for name in ("grpo", "gspo", "ppo", "prime", *PARTS)}
    with started(size) as ranks:
        wrong = {}
        for name, algorithm in cases.items():
            try:
                compared(ranks, algorithm, llama)
            except AssertionError as error:
                wrong[name] = str(error)
        assert wrong == {}


@pytest.mark.full
def test_tensor_parallel_with_branching_episodes_float32_rows_and_recomputed_activations() -> None:
    with started(4) as ranks:
        compared(ranks, pg.GRPO, llama, several=True)
        compared(ranks, pg.GRPO, partial(llama, intermediate_size=18))
        compared(ranks, pg.GRPO, partial(llama, torch.float32), 1e-5, torch.float32)
        config = pg.LearnerConfig(micro_tokens=24, world_size=4, tensor_parallel=2, gradient_checkpointing=True)
        compared(ranks, pg.GRPO, qwen3, config=config)


@pytest.mark.full
def test_cut_layers_have_state_on_the_host_and_no_masters_as_whole_ones_do() -> None:
    """In float64 to rounding. In bf16 partial sums of layers are rounded too, so that some weights go to the other side."""
    algorithm = pg.DR_GRPO.with_max_tokens(6)
    with started(4) as ranks:
        compared(ranks, algorithm, llama, optimizer=pg.OptimizerConfig(eps=1.0, offload=True))
        options = pg.OptimizerConfig(eps=1.0, masters="none")
        config = pg.LearnerConfig(micro_tokens=24, world_size=4, tensor_parallel=2)
        local, ranked, _ = pair(ranks, algorithm, lambda: llama().bfloat16(), config=config, optimizer=options)
        before = {name: x.clone() for name, x in local.state()[0].items()}
        for learner in (local, ranked):
            learned(learner, algorithm, filled(algorithm, torch.float32))
        (expected, _), (result, values) = local.state(), ranked.state()
        moved = sum(int((expected[name] != x).sum()) for name, x in before.items())
        assert sum(int((expected[name] != result[name]).sum()) for name in before) < 0.3 * moved
        saved = {name: x.clone() for name, x in result.items()}
        learned(ranked, algorithm, filled(algorithm, torch.float32))
        later = {name: x.clone() for name, x in ranked.state()[0].items()}
        ranked.restore(saved, values)
        learned(ranked, algorithm, filled(algorithm, torch.float32))
        assert all(torch.equal(x, later[name]) for name, x in ranked.state()[0].items())


def test_layers_that_cannot_be_split_are_refused() -> None:
    def refused(make: Any, words: str, size: int = 2, algorithm: pg.Algorithm = pg.GRPO) -> None:
        with pytest.raises(pg.ConfigError, match=words):
            check_tensor_parallel(make(), size, algorithm)

    mixtral = partial(tf.MixtralConfig, num_local_experts=2)
    sizes = CONFIGS["qwen3"]().to_dict()
    moe: Any = mixtral(**{key: sizes[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")})
    refused(
        model,
        r"learner\.tensor_parallel=2: transformers has no tensor-parallel plan for GPT2LMHeadModel: .*tensor_parallel=1",
    )
    refused(lambda: tf.MixtralForCausalLM(moe), r"uses .*; supported are colwise")
    refused(llama, r"learner\.tensor_parallel=4 does not divide num_key_value_heads, 2", 4)
    refused(partial(llama, intermediate_size=21), r"does not divide model\.layers\.0\.mlp\.gate_proj's outputs, 21")
    refused(llama, "TrustRegion reads gradients layer by layer", algorithm=pg.TRPO)
    exact = replace(pg.OPO, advantage=(pg.OptimalBaseline(norm="exact"),))
    refused(llama, r"OptimalBaseline\(norm='exact'\) reads gradients", algorithm=exact)
    check_tensor_parallel(model(), 1, pg.TRPO)
    with pytest.raises(
        pg.ConfigError, match=r"learner\.tensor_parallel=2 does not divide learner\.world_size=3: choose a divisor"
    ):
        pg.LearnerConfig(world_size=3, tensor_parallel=2).check_processes()
    with pytest.raises(pg.ConfigError, match=r"learner\.tensor_parallel must be at least 1, not 0"):
        pg.LearnerConfig(tensor_parallel=0)


def test_adapters_are_not_split() -> None:
    pytest.importorskip("peft")
    from policygrad.models.adapters import add_adapters
    from policygrad.models.lora_config import Lora

    with pytest.raises(pg.ConfigError, match=r"do not cover adapters \(learner\.lora\)"):
        check_tensor_parallel(add_adapters(llama(), Lora(rank=2)), 2, pg.GRPO)


def test_the_tensor_parallel_plan_covers_every_layer() -> None:
    result = resolve_tp_plan(llama())
    assert len(result) == 7 * 2
    assert result["model.layers.1.self_attn.q_proj"] == "colwise"
    assert result["model.layers.0.mlp.down_proj"] == "rowwise"
    assert resolve_tp_plan(qwen3())["model.layers.0.self_attn.q_norm"] == "replicated_with_grad_allreduce"
    assert resolve_tp_plan(tf.GPT2LMHeadModel(tf.GPT2Config(**PLAIN, n_embd=8, n_layer=1, n_head=2))) == {}
