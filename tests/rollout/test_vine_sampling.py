"""The vine: states where the policy goes, distinct tokens in each, the same random numbers after every one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import policygrad as pg
from doubles.rollouts import collect_rollout
from doubles.tabular_sampler import TabularSampler, TabularTokenizer
from policygrad.rewards.base import RewardScores
from policygrad.rollout.rollouter import Rollouter
from policygrad.rollout.trajectory import VINE
from policygrad.samplers.base import Request, SamplingParams
from policygrad.tasks.base import Example

LENGTH, VOCABULARY = 4, 5
SAMPLING = SamplingParams(max_tokens=LENGTH)


class Listening(TabularSampler):
    """Remembers what it was asked; `apart`: completions have random numbers of their own, whatever key they are asked for by."""

    def __init__(self, prompts: int = 2, apart: bool = False) -> None:
        super().__init__(prompts, LENGTH, VOCABULARY)
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(prompts, LENGTH, VOCABULARY, generator=generator, dtype=torch.float64)
        self.asked: list[Request] = []
        self.apart = apart

    async def generate(self, requests: Sequence[Request]) -> Any:
        self.asked += requests
        if self.apart:
            requests = [replace(r, key=(*r.key, i)) for i, r in enumerate(requests)]
        return await super().generate(requests)


def worth(text: str) -> float:
    return sum(int(word) * 0.1 * 2**i for i, word in enumerate(text.split()))


def score(prompts: Any, texts: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> RewardScores:
    return RewardScores([worth(text) for text in texts], {})


def collect(sampler: TabularSampler, vine: pg.Vine | None = None, scored: Any = score, **changed: Any) -> Any:
    options = {"prompts": 2, "samples": 3, "step": 1, "position": 0} | changed
    rollouter = Rollouter(lambda i: Example(str(i % 2)), TabularTokenizer(), sampler, scored)  # type: ignore[arg-type]
    algorithm = replace(pg.TRPO_VINE, advantage=(vine or pg.Vine(states=3, actions=3),))
    return collect_rollout(rollouter, algorithm, SAMPLING, **options)


def written(tokens: Tensor) -> tuple[int, ...]:
    return tuple(int(t) for t in tokens)


def test_a_group_is_a_state_and_a_row_a_token() -> None:
    sampler = Listening()
    result = collect(sampler)
    batch = result.batch
    assert batch.mask.shape[1] == 1
    assert batch.mask.all()
    assert len(result.groups) == len(batch.prompts) == int(batch.group.max()) + 1
    first = {
        written(r.prompt_ids) for r in sampler.asked[:6]
    }  # the prompts of the completions that the states are chosen from
    for g, group in enumerate(result.groups):
        rows = batch.group == g
        tokens, prompt = batch.tokens[rows, 0], batch.prompts[g]
        assert len(set(written(tokens))) == len(tokens) in (2, 3)
        assert written(prompt[:1]) in first
        logp = sampler.table[prompt[0], len(prompt) - 1].log_softmax(-1)[tokens]
        torch.testing.assert_close(batch.logp_sampler[rows, 0].double(), logp, rtol=0, atol=1e-6)
        share = batch.weight[rows, 0].double()
        torch.testing.assert_close(share / share.sum(), logp.exp() / logp.exp().sum(), rtol=0, atol=1e-6)
        for t, reward, text in zip(tokens.tolist(), batch.reward[rows].tolist(), range(len(tokens)), strict=True):
            output = group.trajectories[text].text
            assert reward == pytest.approx(worth(output))  # one completion each
            assert output.split()[: len(prompt)] == [str(int(x)) for x in (*prompt[1:], t) if x]
    assert result.prompts == tuple(g.spec.example.prompt for g in result.groups for _ in g.trajectories)
    assert len(result.completions) == len(result.lengths) == len(batch.mask)


def test_the_tokens_of_a_state_share_their_random_numbers_and_states_do_not() -> None:
    sampler = Listening()
    result = collect(sampler, pg.Vine(states=3, actions=3, samples=2))
    vine = [r for r in sampler.asked if r.key[1] == VINE]
    draws = [r for r in vine if r.max_tokens == 1 and len({written(q.prompt_ids) for q in vine if q.key == r.key}) == 1]
    assert len({r.key for r in draws}) == len(draws)
    after: dict[tuple[int, ...], list[Request]] = {}
    for r in vine:
        if r not in draws:
            after.setdefault(r.key, []).append(r)
    assert all(len({written(r.prompt_ids) for r in same}) == len(same) > 1 for same in after.values())
    assert all(len({written(r.prompt_ids[:-1]) for r in same}) == 1 for same in after.values())  # one state
    assert {key[-1] for key in after} == {0, 1}  # the two completions of each token draw apart
    assert all(1 <= r.max_tokens + len(r.prompt_ids) - 1 <= LENGTH for r in vine), (
        "within the budget of the whole answer"
    )
    assert all(int(r.prompt_ids[-1]) != 0 or len(r.prompt_ids) == 1 for r in vine), "an end token is not gone on from"
    spent = sum(len(g.tokens) for g in drawn_again(sampler, vine))
    assert result.metrics["tokens/vine"].value == spent
    plain = collect_plain(Listening())
    assert result.metrics["tokens/sampled"].value == plain.metrics["tokens/sampled"].value + spent
    assert result.metrics["reward"].value == plain.metrics["reward"].value  # of the completions, not of what was tried
    assert result.position == plain.position


def drawn_again(sampler: TabularSampler, requests: list[Request]) -> list[Any]:
    return [sampler._one(request) for request in requests]


def collect_plain(sampler: TabularSampler) -> Any:
    rollouter = Rollouter(lambda i: Example(str(i % 2)), TabularTokenizer(), sampler, score)  # type: ignore[arg-type]
    return collect_rollout(rollouter, pg.REINFORCE, SAMPLING, prompts=2, samples=3, step=1, position=0)


def test_the_same_every_time_and_another_at_another_step() -> None:
    one, two, other = collect(Listening()).batch, collect(Listening()).batch, collect(Listening(), step=2).batch
    for name in ("tokens", "reward", "weight", "logp_sampler", "group"):
        assert torch.equal(getattr(one, name), getattr(two, name))
    assert one.reward.tolist() != other.reward.tolist()


def differences(apart: bool, steps: int) -> Tensor:
    """Q̂ of token 2 less Q̂ of token 1 after nothing, at each step where both were tried and neither ends the answer."""
    result = []
    sampler = Listening(prompts=2, apart=apart)
    sampler.table[:, :, 0] = -torch.inf  # nothing ends before the budget does
    for step in range(1, steps + 1):
        batch = collect(sampler, pg.Vine(states=6, actions=4), step=step, prompts=1).batch
        for g, prompt in enumerate(batch.prompts):
            if len(prompt) == 1:
                q = dict(
                    zip(
                        batch.tokens[batch.group == g, 0].tolist(), batch.reward[batch.group == g].tolist(), strict=True
                    )
                )
                if {1, 2} <= set(q):
                    result.append(q[2] - q[1])
    assert len(result) > steps / 4
    return torch.tensor(result)


@pytest.mark.full
def test_common_random_numbers_take_the_noise_off_the_differences() -> None:
    """What follows does not depend on the token here, so that the difference is the tokens' own, 0.1, and nothing else."""
    common, apart = differences(apart=False, steps=6), differences(apart=True, steps=20)
    torch.testing.assert_close(common, torch.full_like(common, 0.1), rtol=0, atol=1e-5)
    assert float(apart.std()) > 0.5
    assert float(apart.mean()) == pytest.approx(0.1, abs=5 * float(apart.std()) / len(apart) ** 0.5)


