"""Texts that are divided between processes: the same gradients, metrics and state as in one, for every model that reads trees."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import policygrad as pg
from doubles.algorithms import runnable
from doubles.architectures import BASE, families
from doubles.batches import branching, make_batch
from doubles.cut import llama, qwen3
from doubles.experts import built, drawn, shaken
from doubles.in_double import compute_in_double
from doubles.ranked import BATCH, agree, filled, learned, model, pair, started, values
from policygrad.algorithms import ALGORITHMS
from policygrad.core.batch import SamplingMask
from policygrad.learners.config import OptimizerConfig
from policygrad.learners.fsdp.context_parallel import ContextGroup, check_context_parallel, divide_nodes
from policygrad.learners.fsdp.processes import WorkerGroup
from policygrad.learners.local.packing import pack_micro_batches
from policygrad.models.adapters import add_adapters
from policygrad.models.loading import load_model
from policygrad.models.lora_config import Lora

TWICE = pg.GradientSteps(epochs=2, minibatches=2)
PARTS = {
    "exact KLs": replace(pg.DR_GRPO, terms=(pg.ExactKLToOld(0.3), pg.ExactKLToReference(0.2)), update_rule=TWICE),
    "exact entropy": replace(pg.DR_GRPO, terms=(pg.ExactEntropy(0.1),)),
    "high entropy": replace(pg.HIGH_ENTROPY, corrections=(pg.HighEntropy(0.4),)),
    "kl_cov": replace(pg.KL_COV, old_policy="sampler"),
    "ppo, a head alone": replace(pg.PPO, critic=pg.Critic(backbone="policy", hidden=5)),
    "a teacher with prompts of its own": replace(
        pg.OPSD, reference=pg.Reference(ema=0.5, templates=("{answer} {prompt}",))
    ),
    "an exact KL to it": replace(
        pg.OPSD,
        terms=(pg.ExactKLToReference(0.2),),
        reference=pg.Reference(ema=0.5, templates=("{answer} {prompt}",)),
    ),
}
TABLE = {name: runnable(name) for name in ALGORITHMS} | PARTS
KINDS = ("grpo", "gspo", "ppo", "dapo", "prime", "exact KLs", "exact entropy", "high entropy", "an exact KL to it")
TREES = {f.type: f for f in families() if f.learning == "tree" and not f.refused}


def compared(
    ranks: WorkerGroup,
    algorithm: pg.Algorithm,
    make: Any = model,
    tolerance: float = 1e-12,
    *,
    count: int | None = None,
    batch: pg.Batch | None = None,
    dtype: torch.dtype = torch.float64,
    ignored: tuple[str, ...] = (),
    **changes: Any,
) -> tuple[Any, Any]:
    """Metrics, and all that a checkpoint holds, after a step in which `count` processes (None = all) divide each text."""
    algorithm = algorithm.with_max_tokens(6).with_state(algorithm.with_max_tokens(6).init_state())
    config = pg.LearnerConfig(micro_tokens=24, world_size=ranks.size, context_parallel=count or ranks.size, **changes)
    local, ranked, full = pair(ranks, algorithm, make, config=config)
    batch = filled(algorithm, dtype) if batch is None else batch
    expected, result = (values(learned(learner, algorithm, batch)) for learner in (local, ranked))
    for metrics in (expected, result):
        for name in ("completions/computed", *ignored):
            metrics.pop(name, None)
    coarse = max(1e-9, tolerance) if algorithm.critic is None else 1e-6
    assert result == pytest.approx(expected, rel=coarse, abs=max(1e-12, tolerance))
    assert any(result[name] for name in ("updates/taken", "value_pretraining") if name in result)
    agree(local, ranked, tolerance)
    ranked.publish()
    state, _ = ranked.state()
    moved = {name: x for name, x in state.items() if name.startswith("weights/")}
    assert all(torch.equal(full.get_parameter(name[8:]), x) for name, x in moved.items())
    return local, ranked


def failures(ranks: WorkerGroup, names: Any, **options: Any) -> dict[str, str]:
    """What each case complains of; none hides another."""
    result = {}
    for name in names:
        try:
            compared(ranks, TABLE[name], **options)
        except AssertionError as error:
            result[name] = str(error)
    return result


def count_tokens(network: Any) -> list[int]:
    """Return a list to which every later pass of a model in this process adds how many tokens it reads."""
    read = list[int]()
    network.get_input_embeddings().register_forward_pre_hook(lambda module, args: read.append(args[0].numel()))
    return read


def test_two_processes_that_divide_texts_equal_one() -> None:
    """Each reads half of the tokens. The Llama's heads share keys, which are gathered; GPT-2's heads are exchanged."""
    with started(2) as ranks:
        compared(ranks, pg.DR_GRPO, partial(llama, num_hidden_layers=1))
        local, ranked = compared(ranks, pg.DR_GRPO, partial(model, n_layer=1))
        whole, own = count_tokens(local.model), count_tokens(ranked._learner.model)
        for learner in (local, ranked):
            learned(learner, pg.DR_GRPO.with_max_tokens(6))
        agree(local, ranked)
        assert sum(whole) / 3 < sum(own) < sum(whole) / 1.6
        ranked.restore(*local.state())
        agree(local, ranked, 0.0)


@pytest.mark.full
@pytest.mark.parametrize(("size", "count"), [(2, 2), (3, 3), (4, 2), (4, 4)])
def test_processes_that_divide_texts_equal_one(size: int, count: int) -> None:
    """One group of two, three and four, and two groups of two."""
    with started(size) as ranks:
        assert failures(ranks, KINDS, count=count) == {}
        compared(ranks, pg.GRPO, partial(llama, num_key_value_heads=4), count=count)
        compared(ranks, pg.GSPO, qwen3, count=count)


@pytest.mark.full
def test_two_processes_that_divide_texts_equal_one_for_every_gradient_algorithm() -> None:
    names = [n for n, a in TABLE.items() if a.update_rule.uses_lr and "grad_logp_sq_norm" not in a.needs]
    assert len(names) > 0.8 * len(TABLE)
    with started(2) as ranks:
        assert failures(ranks, names) == {}


@pytest.mark.full
def test_every_model_that_reads_trees_can_be_divided() -> None:
    """Windows, sinks, latent attention, experts; Llama 4 attends in chunks, and longer texts are read whole."""
    assert {"gemma3_text", "gpt_oss", "deepseek_v3", "llama4"} <= TREES.keys()
    wrong = dict[str, str]()
    with started(2) as ranks:
        for kind in TREES:
            # whose gradient is nothing but rounding there: a softmax does not change with all of its scores
            kept = {"trainable": r"^(?!.*k_proj\.bias)"} if kind == "opt" else {}
            try:
                compared(ranks, pg.DR_GRPO, partial(small, kind), **kept)
            except AssertionError as error:
                wrong[kind] = str(error)
    assert wrong == {}


@pytest.mark.full
def test_four_processes_divide_windows_sinks_latent_attention_and_experts() -> None:
    with started(4) as ranks:
        # with other micro-batches, or in one process that cuts long texts, shared tokens are read more or less often
        options: dict[str, Any] = {"ignored": ("routing/busiest",)}
        for kind in ("gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_moe"):
            make = partial(small, kind)
            compared(ranks, pg.DR_GRPO, make, count=4 if kind == "gpt_oss" else 2, **options)
            compared(ranks, pg.DR_GRPO, make, batch=LONG, gradient_checkpointing=True, **options)
            by_heads = partial(small, kind, num_key_value_heads=4)  # as many as queries, in two processes and in four
            compared(ranks, pg.DR_GRPO, by_heads, batch=LONG, **options)


@pytest.mark.full
def test_whatever_else_a_pack_has_is_divided_with_it() -> None:
    """Texts that fall back, masks of what was sampled from, experts that are replayed, packs of fewer tokens than processes."""
    with started(3) as ranks:
        compared(ranks, pg.GRPO, llama, batch=branching(filled(pg.GRPO)), gradient_checkpointing=True)
        compared(ranks, pg.GRPO, llama, batch=with_masks(filled(pg.GRPO)))
        compared(ranks, TABLE["exact entropy"], batch=with_masks(filled(pg.GRPO)))
        tiny = replace(
            BATCH, mask=BATCH.mask & (torch.arange(6) < 1), prompts=tuple(p[:1] for p in BATCH.prompts or ())
        )
        compared(ranks, pg.GRPO, batch=tiny)
        compared(ranks, pg.DR_GRPO, partial(small, "qwen3_moe"), batch=tiny)
        compared(ranks, pg.GRPO, partial(llama, torch.float32), 1e-5, dtype=torch.float32)
        _replays_experts(ranks)


def _replays_experts(ranks: WorkerGroup) -> None:
    batch = drawn(built("qwen3"), BATCH)

    def make() -> nn.Module:
        result = built("qwen3")
        shaken(result)
        return compute_in_double(result)  # type: ignore[no-any-return]

    local, ranked = compared(ranks, pg.DR_GRPO, make, batch=batch, routing_replay=True)
    metrics = [values(learned(learner, pg.DR_GRPO.with_max_tokens(6), batch)) for learner in (local, ranked)]
    assert metrics[1]["routing/changed"] == pytest.approx(metrics[0]["routing/changed"])
    assert metrics[1]["routing/changed"] > 0.01


@pytest.mark.full
def test_adapters_learn_from_divided_texts() -> None:
    """GRPO's reference is the model without them."""
    pytest.importorskip("peft")

    def adapted(std: float = 0.1) -> nn.Module:
        result = add_adapters(llama(), Lora(rank=2)).double()
        generator = torch.Generator().manual_seed(1)
        for name, parameter in result.named_parameters():
            if "lora_B" in name and std:
                nn.init.normal_(parameter, std=std, generator=generator)
        return result

    with started(2) as ranks:
        compared(ranks, pg.DR_GRPO, adapted)
        compared(ranks, pg.DR_GRPO, adapted, gradient_checkpointing=True)
        compared(ranks, pg.GRPO, partial(adapted, 0.0))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=300), st.integers(1, 5))
