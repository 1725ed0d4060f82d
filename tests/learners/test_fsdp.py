"""The learner in several processes: the same gradients, metrics and state as in one, whatever is spread and whoever idles."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import ceil
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

import policygrad as pg
from doubles.architectures import PLAIN
from doubles.experts import built, drawn, shaken
from doubles.ranked import BATCH, agree, learned, make_spec, model, pair, started, values
from policygrad.learners.fsdp.controller import FsdpController, check_shardable
from policygrad.learners.fsdp.distributed_ops import FsdpWorkDivision
from policygrad.learners.fsdp.processes import WorkerGroup, check_devices
from policygrad.learners.fsdp.torchrun import check_not_torchrun, resolve_world_size
from policygrad.learners.local.learner import LocalLearner
from policygrad.learners.local.packing import Pack, pack_micro_batches
from policygrad.learners.optimizers import OPTIMIZERS
from policygrad.models.adapters import add_adapters
from policygrad.models.loading import load_model
from policygrad.models.lora_config import Lora
from policygrad.models.replica import is_packed
from policygrad.utils.signals import defer_signals

TWICE = pg.GradientSteps(epochs=2, minibatches=2)
ALGORITHMS = {
    "grpo, four updates": replace(pg.GRPO, update_rule=TWICE),
    "high_entropy": replace(pg.HIGH_ENTROPY, corrections=(pg.HighEntropy(0.4),)),  # see `test_fsdp_matrix.APART`
    "ppo": pg.PPO,
    "opo, exact norms": replace(pg.OPO, advantage=(pg.OptimalBaseline(norm="exact"),)),
    "exact KLs": replace(pg.DR_GRPO, terms=(pg.ExactKLToOld(0.3), pg.ExactKLToReference(0.2)), update_rule=TWICE),
    "trpo": replace(pg.TRPO, advantage=(pg.GroupMean(),), critic=None, update_rule=pg.TrustRegion(cg_iters=2)),
    "prime": pg.PRIME,
}
"""A reference, several updates, tokens chosen among all, an entropy, a critic, gradients of single completions, whole
distributions, products with the Fisher matrix, a second model that learns. All others: `test_fsdp_matrix.py`."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[WorkerGroup]:
    """Two. No other group may be formed in this file: a process is in one at a time."""
    with started(2) as result:
        yield result


def test_two_processes_learn_as_one_does(ranks: WorkerGroup) -> None:
    for name, algorithm in ALGORITHMS.items():
        chosen = algorithm.with_max_tokens(6)
        make = model if name == "grpo, four updates" else partial(model, n_layer=1)
        local, ranked, published = pair(ranks, chosen, make)
        expected, result = (values(learned(learner, chosen)) for learner in (local, ranked))
        assert result == pytest.approx(expected, rel=1e-6 if algorithm.critic else 1e-9, abs=1e-12), name
        ranked.publish()
        state = agree(local, ranked)
        assert all(torch.equal(parameter, state[f"weights/{key}"]) for key, parameter in published.named_parameters())


def test_two_processes_learn_as_one_does_whatever_comes_between(ranks: WorkerGroup) -> None:
    """One of them idles, a gradient is bad, the state of one process is taken over, activations are computed again."""
    config = pg.LearnerConfig(micro_tokens=24, gradient_checkpointing=True)
    local, ranked, _ = pair(ranks, pg.DR_GRPO, config=config)
    _recomputes_activations(local, ranked)
    _goes_on_after_a_bad_gradient(local, ranked)
    _one_idles(local, ranked)
    _takes_over_the_state_of_one_process(local, ranked)


