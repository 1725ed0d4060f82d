"""Advantages from values against their defining sums, by hand and on random batches with tool tokens in between."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import policygrad as pg
from doubles.random_batches import Random, Shape, close, make, policy, shapes
from policygrad.core.auxiliary import explained_variance
from policygrad.papers.completions import Completion, Prompts, read_batch
from policygrad.papers.critics import gae, n_step, rewards

ANY = pg.Batch(mask=torch.ones(1, 1, dtype=torch.bool), group=torch.zeros(1, dtype=torch.int64), reward=torch.ones(1))


def row(reward: float, values: list[float], **fields: Tensor) -> pg.Batch:
    """One completion."""
    mask = fields.pop("mask", torch.ones(1, len(values), dtype=torch.bool))
    return pg.Batch(
        mask=mask,
        group=torch.zeros(1, dtype=torch.int64),
        reward=torch.tensor([reward], dtype=torch.float64),
        values=torch.tensor([values], dtype=torch.float64),
        **fields,
    )


def advantage(link: pg.GAE | pg.NStep | pg.LengthAdaptiveGAE, batch: pg.Batch) -> Tensor:
    return link(torch.zeros_like(batch.mask, dtype=torch.float64), batch)


def test_hand_numbers() -> None:
    """V = 100 and Q = 105 give A = 5; three tokens, R = 1, V = [.2, .5, .6]: δ = [.3, .1, .4]."""
    assert advantage(pg.NStep(0), row(105.0, [100.0])).item() == 5.0
    batch = row(1.0, [0.2, 0.5, 0.6])
    expect = {
        pg.NStep(1): [0.3, 0.1, 0.4],
        pg.NStep(2): [0.4, 0.5, 0.4],
        pg.NStep(0): [0.8, 0.5, 0.4],
        pg.GAE(1.0, 0.5): [0.3 + 0.5 * 0.1 + 0.25 * 0.4, 0.1 + 0.5 * 0.4, 0.4],
        pg.GAE(0.5, 1.0): [0.05 + 0.5 * -0.2 + 0.25 * 0.4, -0.2 + 0.5 * 0.4, 0.4],
    }
    for link, numbers in expect.items():
        assert advantage(link, batch)[0].tolist() == pytest.approx(numbers), link


DISCOUNTED = [
    pg.GAE(0.99, 0.95),
    pg.GAE(0.99, 0.95, bootstrap=True),
    pg.NStep(3, 0.99),
    pg.LengthAdaptiveGAE(0.5, 0.99),
    pg.MultiTurnGAE(0.99, 0.95),
    pg.BiLevelGAE(0.99, 0.95),
]


@pytest.mark.parametrize("link", DISCOUNTED, ids=lambda link: type(link).__name__)
def test_one_discount_for_advantage_and_critic(link: pg.Advantage) -> None:
    """Otherwise an exact critic's values are no values of the advantage's rewards; a part of another kind is not asked."""
    with pytest.raises(
        pg.ConfigError, match=r"0\.99 per token and the critic's targets by 1.*--algorithm\.critic\.gamma 0\.99"
    ):
        replace(pg.PPO, advantage=(link, pg.Whiten()))
    replace(pg.PPO, advantage=(link, pg.Whiten()), critic=pg.Critic(gamma=0.99))
    with pytest.raises(pg.ConfigError, match=r"TurnGAE discounts by 1 per token"):
        replace(pg.PPO, advantage=(pg.TurnGAE(0.9), pg.Whiten()), critic=pg.Critic(gamma=0.99, turn_gamma=0.9))


def test_an_exact_critic_leaves_nothing_to_learn_from_equal_successes() -> None:
    """40 tokens, R = 1, V_t = γ^(39 − t), the limit of the critic's own targets: Ψ is 0, whitened or not."""
    ppo = replace(pg.PPO, shaping=(), advantage=(pg.GAE(0.99, 0.95), pg.Whiten()), critic=pg.Critic(gamma=0.99))
    values = [0.99 ** (39 - t) for t in range(40)]
    batch = row(1.0, values)
    assert ppo.compute_advantages(batch).abs().max() < 1e-6
    assert ppo.critic is not None
    assert ppo.critic.targets(batch)[0].tolist() == pytest.approx(values, rel=1e-12)
    assert "λ = 0.95, γ = 0.99" in ppo.equation()["V"]


def test_the_next_value_is_the_next_sampled_tokens() -> None:
    """A tool token between two actions is no step: its value, NaN included, is never read."""
    mask = torch.tensor([[True, False, True]])
    assert advantage(pg.NStep(1), row(1.0, [0.2, math.nan, 0.6], mask=mask))[0].tolist() == pytest.approx(
        [0.4, 0.0, 0.4]
    )


