"""The greedy completion as a baseline: one for each prompt, judged like the others, counted, and in no batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.rollouts import collect_rollout
from doubles.tabular_sampler import TabularSampler, TabularTokenizer
from policygrad.rewards.base import RewardScores
from policygrad.rollout.rollouter import Rollouter
from policygrad.samplers.base import Request, SamplingParams
from policygrad.tasks.base import Example

REMAX = replace(pg.REMAX, samples_per_prompt=3)


class Listening(TabularSampler):
    """Remembers what it was asked."""

    def __init__(self, *shape: int) -> None:
        super().__init__(*shape)
        self.asked: list[Request] = []

    async def generate(self, requests: Sequence[Request]) -> Any:
        self.asked += requests
        return await super().generate(requests)


def solved(prompts: Sequence[str], texts: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> RewardScores:
    """What the first token says, in tenths."""
    return RewardScores([float(text.split()[0]) / 10 if text.split() else 0.0 for text in texts], {})


def sampler() -> Listening:
    result = Listening(4, 3, 4)
    for prompt in range(4):
        result.table[prompt, 0, prompt] += 0.5  # the most probable first token is the prompt's own number
    return result


def collect(algorithm: pg.Algorithm, sampler: TabularSampler, score: Any = solved, **changed: Any) -> Any:
    options = {"prompts": 4, "samples": 3, "step": 1, "position": 0} | changed
    rollouter = Rollouter(lambda i: Example(str(i % 4)), TabularTokenizer(), sampler, score)  # type: ignore[arg-type]
    return collect_rollout(rollouter, algorithm, SamplingParams(max_tokens=3), **options)


def test_one_greedy_episode_for_each_prompt_beside_the_batch() -> None:
    listening = sampler()
    result, plain = collect(REMAX, listening), collect(pg.REINFORCE, sampler())
    greedy = [request for request in listening.asked if request.sampling.temperature == 0]
    assert len(greedy) == 4
    assert len({request.key for request in listening.asked}) == len(listening.asked), "random numbers of its own"
    assert result.position == plain.position == 4
    assert result.completions == plain.completions
    assert torch.equal(result.batch.logp_sampler, plain.batch.logp_sampler)
    first = [int(prompt[0]) if prompt[0] else 0 for prompt in result.batch.prompts]
    assert result.batch.baseline.tolist() == pytest.approx([p / 10 for p in first for _ in range(3)])
    assert plain.batch.baseline is None


def test_what_it_costs_is_counted_and_what_it_is_worth_is_measured() -> None:
    result, plain = collect(REMAX, sampler()), collect(pg.REINFORCE, sampler())
    more = result.metrics["tokens/sampled"].value - plain.metrics["tokens/sampled"].value
    assert more == result.metrics["tokens/greedy"].value > 0
    assert result.metrics["reward/greedy"].value == pytest.approx(0.15)
    for name in ("reward", "entropy", "completions/mean_length"):
        assert result.metrics[name].value == plain.metrics[name].value


def test_a_greedy_completion_without_a_reward_is_said_and_its_prompt_teaches_nothing() -> None:
    def score(prompts: Any, texts: Sequence[str], columns: Any) -> RewardScores:
        if len(texts) == 12:
            return solved(prompts, texts, columns)
        return RewardScores([None, 0.2, None, 0.2], {}, {"raised": 2}, messages=["boom"])

    result = collect(REMAX, sampler(), score)
    assert result.metrics["rewards/failed_raised"].value == 2
    assert result.messages == ("boom", "a greedy completion has no reward; its prompt is not learned from")
    assert result.batch.baseline.isnan().tolist() == [p in (0, 2) for p in range(4) for _ in range(3)]
    psi = REMAX.compute_advantages(result.batch)
    assert psi.isfinite().all()
    assert (psi[result.batch.group == 0] == 0).all()
    assert psi[result.batch.group == 1].abs().sum() > 0


def test_prompts_that_take_no_part_are_not_asked_about() -> None:
    def score(prompts: Any, texts: Sequence[str], columns: Any) -> RewardScores:
        if len(texts) == 12:
            return RewardScores([None if i < 9 else 1.0 for i in range(12)], {}, {"raised": 9})
        return solved(prompts, texts, columns)

    listening = sampler()
    result = collect(REMAX, listening, score)
    assert sum(request.sampling.temperature == 0 for request in listening.asked) == 1
    assert result.batch.baseline.isnan().sum() == 9
    nothing = collect(REMAX, sampler(), lambda p, t, c: RewardScores([None] * len(t), {}, {"raised": len(t)}))
    assert "tokens/greedy" not in nothing.metrics
    assert (REMAX.compute_advantages(nothing.batch) == 0).all()