def test_two_processes_step_as_one_does_with_each_optimizer(ranks: WorkerGroup) -> None:
    """Matrices are large enough for moments in 8 bits, and 75 of their rows are shared unequally. Muon's are gathered."""
    make = partial(model, n_embd=60, n_inner=75, n_layer=1)
    algorithm = pg.DR_GRPO.with_max_tokens(6)
    for name, row in OPTIMIZERS.items():
        config = pg.OptimizerConfig(name=name, eps=1.0 if "eps" in row.options else 1e-8)  # see `make_spec`
        local, ranked, _ = pair(ranks, algorithm, make, optimizer=config)
        for learner in (local, ranked):
            learned(learner, algorithm)
        state = agree(local, ranked, 1e-9)
        moments = {key.rpartition("/")[2] for key in state if not key.startswith("weights/")}
        assert {"sgd": "momentum_buffer", "muon": "momentum_buffer", "adamw8bit": "exp_avg_scale"}.get(name) in {
            None,
            *moments,
        }
        ranked.restore(*local.state())
        agree(local, ranked, 0.0)
        for learner in (local, ranked):
            learned(learner, algorithm)
        agree(local, ranked, 1e-9)


def test_two_processes_learn_in_bf16_as_one_does_up_to_rounding(ranks: WorkerGroup) -> None:
    """Masters in float32, passes in bfloat16: the published model is the masters', rounded. With AdamW's ε at 1 a step is about
    linear in the gradient, of which each micro-batch's part is rounded to 8 bits; the model and a reference are read."""
    chosen, batch = pg.GRPO.with_max_tokens(6), replace(BATCH, reward=BATCH.reward.float())
    local, ranked, published = pair(ranks, chosen, make=partial(model, torch.bfloat16))
    before = {name: x.clone() for name, x in local.state()[0].items() if name.startswith("weights/")}
    for learner in (local, ranked):
        learned(learner, chosen, batch)
    ranked.publish()
    (expected, _), (result, _) = local.state(), ranked.state()
    moved = sum(float((expected[name] - x).square().sum()) for name, x in before.items())
    apart = sum(float((expected[name] - result[name]).square().sum()) for name in before)
    assert moved > 0
    assert apart <= 0.05**2 * moved
    assert all(result[name].dtype == expected[name].dtype == torch.float32 for name in before)
    for key, parameter in published.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, result[f"weights/{key}"].bfloat16())


def test_two_processes_without_masters_or_with_state_on_the_host_step_as_one_does(ranks: WorkerGroup) -> None:
    """To the bit where one of them has the whole gradient, whose norm is not asked for: weights in bf16 are rounded by the same
    chance. Resumed to the bit too."""
    one = replace(BATCH, mask=BATCH.mask & (torch.arange(len(BATCH.mask)) == 0)[:, None], reward=BATCH.reward.float())
    psi, make = torch.ones(one.mask.shape), partial(model, torch.bfloat16, n_embd=60, n_inner=75, n_layer=1)
    for options in ({"masters": "none"}, {"name": "adamw8bit", "masters": "none"}, {"name": "muon", "offload": True}):
        local, ranked, published = pair(ranks, pg.REINFORCE, make, optimizer=pg.OptimizerConfig(**options, clip=0.0))
        before = {name: x.clone() for name, x in local.state()[0].items()}
        for _ in range(2):
            for learner in (local, ranked):
                learner.update(one, psi, pg.REINFORCE)
            state = agree(local, ranked, 0.0)
        assert any(not torch.equal(x, state[name]) for name, x in before.items())
        weights = {name: x for name, x in state.items() if name.startswith("weights/")}
        bare = "masters" in options
        assert all(x.dtype == (torch.bfloat16 if bare else torch.float32) for x in weights.values())
        ranked.publish()
        assert all(torch.equal(p, weights[f"weights/{name}"].bfloat16()) for name, p in published.named_parameters())
        saved = {name: x.clone() for name, x in state.items()}, ranked.state()[1]
        ranked.update(one, psi, pg.REINFORCE)
        later = {name: x.clone() for name, x in ranked.state()[0].items()}
        assert any(not torch.equal(x, saved[0][name]) for name, x in later.items())
        ranked.restore(*saved)
        ranked.update(one, psi, pg.REINFORCE)
        resumed = ranked.state()[0]
        assert all(torch.equal(x, resumed[name]) for name, x in later.items())


