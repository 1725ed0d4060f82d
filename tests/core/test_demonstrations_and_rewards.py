"""Parts that read several rewards, turns or demonstrations: numbers by hand, exact limits, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import policygrad as pg
from doubles.data_fields import with_demonstrations
from doubles.random_batches import Random, Shape, close, extra_of, gradients, make, policy, shapes
from policygrad.core.masked import first_valid
from policygrad.core.objective import measure_forward
from policygrad.core.staleness import resolve_old_policy, staleness_metrics
from policygrad.core.validation import check_sampling


def rewarded(rewards: list[list[float]], weights: tuple[float, ...], group: list[int] | None = None) -> pg.Batch:
    """One token each; `rewards` are rows."""
    table = torch.tensor(rewards, dtype=torch.float64)
    total = (table.nan_to_num() * torch.tensor(weights, dtype=torch.float64)).sum(1)
    return pg.Batch(
        mask=torch.ones(len(rewards), 1, dtype=torch.bool),
        group=torch.tensor(group or [0] * len(rewards)),
        reward=total,
        rewards=table,
        reward_names=tuple(f"r{k}" for k in range(len(weights))),
        reward_weights=weights,
    )


def test_rewards_with_equal_sums_are_distinguished() -> None:
    """Two answers, two rewards of 0 or 1: (0, 1) against (0, 2) in all. GRPO's z-scores are the same, GDPO's are not (fig. 2)."""
    one, two = rewarded([[0, 0], [0, 1]], (1.0, 1.0)), rewarded([[0, 0], [1, 1]], (1.0, 1.0))
    half = 1 / math.sqrt(2)
    plain = replace(pg.GRPO, terms=())
    for batch in (one, two):
        assert plain.compute_advantages(batch)[:, 0].tolist() == pytest.approx([-half, half], abs=2e-4)
    only = replace(pg.GDPO, advantage=(pg.RewardZScores(eps=0.0),))
    assert only.compute_advantages(one)[:, 0].tolist() == pytest.approx([-half, half])
    assert only.compute_advantages(two)[:, 0].tolist() == pytest.approx([-2 * half, 2 * half])


def test_reward_weights_scale_normalised_rewards() -> None:
    """r = (0, 0, 1, 0) and 100·(3, 1, 1, 3): in a sum the second is all; here each has unit spread, times its weight."""
    batch = rewarded([[0, 300], [0, 100], [1, 100], [0, 300]], (1.0, -0.5))
    psi = replace(pg.GDPO, advantage=(pg.RewardZScores(eps=0.0),)).compute_advantages(batch)[:, 0]
    second = math.sqrt(3) / 2  # (300 − 200)/std, std = 200/√3
    expected = [-0.5 - 0.5 * second, -0.5 + 0.5 * second, 1.5 + 0.5 * second, -0.5 - 0.5 * second]
    assert psi.tolist() == pytest.approx(expected)


def test_missing_reward_is_left_out_of_the_mean() -> None:
    nan = math.nan
    batch = rewarded([[0, nan], [1, 2], [0, 4], [1, nan]], (1.0, 1.0))
    psi = replace(pg.GDPO, advantage=(pg.RewardZScores(eps=0.0),)).compute_advantages(batch)[:, 0]
    a, b = math.sqrt(3) / 2, 1 / math.sqrt(2)
    assert psi.tolist() == pytest.approx([-a, a - b, -a + b, a])


@settings(max_examples=30, derandomize=True)
@given(
    shape=shapes(max_groups=4, max_size=5), scale=st.sampled_from([1e-3, 0.5, 40.0]), shift=st.sampled_from([-3.0, 8.0])
)
def test_scale_and_shift_of_one_reward_change_nothing(shape: Shape, scale: float, shift: float) -> None:
    """But for eps, a reward's unit is nobody's business; the batch's mean is 0, so that `BatchStd` is all of the last step."""
    batch, _ = make(shape, extra="rewards")
    algorithm = replace(pg.GDPO, advantage=(pg.RewardZScores(eps=0.0),))
    assert batch.rewards is not None
    moved = torch.cat([scale * batch.rewards[:, :1] + shift, batch.rewards[:, 1:]], 1)
    psi = algorithm.compute_advantages(batch)
    close(algorithm.compute_advantages(replace(batch, rewards=moved)), psi, tolerance=1e-9)
    known = batch.mask.any(1)
    assert abs(float(first_valid(psi, batch.mask)[known].sum())) < 1e-9