def test_all_processes_have_equally_many_nodes(cost: list[int], size: int) -> None:
    shares = divide_nodes(np.array(cost), size)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(cost)))
    assert all((np.diff(nodes) > 0).all() for nodes in shares)
    assert max(map(len, shares)) - min(map(len, shares)) <= 4


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_all_processes_have_the_same_cost_of_attention(size: int) -> None:
    """Of a single text exactly; after a prompt with many completions none has much more than the mean."""
    text = np.arange(1, 64 * size + 1)
    assert len({int(text[nodes].sum()) for nodes in divide_nodes(text, size)}) == 1
    tree = np.concatenate([np.arange(1, 301), *(np.arange(301, 301 + n) for n in range(20, 600, 40))])
    assert max(int(tree[nodes].sum()) for nodes in divide_nodes(tree, size)) <= 1.05 * tree.sum() / size


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 24, 10**6]), st.integers(2, 5))
def test_each_token_is_predicted_in_one_process(seed: int, budget: int, size: int) -> None:
    """From the node that predicts it among all."""
    batch = with_masks(make_batch(seed))
    for part in pack_micro_batches(batch, torch.arange(len(batch.mask)), budget):
        count, left = torch.zeros_like(part.mask, dtype=torch.int64), list[Any]()
        for rank in range(size):
            own = ContextGroup(None, rank, size).divide(part, reads_tree=True)  # type: ignore[arg-type]
            assert torch.equal(own.tokens[own.mask], part.tokens[own.mask])
            predictors = own.predicting_nodes[own.predictor[own.mask]]
            expected = part.predicting_nodes[part.predictor[own.mask]]
            assert torch.equal(own.ids[predictors], part.ids[expected])
            assert torch.equal(own.positions[predictors], part.positions[expected])
            assert len(own.ids) <= len(part.ids) / size + 4
            assert own.sampling_mask is not None
            assert len(own.sampling_mask.counts) == int(own.mask.sum())
            whole = ContextGroup(None, rank, size).divide(part, reads_tree=False)  # type: ignore[arg-type]
            assert torch.equal(whole.mask, part.mask if rank == 0 else torch.zeros_like(part.mask))
            count += own.mask
            left.append(own.sampling_mask.ids)
        assert torch.equal(count == 1, part.mask)
        assert part.sampling_mask is not None
        assert sorted(torch.cat(left).tolist()) == sorted(part.sampling_mask.ids.tolist())


