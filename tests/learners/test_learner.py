"""The local learner: schedule, clipping, bf16 masters, minibatches, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import policygrad as pg
from doubles.batches import float_batch, make_batch
from doubles.drawing import Context, sample
from policygrad.learners.base import LearnerSpec
from policygrad.learners.config import LearnerConfig, OptimizerConfig
from policygrad.learners.local import forward
from policygrad.learners.local.learner import LocalLearner
from policygrad.learners.local.optimizer import Optimizer
from policygrad.learners.local.updates import LocalGradientProblem
from policygrad.models.loading import load_model
from policygrad.samplers.base import SamplingParams
from policygrad.samplers.local.sampler import LocalSampler


def learner_for(
    folder: Path, algorithm: pg.Algorithm = pg.DR_GRPO, *, dtype: str = "fp32", **config: object
) -> LocalLearner:
    model = load_model(str(folder), dtype=dtype)
    return LocalLearner(
        model,
        LearnerSpec(
            algorithm, lr=1e-3, steps=4, config=LearnerConfig(dtype=dtype, **config), optimizer=OptimizerConfig()
        ),
    )


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 1, 0.85355, 0.5, 0.14645]),
    ],
)
def test_schedule(schedule: str, factors: list[float]) -> None:
    config = OptimizerConfig(schedule=schedule, warmup=2)
    assert [config.lr_factor(step, 6) for step in range(6)] == pytest.approx(factors, abs=1e-5)


def test_clips_to_the_norm_and_reports_it_before() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = Optimizer(model, OptimizerConfig(clip=1.0), lr=0.0, total=1)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    seen: list[torch.Tensor] = []
    optimizer.rules[0].register_step_pre_hook(lambda *_: seen.append(model.weight.grad.clone()))  # type: ignore[union-attr]
    norm, rate = optimizer.step()
    assert norm == pytest.approx(5.0)
    assert rate == 0.0
    assert torch.allclose(seen[0], torch.tensor([[0.6, 0.8]]), atol=1e-5)


def test_a_nonfinite_gradient_leaves_the_weights_unchanged() -> None:
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    optimizer = Optimizer(model, OptimizerConfig(), lr=0.1, total=1)
    model.weight.grad = torch.tensor([[float("nan"), 1.0]])
    with pytest.raises(FloatingPointError, match="weights are unchanged"):
        optimizer.step()
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_bf16_weights_have_float32_master_copies() -> None:
    """A hundred steps of 1e-5 on a weight of 1: in bf16 alone each would round to nothing."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = Optimizer(model, OptimizerConfig(clip=0), lr=1e-4, total=100)
    for _ in range(100):
        model.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
        optimizer.accumulate_master_grads()
        optimizer.step()
    (master,) = optimizer.masters.values()
    assert float(master.detach()) == pytest.approx(0.99, abs=1e-4)
    assert model.weight.dtype == torch.bfloat16
    assert float(model.weight.detach()) == float(master.detach().bfloat16())


@pytest.mark.parametrize(
    "options", [{}, {"gradient_checkpointing": True}, {"micro_tokens": 20}, {"dtype": "bf16"}], ids=str
)
def test_memory_saving_options_change_only_rounding(random_model: Path, options: dict[str, object]) -> None:
    """Memory-saving options change the rounding, not the step."""
    batch = float_batch()
    plain, other = learner_for(random_model), learner_for(random_model, **options)  # type: ignore[arg-type]
    algorithm = pg.DR_GRPO
    psi = algorithm.compute_advantages(batch)
    norms = []
    for learner in (plain, other):
        problem = learner.build_problem(batch, psi, algorithm)
        problem.accumulate()
        masters = learner.optimizer.masters.values()
        norms.append(torch.cat([m.grad.flatten() for m in masters if m.grad is not None]))
        learner.update(batch, psi, algorithm)
    cosine = torch.nn.functional.cosine_similarity(norms[0], norms[1], dim=0)
    assert float(cosine) > (0.99 if options.get("dtype") == "bf16" else 1 - 1e-6)
    assert other.version == 1