def episodes(turns: list[list[tuple[int, int, float]]], rewards: list[float], group: list[int]) -> pg.Batch:
    """Rows of turns (tokens, state, reward), a tool's token between any two."""
    width = max(sum(n + 1 for n, _, _ in row) for row in turns)
    shape = (len(turns), width)
    mask, anchor = torch.zeros(shape, dtype=torch.bool), torch.full(shape, 77)
    worth = torch.full(shape, math.nan, dtype=torch.float64)
    for i, row in enumerate(turns):
        at = 0
        for n, state, reward in row:
            mask[i, at : at + n], anchor[i, at : at + n], worth[i, at : at + n] = True, state, 0.0
            worth[i, at + n - 1] = reward
            at += n + 1
    return pg.Batch(
        mask=mask,
        group=torch.tensor(group),
        reward=torch.tensor(rewards, dtype=torch.float64),
        turn_state=anchor,
        token_reward=worth,
    )


def test_turns_by_hand() -> None:
    """Two episodes of a group: 0 → 1 → end worth 1, and 0 → 2 → 1 → end worth 0. γ = ½, F = 1.

    Returns: (½, 1) and (0, 0, 0). State 0 holds ½ and 0, state 1 holds 1 and 0, state 2 one turn alone. Episodes: 1 and 0.
    """
    batch = episodes([[(2, 0, 0.0), (1, 1, 0.0)], [(1, 0, 0.0), (2, 2, 0.0), (1, 1, 0.0)]], [1.0, 0.0], [0, 0])
    psi = replace(pg.GIGPO, advantage=(pg.GroupInGroup(omega=2.0, gamma=0.5, std=False),)).compute_advantages(batch)
    assert psi[0].tolist() == [0.5 + 2 * 0.25, 0.5 + 2 * 0.25, 0.0, 0.5 + 2 * 0.5, 0.0, 0.0, 0.0]
    assert psi[1].tolist() == [-0.5 - 2 * 0.25, 0.0, -0.5, -0.5, 0.0, -0.5 - 2 * 0.5, 0.0]


def test_rewards_of_turns_reach_the_turns_before_them_discounted() -> None:
    """Turn rewards 1, 2 and an outcome of 4: returns 1 + γ(2 + 4), 6."""
    batch = episodes([[(1, 0, 1.0), (1, 1, 2.0)], [(1, 0, 0.0), (1, 1, 0.0)]], [4.0, 0.0], [0, 0])
    psi = replace(pg.GIGPO, advantage=(pg.GroupInGroup(omega=1.0, gamma=0.5, std=False),)).compute_advantages(batch)
    assert psi[0, [0, 2]].tolist() == [3.5 + 2.0, 3.5 + 3.0]  # half of R = 7; half of 4, half of 6
    assert psi[1, [0, 2]].tolist() == [-5.5, -6.5]


def test_equal_states_of_other_groups_are_not_compared() -> None:
    batch = episodes([[(1, 0, 0.0)], [(1, 0, 0.0)], [(1, 0, 0.0)]], [1.0, 0.0, 5.0], [0, 0, 1])
    psi = replace(pg.GIGPO, advantage=(pg.GroupInGroup(std=False),)).compute_advantages(batch)
    assert psi[:, 0].tolist() == [1.0, -1.0, 0.0]


@settings(max_examples=30, derandomize=True)
@given(shape=shapes(max_groups=4, max_size=5))
def test_single_turn_gigpo_is_grpo_doubled(shape: Shape) -> None:
    """All episodes of a group begin in one state: Ψ = (1 + ω) times the z-score. With ω = 0 it is GRPO at any turns."""
    batch, _ = make(shape)
    mask = torch.arange(shape.width) < batch.lengths[:, None]
    zeros = torch.zeros(mask.shape).double()
    batch = replace(batch, mask=mask, reward=batch.reward.nan_to_num(), turn_state=zeros.long(), token_reward=zeros)
    z = replace(pg.GRPO, terms=()).compute_advantages(replace(batch, token_reward=None))
    close(pg.GIGPO.compute_advantages(batch), 2 * z, tolerance=1e-11)
    turned, _ = make(shape, extra="turns")
    still = replace(pg.GIGPO, advantage=(pg.GroupInGroup(omega=0.0),)).compute_advantages(turned)
    totals = turned.reward.nan_to_num() + torch.where(turned.mask, turned.token_reward, 0.0).sum(1)  # type: ignore[arg-type]
    plain = replace(pg.GRPO, terms=()).compute_advantages(replace(turned, reward=totals, token_reward=None))
    close(still, plain, tolerance=1e-9)


