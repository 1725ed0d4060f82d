"""Values from fresh completions: exact where they are enumerated, each prefix once, within its budget, the same every time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.drawing import Context, sample
from doubles.rollouts import collect_rollout
from doubles.tabular_sampler import TabularSampler, TabularTokenizer
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer, pad_token_id
from policygrad.rewards.base import ProcessScores, RewardScores
from policygrad.rollout.prefix_values import add_prefix_values
from policygrad.rollout.rollouter import Rollouter
from policygrad.rollout.scoring import score_groups
from policygrad.rollout.step_marks import add_step_marks
from policygrad.rollout.trajectory import (
    TRAIN,
    VALUES,
    EpisodeGroup,
    EpisodeSpec,
    Segment,
    StepMarks,
    Trajectory,
)
from policygrad.samplers.base import Generation, Request, SamplingParams
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.tasks.base import Example

VOCABULARY, LONGEST = 3, 3
ALL = list(itertools.product(range(VOCABULARY), repeat=LONGEST))
K = len(ALL)
SAMPLING = SamplingParams(max_tokens=LONGEST)


def worth(text: str) -> float:
    """A reward that depends on everything written: "1 2" is 1·3 + 2·9, plus 1 for what is empty."""
    return 1.0 + sum(int(word) * 3**i for i, word in enumerate(text.split(), 1))


def score(prompts: Any, texts: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> RewardScores:
    assert len(prompts) == len(texts) == len(columns["answer"])
    return RewardScores([worth(text) for text in texts], {})


def ended(tokens: Sequence[int]) -> tuple[int, ...]:
    """Up to the end token 0, which is included."""
    return tuple(tokens[: tokens.index(0) + 1]) if 0 in tokens else tuple(tokens)


@dataclass
class Enumerating:
    """Samples a uniform policy by writing out every string of three tokens: K of them hold each continuation in proportion."""

    asked: list[Request] = field(default_factory=list)
    calls: int = 0

    async def update(self, weights: Any) -> None: ...

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        assert len(requests) % K == 0
        self.calls += 1
        self.asked += requests[::K]
        return [self.one(ALL[i % K][: request.max_tokens]) for i, request in enumerate(requests)]

    @staticmethod
    def one(tokens: Sequence[int]) -> Generation:
        kept = ended(list(tokens))
        return Generation(torch.tensor(kept), torch.zeros(len(kept)), "stop" if 0 in kept else "length", 0)


def value(prefix: tuple[int, ...]) -> float:
    """V(prefix) by recursion over the next token, each of probability 1/3."""
    if len(prefix) == LONGEST or 0 in prefix:
        return worth(" ".join(str(t) for t in prefix if t))
    return sum(value((*prefix, t)) for t in range(VOCABULARY)) / VOCABULARY


def rollout(completions: Sequence[Sequence[int]], ends: Sequence[Sequence[int]]) -> tuple[pg.Batch, list[EpisodeGroup]]:
    """One group of prompt 7, whose completions' steps end at `ends`."""
    rows = tuple(
        Trajectory((Segment(torch.tensor(o), torch.zeros(len(o)), torch.zeros(len(o)).long()),), "", 0 not in o)
        for o in completions
    )
    start = EpisodeSpec(Example("0", {"answer": "1"}), (5, TRAIN, 2, 7), LONGEST)  # type: ignore[arg-type]
    groups = [EpisodeGroup(start, torch.tensor([0]), rows)]
    lengths = torch.tensor([len(o) for o in completions])
    batch = pg.Batch(
        mask=torch.arange(LONGEST) < lengths[:, None],
        group=torch.zeros(len(rows), dtype=torch.int64),
        reward=torch.tensor([worth(" ".join(str(t) for t in o if t)) for o in completions], dtype=torch.float64),
    )
    return add_step_marks(batch, [StepMarks(tuple(e), (0.0,) * len(e)) for e in ends], scored=False), groups


def rollouter(sampler: Any, score: Any = score, **options: Any) -> Rollouter:
    return Rollouter(lambda i: Example("0", {"answer": "1"}), TabularTokenizer(), sampler, score, seed=5, **options)  # type: ignore[arg-type, return-value]


def valued(sampler: Any, batch: pg.Batch, groups: list[EpisodeGroup], score: Any = score) -> Any:
    """(batch, metrics, messages) with K samples a prefix in step 2."""
    player = rollouter(sampler, score)
    out, judged = add_prefix_values(
        batch,
        groups,
        K,
        lambda specs, n: player.play(specs, n, SAMPLING),
        lambda some: score_groups(some, score),
        step=2,
    )
    return out, judged.metrics, judged.messages