def test_bootstrap_value_ends_a_truncated_episode() -> None:
    batch = row(0.0, [0.2, 0.5], bootstrap=torch.tensor([0.9], dtype=torch.float64))
    assert advantage(pg.NStep(1), batch)[0].tolist() == pytest.approx([0.3, 0.4])
    assert advantage(pg.NStep(0), batch)[0].tolist() == pytest.approx([0.7, 0.4])


def test_truncated_completion_bootstraps_from_the_critic() -> None:
    """V = [.2, .5] and .9 where it stopped: R = 0 gives δ = [.3, .4]; what has ended has .9 nowhere. Without it: [.3, −.5]."""
    batch = row(0.0, [0.2, 0.5])
    assert advantage(pg.GAE(1.0, 0.5), batch)[0].tolist() == pytest.approx([0.3 - 0.25, -0.5])
    known = replace(batch, bootstrap=torch.tensor([0.9], dtype=torch.float64))
    assert advantage(pg.GAE(1.0, 0.5, bootstrap=True), known)[0].tolist() == pytest.approx([0.3 + 0.2, 0.4])
    assert advantage(pg.NStep(2, 0.5, bootstrap=True), known)[0].tolist() == pytest.approx([0.9 / 4 - 0.2, 0.45 - 0.5])
    assert pg.Critic(lam=1.0).targets(known)[0].tolist() == pytest.approx([0.9, 0.9])  # and so are the critic's targets
    for link in (pg.GAE(bootstrap=True), pg.NStep(bootstrap=True), pg.LengthAdaptiveGAE(bootstrap=True)):
        assert link.needs == {"values", "bootstrap"}
        assert "truncated" in link.formula
        with pytest.raises(pg.ConfigError, match=rf"{type(link).__name__} needs Batch\.bootstrap"):
            advantage(link, batch)
    assert pg.GAE().needs == {"values"}


@pytest.mark.parametrize(("length", "lam"), [(1, 0.0), (19, 0.0), (20, 0.0), (40, 0.5), (200, 0.9)])
def test_length_adaptive_lambda_by_hand(length: int, lam: float) -> None:
    """λ = 1 − 1/(0.05·l), and 0 below l = 20."""
    batch = row(1.0, [0.1] * length)
    assert pg.LengthAdaptiveGAE(0.05).lam(batch).item() == pytest.approx(lam)
    assert torch.allclose(advantage(pg.LengthAdaptiveGAE(0.05), batch), advantage(pg.GAE(1.0, lam), batch))


def test_the_range_of_lambda_is_reported_over_the_completions_that_take_part() -> None:
    """α = 0.5: 2 tokens have λ = 0, 4 have 0.5, 8 have 0.75; an empty completion has no length to speak of."""
    mask = torch.arange(8) < torch.tensor([2, 4, 8, 0])[:, None]
    batch = pg.Batch(mask=mask, group=torch.zeros(4, dtype=torch.int64), reward=torch.zeros(4, dtype=torch.float64))
    algorithm = replace(pg.VAPO, advantage=(pg.LengthAdaptiveGAE(0.5),))
    reported = {name: metric.value for name, metric in algorithm.report(batch).items()}
    assert reported == {"lambda/min": 0.0, "lambda/max": 0.75, "lambda/mean": pytest.approx(1.25 / 3)}
    assert algorithm.report(replace(batch, mask=torch.zeros_like(mask))) == {}
    assert pg.PPO.report(batch) == {}


def known(shape: Shape) -> tuple[pg.Batch, Prompts]:
    batch, logits = make(shape, 0.3, "token_reward")
    batch = replace(batch, reward=torch.where(batch.mask.any(1), batch.reward, 0.0))
    return batch, read_batch(batch, policy(logits, batch.tokens, batch.mask))


def double_sum(o: Completion, r: list[float], gamma: float, lam: float, end: float = 0.0) -> list[float]:
    """GAE as it is defined, Σ_l (γλ)^l δ_{t+l}; the package sums from the end."""
    n, after = len(o), [*o.value[1:], end]
    delta = [r[t] + gamma * after[t] - o.value[t] for t in range(n)]
    result = [sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, n)) for t in range(n)]
    assert result == pytest.approx(gae(o, r, gamma, lam, end), rel=1e-12, abs=1e-12)
    return result


def flat(batch: pg.Batch, psi: Tensor) -> Tensor:
    """Completions in the transcription's order: prompt by prompt as they first appear."""
    seen = torch.nonzero(batch.mask.any(1)).flatten().tolist()
    groups = dict.fromkeys(int(batch.group[i]) for i in seen)
    rows = [i for g in groups for i in seen if int(batch.group[i]) == g]
    parts = [psi[i][batch.mask[i]] for i in rows]
    return torch.cat(parts) if parts else psi.new_zeros(0)