def shown(logp: list[float], wrote: float = 0.0, dtype: torch.dtype = torch.float64) -> pg.Batch:
    """Two samples and a demonstration of one token each per number, π_old = π_θ."""
    n = len(logp)
    line = torch.tensor([logp] * 3, dtype=dtype)
    return pg.Batch(
        mask=torch.ones(3, n, dtype=torch.bool),
        group=torch.zeros(3, dtype=torch.int64),
        reward=torch.tensor([0.0, 0.0, 1.0], dtype=dtype),
        logp_old=line,
        logp_sampler=torch.stack([line[0], line[1], torch.full((n,), wrote, dtype=dtype)]),
        demonstration=torch.tensor([False, False, True]),
    )


def test_policy_shaping_by_hand() -> None:
    """p = 0.1: f = ½, w = 0.1·0.1/0.2² = ¼; p = 0.9: f = 0.9, w = 0.09. Of a writer with π_φ = ½, x = p/½."""
    gate = pg.PolicyShaping()
    batch = shown([math.log(0.1), math.log(0.9)])
    ratio, psi = torch.ones(3, 2).double(), torch.ones(3, 2).double()
    assert gate.weight(ratio, psi, batch)[2].tolist() == pytest.approx([0.25, 0.09])
    assert gate.value(ratio, psi, batch)[2].tolist() == pytest.approx([0.5, 0.9])
    assert gate.weight(ratio, psi, batch)[:2].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    output = shown([math.log(0.1), math.log(0.9)], wrote=math.log(0.5))
    assert gate.value(ratio, psi, output)[2].tolist() == pytest.approx([0.2 / 0.3, 1.8 / 1.9])


def test_a_demonstration_is_never_clipped() -> None:
    """Samples lose their gradient beyond 1.2; a demonstration's token that has become twice as likely keeps the weight it has."""
    gate, batch = pg.PolicyShaping(), shown([math.log(0.2)])
    ratio, psi = torch.full((3, 1), 2.0).double(), torch.ones(3, 1).double()
    weight = gate.weight(ratio, psi, batch)
    assert weight[:, 0].tolist() == pytest.approx([0.0, 0.0, 0.04 / 0.25])  # p is 0.4 now
    below, above = gate.clipped(ratio, psi, batch)
    assert (below.any(), above[:, 0].tolist()) == (False, [True, True, False])


def test_demonstration_ratio_is_to_its_author() -> None:
    """π_old := μ: of a demonstration r itself is π_θ/π_φ, and what the gate makes of it is the same."""
    output, p = shown([math.log(0.1), math.log(0.9)], wrote=math.log(0.5)), torch.tensor([0.1, 0.9]).double()
    recomputed = pg.PolicyShaping().value(torch.ones(3, 2).double(), torch.ones(3, 2).double(), output)
    algorithm, batch = resolve_old_policy(replace(pg.LUFFY, old_policy="sampler"), output, version=3)
    out = pg.Forward(p.log().expand(3, 2))
    weight, ratio = pg.gate_weight(out, batch, torch.ones(3, 2).double(), algorithm)
    assert ratio[2].tolist() == pytest.approx([0.2, 1.8])
    assert algorithm.gate.value(ratio, torch.ones(3, 2).double(), batch)[2].tolist() == pytest.approx(
        recomputed[2].tolist()
    )
    assert weight[2].tolist() == pytest.approx([0.1 * x / (x + 0.1) ** 2 for x in (0.2, 1.8)])


def test_demonstrations_are_never_stale() -> None:
    batch = shown([-1.0])
    old = replace(batch, version=torch.tensor([[5], [5], [0]]))
    assert resolve_old_policy(pg.LUFFY, old, version=5)[0] == pg.LUFFY
    assert staleness_metrics(old, 5)["staleness/max"].value == 0


