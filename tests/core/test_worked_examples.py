"""Hand numbers, limits and robustness."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

import policygrad as pg
from doubles.cases import naming
from doubles.data_fields import blank
from doubles.random_batches import Random, Shape, close, gradients, make, passed, policy
from policygrad.algorithms import ALGORITHMS
from policygrad.core.base import Advantage
from policygrad.core.objective import measure_forward

GATES = (
    pg.OnPolicy(),
    pg.Importance(),
    pg.Clip(0.2, 0.28),
    pg.Clip(0.2, 0.28, 3.0),
    pg.ClippedImportance(0.5, 2.0),
    pg.SigmoidGate(1.0, 1.05),
    pg.SigmoidGate(2.0, 5.0),
    pg.UnitWeight(),
    pg.TaperedImportance(),
)
RATIOS = (pg.Token(), pg.Sequence(), pg.SequenceProduct())
BASELINES = {
    "loo": (pg.LeaveOneOut(),),
    "group mean": (pg.GroupMean(),),
    "z-score": (pg.GroupMean(), pg.GroupStd()),
    "z-score, ddof 0": (pg.GroupMean(), pg.GroupStd(ddof=0)),
    "batch std": (pg.GroupMean(), pg.BatchStd()),
}


def batch_of(*rewards: float, group: list[int] | None = None, width: int = 2, dtype=torch.float64, **extra) -> pg.Batch:
    n = len(rewards)
    mask = torch.ones(n, width, dtype=torch.bool)
    which = torch.zeros(n, dtype=torch.int64) if group is None else torch.tensor(group)
    return pg.Batch(**{"mask": mask, "group": which, "reward": torch.tensor(rewards, dtype=dtype)} | extra)


def plain(ratio: Tensor) -> pg.Batch:
    """A batch of the ratio's shape, for gates that look at no more than its mask."""
    n = len(ratio)
    return pg.Batch(mask=torch.ones(ratio.shape, dtype=torch.bool), group=torch.arange(n), reward=torch.zeros(n))


def psi_of(batch: pg.Batch, *chain) -> list[float]:
    """Ψ at each completion's first token."""
    return pg.Algorithm(advantage=chain).compute_advantages(batch)[:, 0].tolist()


def test_the_worked_example() -> None:
    batch = batch_of(0, 0, 1, 0)
    assert psi_of(batch, pg.GroupMean(), pg.GroupStd(eps=0)) == pytest.approx([-0.5, -0.5, 1.5, -0.5], rel=1e-15)
    assert psi_of(batch, pg.GroupMean(), pg.GroupStd()) == pytest.approx([-0.49990002] * 2 + [1.49970006, -0.49990002])
    assert psi_of(batch, pg.LeaveOneOut()) == pytest.approx([-1 / 3, -1 / 3, 1, -1 / 3], rel=1e-15)
    assert psi_of(batch, pg.GroupMean()) == [-0.25, -0.25, 0.75, -0.25]


def test_running_mean_keeps_state() -> None:
    """decay ½: 4, then (4·½ + 1)/(½ + 1) = 2, then (4·¼ + 1·½ + 9)/(¼ + ½ + 1) = 6; without start-up bias."""
    algorithm = replace(pg.REINFORCE, advantage=(pg.RunningMean(decay=0.5),))
    means, state = [], algorithm.init_state()
    assert (
        psi_of(batch_of(7.0), *algorithm.with_state(state).advantage)
        == psi_of(batch_of(7.0), *algorithm.advantage)
        == [7.0]
    )
    for rewards in ((3.0, 5.0), (1.0,), (9.0, 9.0)):
        state = algorithm.update_state(state, batch_of(*rewards))
        means.append(state["advantage.0"]["mean"])
    assert means == pytest.approx([4, 2, 6], rel=1e-15)
    assert psi_of(batch_of(7.0), *algorithm.with_state(state).advantage) == pytest.approx([1.0])
    nobody = batch_of(1.0, mask=torch.zeros(1, 2, dtype=torch.bool))
    assert algorithm.update_state(state, nobody) == state