@settings(max_examples=40)
@given(shapes(max_width=7), st.floats(0, 1), st.floats(0, 1), st.integers(1, 9))
def test_defining_sums(shape: Shape, gamma: float, lam: float, n: int) -> None:
    batch, prompts = known(shape)
    everyone = [o for outputs in prompts for o in outputs]
    order = {id(o): i for i, o in enumerate(everyone)}
    assert len(order) == int(batch.mask.any(1).sum())
    for link, definition in (
        (pg.GAE(gamma, lam), lambda o: double_sum(o, rewards(o), gamma, lam)),
        (pg.NStep(n, gamma), lambda o: n_step(o, rewards(o), gamma, n)),
    ):
        expected = torch.tensor([x for o in everyone for x in definition(o)], dtype=torch.float64)
        assert torch.allclose(flat(batch, advantage(link, batch)), expected, atol=1e-10)


@settings(max_examples=40)
@given(shapes(max_width=7), st.floats(0, 1), st.floats(0, 1), st.integers(0, 9))
def test_defining_sums_with_bootstrap_values(shape: Shape, gamma: float, lam: float, n: int) -> None:
    """PPO's and A2C's advantages and the critic's targets, literally, with V(end) of the truncated ones."""
    batch, prompts = known(shape)
    end = torch.where(batch.truncated, Random(shape.seed + 1).normal(len(batch.mask)), 0.0)
    batch = replace(batch, bootstrap=end)
    everyone = [o for outputs in prompts for o in outputs]
    seen = torch.nonzero(batch.mask.any(1)).flatten().tolist()
    rows = [i for g in dict.fromkeys(int(batch.group[i]) for i in seen) for i in seen if int(batch.group[i]) == g]
    assert [o.truncated for o in everyone] == [bool(batch.truncated[i]) for i in rows]
    for link, definition in (
        (pg.GAE(gamma, lam, bootstrap=True), lambda o, v: double_sum(o, rewards(o), gamma, lam, v)),
        (
            pg.NStep(n, gamma, bootstrap=True),
            lambda o, v: n_step(o, rewards(o), gamma, n or len(o), v),
        ),
        (
            pg.LengthAdaptiveGAE(0.4, gamma, bootstrap=True),
            lambda o, v: double_sum(o, rewards(o), gamma, max(0.0, 1 - 1 / (0.4 * len(o))), v),
        ),
    ):
        result = [definition(o, float(end[i])) for o, i in zip(everyone, rows, strict=True)]
        expected = torch.tensor([x for part in result for x in part], dtype=torch.float64)
        assert torch.allclose(flat(batch, advantage(link, batch)), expected, rtol=0, atol=1e-12)
        if isinstance(link, pg.GAE) and result:
            expected = expected + torch.tensor([v for o in everyone for v in o.value], dtype=torch.float64)
            assert torch.allclose(
                flat(batch, pg.Critic(gamma=gamma, lam=lam).targets(batch)), expected, rtol=0, atol=1e-12
            )


@settings(max_examples=20)
@given(shapes(max_width=6), st.floats(0.05, 0.95))
def test_gae_is_the_geometric_mixture_of_n_step_advantages(shape: Shape, lam: float) -> None:
    """GAE(γ, λ) = (1 − λ) Σ_{n≥1} λ^{n−1} A^{(n)}; past the end every A^{(n)} is the Monte-Carlo one."""
    batch, _ = known(shape)
    width, gamma = batch.mask.shape[1], 0.9
    mixture = sum((1 - lam) * lam ** (n - 1) * advantage(pg.NStep(n, gamma), batch) for n in range(1, width + 1))
    mixture = mixture + lam**width * advantage(pg.NStep(0, gamma), batch)
    close(advantage(pg.GAE(gamma, lam), batch), mixture)
    close(advantage(pg.GAE(gamma, 1.0), batch), advantage(pg.NStep(0, gamma), batch))
    close(advantage(pg.GAE(gamma, 0.0), batch), advantage(pg.NStep(1, gamma), batch))