def test_two_processes_without_masters_learn_as_one_does_up_to_rounding(ranks: WorkerGroup) -> None:
    """Gradients of micro-batches are rounded to bf16 before they are summed, and micro-batches are others, so that some weights are
    rounded to the other side; by another chance it would be twice as many as move."""
    batch = replace(BATCH, reward=BATCH.reward.float())
    options = pg.OptimizerConfig(masters="none", eps=1.0)
    algorithm = pg.DR_GRPO.with_max_tokens(6)
    local, ranked, _ = pair(ranks, algorithm, partial(model, torch.bfloat16), optimizer=options)
    before = {name: x.clone() for name, x in local.state()[0].items()}
    for learner in (local, ranked):
        learned(learner, algorithm, batch)
    (expected, _), (result, _) = local.state(), ranked.state()
    moved = sum(int((expected[name] != x).sum()) for name, x in before.items())
    apart = sum(int((expected[name] != result[name]).sum()) for name in before)
    assert moved > 100
    assert apart < 0.3 * moved


def test_two_processes_replay_and_adapt_experts_as_one_does(ranks: WorkerGroup) -> None:
    _replays_experts(ranks)
    _adapts_experts(ranks)


def _one_idles(local: LocalLearner, ranked: FsdpController) -> None:
    """A single completion is one micro-batch."""
    one = replace(BATCH, mask=BATCH.mask & (torch.arange(len(BATCH.mask)) == 0)[:, None])
    for learner in (local, ranked):
        assert (
            values(learner.update(one, torch.ones_like(one.mask, dtype=torch.float64), pg.REINFORCE))["updates/taken"]
            == 1
        )


def _goes_on_after_a_bad_gradient(local: LocalLearner, ranked: FsdpController) -> None:
    nothing = torch.full(BATCH.mask.shape, float("nan"), dtype=torch.float64)
    with pytest.raises(pg.NumericsError, match=r"first in transformer\.wte\.weight"):
        ranked.update(BATCH, nothing, pg.DR_GRPO)
    flat = replace(BATCH, reward=torch.ones_like(BATCH.reward))
    for learner in (local, ranked):
        assert values(learned(learner, pg.DR_GRPO.with_max_tokens(6), flat))["updates/skipped"] == 1
        learned(learner, pg.DR_GRPO.with_max_tokens(6))


def _takes_over_the_state_of_one_process(local: LocalLearner, ranked: FsdpController) -> None:
    """What the two have learned before is alike."""
    agree(local, ranked)
    learned(local, pg.DR_GRPO.with_max_tokens(6))
    ranked.restore(*local.state())
    agree(local, ranked, 0.0)
    ranked.lr = local.lr = 0.5
    for learner in (local, ranked):
        learned(learner, pg.DR_GRPO.with_max_tokens(6))
    agree(local, ranked)


def _recomputes_activations(local: LocalLearner, ranked: FsdpController) -> None:
    for learner in (local, ranked):
        learned(learner, pg.DR_GRPO.with_max_tokens(6))
    agree(local, ranked)


def _replays_experts(ranks: WorkerGroup) -> None:
    """Those that drew the batch before the weights moved. A Qwen normalises in float32."""
    batch, algorithm = drawn(built("qwen3"), BATCH), pg.DR_GRPO.with_max_tokens(6)

    def moved() -> nn.Module:
        result = built("qwen3")
        shaken(result)
        return result

    config = pg.LearnerConfig(micro_tokens=24, routing_replay=True)
    local, ranked, _ = pair(ranks, algorithm, moved, config=config)
    expected, result = (values(learned(learner, algorithm, batch)) for learner in (local, ranked))
    assert result == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert result["routing/changed"] > 0.01
    assert result["routing/busiest"] > 1
    agree(local, ranked, 1e-6)