def test_models_that_cannot_be_divided_are_refused_by_name() -> None:
    words = r"learner\.context_parallel=2 needs a model of which attention alone mixes .* Lfm2ForCausalLM has other layers .*: "
    words += "leave --learner.context-parallel out"
    lfm = tf.Lfm2ForCausalLM(tf.Lfm2Config(**BASE, layer_types=["conv", "full_attention"])).eval()
    with started(2) as ranks, pytest.raises(pg.ConfigError, match=words):
        compared(ranks, pg.GRPO, lambda: lfm)
    for kind in ("dynamic", "longrope"):
        settings = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
        settings |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
        stretched = tf.LlamaForCausalLM(tf.LlamaConfig(**BASE, rope_parameters=settings))
        with pytest.raises(
            pg.ConfigError, match=f"LlamaForCausalLM rotates positions by the longest .*{kind}.*: leave --"
        ):
            check_context_parallel(stretched, 3, True)
        check_context_parallel(stretched, 1, True)


def test_options_that_do_not_go_with_divided_texts_are_refused_before_a_model_is_loaded() -> None:
    def refused(words: str, algorithm: pg.Algorithm = pg.GRPO, **options: Any) -> None:
        with pytest.raises(pg.ConfigError, match=words):
            pg.Run(model="nowhere/at-all", algorithm=algorithm, learner=pg.LearnerConfig(**options))

    two = {"world_size": 2, "context_parallel": 2}
    refused(r"learner\.context_parallel must be at least 1, not 0", context_parallel=0)
    refused(r"context_parallel=2 does not divide learner\.world_size=1: .*--learner\.world-size 2", context_parallel=2)
    refused(
        r"context_parallel=2 does not divide learner\.world_size=3: choose a divisor", world_size=3, context_parallel=2
    )
    refused(r"tensor_parallel=2 and learner\.context_parallel=2 do not go together: leave", tensor_parallel=2, **two)
    refused(r"learner\.compile is for a learner in one process.*leave it out", compile=True, **two)
    words = r"context_parallel=2: {} differentiates each text in one process: leave --learner\.context-parallel out"
    refused(words.format("TrustRegion"), pg.TRPO, **two)
    exact = replace(pg.OPO, advantage=(pg.OptimalBaseline(norm="exact"),))
    refused(words.format(r"OptimalBaseline\(norm='exact'\)"), exact, **two)
    with pytest.raises(pg.ConfigError, match=r"learner\.context_parallel is for policygrad train; sft uses"):
        pg.SFTConfig(data="x.jsonl", learner=pg.LearnerConfig(**two))
    OptimizerConfig(name="muon").check_learner(pg.LearnerConfig(**two))