def test_recomputed_activations_do_not_disable_the_samplers_cache(random_model: Path) -> None:
    """Transformers recompute in training mode only, and keep no cache there; sampler and learner share one model."""
    learner, batch = learner_for(random_model, gradient_checkpointing=True), float_batch()
    calls: list[bool] = []
    attention = learner.model.model.layers[0].self_attn  # type: ignore[union-attr, index]
    attention.register_forward_hook(lambda *_: calls.append(learner.model.training))  # type: ignore[union-attr, operator]
    learner.build_problem(batch, pg.DR_GRPO.compute_advantages(batch), pg.DR_GRPO).accumulate()
    assert calls == [True, True]  # once forward, once more on the way back
    assert not learner.model.training
    sampler = LocalSampler(learner.model, frozenset({1}), 0)
    (group,) = sample(sampler, [Context(torch.tensor([3, 4]), (0,))], 2, SamplingParams(max_tokens=3))
    assert len(group) == 2


def test_minibatches_are_full_groups_and_each_epoch_sees_every_group_once(random_model: Path) -> None:
    batch = float_batch()
    problem = learner_for(random_model).build_problem(batch, torch.ones(batch.mask.shape), pg.DR_GRPO)
    orders = []
    for epoch in range(6):
        parts = problem.split(epoch, 2)
        groups = [part.batch.group.unique().tolist() for part in parts]
        assert sorted(g for share in groups for g in share) == [0, 1, 2]
        assert sum(len(part.batch.mask) for part in parts) == len(batch.mask)
        orders.append(str(groups))
    assert len(set(orders)) > 1
    assert problem.split(0, 1) == [problem]


def test_filtered_groups_are_in_no_minibatch(random_model: Path) -> None:
    """What a filter emptied is in no minibatch, and fewer groups than minibatches make fewer updates."""
    batch = float_batch()
    learner = learner_for(random_model)

    def shares(*left: int) -> list[list[int]]:
        kept = replace(batch, mask=batch.mask & torch.isin(batch.group, torch.tensor(left))[:, None])
        parts = learner.build_problem(kept, torch.ones(batch.mask.shape), pg.DR_GRPO).split(0, 4)
        return sorted(part.batch.group.unique().tolist() for part in parts)

    assert shares(0, 1, 2) == [[0], [1], [2]]
    assert shares(0, 2) == [[0], [2]]
    assert shares() == [[0, 1, 2]]  # nothing to learn from, once


def test_first_order_updates_need_only_the_gradient_problem(random_model: Path) -> None:
    """A learner without curvature trains every algorithm that steps by gradients, to the same bit."""
    batch, step = float_batch(), pg.GradientSteps(epochs=2, minibatches=2)
    uninterrupted, part = learner_for(random_model), learner_for(random_model)
    psi = pg.DR_GRPO.compute_advantages(batch)
    full = uninterrupted.build_problem(batch, psi, pg.DR_GRPO)
    bare = LocalGradientProblem(networks=part.networks, batch=batch, psi=psi, algorithm=pg.DR_GRPO, seed=part.version)
    assert not hasattr(bare, "fisher")
    assert not hasattr(bare, "measure")
    one, two = step(full), step(bare)
    assert {k: m.value for k, m in one.items()} == {k: m.value for k, m in two.items()}
    assert uninterrupted.version == part.version == 4
    assert all(
        torch.equal(a, b) for a, b in zip(uninterrupted.model.parameters(), part.model.parameters(), strict=True)
    )