def _adapts_experts(ranks: WorkerGroup) -> None:
    """Adapters of stacked experts, of a shared layer and of a dense one."""
    pytest.importorskip("peft")

    def adapted() -> nn.Module:
        result = add_adapters(built("glm4"), Lora(rank=2))
        generator = torch.Generator().manual_seed(1)
        for name, parameter in result.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1, generator=generator)
        return result

    algorithm = pg.DR_GRPO.with_max_tokens(6)
    local, ranked, published = pair(ranks, algorithm, adapted)
    before = {name: p.clone() for name, p in local.model.named_parameters() if p.requires_grad}
    expected, result = (values(learned(learner, algorithm)) for learner in (local, ranked))
    assert result == pytest.approx(expected, rel=1e-5, abs=1e-7)
    agree(local, ranked, 1e-6)
    ranked.publish()
    after = dict(published.named_parameters())
    assert sum("experts" in name for name in before) >= 4
    assert all(bool((after[name] != x).any()) for name, x in before.items())


@pytest.mark.parametrize("budget", [7, 24, 60, 10**6])
def test_micro_batches_are_distributed_over_ranks(budget: int) -> None:
    """Each completion to one process; all take equally many passes, no more than the budget makes necessary, within the budget."""
    rows = torch.arange(len(BATCH.mask))
    longest = max(len(part.ids) for part in pack_micro_batches(BATCH, rows, 0))
    make_packs, count = partial(pack_micro_batches, BATCH, rows), lambda part: len(part.ids)
    passes = len(list(make_packs(budget)))
    for size in (1, 2, 3, 8):
        given, turns = [], []
        for rank in range(size):
            idle: list[Pack] = []
            ranks: Any = SimpleNamespace(rank=rank, size=size)
            division: Any = FsdpWorkDivision(ranks, None, None)  # type: ignore[arg-type]
            mine = list(division.divide(make_packs, budget, idle.append, count))
            given += [row for part in mine for row in part.rows.tolist()]
            turns.append(len(mine) + len(idle))
            assert all(len(part.ids) <= max(budget, 1.5 * longest) for part in mine), size
        assert sorted(given) == rows[BATCH.mask.any(1)].tolist(), size
        assert turns == [ceil(passes / size)] * size, size


def test_deferred_signals_arrive_after_the_block() -> None:
    came: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with defer_signals():
            signal.raise_signal(signal.SIGTERM)
            assert came == []
        assert came == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_weights_in_four_bits_are_refused() -> None:
    uninterrupted = model()
    check_shardable(uninterrupted)
    uninterrupted.is_quantized = True  # type: ignore[assignment]
    with pytest.raises(pg.ConfigError, match=r"quantised and cannot be sharded.*learner\.world_size=1"):
        check_shardable(uninterrupted)


def test_two_processes_train_adapters_on_four_bits_as_one_does(ranks: WorkerGroup) -> None:
    """Each has the frozen weights whole, and its share of the adapters and of their moments."""
    pytest.importorskip("bitsandbytes")

    def make() -> nn.Module:
        result = load_model("tiny", lora=Lora(rank=4, bits=4))
        generator = torch.Generator().manual_seed(1)
        for name, parameter in result.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1, generator=generator)
        return result

    for chosen in (pg.DR_GRPO, pg.GRPO):  # the second reads the policy without its adapters
        algorithm, batch = chosen.with_max_tokens(6), replace(BATCH, reward=BATCH.reward.float())
        local, ranked, published = pair(ranks, algorithm, make)
        packed = {name: p for name, p in ranked._learner.model.named_parameters() if is_packed(p)}
        assert len(packed) > 4
        assert all(not hasattr(p, "to_local") and p.dtype == torch.uint8 for p in packed.values())
        expected, result = (values(learned(learner, algorithm, batch)) for learner in (local, ranked))
        assert result == pytest.approx(expected, rel=1e-4, abs=1e-6)
        state = agree(local, ranked, 1e-5)
        assert state
        assert all("lora_" in name for name in state)
        ranked.publish()
        assert all(published.get_parameter(name) is p for name, p in packed.items())
        trained = {f"weights/{name}": p for name, p in published.named_parameters() if p.requires_grad}
        assert trained
        assert all(torch.equal(p, state[name]) for name, p in trained.items())
        saved = {name: x.clone() for name, x in state.items()}, ranked.state()[1]
        learned(ranked, algorithm, batch)
        later = {name: x.clone() for name, x in ranked.state()[0].items()}
        ranked.restore(*saved)
        learned(ranked, algorithm, batch)
        assert all(torch.equal(x, later[name]) for name, x in ranked.state()[0].items())