def test_states_are_those_the_policy_visits_and_equal_ones_are_one() -> None:
    """Every token of three completions is chosen: the empty prefix, before each, counts three times."""
    sampler = Listening(prompts=1)
    result = collect(sampler, pg.Vine(states=100, actions=2), prompts=1)
    plain = collect_plain_of(Listening(prompts=1))
    rows = [plain.batch.tokens[i][plain.batch.mask[i]] for i in range(3)]
    prefixes = [written(row[:t]) for row in rows for t in range(len(row))]
    total = result.batch.weight.sum()
    counted = {
        written(p[1:]): float(result.batch.weight[result.batch.group == g].sum() / 2)
        for g, p in enumerate(result.batch.prompts)
    }
    assert set(counted) <= set(prefixes)
    kept = [p for p in prefixes if p in counted]
    for prefix, share in counted.items():
        assert share == pytest.approx(prefixes.count(prefix) * len(counted) / len(prefixes), rel=1e-5)
    assert counted[()] == pytest.approx(3 * len(counted) / len(prefixes), rel=1e-5)
    assert float(total) == pytest.approx(2 * len(counted) * len(kept) / len(prefixes), rel=1e-5)
    c = pg.TRPO_VINE.coefficients(result.batch)
    assert float(c.sum()) == pytest.approx(len(kept) / len(prefixes), rel=1e-5)  # a mean over all that were chosen