def test_targets_and_value_loss_by_hand() -> None:
    """Targets are GAE + V_old; beyond V_old ± 0.2 the clipped error counts where it is worse."""
    batch = row(1.0, [0.2, 0.5, 0.6])
    critic = pg.Critic(lam=1.0)
    targets = critic.targets(batch)
    assert targets[0].tolist() == pytest.approx([1.0, 1.0, 1.0])
    values = torch.tensor([[0.9, 0.6, -0.3]], dtype=torch.float64)
    # 0.9 is clipped to 0.4: (0.4 − 1)² > (0.9 − 1)²; 0.6 is inside; −0.3 is clipped to 0.4, its own error is larger.
    assert critic.loss(values, batch, targets)[0].tolist() == pytest.approx([0.5 * 0.36, 0.5 * 0.16, 0.5 * 1.69])
    assert pg.Critic(lam=1.0, clip=0).loss(values, batch, targets)[0, 0].item() == pytest.approx(0.5 * 0.01)
    assert explained_variance(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.0]]), torch.ones(1, 2).bool()) == 1.0
    assert explained_variance(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 3.0]]), torch.ones(1, 2).bool()) == 0.0
    for constant in (
        0.1,
        0.3,
        0.7,
        0.9,
    ):  # whose float32 mean of 13 is rounded: what is equal has no variance to explain
        everywhere, targets = torch.ones(1, 13).bool(), torch.full((1, 13), constant)
        assert explained_variance(torch.rand(1, 13), targets, everywhere) == 0.0


def test_whitening_has_mean_zero_and_deviation_one() -> None:
    batch, _ = make(Shape((4, 4), 6, seed=1, binary=False))
    psi = pg.Whiten()(torch.where(batch.mask, Random(2).normal(*batch.mask.shape), math.nan), batch)
    assert psi[batch.mask].mean().item() == pytest.approx(0.0, abs=1e-12)
    assert psi[batch.mask].std().item() == pytest.approx(1.0, abs=1e-7)


def test_whitening_adds_eps_to_the_variance_as_verl_does() -> None:
    """Ψ = ±1e-4 has a variance of 2e-8: (1e-4)/√(2e-8 + 1e-8), where (std + 1e-8) would give 1/√2."""
    batch = row(0.0, [0.0, 0.0])
    psi = pg.Whiten()(torch.tensor([[1e-4, -1e-4]], dtype=torch.float64), batch)
    assert psi[0].tolist() == pytest.approx([1 / math.sqrt(3), -1 / math.sqrt(3)])


def test_ppo_penalty_adapts_beta_by_ppos_rule() -> None:
    from policygrad.core.metrics import Mean

    term = pg.KLToOld(1.0, target=0.01)
    betas = [
        term.update_state({"beta": 1.0}, ANY, {"kl_old/last": Mean(kl)})["beta"]
        for kl in (0.0151, 0.0149, 0.0067, 0.0066)
    ]
    assert betas == [2.0, 1.0, 1.0, 0.5]
    assert pg.KLToOld(1.0).init_state() is None


def test_masked_correction_drops_what_lies_outside_its_band() -> None:
    batch = row(1.0, [0.0] * 3, logp_old=torch.tensor([[0.0, 1.0, -3.0]]), logp_sampler=torch.zeros(1, 3))
    out = pg.Forward(torch.zeros(1, 3))
    assert pg.MaskedIS(0.5, 5.0)(out, batch, batch.mask)[0].tolist() == pytest.approx([1.0, math.e, 0.0])
    assert pg.MaskedIS(0.1, 5.0, "sequence")(out, batch, batch.mask)[0].tolist() == pytest.approx([math.exp(-2)] * 3)
    assert pg.TruncatedIS(2.0)(out, batch, batch.mask)[0].tolist() == pytest.approx([1.0, 2.0, math.exp(-3)])


@pytest.mark.parametrize(
    ("make_it", "says"),
    [
        (lambda: replace(pg.GRPO, advantage=(pg.GAE(),)), "needs values, and critic is None"),
        (lambda: replace(pg.GRPO, critic=pg.Critic()), "no advantage uses the critic"),
        (lambda: replace(pg.PPO, advantage=(pg.GroupMean(), pg.GAE())), "put it first in advantage"),
        (
            lambda: replace(pg.PPO, advantage=(pg.GAE(bootstrap=True),), filters=(pg.MaskTruncated(),)),
            "MaskTruncated masks them",
        ),
        (lambda: pg.GAE(lam=1.5), "GAE.lam"),
        (lambda: pg.NStep(-1), "NStep.n"),
        (lambda: pg.LengthAdaptiveGAE(0.0), "alpha"),
        (lambda: pg.Critic(lam=2), "lam"),
        (lambda: pg.Critic(lr=-1), "Critic.lr"),
        (lambda: pg.KLToOld(-1), "KLToOld.beta"),
        (lambda: pg.KLToOld(target=0), "KLToOld.target"),
        (lambda: pg.TruncatedIS(0.5), "cap"),
        (lambda: pg.MaskedIS(1.5), "low"),
        (lambda: pg.MaskedIS(level="word"), "level"),  # type: ignore[arg-type]
        (lambda: advantage(pg.GAE(), ANY), r"GAE needs Batch\.values"),
    ],
)
def test_refuses(make_it: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_it()  # type: ignore[operator]
