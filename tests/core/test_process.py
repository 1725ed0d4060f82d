"""Rewards at step ends and values of steps: the worked example, no spread, exact enumeration, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import policygrad as pg
from doubles import enumeration as exact
from doubles.random_batches import Random, Shape, close, gradients, make
from policygrad.core.validation import check_sampling

S = 3**0.5 / 2  # (1 − ½)/std of [1, 1, 0, 0] with ddof 1


def batch(ends: list[list[int]], scores: list[list[float]], rewards: list[float], lengths: list[int]) -> pg.Batch:
    """One group; a completion's steps end at `ends` with `scores`."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    step_end, token_reward = torch.zeros_like(mask), torch.zeros(mask.shape, dtype=torch.float64)
    for row, (at, score) in enumerate(zip(ends, scores, strict=True)):
        step_end[row, at] = True
        token_reward[row, at] = torch.tensor(score, dtype=torch.float64)
    return pg.Batch(
        mask=mask,
        group=torch.zeros(len(ends), dtype=torch.int64),
        reward=torch.tensor(rewards, dtype=torch.float64),
        step_end=step_end,
        token_reward=token_reward,
    )


def psi(link: pg.ProcessReward | pg.PrefixValue, of: pg.Batch) -> Tensor:
    return link(torch.full(of.mask.shape, torch.nan), of)


def test_the_worked_example() -> None:
    """Steps rewarded [1, 1] and [0, 0]: mean ½, std 1/√3; a token answers for its own step and those to come."""
    of = batch([[1, 3], [0, 2]], [[1, 0], [0, 0]], [1.0, 0.0], [4, 3])  # the second 1 is the outcome's
    expected = torch.tensor([[2 * S, 2 * S, S, S], [-2 * S, -S, -S, 0.0]], dtype=torch.float64)
    close(psi(pg.ProcessReward(eps=0.0), of), expected)
    close(psi(pg.ProcessReward(eps=0.0, ddof=0), of), expected / S)


def test_process_rewards_alone() -> None:
    """Steps rewarded [1, 0] and [0, 1] whatever the outcomes are: mean ½, std 1/√3; without spread nothing at all."""
    of = batch([[1, 3], [0, 2]], [[1, 0], [0, 1]], [1.0, 0.0], [4, 3])
    alone = pg.ProcessReward(eps=0.0, outcome=False)
    close(psi(alone, of), torch.tensor([[0, 0, -S, -S], [0, S, S, 0]], dtype=torch.float64))
    for outcomes in ([0.0, 0.0], [-7.0, 100.0]):
        assert torch.equal(psi(alone, replace(of, reward=torch.tensor(outcomes, dtype=torch.float64))), psi(alone, of))
    assert not torch.equal(psi(pg.ProcessReward(eps=0.0), of), psi(alone, of))
    alike = batch([[1, 3], [0, 2]], [[1, 1], [1, 1]], [1.0, 0.0], [4, 3])
    assert psi(alone, alike).abs().sum() == 0
    assert "without the outcome" in alone.formula


def test_outcome_parts_are_refused_without_outcome() -> None:
    pure = replace(pg.GRPO_PROCESS, advantage=(pg.ProcessReward(outcome=False),))
    for changes, says in (
        ({"filters": (pg.DropZeroVariance(),)}, "DropZeroVariance filters by the outcome's reward"),
        ({"filters": (pg.Downsample(2, "max_variance"),)}, "Downsample filters by the outcome's reward"),
        ({"shaping": (pg.SoftOverlong(),)}, "SoftOverlong shapes the outcome's reward"),
    ):
        with pytest.raises(pg.ConfigError, match=says):
            replace(pure, **changes)  # type: ignore[arg-type]
        replace(pg.GRPO_PROCESS, **changes)  # type: ignore[arg-type]
    replace(pure, filters=(pg.MaskTruncated(), pg.Downsample(2)))


def test_one_step_each_is_the_groups_z_score() -> None:
    of = batch([[1], [2], [0], [1]], [[0.0]] * 4, [0.0, 0.0, 1.0, 0.0], [2, 3, 1, 2])
    close(psi(pg.ProcessReward(), of), pg.GRPO.compute_advantages(of))


def test_tokens_after_the_last_step_get_zero() -> None:
    of = batch([[0], [0]], [[0.0], [0.0]], [1.0, 0.0], [2, 2])
    result = psi(pg.ProcessReward(eps=0.0), of)
    assert result[:, 1].tolist() == [0.0, 0.0]
    assert result[0, 0] == -result[1, 0] != 0