def test_the_learning_rate_can_change_between_updates(random_model: Path) -> None:
    """It is the peak that the schedule multiplies; a step without one refuses it."""
    batch, config = float_batch(), OptimizerConfig(schedule="linear")
    psi = pg.DR_GRPO.compute_advantages(batch)
    learner = LocalLearner(load_model(str(random_model)), LearnerSpec(pg.DR_GRPO, lr=1e-3, steps=4, optimizer=config))
    assert learner.lr == 1e-3
    rates = []
    for rate in (1e-3, 5e-4, 0.0):
        learner.lr = rate
        before = [p.detach().clone() for p in learner.model.parameters()]
        rates.append(learner.update(batch, psi, pg.DR_GRPO)["lr"].value)
        moved = not all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))
        assert moved == (rate > 0)
    assert rates == pytest.approx([1e-3, 5e-4 * 0.75, 0.0])
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="at least 0 and finite"):
            learner.lr = wrong
    natural = replace(pg.TRPO, advantage=(pg.GroupMean(),), critic=None)
    learner = LocalLearner(load_model(str(random_model)), LearnerSpec(natural, lr=None, steps=1))
    assert learner.lr is None
    with pytest.raises(ValueError, match="has no learning rate"):
        learner.lr = 1e-3


def test_the_objective_does_not_grow_with_the_number_of_updates(random_model: Path) -> None:
    """At a learning rate of 0 every epoch measures the same objective, and that is what a rollout reports."""
    batch, values = float_batch(), []
    for epochs in (1, 3):
        algorithm = replace(pg.DR_GRPO, update_rule=pg.GradientSteps(epochs=epochs))
        learner = LocalLearner(load_model(str(random_model)), LearnerSpec(algorithm, lr=0.0, steps=1))
        scored = learner.evaluate(batch, frozenset({"logp_old"}))
        values.append(learner.update(scored, scored.reward[:, None] * batch.mask, algorithm)["objective"].value)
    assert values[0] > 0.01
    assert values[1] == pytest.approx(values[0], rel=1e-5)


def test_a_reference_is_loaded_only_when_a_part_needs_one(random_model: Path) -> None:
    assert learner_for(random_model, pg.DR_GRPO).reference is None
    learner = learner_for(random_model, pg.GRPO)
    assert learner.reference is not None
    batch = float_batch()
    scored = learner.evaluate(batch, frozenset({"logp_ref"}))
    assert scored.logp_old is None
    assert scored.logp_ref is not None
    learner.update(scored, pg.GRPO.compute_advantages(scored), pg.GRPO)
    second = learner.evaluate(batch, frozenset({"logp_ref", "logp_old"}))
    assert torch.equal(second.logp_ref, scored.logp_ref)  # type: ignore[arg-type]  # the reference has not moved
    assert not torch.allclose(second.logp_old, scored.logp_ref)  # type: ignore[arg-type]  # the policy has


def test_without_any_gradient_no_step_is_taken(random_model: Path) -> None:
    """Equal rewards in every group: AdamW's momentum must not move the weights on a step that says nothing."""
    learner = learner_for(random_model)
    batch = float_batch()
    learner.update(batch, pg.DR_GRPO.compute_advantages(batch), pg.DR_GRPO)
    before = [p.detach().clone() for p in learner.model.parameters()]
    flat = replace(batch, reward=torch.full_like(batch.reward, 0.7))
    metrics = learner.update(flat, pg.DR_GRPO.compute_advantages(flat), pg.DR_GRPO)
    assert metrics["updates/skipped"].value == 1
    assert metrics["completions/computed"].value == 0
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))