def test_batch_mean_and_batch_std() -> None:
    batch = batch_of(0, 2, 3, 5, group=[0, 0, 1, 1])
    assert psi_of(batch, pg.BatchMean()) == [-2.5, -0.5, 0.5, 2.5]
    assert psi_of(batch, pg.GroupMean(), pg.BatchStd(eps=0, ddof=0)) == pytest.approx([-1, 1, -1, 1], rel=1e-15)


ROUNDED = (0.1, 0.3, 0.7, 0.9)
"""No float32 is any of these, and the mean of several of the same is another number than each."""
SPREADS: dict[str, tuple[Advantage, ...]] = {
    **BASELINES,
    "optimal baseline": (pg.OptimalBaseline("length"),),
    "optimal token baseline": (pg.OptimalBaseline("logits"),),
    "optimal token baseline, as published": (pg.OptimalBaseline("logits", leave_one_out=False),),
    "batch mean": (pg.BatchMean(),),
    "batch mean and std": (pg.BatchMean(), pg.BatchStd()),
    "batch std of rewards": (pg.GroupMean(), pg.BatchStd(of="rewards")),
    "whitened": (pg.Whiten(),),
    "group mean, whitened": (pg.GroupMean(), pg.Whiten()),
    "batch mean, whitened": (pg.BatchMean(), pg.Whiten()),
    "over the mean": (pg.GroupMean(), pg.DivideByGroupMean()),
    "pass@1": (pg.PassAtK(1),),
    "pass@2": (pg.PassAtK(2),),
    "several rewards": (pg.RewardZScores(),),
    "several rewards, batch std": (pg.RewardZScores(), pg.BatchStd()),
    "process": (pg.ProcessReward(outcome=False),),
    "turns": (pg.GroupInGroup(gamma=1.0),),
    "turns, siblings": (pg.TurnReturn(), pg.TurnLeaveOneOut()),
    "turns, whitened": (pg.TurnReturn(), pg.Whiten()),
}


def constant_batch(value: float) -> pg.Batch:
    """Three groups of 7, 5 and 1 in float32, all rewarded alike, by every function and at every step; a turn each."""
    group = [0] * 7 + [1] * 5 + [2]
    batch = batch_of(*[value] * 13, group=group, width=3, dtype=torch.float32)
    end = torch.tensor([False, False, True]).expand(13, 3)
    return replace(
        batch,
        mask=batch.mask & (torch.arange(3) >= torch.arange(13)[:, None] % 3),
        rewards=torch.full((13, 2), value),
        reward_names=("first", "second"),
        reward_weights=(1.0, 0.3),
        step_end=end,
        token_reward=torch.zeros(13, 3),
        turn_state=torch.zeros(13, 3, dtype=torch.int64),
        grad_logp_sq_norm=torch.rand(13),
        logp_old=-torch.rand(13, 3),
        logp_ref=-torch.rand(13, 3),
        sum_pi_squared=1 + torch.rand(13, 3),
    )


def test_equal_rewards_give_exactly_zero_advantage() -> None:
    for (name, chain), value in product(SPREADS.items(), ROUNDED):
        with naming(name, value):
            batch = constant_batch(value)
            if isinstance(chain[0], pg.ProcessReward):
                batch = replace(batch, token_reward=torch.where(batch.step_end, value, 0.0))
            if isinstance(chain[0], pg.RewardZScores):
                batch = replace(batch, token_reward=None)
            psi = pg.Algorithm(advantage=chain).compute_advantages(batch)
            if any(
                isinstance(link, pg.TurnLeaveOneOut) for link in chain
            ):  # a turn that no sibling has is compared with 0
                psi = psi[batch.group < 2]
            assert (psi == 0).all()


@pytest.mark.parametrize("value", ROUNDED)
def test_whitening_equal_rewards_gives_zeros_for_every_number_of_completions(value: float) -> None:
    """Which sums are rounded depends on how many numbers are added, so one batch shows nothing about the next."""
    for completions in range(2, 40):
        batch = batch_of(*[value] * completions, width=3, dtype=torch.float32)
        assert (pg.Algorithm(advantage=(pg.Whiten(),)).compute_advantages(batch) == 0).all(), completions


