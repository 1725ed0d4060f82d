"""Other objectives than the mean reward: by hand, by all subsets, and as exact expectations over every group."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import policygrad as pg
from doubles.random_batches import Shape, close, make, shapes
from policygrad.core.validation import check_sampling

QUICK = settings(max_examples=40, derandomize=True)


def psi_of(chain: tuple[pg.Advantage, ...], rewards: list[float], **fields: Tensor) -> list[float]:
    """Ψ of one group whose completions have one token each."""
    n = len(rewards)
    batch = pg.Batch(
        mask=torch.ones(n, 1, dtype=torch.bool),
        group=torch.zeros(n, dtype=torch.int64),
        reward=torch.tensor(rewards, dtype=torch.float64),
        **fields,  # type: ignore[arg-type]
    )
    return pg.Algorithm(advantage=chain).compute_advantages(batch).flatten().tolist()


def approx(values: list[float]) -> list[float]:
    return pytest.approx(values, rel=1e-12, abs=1e-12)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("rewards", "k", "right", "wrong"),
    [
        # R̄ = 1 − C(3,2)/C(4,2) = 1/2, σ = 1/2; wrong: 1 − 1/2 − C(2,1)/C(3,1) = −1/6
        ([1, 0, 0, 0], 2, 1.0, -1 / 3),
        # R̄ = 1 − C(2,2)/C(4,2) = 5/6, σ = √5/6; wrong: 1/6 − C(1,1)/C(3,1) = −1/6
        ([1, 0, 1, 0], 2, 1 / math.sqrt(5), -1 / math.sqrt(5)),
        # no 2-subset without a right one
        ([1, 1, 1, 0], 2, 0.0, 0.0),
        # pass@1: the z-score with ddof 0
        ([1, 0, 0, 0], 1, math.sqrt(3), -1 / math.sqrt(3)),
    ],
)
def test_pass_at_k_by_hand(rewards: list[float], k: int, right: float, wrong: float) -> None:
    expected = [right if r else wrong for r in rewards]
    assert psi_of((pg.PassAtK(k, eps=0.0),), rewards) == approx(expected)


SHAPED = {
    "KL at each token": (pg.KLInReward(0.05),),
    "KL of the completion": (pg.KLInReward(0.05, level="sequence"),),
    "overlong": (pg.SoftOverlong(length=1),),
    "both": (pg.KLInReward(0.05), pg.SoftOverlong(length=1)),
}


@pytest.mark.parametrize("shaping", SHAPED.values(), ids=SHAPED.keys())
def test_thresholds_read_the_outcome(shaping: tuple[pg.Shaping, ...]) -> None:
    """Successes stay successes when shaping lowers their rewards: rewards 1, 1, 0, 1."""
    batch = pg.Batch(
        mask=torch.ones(4, 2, dtype=torch.bool),
        group=torch.zeros(4, dtype=torch.int64),
        reward=torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64),
        logp_old=torch.full((4, 2), -1.0, dtype=torch.float64),
        logp_ref=torch.full((4, 2), -2.0, dtype=torch.float64),
        example_id=torch.zeros(4, dtype=torch.int64),
        level=torch.zeros(4, dtype=torch.int64),
        levels=torch.full((4,), 3),
    )

    def psi(*chain: pg.Advantage) -> list[float]:
        return pg.Algorithm(advantage=chain, shaping=shaping).compute_advantages(batch)[:, 0].tolist()

    assert psi(pg.RejectionSampling()) == [1, 1, 0, 1]
    assert psi(pg.ClassLabels()) == [1, 1, -2, 1]  # G/(1 + 3) and −G/(1 + 1)
    shaped = pg.Algorithm(shaping=shaping).shape_rewards(batch)
    assert (shaped.reward + (0 if shaped.token_reward is None else shaped.token_reward.sum(1))).max() < 1
    assert shaped.outcomes.tolist() == [1, 1, 0, 1]
    for shaped_or_not in (batch, shaped):
        assert pg.PositiveNLL().token_mask(shaped_or_not)[:, 0].tolist() == [True, True, False, True]
    # the curricula's state follows a rollout, and is updated with the shaped batch
    part: pg.Filter
    for part in (pg.NoPositiveResampling(0.75), pg.PassRateBand(0.74, 1.0), pg.MovingLevel(up=0.75, rollouts=1)):
        state = part.init_state()
        assert state is not None
        assert part.update_state(state, shaped, {}) == part.update_state(state, batch, {})
        assert part.update_state(state, shaped, {}) != part.update_state(
            state, replace(batch, reward=0 * batch.reward), {}
        )


def test_thresholds_read_the_rewards_of_turns() -> None:
    """An episode with rewards ½ and ½ in its turns is a success, whether they are in its reward or at its tokens."""
    at_tokens = pg.Batch(
        mask=torch.ones(2, 2, dtype=torch.bool),
        group=torch.zeros(2, dtype=torch.int64),
        reward=torch.zeros(2, dtype=torch.float64),
        token_reward=torch.tensor([[0.5, 0.5], [0.5, 0.0]], dtype=torch.float64),
    )
    assert pg.RejectionSampling()(torch.zeros(2, 2, dtype=torch.float64), at_tokens)[:, 0].tolist() == [1, 0]
    assert pg.PositiveNLL().token_mask(at_tokens)[:, 0].tolist() == [True, False]
    four = pg.Batch(
        mask=torch.ones(4, 2, dtype=torch.bool),
        group=torch.zeros(4, dtype=torch.int64),
        reward=torch.zeros(4, dtype=torch.float64),
        token_reward=torch.tensor([[0.0, 1.0], [0.5, 0.0], [0.25, 0.25], [0.0, 0.0]], dtype=torch.float64),
    )
    chosen = pg.Downsample(2, by="max_variance", statistics="kept")(four).mask.any(1)
    assert chosen.tolist() == [True, False, False, True]


@QUICK
@given(
    rewards=st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 1.5]), min_size=3, max_size=7),
    k=st.integers(1, 4),
    normalise=st.booleans(),
)
def test_pass_at_k_is_the_mean_over_all_subsets(rewards: list[float], k: int, normalise: bool) -> None:
    n, result = len(rewards), psi_of((pg.PassAtK(k, normalise=normalise),), rewards)
    subsets = list(itertools.combinations(range(n), k))
    best = [max(rewards[i] for i in s) for s in subsets]
    if len(set(best)) < 2:
        assert result == [0.0] * n
        return
    mean = math.fsum(best) / len(best)
    scale = math.sqrt(math.fsum((b - mean) ** 2 for b in best) / len(best)) + 1e-6 if normalise else 1
    for i in range(n):
        own = [b for b, s in zip(best, subsets, strict=True) if i in s]
        assert result[i] == pytest.approx((math.fsum(own) / len(own) - mean) / scale, rel=1e-11, abs=1e-11)


def expected_score(chain: tuple[pg.Advantage, ...], p: float, size: int) -> float:
    """E[mean_i Ψ_i ∂log π(o_i)/∂p] over all groups of `size` answers that are right with probability p, exactly."""
    total = 0.0
    for rewards in itertools.product([0.0, 1.0], repeat=size):
        chance = math.prod(p if r else 1 - p for r in rewards)
        psi = psi_of(chain, list(rewards))
        total += chance * sum(a * (1 / p if r else -1 / (1 - p)) for a, r in zip(psi, rewards, strict=True)) / size
    return total


@pytest.mark.parametrize("p", [0.1, 0.5, 0.85])
def test_maximum_likelihood_to_the_order_of_the_group(p: float) -> None:
    """E of MaxRL's estimate is the derivative of −Σ_{k < G} (1 − p)^k/k, which goes to that of log p; not of k ≤ G, since the
    mean score is not subtracted where nothing is right."""
    for size in (2, 3, 5):
        truncated = sum((1 - p) ** (k - 1) for k in range(1, size))
        assert expected_score((pg.GroupMean(), pg.DivideByGroupMean()), p, size) == pytest.approx(truncated, rel=1e-12)
    assert abs(sum((1 - p) ** k for k in range(400)) - 1 / p) < 1e-9


@pytest.mark.parametrize("p", [0.1, 0.5, 0.85])
def test_pass_at_k_without_its_scale_follows_the_gradient_of_pass_at_k(p: float) -> None:
    """E = (1 − k/G)·∇pass@k/k: what a completion's own part of the baseline takes away, (G − 1)/G at k = 1 as with any mean."""
    for size, k in ((4, 1), (4, 2), (5, 3)):
        result = expected_score((pg.PassAtK(k, normalise=False),), p, size)
        slope = k * (1 - p) ** (k - 1)
        assert result == pytest.approx(slope / k * (1 - k / size), rel=1e-12)