@pytest.mark.parametrize("change", [-95.0, 95.0])
def test_log_ratios_far_beyond_float32_stay_finite(change: float) -> None:
    batch = shown([-90.0, -0.1], dtype=torch.float32)
    logp = (batch.logp_old + change).requires_grad_()  # type: ignore[operator]
    for algorithm in (pg.LUFFY, pg.CHORD):
        rollout = algorithm.apply_filters(batch)
        loss = pg.surrogate(logp, rollout, algorithm.compute_advantages(rollout), algorithm)
        assert torch.isfinite(gradients(loss, logp)[0]).all()
        assert torch.isfinite(loss)


def test_without_demonstrations_luffy_and_chord_are_grpo() -> None:
    batch, logits = make(Shape((4, 3), 5, seed=2, binary=True), 0.3)
    batch = replace(batch, demonstration=torch.zeros(7, dtype=torch.bool))
    plain = replace(pg.GRPO, terms=(), aggregation=pg.TokenMean())
    expected = gradients(
        pg.surrogate(policy(logits, batch.tokens, batch.mask), batch, plain.compute_advantages(batch), plain), logits
    )
    for algorithm, factor in ((pg.LUFFY, 1.0), (pg.CHORD, 0.9)):
        rollout = algorithm.apply_filters(batch)
        logp = policy(logits, batch.tokens, batch.mask)
        result = gradients(pg.surrogate(logp, rollout, algorithm.compute_advantages(rollout), algorithm), logits)
        close(result[0], factor * expected[0])


def test_mu_splits_the_objective() -> None:
    """μ of the demonstrations leaves 1 − μ of Ψ, whatever else is put in μ's place."""
    batch, _ = make(Shape((4, 3), 5, seed=3, binary=True), 0.3, "demonstrations")
    batch = pg.CHORD.apply_filters(batch)
    plain = replace(pg.GRPO, terms=()).compute_advantages(replace(batch, demonstration=None))
    for mu in (0.0, 0.1, 0.35, 1.0):
        algorithm = replace(pg.CHORD, terms=(pg.DemonstrationNLL(mu),))
        assert torch.equal(algorithm.compute_advantages(batch), (1 - mu) * plain)
        assert algorithm.equation()["Ψ"].endswith(f"; × {1 - mu:g}" if mu else "/(std_g + 0.0001)")
    both = replace(pg.CHORD, terms=(pg.DemonstrationNLL(0.5), pg.DemonstrationNLL(0.25, token_weighting=False)))
    assert torch.equal(both.compute_advantages(batch), 0.25 * plain)


def test_mu_follows_a_half_cosine() -> None:
    """CHORD-μ: from 0.9 to 0.05; half of the way after half of the rollouts, and there after all of them."""
    algorithm = replace(
        pg.CHORD, terms=(pg.DemonstrationNLL(0.9, token_weighting=False, final_mu=0.05, decay_rollouts=4),)
    )
    batch = pg.CHORD.apply_filters(make(Shape((4, 3), 5, seed=3, binary=True), 0.3, "demonstrations")[0])
    plain = replace(pg.GRPO, terms=()).compute_advantages(replace(batch, demonstration=None))
    state, seen = algorithm.init_state(), []
    for _ in range(6):
        now = algorithm.with_state(json.loads(json.dumps(state)))  # as a checkpoint holds it
        seen.append(now.report(batch)["demonstrations/mu"].value)
        assert torch.equal(now.compute_advantages(batch), (1 - seen[-1]) * plain)
        state = algorithm.update_state(state, batch)
    eighth = 0.05 + 0.85 * (1 + math.sqrt(0.5)) / 2
    assert seen == pytest.approx([0.9, eighth, 0.475, 0.95 - eighth, 0.05, 0.05], rel=1e-12)
    assert algorithm.equation()["Ψ"].endswith("; × (1 − μ)")
    assert algorithm.equation()["k"] == "μ·1 on demonstrations,  μ from 0.9 to 0.05 in 4 rollouts"
    assert pg.CHORD.init_state() == {}
    assert "demonstrations/mu" not in pg.CHORD.report(batch)