OWN_SIGNAL = {
    *(
        "reinforce",
        "remax",
        "astar_po",
        "raft",
        "topr",
        "asymre",
        "a2c",
        "trpo",
        "natural",
        "ppo",
        "ppo_penalty",
        "pf_ppo",
        "vapo",
        "vineppo",
    ),
    *("prime", "distill", "trpo_vine", "spiral"),
}
"""Rows whose Ψ is not of rewards compared with each other: a baseline of the past or a constant, values, another model."""


def test_group_algorithms_have_zero_gradient_on_equal_rewards() -> None:
    for name, value in product(sorted(ALGORITHMS.keys() - OWN_SIGNAL), ROUNDED):
        with naming(name, value):
            algorithm = replace(ALGORITHMS[name], shaping=())  # a penalty of length, or a KL, is a spread
            batch = constant_batch(0.0 if name == "grpo_process" else value)  # whose outcome is one step's alone
            if name == "grpo_process":
                batch = replace(batch, token_reward=torch.where(batch.step_end, value, 0.0))
            if name == "gdpo":
                batch = replace(batch, token_reward=None)
            assert (algorithm.compute_advantages(batch) == 0).all()


@pytest.mark.parametrize("of", ["advantages", "rewards"])
def test_constant_batch_is_not_scaled_by_eps(of) -> None:
    """Without a baseline before it Ψ stays as it is, as after `GroupStd`, and is not 0.7/eps."""
    assert psi_of(batch_of(0.5, 0.5), pg.BatchStd(of=of)) == psi_of(batch_of(0.5, 0.5), pg.GroupStd()) == [0.5, 0.5]


def test_token_rewards_count_from_their_token_on() -> None:
    batch = batch_of(1.0, 0.0, token_reward=torch.tensor([[0.5, 0.25], [0.0, -1.0]], dtype=torch.float64))
    assert pg.Algorithm().compute_advantages(batch).tolist() == [[1.75, 1.25], [-1.0, -1.0]]
    assert pg.Algorithm(advantage=(pg.LeaveOneOut(),)).compute_advantages(batch).tolist() == [
        [2.75, 2.25],
        [-2.75, -2.75],
    ]


@pytest.mark.parametrize(
    ("r", "psi", "value", "weight"),
    [
        (0.5, 1.0, 0.5, 0.5),
        (1.1, 1.0, 1.1, 1.1),
        (1.5, 1.0, 1.2, 0.0),
        (0.5, -1.0, -0.8, 0.0),
        (1.1, -1.0, -1.1, 1.1),
        (1.5, -1.0, -1.5, 1.5),
        (0.5, -10.0, -8.0, 0.0),  # min(−5, −8)
    ],
)
def test_the_clip_cases(r: float, psi: float, value: float, weight: float) -> None:
    """Below, inside and above the range, for an advantage that is positive and one that is negative."""
    ratio, advantage = torch.tensor([[r]], dtype=torch.float64), torch.tensor([[psi]], dtype=torch.float64)
    gate = pg.Clip(0.2, 0.2)
    assert gate.value(ratio, advantage, plain(ratio)).item() == pytest.approx(value, rel=1e-15)
    assert gate.weight(ratio, advantage, plain(ratio)).item() == weight