def collect_plain_of(sampler: TabularSampler) -> Any:
    rollouter = Rollouter(lambda i: Example("0"), TabularTokenizer(), sampler, score)  # type: ignore[arg-type]
    return collect_rollout(rollouter, pg.REINFORCE, SAMPLING, prompts=1, samples=3, step=1, position=0)


def test_independent_draws_weigh_by_how_often_they_came() -> None:
    sampler = Listening()
    result = collect(sampler, pg.Vine(states=4, actions=8, distinct=False))
    batch = result.batch
    draws: dict[tuple[int, ...], list[int]] = {}
    for request in (r for r in sampler.asked if r.key[1] == VINE and len(r.key) == 8 and r.key[6] == 0):
        (token,) = sampler._one(request).tokens.tolist()
        draws.setdefault(written(request.prompt_ids), []).append(token)
    assert all(len(d) == 8 for d in draws.values()), "K draws, and no more"
    for g, prompt in enumerate(batch.prompts):
        rows, drawn = batch.group == g, draws[written(prompt)]
        assert set(batch.tokens[rows, 0].tolist()) == set(drawn)
        share = batch.weight[rows, 0] / batch.weight[rows, 0].sum()
        assert share.tolist() == pytest.approx([drawn.count(t) / 8 for t in batch.tokens[rows, 0].tolist()])


def test_a_token_whose_reward_failed_is_not_compared() -> None:
    def some_fail(prompts: Any, texts: Sequence[str], columns: Any) -> RewardScores:
        if len(texts) == 6:
            return score(prompts, texts, columns)
        values = [None if text.endswith("3") else worth(text) for text in texts]
        return RewardScores(values, {}, {"raised": values.count(None)}, messages=["boom"])

    result, full = collect(Listening(), scored=some_fail), collect(Listening())
    failed = sum(t.text.endswith("3") for g in full.groups for t in g.trajectories)
    assert failed > 0
    assert result.metrics["vine/failed"].value == result.metrics["rewards/failed_raised"].value == failed
    assert len(result.batch.mask) <= len(full.batch.mask) - failed
    assert result.messages == (
        "boom",
        "a vine's token has no reward; it is not compared with the other tokens of its state",
    )
    assert pg.TRPO_VINE.compute_advantages(result.batch).isfinite().all()
    for g in range(len(result.batch.prompts)):
        assert int((result.batch.group == g).sum()) > 1


@pytest.mark.parametrize("why", ["sure", "failed", "none"])
def test_nothing_to_compare_teaches_nothing(why: str) -> None:
    sampler = Listening()
    if why == "sure":
        sampler.table[:, :, 1] += 200
    nothing = {
        "sure": score,
        "failed": lambda p, t, c: (
            score(p, t, c) if len(t) == 6 else RewardScores([None] * len(t), {}, {"raised": len(t)})
        ),
        "none": lambda p, t, c: RewardScores([None] * len(t), {}, {"raised": len(t)}),
    }[why]
    result = collect(sampler, scored=nothing)
    assert not result.batch.mask.any()
    assert len(result.batch.mask) == len(result.completions) == 6
    assert any("no vine state has two tokens to compare" in message for message in result.messages)
    assert result.metrics["vine/states"].value == 0
    assert (pg.TRPO_VINE.compute_advantages(result.batch) == 0).all()
    if why == "none":
        assert result.metrics["tokens/vine"].value == 0


def test_an_environment_cannot_be_set_back() -> None:
    rollouter = Rollouter(
        lambda i: Example(str(i)),  # type: ignore[arg-type]
        TabularTokenizer(),
        Listening(),
        score,
        environment=lambda example: pg.SingleTurn(example),
    )
    with pytest.raises(
        pg.ConfigError, match="Vine continues completions, which an environment's episodes do not allow"
    ):
        collect_rollout(rollouter, pg.TRPO_VINE, SAMPLING, prompts=1, samples=2)