COMPLETIONS, ENDS = [[1, 2, 0], [1, 1, 2], [2, 0], [1, 2, 0], [0]], [[0, 1, 2], [0, 2], [1], [0, 1, 2], [0]]


def test_enumerated_values_are_exact() -> None:
    batch, groups = rollout(COMPLETIONS, ENDS)
    sampler = Enumerating()
    out, _, messages = valued(sampler, batch, groups)
    starts = [[(), (1,), (1, 2)], [(), (1,), (1,)], [(), ()], [(), (1,), (1, 2)], [()]]
    for row, prefixes in enumerate(starts):
        expected = [value(p) for p in prefixes]
        assert out.values is not None
        assert out.values[row, : len(expected)].tolist() == pytest.approx(expected, rel=1e-14)
    assert messages == ()
    assert value(()) != value((1,)) != value((1, 2))


def test_equal_prefixes_are_estimated_once_within_their_budget_in_one_call() -> None:
    batch, groups = rollout(COMPLETIONS, ENDS)
    sampler = Enumerating()
    _, metrics, _ = valued(sampler, batch, groups)
    assert sampler.calls == 1
    assert [p.prompt_ids.tolist() for p in sampler.asked] == [
        [0],
        [0, 1],
        [0, 1, 2],
    ]  # none where a completion has ended
    assert [p.max_tokens for p in sampler.asked] == [3, 2, 1]
    assert [p.key for p in sampler.asked] == [(5, VALUES, 2, 7, 0, n, 0) for n in range(3)]
    assert metrics["values/prefixes"].value == 3
    tokens = sum(len(ended(o[:budget])) for o in ALL for budget in (3, 2, 1))
    assert metrics["tokens/values"].value == metrics["tokens/sampled"].value == tokens


def test_what_takes_no_part_is_not_estimated() -> None:
    batch, groups = rollout([[1, 2, 0], [2, 2, 0]], [[0, 2], [0, 2]])
    batch = replace(batch, mask=batch.mask & torch.tensor([[False], [True]]))
    sampler = Enumerating()
    out, _, _ = valued(sampler, batch, groups)
    assert [p.prompt_ids.tolist() for p in sampler.asked] == [[0], [0, 2]]
    assert out.values is not None
    assert out.values[0].tolist() == [0.0] * 3
    nobody = replace(batch, mask=torch.zeros_like(batch.mask))
    out, metrics, _ = valued(Enumerating(), nobody, groups)
    assert metrics["values/prefixes"].value == 0
    assert out.values is not None
    assert not out.values.any()


def test_failed_rewards_are_left_out_and_a_prefix_without_any_falls_back() -> None:
    """Half of the completions fail; then all of those of one prefix, whose value is the step before's; then the prompt's."""

    def failing(bad: Any) -> Any:
        def judge(prompts: Any, texts: Sequence[str], columns: Any) -> RewardScores:
            total = [None if bad(i, text) else worth(text) for i, text in enumerate(texts)]
            return RewardScores(total, {}, {"raised": total.count(None)}, messages=["boom"] if None in total else [])

        return judge

    batch, groups = rollout([[1, 2, 0], [2, 2, 2]], [[0, 2], [0, 2]])

    def run(bad: Any) -> Any:
        return valued(Enumerating(), batch, groups, failing(bad))

    out, metrics, messages = run(lambda i, text: not text)  # the empty answer alone has no reward
    texts = [" ".join(str(t) for t in ended(o) if t) for o in ALL]
    known = [worth(text) for text in texts if text]
    assert out.values[0, 0].item() == pytest.approx(sum(known) / len(known))
    assert metrics["rewards/failed_raised"].value == texts.count("")
    assert metrics["values/failed"].value == 0
    assert messages == ("boom",)

    out, metrics, messages = run(lambda i, text: text[:1] == "1" and i >= K)  # the prompt's own samples come first
    assert out.values[0].tolist() == pytest.approx([value(())] * 3)
    assert out.values[1].tolist() == pytest.approx([value(()), value((2,)), value((2,))])
    assert metrics["values/failed"].value == 1
    assert "step before" in messages[-1]

    out, metrics, _ = run(lambda i, text: True)
    assert out.values[0].tolist() == pytest.approx([float(batch.reward.mean())] * 3)
    assert metrics["values/failed"].value == 3


def steps_by_token(prompts: Any, texts: Sequence[str], columns: Any) -> ProcessScores:
    """A step per token that is written, worth its number."""
    return ProcessScores(
        [tuple((2 * i + 1, float(w)) for i, w in enumerate(text.split())) for text in texts], {}, {}, []
    )