@pytest.mark.parametrize("value", [0.0, 0.1, 0.7])
def test_equal_step_rewards_give_exactly_zero(value: float) -> None:
    """0.7 has no exact mean in floating point: max = min decides, not the deviation."""
    of = batch([[0, 1, 2], [0, 2], [1]], [[value, value, 0], [value, 0], [0]], [value] * 3, [3, 3, 2])
    of = replace(of, reward=of.reward.float(), token_reward=of.token_reward.float())
    assert torch.equal(psi(pg.ProcessReward(), of), torch.zeros(of.mask.shape))


def test_single_completion_gets_zero() -> None:
    of = batch([[0, 1]], [[1.0, 0.0]], [0.0], [2])
    assert torch.equal(psi(pg.ProcessReward(), of), torch.zeros(1, 2, dtype=torch.float64))
    failed = replace(
        batch([[0, 1], [0, 1]], [[1, 0], [0, 1]], [0, 1], [2, 2]), mask=torch.tensor([[True] * 2, [False] * 2])
    )
    assert psi(pg.ProcessReward(), failed).abs().sum() == 0


def test_groups_are_independent_of_each_other_and_of_row_order() -> None:
    of, _ = make(Shape((3, 2, 4), 5, seed=5, binary=False), None, "steps")
    uninterrupted = psi(pg.ProcessReward(), of)
    assert uninterrupted.abs().max() > 0.1
    for group in of.group.unique():
        rows = (of.group == group).nonzero().squeeze(1)
        close(psi(pg.ProcessReward(), of.select(rows.flip(0))), uninterrupted[rows.flip(0)])


def test_a_process_reward_refuses_what_it_cannot_read() -> None:
    of = batch([[1, 3], [0, 2]], [[1, 0], [0, 0]], [1.0, 0.0], [4, 3])
    for name in ("step_end", "token_reward"):
        with pytest.raises(ValueError, match=f"ProcessReward needs Batch.{name}"):
            psi(pg.ProcessReward(), replace(of, **{name: None}))
    without = replace(of, step_end=of.step_end & torch.tensor([[True], [False]]))
    with pytest.raises(ValueError, match=r"completion 1 has no True in Batch\.step_end"):
        psi(pg.ProcessReward(), without)
    between = replace(of, token_reward=torch.where(torch.arange(4) == 1, 0.5, 0.0).double().expand(2, 4))
    with pytest.raises(ValueError, match=r"completion 1 .*Batch\.token_reward"):
        psi(pg.ProcessReward(), between)
    for bad in ({"eps": -1.0}, {"eps": float("nan")}, {"ddof": 2}):
        with pytest.raises(ValueError, match="ProcessReward"):
            pg.ProcessReward(**bad)


def test_step_advantage_is_the_change_in_value() -> None:
    """V = .2, .6 and .5: the first step adds .4, the second loses .1 and the outcome 1 − .5 is the last one's."""
    of = batch([[1, 2, 4]], [[0.0, 0.0, 0.0]], [1.0], [5])
    values = torch.tensor([[0.2, 0.2, 0.6, 0.5, 0.5]], dtype=torch.float64)
    of = replace(of, values=values, token_reward=None)
    expected = torch.tensor([[0.4, 0.4, -0.1, 0.5, 0.5]], dtype=torch.float64)
    close(psi(pg.PrefixValue(1), of), expected)
    penalty = torch.tensor([[-0.1, 0.0, 0.0, -0.2, 0.1]], dtype=torch.float64)
    by_step = torch.tensor([[-0.1, -0.1, 0.0, -0.1, -0.1]], dtype=torch.float64)
    close(psi(pg.PrefixValue(1), replace(of, token_reward=penalty)), expected + by_step)


def test_one_step_is_the_reward_minus_the_prompts_value() -> None:
    of = batch([[2], [1]], [[0.0], [0.0]], [1.0, 0.0], [3, 2])
    of = replace(of, values=torch.full((2, 3), 0.25, dtype=torch.float64), token_reward=None)
    assert psi(pg.PrefixValue(), of).tolist() == [[0.75] * 3, [-0.25, -0.25, 0.0]]


def test_prefix_values_refuse_what_they_cannot_read() -> None:
    of = batch([[1]], [[0.0]], [1.0], [2])
    with pytest.raises(ValueError, match=r"PrefixValue needs Batch\.values"):
        psi(pg.PrefixValue(), of)
    with pytest.raises(ValueError, match=r"PrefixValue needs Batch\.step_end"):
        psi(pg.PrefixValue(), replace(of, values=of.token_reward, step_end=None))
    with pytest.raises(ValueError, match="at least 1 completion"):
        pg.PrefixValue(0)