def test_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    ratio, psi = torch.tensor([[2.0, 4.0, 0.5, 4.0]]), torch.tensor([[-1.0, -1.0, -1.0, 1.0]])
    gate = pg.Clip(0.25, 0.25, 3.0)
    assert gate.value(ratio, psi, plain(ratio)).tolist() == [[-2.0, -3.0, -0.75, 1.25]]
    assert gate.weight(ratio, psi, plain(ratio)).tolist() == [[2.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("gate", GATES, ids=repr)
def test_every_gate_weighs_one_at_ratio_one(gate) -> None:
    one, psi = torch.ones(1, 3, dtype=torch.float64), torch.tensor([[-2.0, 0.0, 2.0]], dtype=torch.float64)
    assert gate.weight(one, psi, plain(one)).tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("gate", GATES, ids=repr)
def test_the_weight_is_the_values_derivative_in_log_r(gate) -> None:
    random = Random(0)
    change = (1.5 * random.normal(4, 200)).requires_grad_()
    psi = random.normal(4, 200)
    (derivative,) = gradients(gate.value(change.exp(), psi, plain(psi)).sum(), change)
    close(gate.weight(change.exp(), psi, plain(psi)).detach() * psi, derivative)


def gradient(algorithm: pg.Algorithm, batch: pg.Batch, logits: Tensor) -> Tensor:
    logp = policy(logits, batch.tokens, batch.mask)
    return gradients(pg.surrogate(logp, batch, algorithm.compute_advantages(batch), algorithm), logits)[0]


GRPO = replace(pg.GRPO, terms=())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (replace(GRPO, gate=pg.Clip(math.inf, math.inf)), replace(GRPO, gate=pg.Importance())),
        (replace(pg.CISPO, gate=pg.ClippedImportance(0, math.inf)), replace(pg.CISPO, gate=pg.Importance())),
        (replace(GRPO, gate=pg.Clip(0.2, 0.2, math.inf)), GRPO),
    ],
    ids=["infinite clip = importance", "infinite cap = off-policy REINFORCE", "infinite dual clip = clip"],
)
def test_limits(one: pg.Algorithm, other: pg.Algorithm) -> None:
    batch, logits = make(Shape((4, 4), 5, seed=1, binary=False), 0.8)
    assert torch.equal(gradient(one, batch, logits), gradient(other, batch, logits))
    assert gradient(one, batch, logits).abs().max() > 0


def test_grpo_with_token_mean_and_without_kl_is_ppos_clip() -> None:
    """PPO eq. 7, Ê_t over every token of the batch, with the same Ψ."""
    batch, logits = make(Shape((4, 4), 5, seed=1, binary=False), 0.8)
    algorithm = replace(GRPO, aggregation=pg.TokenMean())
    psi = algorithm.compute_advantages(batch)[batch.mask]
    logp = policy(logits, batch.tokens, batch.mask)
    r = (logp[batch.mask] - batch.logp_old[batch.mask]).exp()  # type: ignore[index]
    ppo = torch.minimum(r * psi, r.clamp(0.8, 1.2) * psi).mean()
    close(-gradient(algorithm, batch, logits), gradients(ppo, logits)[0])


def test_sequence_ratio_gates_whole_completions() -> None:
    """s = exp(mean log r) = e^0.1 at every token, holes aside; the product is e^0.2."""
    mask = torch.tensor([[True, False, True]])
    change = torch.tensor([[0.3, math.nan, -0.1]], dtype=torch.float64)
    assert pg.Sequence()(change, mask)[0, 0].item() == pytest.approx(math.exp(0.1), rel=1e-15)
    assert pg.SequenceProduct()(change, mask)[0, 2].item() == pytest.approx(math.exp(0.2), rel=1e-15)