def test_rejection_sampling() -> None:
    assert psi_of((pg.RejectionSampling(),), [1, 0, 1, 0.5]) == [1, 0, 1, 0]
    assert psi_of((pg.RejectionSampling(threshold=0.5),), [1, 0, 1, 0.5]) == [1, 0, 1, 1]
    assert psi_of((pg.RejectionSampling("best"),), [0.2, 0.7, 0.7, -1]) == [0, 1, 1, 0]
    assert psi_of((pg.RejectionSampling("best"),), [0.0, 0.0]) == [1, 1]


def test_maximum_likelihood_by_hand() -> None:
    chain = (pg.GroupMean(), pg.DivideByGroupMean())
    assert psi_of(chain, [1, 0, 0, 0]) == approx([3, -1, -1, -1])
    assert psi_of(chain, [0, 0, 0, 0]) == [0, 0, 0, 0]
    assert psi_of(chain, [0.5, 0.25, 0, 0.25]) == approx([1, 0, -1, 0])


def test_likelihood_of_success_refuses_negative_rewards() -> None:
    """mean_g = 0.125 would make of a punishment of −0.5 and a success an advantage of 7; mean_g = −0.25 nothing at all."""
    refused = r"DivideByGroupMean maximises .* the reward of row 1 is -0\.5: use a reward of at least 0.*such as grpo"
    for rewards in ([1, -0.5, 0, 0], [0, -0.5, 0, 0]):
        with pytest.raises(pg.ConfigError, match=refused):
            psi_of((pg.GroupMean(), pg.DivideByGroupMean()), rewards)
    for part in (pg.SoftOverlong(), pg.KLInReward()):
        with pytest.raises(pg.ConfigError, match=f"{type(part).__name__} would make rewards negative: set shaping="):
            replace(pg.MAXRL, shaping=(part,), reference=pg.Reference())