def test_algorithms_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="KLInReward puts one at every token"):
        replace(pg.GRPO_PROCESS, shaping=(pg.KLInReward(),))
    with pytest.raises(ValueError, match="keep_in_statistics=False"):
        replace(pg.GRPO_PROCESS, filters=(pg.MaskTruncated(keep_in_statistics=True),))
    with pytest.raises(ValueError, match="would not use the critic: set critic=None"):
        replace(pg.VINEPPO, critic=pg.Critic())
    with pytest.raises(ValueError, match="starts from the rewards"):
        replace(pg.GRPO_PROCESS, advantage=(pg.GroupMean(), pg.ProcessReward()))
    with pytest.raises(ValueError, match="2 or more"):
        check_sampling(pg.GRPO_PROCESS, 1, 1.0)
    assert pg.VINEPPO.critic is None
    assert pg.VINEPPO.all_needs == {"step_end", "logp_old", "logp_ref"}


# --- exact values, by enumeration of every completion ----------------------


def exact_values() -> Tensor:
    """V(s_t) [15, T] = E[R | the first t tokens], from the completions' probabilities."""
    probability = exact.logp_of(exact.THETA).exp()
    values = torch.zeros(exact.MASK.shape, dtype=torch.float64)
    for i, o in enumerate(exact.COMPLETIONS):
        for t in range(len(o)):
            same = torch.tensor([p[:t] == o[:t] for p in exact.COMPLETIONS])
            values[i, t] = (probability * exact.REWARD)[same].sum() / probability[same].sum()
    return values


def step_ends(kind: str) -> Tensor:
    """[15, T] bool, decided by the tokens so far: at every token, at none but the last, after token 2, or by the prefix."""
    last = exact.MASK & (exact.MASK.flip(1).cumsum(1).flip(1) == 1)
    if kind == "every token":
        return exact.MASK
    if kind == "the answer":
        return last
    if kind == "a token":
        return exact.MASK & (exact.TOKENS == 2) | last
    prefix = (exact.TOKENS * torch.tensor([1, 3, 9])).cumsum(1)
    return exact.MASK & (prefix % 4 == 1) | last


def vine_batch(kind: str, noise: float = 0.0) -> pg.Batch:
    """Every completion once, weighted by its probability; values exact, or off by noise that depends on the prefix alone."""
    end, values = step_ends(kind), exact_values()
    start = torch.zeros_like(values)
    for i, o in enumerate(exact.COMPLETIONS):
        first = 0
        for t in range(len(o)):
            off = noise * Random(hash(o[:first]) % 1000).normal(1)[0]
            start[i, t] = values[i, first] + off
            first = t + 1 if bool(end[i, t]) else first
    weight = exact.logp_of(exact.THETA).exp()[:, None] * len(end)
    return pg.Batch(
        mask=exact.MASK,
        group=torch.arange(len(end)),
        reward=exact.REWARD,
        values=start,
        step_end=end,
        weight=weight.expand(end.shape),
    )


VINE = replace(pg.REINFORCE, advantage=(pg.PrefixValue(),))


@pytest.mark.parametrize("kind", ["every token", "the answer", "a token", "the prefix"])
def test_exact_values_give_the_exact_gradient(kind: str) -> None:
    """Whatever decides where a step ends from what was written so far: E[Σ Ψ ∇log π] = ∇E[R]."""
    of, theta = vine_batch(kind), exact.THETA.clone().requires_grad_()
    assert int(of.step_end.sum()) != int(of.mask.sum()) or kind == "every token"
    result = gradients(-pg.surrogate(exact.token_logp(theta), of, VINE.compute_advantages(of), VINE), theta)[0]
    close(result, exact.true_gradient())


def test_prompt_value_is_an_unbiased_baseline() -> None:
    """With one step, an error in V changes nothing in expectation; in between, an error of V biases the step before."""
    for kind, unbiased in (("the answer", True), ("every token", False)):
        of, theta = vine_batch(kind, noise=0.5), exact.THETA.clone().requires_grad_()
        result = gradients(-pg.surrogate(exact.token_logp(theta), of, VINE.compute_advantages(of), VINE), theta)[0]
        assert bool((result - exact.true_gradient()).abs().max() < 1e-12) is unbiased