def test_other_parts_average_without_demonstrations() -> None:
    batch, _ = make(Shape((4, 3), 5, seed=5, binary=True), 0.3, "demonstrations")
    own = replace(batch, mask=batch.policy_tokens)
    kl = pg.KLToReference(0.1, "k3")
    mixed = replace(pg.LUFFY, terms=(kl, replace(kl, aggregation=pg.SequenceMean())))
    policy_, first_term, second_term = mixed.all_coefficients(batch)
    assert torch.equal(policy_, pg.TokenMean()(batch.mask, batch.group))
    assert torch.equal(first_term, pg.TokenMean()(own.mask, own.group))
    assert torch.equal(second_term, pg.SequenceMean()(own.mask, own.group))
    chord, nll = pg.CHORD.all_coefficients(batch)
    assert torch.equal(chord, pg.TokenMean()(own.mask, own.group))
    assert torch.equal(nll, pg.TokenMean()(batch.mask & ~batch.policy_tokens, batch.group))


def test_demonstrations_are_left_out_of_metrics_and_corrections() -> None:
    random = Random(9)
    batch, logits = make(Shape((4, 4), 5, seed=9, binary=True), 0.3)
    batch = with_demonstrations(batch, random)
    assert batch.demonstration is not None
    far = torch.where(batch.demonstration[:, None], -50.0, batch.logp_sampler)  # type: ignore[arg-type]
    batch = replace(batch, logp_sampler=far, logp_ref=torch.where(batch.demonstration[:, None], -60.0, batch.logp_ref))  # type: ignore[arg-type]
    out = pg.Forward(policy(logits, batch.tokens, batch.mask).detach())
    psi = pg.LUFFY.compute_advantages(batch)
    result = measure_forward(out, batch, psi, pg.LUFFY, pg.LUFFY.all_coefficients(batch))
    rows = ~batch.demonstration
    alone = batch.select(rows)
    expected = measure_forward(
        pg.Forward(out.logp[rows]), alone, psi[rows], pg.LUFFY, tuple(c[rows] for c in pg.LUFFY.all_coefficients(batch))
    )
    for name in ("kl", "kl_old", "mismatch/logp_max", "mismatch/logp_mean", "mismatch/ess"):
        assert result[name].value == pytest.approx(expected[name].value, rel=1e-12), name
    rho = pg.TruncatedIS()(out, batch, psi)
    assert (rho[batch.demonstration] == 1).all()
    assert (rho[batch.policy_tokens] != 1).any()