def test_state_round_trip_continues_bit_for_bit(random_model: Path) -> None:
    batch = float_batch()
    psi = pg.DR_GRPO.compute_advantages(batch)
    one, two = learner_for(random_model), learner_for(random_model)
    one.update(batch, psi, pg.DR_GRPO)
    tensors, values = one.state()
    two.restore({k: v.clone() for k, v in tensors.items()}, values)
    for learner in (one, two):
        learner.update(batch, psi, pg.DR_GRPO)
    assert one.version == two.version == 2
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: OptimizerConfig(schedule="polynomial"), "schedule must be one of"),
        (lambda: OptimizerConfig(clip=-1), "optimizer.clip"),
        (lambda: LearnerConfig(dtype="fp16"), "fp32, bf16 or auto"),
        (lambda: LearnerConfig(micro_tokens=-1), "micro_tokens"),
    ],
)
def test_refuses(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()  # type: ignore[operator]


def test_policy_and_critic_steps_are_independent(random_model: Path) -> None:
    """Both start from one model; with either learning rate at 0 that one stands still while the other moves."""
    batch = float_batch()
    for policy_lr, critic_lr in ((1e-2, 0.0), (0.0, 1e-2)):
        algorithm = replace(pg.PPO, shaping=(), critic=pg.Critic(lr=critic_lr))
        model = load_model(str(random_model))
        learner = LocalLearner(model, LearnerSpec(algorithm, lr=policy_lr, steps=4))
        assert learner.critic is not None
        forward = learner.critic.network
        before = [[p.detach().clone() for p in m.parameters()] for m in (model, forward)]
        scored = algorithm.add_critic_targets(learner.evaluate(batch, algorithm.needs))
        assert scored.values is not None
        assert float(scored.values.abs().max()) == 0.0  # a head of zeros says V = 0
        metrics = learner.update(scored, algorithm.compute_advantages(scored), algorithm)
        after = [list(model.parameters()), list(forward.parameters())]
        moved = [
            any(not torch.equal(a, b) for a, b in zip(x, y, strict=True)) for x, y in zip(before, after, strict=True)
        ]
        assert moved == [policy_lr > 0, critic_lr > 0]
        assert {"value_loss", "explained_variance", "value"} <= metrics.keys()


def test_a_critic_learns_the_returns_and_pretraining_ends_when_it_explains_them(random_model: Path) -> None:
    """Rewards that depend on the prompt alone can be foreseen; the policy stands still until they are."""
    batch = float_batch()
    batch = replace(batch, reward=(batch.group % 2).float())
    algorithm = replace(pg.PPO, shaping=(), critic=pg.Critic(lr=1e-2, lam=1.0, clip=0, pretrain=60, pretrain_until=0.9))
    learner = LocalLearner(load_model(str(random_model)), LearnerSpec(algorithm, lr=1e-2, steps=60))
    before = [p.detach().clone() for p in learner.model.parameters()]
    state = algorithm.init_state()
    while state["critic"]["pretrain"]:
        now = algorithm.with_state(state)
        scored = now.add_critic_targets(learner.evaluate(batch, now.needs))
        metrics = learner.update(scored, now.compute_advantages(scored), now)
        assert "updates/taken" not in metrics
        assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))
        state = algorithm.update_state(state, scored, metrics)
    assert metrics["explained_variance"].value >= 0.9


def test_the_value_is_that_of_the_state_before_the_token(random_model: Path) -> None:
    """V_t reads the prompt and the tokens before t, not t itself: changing the last token changes no value."""
    learner = learner_for(random_model, replace(pg.PPO, shaping=()))
    assert learner.critic is not None
    torch.nn.init.normal_(learner.critic.network.head.weight)
    batch = float_batch(3)
    last = batch.lengths.clamp(min=1) - 1
    assert batch.tokens is not None
    other = replace(batch, tokens=batch.tokens.scatter(1, last[:, None], 7))
    values, second = learner.critic.evaluate(batch).values, learner.critic.evaluate(other).values
    assert values is not None
    assert torch.allclose(values, second, atol=1e-5)  # type: ignore[arg-type]
    assert float(values.abs().max()) > 0.1


def one_prompt(rows: int) -> pg.Batch:
    """One-token completions of a single prompt: all their gradients are added up at one hidden state."""
    g = torch.Generator().manual_seed(0)
    return pg.Batch(
        mask=torch.ones(rows, 1, dtype=torch.bool),
        group=torch.zeros(rows, dtype=torch.int64),
        reward=torch.rand(rows, generator=g),
        tokens=torch.randint(40, (rows, 1), generator=g),
        prompts=(torch.arange(5),),
    )