def test_a_trust_region_of_a_model_without_forward_mode_is_refused(ranks: WorkerGroup) -> None:
    """One process takes the derivative of reverse mode there, which FSDP does not have."""
    bloom = tf.BloomForCausalLM(tf.BloomConfig(**PLAIN, hidden_size=8, n_layer=1, n_head=2)).eval()
    with pytest.raises(pg.ConfigError, match=r"forward-mode derivatives.*learner\.world_size=1"):
        FsdpController(ranks, bloom, make_spec(replace(pg.TRPO, advantage=(pg.GroupMean(),), critic=None)))


def test_four_bits_are_refused_where_a_layers_matrices_are_shared() -> None:
    config = pg.LearnerConfig(world_size=2, tensor_parallel=2, lora="rank=4,bits=4")
    with pytest.raises(pg.ConfigError, match=r"bits=4 keeps .* in one piece, and learner\.tensor_parallel is 2"):
        config.check_processes()


@pytest.mark.parametrize("options", [{"device": "cuda:1"}], ids=str)
def test_options_for_one_process_are_refused_with_several(options: dict[str, Any]) -> None:
    with pytest.raises(pg.ConfigError, match=rf"learner\.{next(iter(options))}.*learner\.world_size=2"):
        pg.Run(learner=pg.LearnerConfig(world_size=2, **options))
    with pytest.raises(pg.ConfigError, match=rf"learner\.{next(iter(options))}.*learner\.world_size=2"):
        pg.SFTConfig(data="x.jsonl", learner=pg.LearnerConfig(world_size=2, **options))


def test_world_size_and_routing_replay_are_checked() -> None:
    with pytest.raises(pg.ConfigError, match=r"learner\.world_size must be at least 1, not 0"):
        pg.LearnerConfig(world_size=0)
    with pytest.raises(pg.ConfigError, match=r"learner\.routing_replay replays .*, and sft samples nothing"):
        pg.SFTConfig(data="x.jsonl", learner=pg.LearnerConfig(routing_replay=True))


def test_a_command_that_cannot_be_pickled_is_refused_before_it_is_sent() -> None:
    with pytest.raises(
        pg.ConfigError, match=r"cannot be sent to the other processes \(.*lock.*\): .*learner\.world_size to 1"
    ):
        WorkerGroup.broadcast_object(SimpleNamespace(), threading.Lock())  # type: ignore[arg-type]


def test_each_process_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_devices("cpu", 4)
    check_devices("cuda", 1)
    with pytest.raises(pg.ConfigError, match=r"learner\.world_size=2 needs 2 GPUs; this machine has 1"):
        check_devices("cuda", 2)


@pytest.mark.full
def test_world_size_comes_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_world_size(3) == 3
    check_not_torchrun(1)
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert resolve_world_size(1) == resolve_world_size(2) == 2
    check_not_torchrun(2)
    with pytest.raises(pg.ConfigError, match=r"learner\.world_size=3 and torchrun has started 2 processes"):
        resolve_world_size(3)
    with pytest.raises(pg.ConfigError, match="each would train the full run"):
        check_not_torchrun(1)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(pg.ConfigError, match="each would train the full run"):
        check_not_torchrun(2)