def test_a_rollout_carries_values_and_they_are_unbiased() -> None:
    """A table that is not uniform, 200 samples a prefix: each value within five standard errors of the exact one."""
    sampler = TabularSampler(1, LONGEST, VOCABULARY)
    sampler.table = torch.randn(1, LONGEST, VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    probability = sampler.table[0].softmax(-1)

    def exact(prefix: tuple[int, ...], power: int = 1) -> float:
        if len(prefix) == LONGEST or 0 in prefix:
            return worth(" ".join(str(t) for t in prefix if t)) ** power
        return sum(float(probability[len(prefix), t]) * exact((*prefix, t), power) for t in range(VOCABULARY))

    many, options = 200, {"prompts": 1, "samples": 24, "step": 1, "position": 0}
    algorithm = replace(pg.VINEPPO, advantage=(pg.PrefixValue(many),))
    stepped = rollouter(sampler, score_steps=steps_by_token)
    result = collect_rollout(stepped, algorithm, SAMPLING, **options)
    batch, checked = result.batch, 0
    assert batch.values is not None
    assert batch.tokens is not None
    assert batch.step_end is not None
    assert batch.token_reward is None  # what steps are worth is not what VinePPO asks
    for row in range(24):
        n = int(batch.mask[row].sum())
        for t in range(n):
            prefix = tuple(batch.tokens[row, :t].tolist())
            closed = bool(batch.step_end[row, t - 1]) if t else True
            if closed:
                error = ((exact(prefix, 2) - exact(prefix) ** 2) / many) ** 0.5
                assert float(batch.values[row, t]) == pytest.approx(exact(prefix), abs=5 * error)
                checked += 1
            else:
                assert batch.values[row, t] == batch.values[row, t - 1]
    assert checked > 20
    assert result.metrics["tokens/sampled"].value == result.metrics["tokens/values"].value + float(batch.mask.sum())
    few = replace(pg.VINEPPO, advantage=(pg.PrefixValue(5),))
    first, second, other = (
        collect_rollout(stepped, few, SAMPLING, **options | {"step": step}).batch.values for step in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_values_of_no_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="give the Rollouter `score_steps`"):
        collect_rollout(rollouter(TabularSampler(1, 3, 3)), pg.VINEPPO, SAMPLING, prompts=1, samples=2)


@pytest.fixture(scope="module")
def local(random_model: Path) -> tuple[LocalSampler, Any]:
    model = load_model(str(random_model))
    tokenizer = load_tokenizer(str(random_model), model)
    return LocalSampler(model, tokenizer.end_ids, pad_token_id(tokenizer)), tokenizer


def test_a_models_sampler_restarts_from_prefixes_within_their_budgets(local: tuple[LocalSampler, Any]) -> None:
    """Longer and shorter rests side by side: each row stops at its own, and draws what it draws alone."""
    sampler, tokenizer = local
    text = tokenizer.encode("1 + 2 =\n", 8).ids
    prompts = [
        Context(torch.cat([text, torch.full((n,), 40)]), (0, VALUES, 1, 0, 0, n), 8 - n) for n in (0, 3, 7, 6, 1)
    ]
    sampling = SamplingParams(max_tokens=8)
    groups = sample(sampler, prompts, 6, sampling)
    for prompt, group in zip(prompts, groups, strict=True):
        alone = sample(sampler, [prompt], 6, sampling)[0]
        for a, b in zip(group, alone, strict=True):
            assert 1 <= len(a.tokens) <= prompt.budget(sampling)
            truncated = a.finish_reason == "length"
            assert truncated is (int(a.tokens[-1]) not in tokenizer.end_ids)
            assert len(a.tokens) == prompt.budget(sampling) or not truncated
            assert torch.equal(a.tokens, b.tokens)
            assert torch.allclose(a.logp, b.logp, atol=1e-5)
    assert any(c.finish_reason == "length" for g in groups for c in g)


def test_a_row_that_waits_stays_within_learned_positions(local: tuple[LocalSampler, Any]) -> None:
    """GPT-2 has a vector per position and no more: a long prefix beside a short one must not run past the last."""
    from transformers import GPT2Config, GPT2LMHeadModel

    _, tokenizer = local
    torch.manual_seed(0)
    size = len(tokenizer.hf)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=size, n_positions=24, n_embd=16, n_layer=1, n_head=2)).eval()
    sampler = LocalSampler(model, frozenset({size + 1}), 0)  # an end that never comes
    prompts = [Context(torch.full((n,), 40), (0, VALUES, 1, 0, 0, n), 24 - n) for n in (22, 4, 4, 4, 4, 4)]
    groups = sample(sampler, prompts, 2, SamplingParams(max_tokens=20))
    assert [len(g[0].tokens) for g in groups] == [2, 20, 20, 20, 20, 20]