def a_step() -> pg.Batch:
    batch = make_batch(3, groups=64, size=8, width=16, holes=False)
    return replace(batch, reward=torch.rand(512, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(("batch", "times"), [(a_step(), 2), (one_prompt(8192), 3)], ids=["a step", "one prompt"])
def test_gradients_are_bitwise_reproducible(batch: pg.Batch, times: int) -> None:
    """What a bitwise resume stands on, where several threads work on one sum: at the size of a real step, and with many terms
    in one sum."""
    from policygrad.models.loading import resolve_model

    model = load_model(resolve_model("tiny"))
    learner = LocalLearner(model, LearnerSpec(pg.DR_GRPO, lr=0.0, steps=1))
    psi = pg.DR_GRPO.compute_advantages(batch)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        learner.build_problem(batch, psi, pg.DR_GRPO).accumulate()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    first = gradient()
    assert all(torch.equal(first, gradient()) for _ in range(times))


def test_shared_hidden_states_get_reproducible_gradients() -> None:
    """400,000 terms in one sum: an order of addition that is left to the threads shows at every attempt."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(8, 32, generator=generator).requires_grad_()
    index, above = torch.zeros(400_000, dtype=torch.int64), torch.randn(400_000, 32, generator=generator)

    def gradient() -> torch.Tensor:
        (result,) = torch.autograd.grad(forward.gather_positions(states[None], index), states, above)
        return result

    first = gradient()
    assert float(first.abs().max()) > 100
    assert all(torch.equal(first, gradient()) for _ in range(3))


@pytest.mark.parametrize("name", ["dapo", "gspo", "sapo"])
def test_the_papers_gates_act_from_a_rollouts_second_update_on(random_model: Path, name: str) -> None:
    """With one update per rollout every ratio is 1; with the paper's own number it is not, and the clips clip."""
    algorithm = replace(pg.get_algorithm(name), filters=(), shaping=())
    batch = float_batch()
    batch = replace(batch, reward=torch.linspace(0, 1, len(batch.group)))  # a best and a worst in every group
    moved = {}
    for step in (pg.GradientSteps(), algorithm.update_rule):
        own = replace(algorithm, update_rule=step)
        learner = LocalLearner(load_model(str(random_model)), LearnerSpec(own, lr=0.02, steps=1))
        filled = learner.evaluate(batch, own.needs)
        metrics = learner.update(filled, own.compute_advantages(filled), own)
        clipped = metrics["clip_ratio/low"].value + metrics["clip_ratio/high"].value if name != "sapo" else 0.0
        moved[step.updates] = (metrics["updates/taken"].value, clipped)
    assert moved[1] == (1.0, 0.0)
    assert moved[algorithm.update_rule.updates][0] == 3.0  # three groups, a minibatch each
    assert name == "sapo" or moved[algorithm.update_rule.updates][1] > 0


@dataclass(frozen=True)
class _Overflowing(pg.Gate):
    """A weight that is not finite, of a ratio that is."""

    def weight(self, ratio: torch.Tensor, psi: torch.Tensor, batch: pg.Batch) -> torch.Tensor:
        return ratio / 0

    def value(self, ratio: torch.Tensor, psi: torch.Tensor, batch: pg.Batch) -> torch.Tensor:
        return ratio * psi


@dataclass(frozen=True)
class _Root(pg.LossTerm):
    """Finite, with a gradient that is not: √0."""

    def objective(self, out: pg.Forward, batch: pg.Batch, psi: torch.Tensor) -> torch.Tensor:
        return (out.logp - out.logp.detach()).sqrt()


@pytest.mark.parametrize(
    ("change", "part", "place"),
    [({"gate": _Overflowing()}, "_Overflowing", "gate"), ({"terms": (_Root(),)}, "_Root", r"terms\.0")],
)
def test_a_nonfinite_gradient_names_its_part(random_model: Path, change: dict[str, Any], part: str, place: str) -> None:
    """Not the learning rate, which would not help; only where no part did is it named."""
    algorithm = replace(pg.GRPO, **({"terms": ()} | change))
    learner = learner_for(random_model, algorithm)
    batch = float_batch()
    output = rf"at update 1, first in .*: the weights are unchanged\. {part} in {place} returned NaN"
    with pytest.raises(pg.NumericsError, match=output) as caught:
        learner.update(batch, torch.ones(batch.mask.shape), algorithm)
    assert caught.value.part == part
    assert "--lr" not in str(caught.value)