def test_baselines_by_hand() -> None:
    assert psi_of((pg.ConstantBaseline(0.5),), [1, 0]) == [0.5, -0.5]
    assert psi_of((pg.GroupMean(), pg.ConstantBaseline(-0.1)), [1, 0]) == approx([0.6, -0.4])
    baseline = torch.tensor([1.0, 1.0, math.nan], dtype=torch.float64)
    assert psi_of((pg.GreedyBaseline(),), [1, 0, 1], baseline=baseline) == [0, -1, 0]


def test_greedy_baseline_is_needed() -> None:
    with pytest.raises(pg.ConfigError, match=r"GreedyBaseline needs Batch\.baseline"):
        psi_of((pg.GreedyBaseline(),), [1, 0])


@QUICK
@given(shape=shapes(max_groups=4, max_size=5, max_width=4))
def test_masked_or_uncounted_completions_have_no_effect(shape: Shape) -> None:
    """A row that does not count may hold any reward."""
    batch, _ = make(shape, extra="successes")
    nobody = ~batch.mask.any(1)
    for chain in (
        (pg.PassAtK(2),),
        (pg.GroupMean(), pg.DivideByGroupMean()),
        (pg.RejectionSampling("best"),),
        (pg.RejectionSampling(),),
    ):
        a = pg.Algorithm(advantage=chain)
        close(
            a.compute_advantages(replace(batch, reward=torch.where(nobody, -9.0, batch.reward))),
            a.compute_advantages(batch),
        )