REFUSED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "demonstrations nobody learns from": (
        lambda: replace(pg.GRPO, filters=(pg.SeparateDemonstrations(),)),
        ["none learns from them", "gate=PolicyShaping()", "DemonstrationNLL()"],
    ),
    "a ratio of the whole completion": (
        lambda: replace(pg.LUFFY, ratio=pg.Sequence()),
        ["PolicyShaping", "ratio=Token()"],
    ),
    "a critic": (
        lambda: replace(pg.PPO, gate=pg.PolicyShaping(), shaping=()),
        ["a critic is fitted", "critic=None", "GroupMean()"],
    ),
    "a trust region": (
        lambda: replace(pg.LUFFY, update_rule=pg.TrustRegion()),
        ["TrustRegion measures", "the policy's samples", "update_rule=GradientSteps()"],
    ),
    "steps": (
        lambda: replace(pg.GRPO_PROCESS, gate=pg.PolicyShaping()),
        ["an advantage along steps", "a demonstration has none"],
    ),
    "a choice among completions": (
        lambda: replace(pg.LUFFY, filters=(pg.Downsample(4),)),
        ["could drop the demonstration"],
    ),
    "refill before a demonstration joins": (
        lambda: replace(pg.LUFFY, filters=(pg.DropZeroVariance(),)),
        ["DropZeroVariance replaces groups", "before a demonstration joins", "mode='drop'"],
    ),
    "shaping beside rewards one by one": (
        lambda: replace(pg.GDPO, shaping=(pg.SoftOverlong(),)),
        ["the reward functions' separate rewards, which SoftOverlong would not change", "shaping=()"],
    ),
    "turns of masked completions": (
        lambda: replace(pg.GIGPO, filters=(pg.MaskTruncated(keep_in_statistics=True),)),
        ["compares turns", "keep_in_statistics=False"],
    ),
    "turns late in the chain": (
        lambda: replace(pg.GRPO, advantage=(pg.GroupMean(), pg.GroupInGroup())),
        ["GroupInGroup starts from the rewards", "put it first"],
    ),
    "one sample": (lambda: check_sampling(pg.GDPO, 1, 1.0), ["RewardZScores compares the samples of one prompt"]),
    "a discount above 1": (lambda: pg.GroupInGroup(gamma=1.1), ["GroupInGroup.gamma must be in [0, 1], not 1.1"]),
    "a negative ω": (lambda: pg.GroupInGroup(omega=-1.0), ["GroupInGroup.omega must be at least 0"]),
    "a divisor": (lambda: pg.GroupInGroup(ddof=2), ["GroupInGroup.ddof must be 0 or 1"]),
    "an eps": (lambda: pg.RewardZScores(eps=-1.0), ["RewardZScores.eps must be at least 0"]),
    "another divisor": (lambda: pg.RewardZScores(ddof=3), ["RewardZScores.ddof must be 0 or 1"]),
    "no γ": (lambda: pg.PolicyShaping(gamma=0.0), ["PolicyShaping.gamma must be above 0"]),
    "a negative μ": (lambda: pg.DemonstrationNLL(mu=-0.1), ["DemonstrationNLL.mu must be in [0, 1], not -0.1"]),
    "a μ to come": (
        lambda: pg.DemonstrationNLL(final_mu=1.5),
        ["DemonstrationNLL.final_mu must be in [0, 1], not 1.5"],
    ),
    "no rollouts": (
        lambda: pg.DemonstrationNLL(decay_rollouts=0),
        ["DemonstrationNLL.decay_rollouts must be at least 1, not 0"],
    ),
    "more than the whole": (
        lambda: replace(pg.CHORD, terms=(pg.DemonstrationNLL(0.7), pg.DemonstrationNLL(0.4, token_weighting=False))),
        ["DemonstrationNLL 0.7 and DemonstrationNLL 0.4", "more than 1"],
    ),
    "a demonstration taken for a sample": (
        lambda: pg.DR_GRPO.compute_advantages(shown([-1.0])),
        ["row 2 is a demonstration", "dr_grpo would treat as a sample", "gate=PolicyShaping()"],
    ),
    "no rewards": (lambda: pg.GDPO.compute_advantages(shown([-1.0])), ["row 2 is a demonstration"]),
    "rewards missing": (
        lambda: pg.GDPO.compute_advantages(replace(shown([-1.0]), demonstration=None)),
        ["RewardZScores needs Batch.rewards"],
    ),
    "rewards of tokens beside": (
        lambda: pg.GDPO.compute_advantages(
            replace(rewarded([[0.0], [1.0]], (1.0,)), token_reward=torch.zeros(2, 1).double())
        ),
        ["would ignore Batch.token_reward", "grpo_process"],
    ),
    "states missing": (
        lambda: pg.GIGPO.compute_advantages(replace(shown([-1.0]), demonstration=None)),
        ["GroupInGroup needs Batch.turn_state"],
    ),
    "demonstrations missing": (
        lambda: pg.CHORD.apply_filters(replace(shown([-1.0]), demonstration=None)),
        ["SeparateDemonstrations needs Batch.demonstration"],
    ),
}


@pytest.mark.parametrize(("build", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_reason_and_remedy(build: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(pg.ConfigError) as error:
        build()
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("name", ["gdpo", "gigpo", "luffy", "chord"])
def test_equal_rewards_and_lone_completions_teach_nothing(name: str) -> None:
    """Bit for bit: no rounding is taken for spread, whatever the rewards' size."""
    algorithm = pg.ALGORITHMS[name]
    batch, _ = make(Shape((4, 1), 4, seed=1, binary=True), 0.1, extra_of(algorithm))
    flat = torch.full((5,), 0.1).double()
    batch = replace(batch, reward=flat, in_statistics=None)
    if batch.rewards is not None:
        batch = replace(batch, rewards=torch.full((5, 3), 0.1).double())
    if batch.token_reward is not None:
        batch = replace(
            batch, token_reward=torch.zeros(batch.mask.shape).double(), turn_state=torch.zeros_like(batch.turn_state)
        )  # type: ignore[arg-type]
        batch = replace(batch, mask=torch.arange(4) < batch.lengths[:, None])
    rollout = algorithm.apply_filters(batch)
    assert not algorithm.compute_advantages(rollout)[rollout.policy_tokens].any()