def small(kind: str, **settings: Any) -> nn.Module:
    """A family's small model, all in float64."""
    torch.manual_seed(0)
    family = TREES[kind]
    config = replace(family, settings={**family.settings, **settings}).config()
    config._experts_implementation = "eager"  # the grouped product has no float64
    return load_model(compute_in_double(tf.AutoModelForCausalLM.from_config(config)).eval())


def with_masks(batch: pg.Batch) -> pg.Batch:
    """The batch with random masks of what was sampled from, which leave each token itself; none for every fifth."""
    assert batch.tokens is not None
    left = torch.rand(*batch.mask.shape, 40, generator=torch.Generator().manual_seed(3)) < 0.2
    left.scatter_(-1, batch.tokens[..., None], True)
    shown = batch.mask & (torch.arange(batch.mask.shape[1]) % 5 != 4)
    masks = [SamplingMask.of(row) for row in left & shown[..., None]]
    counts, ids = torch.stack([mask.counts for mask in masks]), tuple(mask.ids for mask in masks)
    return replace(batch, sampling_mask_counts=counts, sampling_mask_ids=ids)


LONG = replace(
    filled(pg.DR_GRPO),
    prompts=tuple(torch.cat([p, torch.arange(3, 30 + i)]) for i, p in enumerate(BATCH.prompts or ())),
)
"""After prompts longer than every window."""