@pytest.mark.parametrize("chain", BASELINES.values(), ids=BASELINES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eight_equal_rewards_give_exactly_zero(chain, dtype) -> None:
    assert psi_of(batch_of(*[0.7] * 8, dtype=dtype), *chain) == [0.0] * 8


@pytest.mark.parametrize("chain", BASELINES.values(), ids=BASELINES.keys())
def test_a_group_of_one_gets_zero(chain) -> None:
    """At every token, with token rewards too; failed siblings (empty masks) are nobody."""
    mask = torch.tensor([[True, True], [False, False], [True, True], [True, True]])
    tokens = torch.tensor([[0.5, 0.25], [9.0, 9.0], [0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    batch = batch_of(1.0, math.nan, 2.0, 5.0, group=[0, 0, 1, 1], mask=mask, token_reward=tokens)
    psi = pg.Algorithm(advantage=chain).compute_advantages(batch)
    assert psi[:2].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert psi[2:].abs().min() > 0


def test_statistics_over_more_completions_than_the_gradient() -> None:
    """N ≥ G: the third completion only informs the baseline; the fourth is only informed by it."""
    mask = torch.tensor([[True], [True], [False], [True]])
    batch = batch_of(1, 1, 4, 6, width=1, mask=mask, in_statistics=torch.tensor([True, True, True, False]))
    assert psi_of(batch, pg.GroupMean()) == [-1, -1, 0, 4]
    assert psi_of(batch, pg.LeaveOneOut()) == [-1.5, -1.5, 0, 4]
    same = replace(batch, reward=torch.tensor([0.7, 0.7, 0.7, 1.7]))
    assert psi_of(same, pg.GroupMean()) == pytest.approx([0, 0, 0, 1])


def test_extreme_float32_log_ratios_stay_finite() -> None:
    for ratio, gate, change in product(RATIOS, GATES, (95.0, -95.0)):
        with naming(ratio, gate, change):
            mask = torch.ones(2, 4, dtype=torch.bool)
            r = ratio(torch.full((2, 4), change), mask)
            psi = torch.tensor([[1.0], [-1.0]]).expand(2, 4)
            assert torch.isfinite(gate.weight(r, psi, plain(r))).all()
            assert torch.isfinite(gate.value(r, psi, plain(r))).all()


@pytest.mark.parametrize("form", ["k2", "k3", "r*k1", "r*k3"])
@pytest.mark.parametrize("change", [95.0, -95.0])
def test_extreme_float32_kl_terms_and_metrics_stay_finite(form, change: float) -> None:
    zeros = torch.zeros(2, 3)
    batch = batch_of(1.0, 0.0, width=3, dtype=torch.float32, logp_ref=zeros + change, logp_old=zeros - change)
    algorithm = replace(pg.GRPO, terms=(pg.KLToReference(0.04, form),))
    logp = zeros.clone().requires_grad_()
    psi, out = algorithm.compute_advantages(batch), pg.Forward(logp)
    assert torch.isfinite(gradients(pg.surrogate(out, batch, psi, algorithm), logp)[0]).all()
    metrics = measure_forward(out, batch, psi, algorithm, algorithm.all_coefficients(batch))
    assert [name for name, metric in metrics.items() if not math.isfinite(metric.value)] == []


def test_a_fully_masked_batch_gives_zero_not_nan() -> None:
    for name, width in product(pg.ALGORITHMS, (0, 3)):
        with naming(name, width):
            algorithm = pg.get_algorithm(name)
            shape = (4, width)
            nan = torch.full(shape, math.nan)
            batch = pg.Batch(
                mask=torch.zeros(shape, dtype=torch.bool),
                group=torch.tensor([0, 0, 1, 1]),
                reward=torch.full((4,), math.nan),
                logp_old=nan,
                logp_ref=nan,
                values=nan,
                step_end=torch.ones(shape, dtype=torch.bool) if "step_end" in algorithm.all_needs else None,
                token_reward=None if "rewards" in algorithm.all_needs else nan,
                logp_sampler=nan,
                baseline=torch.full((4,), math.nan),
                example_id=torch.tensor([0, 0, 1, 1]),
                implicit_reward=nan,
                entropy=nan,
                **blank(nan),
            )
            batch = algorithm.apply_filters(batch)
            logp = nan.clone().requires_grad_()
            psi = algorithm.compute_advantages(batch)
            loss = pg.surrogate(passed(logp, batch), batch, psi, algorithm)
            assert gradients(loss, logp)[0].abs().sum() == 0
            assert loss == 0
            assert pg.objective(passed(logp, batch), batch, psi, algorithm) == 0
            before, after = algorithm.init_state(), algorithm.update_state(algorithm.init_state(), batch)
            assert {key: state | {"rollouts": 0} for key, state in after.items()} == {
                key: state | {"rollouts": 0} for key, state in before.items()
            }


def test_soft_overlong_hand_numbers() -> None:
    """L_max 10, L_cache 2: nothing up to 8, −½ at 9, −1 at 10 and beyond; a truncated one has reached the budget."""
    lengths = torch.tensor([0, 8, 9, 10, 12, 3])
    mask = torch.arange(12) < lengths[:, None]
    batch = batch_of(*[1.0] * 6, mask=mask, truncated=torch.tensor([False] * 5 + [True]))
    assert pg.SoftOverlong(10)(batch).reward.tolist() == [1, 1, 0.5, 0, 0, 0]
    tenth = pg.SoftOverlong(10, scale=0.1)(batch).reward.tolist()
    assert tenth == pytest.approx([1, 1, 0.95, 0.9, 0.9, 0.9], abs=1e-7)
    for budget in (6, 7, 10, 13, 100):  # exactly −1 at the budget, so that 1 − 1 and 0 have no spread
        full = torch.ones(1, budget, dtype=torch.bool)
        for dtype in (torch.float32, torch.float64):
            assert pg.SoftOverlong()(batch_of(1.0, mask=full, dtype=dtype)).reward.item() == 0.0


def test_the_two_levels_of_the_kl_in_the_reward() -> None:
    """u = (1, 2) and (3, 0), β = ½. token: −½, −1 and −3/2, 0, summed to go. sequence: R − 3/2 at both tokens."""
    old = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]])
    batch = replace(batch_of(1.0, 0.0, width=2), logp_old=old, logp_ref=old - torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
    to_go, uninterrupted = (pg.Algorithm(shaping=(pg.KLInReward(0.5, level=level),)) for level in ("token", "sequence"))
    assert to_go.compute_advantages(batch).tolist() == [[-0.5, 0.0], [-1.5, 0.0]]
    assert uninterrupted.compute_advantages(batch).tolist() == [[-0.5, -0.5], [-1.5, -1.5]]
    hidden = replace(batch, mask=torch.tensor([[True, False], [True, True]]))  # a token that was not sampled has no KL
    assert uninterrupted.compute_advantages(hidden).tolist() == [[0.5, 0.0], [-1.5, -1.5]]
    assert pg.RLOO.compute_advantages(batch)[:, 0].tolist() == pytest.approx(
        [1.0, -1.0]
    )  # both are 0.15 from the reference


def test_dynamic_sampling_drops_and_reweights() -> None:
    """Two of three groups have no spread: f = 4/6, so kept-only 1/2 equals 1/6 × 3."""
    batch = batch_of(1, 1, 0, 1, 0, 0, group=[0, 0, 1, 1, 2, 2], width=1)
    kept = pg.DropZeroVariance()(batch)
    assert kept.mask[:, 0].tolist() == [False, False, True, True, False, False]
    weighted = pg.DropZeroVariance("reweight")(batch)
    assert weighted.mask.all()
    assert weighted.weight[:, 0].tolist() == [0, 0, 3, 3, 0, 0]  # type: ignore[index]
    for aggregate in (pg.SequenceSum(), pg.SequenceMean(), pg.TokenMean(), pg.FixedLength(1)):
        algorithm = pg.Algorithm(aggregation=aggregate)
        torch.testing.assert_close(algorithm.coefficients(kept), algorithm.coefficients(weighted), rtol=1e-15, atol=0)
    overlong = replace(kept, in_statistics=torch.ones(6, dtype=torch.bool))
    assert pg.DropZeroVariance()(overlong).counted.tolist() == [False, False, True, True, False, False]


def test_the_budget_reaches_every_open_length() -> None:
    own = pg.KLToReference(0.1, "k2", aggregation=pg.FixedLength())
    algorithm = replace(pg.DR_GRPO, shaping=(pg.SoftOverlong(),), terms=(own,)).with_max_tokens(7)
    assert algorithm.aggregation == pg.FixedLength(7)
    assert algorithm.shaping == (pg.SoftOverlong(7),)
    assert algorithm.terms == (replace(own, aggregation=pg.FixedLength(7)),)
    assert replace(pg.DR_GRPO, aggregation=pg.FixedLength(3)).with_max_tokens(7).aggregation == pg.FixedLength(3)