def test_a_ratio_of_a_completion_is_tapered_on_one_side() -> None:
    batch, _ = make(Shape((2,), 3, seed=1, binary=True))
    psi = torch.tensor([[1.0, -1.0, -1.0, 0.0]])
    ratio = torch.tensor([[0.5, 0.5, 2.0, 0.5]])
    assert pg.TaperedImportance().weight(ratio, psi, batch).tolist() == [[1, 0.5, 1, 1]]
    below, above = pg.TaperedImportance().clipped(ratio, psi, batch)
    assert not below.any()
    assert above.tolist() == [[False, False, True, False]]
    assert pg.UnitWeight().weight(ratio, psi, batch).tolist() == [[1, 1, 1, 1]]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_taper_weighs_by_the_derivative_of_its_value(sign: float) -> None:
    batch, _ = make(Shape((2,), 3, seed=1, binary=True))
    log_ratio = torch.linspace(-3, 3, 25, dtype=torch.float64).requires_grad_()
    psi = torch.full_like(log_ratio, 0.7 * sign).detach()
    for gate in (pg.TaperedImportance(), pg.UnitWeight()):
        value = gate.value(log_ratio.exp(), psi, batch)
        (slope,) = torch.autograd.grad(value.sum(), log_ratio)
        torch.testing.assert_close(slope, gate.weight(log_ratio.exp(), psi, batch).detach() * psi)
    if sign < 0:
        far = pg.TaperedImportance().value(torch.tensor([math.exp(-40)]), torch.tensor([-1.0]), batch)
        assert -1e-12 < float(far) <= 0, "a failure that is gone has nothing left to give"


REFUSED = {
    "a k of none": (lambda: pg.PassAtK(0), ["PassAtK.k", "at least 1"]),
    "too few samples": (lambda: check_sampling(pg.PASSK, 2, 1.0), ["PassAtK(k=2)", "samples_per_prompt to 3"]),
    "another thing to keep": (lambda: pg.RejectionSampling("worst"), ["'right'", "'best'", "worst"]),  # type: ignore[arg-type]
    "the best of one": (
        lambda: check_sampling(replace(pg.RAFT, advantage=(pg.RejectionSampling("best"),)), 1, 1.0),
        ["RejectionSampling"],
    ),
    "no number": (lambda: pg.ConstantBaseline(math.nan), ["ConstantBaseline.value", "finite"]),
    "a chain after": (
        lambda: replace(pg.GRPO, advantage=(pg.GroupMean(), pg.PassAtK())),
        ["PassAtK starts from the rewards", "put it first in advantage"],
    ),
    "the sampler's policy and a gate that takes no ratio": (
        lambda: replace(pg.ASYMRE, gate=pg.OnPolicy(), ratio=None, update_rule=pg.GradientSteps()),
        ["old_policy='sampler'", "OnPolicy ignores"],
    ),
}


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(build, message: list[str]) -> None:
    with pytest.raises(pg.ConfigError) as error:
        build()
    assert [words for words in message if words not in str(error.value)] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.7, 1.0, 0.0, -0.3])
def test_equal_rewards_give_exactly_zero_to_what_compares_them(dtype: torch.dtype, reward: float) -> None:
    batch = pg.Batch(
        mask=torch.ones(8, 2, dtype=torch.bool),
        group=torch.zeros(8, dtype=torch.int64),
        reward=torch.full((8,), reward, dtype=dtype),
        example_id=torch.zeros(8, dtype=torch.int64),
    )
    for name in ("maxrl",) * (reward >= 0) + ("passk", "gpg", "reinforce_pp_baseline", "lite_ppo", "scale_rl"):
        algorithm = pg.get_algorithm(name)
        psi = algorithm.compute_advantages(algorithm.apply_filters(batch))
        assert psi.dtype == dtype
        assert (psi == 0).all(), name


def test_constant_groups_are_dropped_or_reweighted() -> None:
    """Of three prompts one is solved: ScaleRL's step is of the other two, GPG's of all three, times 3/2."""
    mask = torch.ones(6, 2, dtype=torch.bool)
    prompt, reward = torch.arange(6) // 2, torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    batch = pg.Batch(mask=mask, group=prompt, reward=reward, example_id=prompt)
    dropped, scaled = pg.SCALE_RL.apply_filters(batch), pg.GPG.apply_filters(batch)
    assert dropped.counted.tolist() == [False, False, True, True, True, True]
    assert pg.SCALE_RL.coefficients(dropped).sum(1).tolist() == pytest.approx([0, 0, 0.25, 0.25, 0.25, 0.25])
    assert pg.GPG.coefficients(scaled).sum(1).tolist() == pytest.approx([0, 0, 0.25, 0.25, 0.25, 0.25])
    assert pg.GPG.compute_advantages(scaled)[2:, 0].tolist() == [0.5, -0.5, -0.5, 0.5]
