"""Where a text's steps end, in tokens; and how a rollout carries them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import policygrad as pg
from doubles.rollouts import collect_rollout
from doubles.tabular_sampler import TabularSampler, TabularTokenizer
from policygrad.rewards.base import ProcessScores, RewardScores
from policygrad.rollout.rollouter import Rollouter
from policygrad.rollout.trajectory import find_token_index, locate_steps
from policygrad.samplers.base import SamplingParams
from policygrad.tasks.base import Example


def decoder(pieces: Sequence[bytes]) -> Any:
    """A byte-level tokenizer: token i is pieces[i]; what is no character yet decodes as U+FFFD."""
    return lambda tokens: b"".join(pieces[int(t)] for t in tokens).decode("utf-8", errors="replace")


def ids(pieces: Sequence[bytes]) -> Tensor:
    return torch.arange(len(pieces))


def test_a_step_ends_with_the_token_whose_text_reaches_it() -> None:
    pieces = [b"9*d", b" = ", b"27, ", b"d", b" = 3", b". <a>"]
    text, decode = "9*d = 27, d = 3. <a>", decoder(pieces)
    where = {end: find_token_index(decode, ids(pieces), text, end) for end in range(1, len(text) + 1)}
    assert where[1] == where[3] == 0
    assert where[4] == where[6] == 1
    assert where[8] == 2  # the token that holds "27" holds the comma as well
    assert where[15] == 4
    assert where[16] == where[len(text)] == 5


def test_a_character_of_several_tokens_is_there_with_its_last_one() -> None:
    euro = "€".encode()
    pieces = [b"1", euro[:1], euro[1:2], euro[2:], b"2", b"3"]
    decode = decoder(pieces)
    assert decode(ids(pieces)[:2]) == "1\ufffd"  # as long as what it will be, and not it
    assert [find_token_index(decode, ids(pieces), "1€23", end) for end in (1, 2, 3)] == [0, 3, 4]


def test_white_space_and_the_end_token_are_no_step() -> None:
    pieces = [b"a\n", b"b\n", b" ", b""]  # the last decodes to nothing, as an end token does
    result = locate_steps(decoder(pieces), ids(pieces), "a\nb\n ", ((2, 1.0), (4, 0.5)))
    assert (result.ends, result.scores) == ((0, 3), (1.0, 0.5))


def test_steps_within_one_token_add_up_and_the_last_token_always_ends_one() -> None:
    pieces = [b"ab", b"cd", b"ef"]
    result = locate_steps(decoder(pieces), ids(pieces), "abcdef", ((1, 1.0), (2, 0.25), (3, -1.0)))
    assert (result.ends, result.scores) == ((0, 1, 2), (1.25, -1.0, 0.0))
    assert locate_steps(decoder(pieces), ids(pieces), "abcdef", ()).ends == (2,)


@settings(max_examples=100, derandomize=True)
@given(st.text(st.sampled_from("a1 é€😀"), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_any_split_of_any_text_into_tokens(text: str, random: Any) -> None:
    """The first token by which the bytes of the first `end` characters are there."""
    data = text.encode()
    cuts = sorted({0, len(data), *(random.randrange(len(data) + 1) for _ in range(6))})
    pieces = [data[a:b] for a, b in itertools.pairwise(cuts)]
    for end in range(1, len(text) + 1):
        needed = len(text[:end].encode())
        expected = next(n for n in range(len(pieces)) if len(b"".join(pieces[: n + 1])) >= needed)
        if end >= len(text.rstrip()):
            expected = len(pieces) - 1
        assert find_token_index(decoder(pieces), ids(pieces), text, end) == expected


# --- a rollout -------------------------------------------------------------


def outcome(prompts: Any, texts: Sequence[str], columns: Any) -> RewardScores:
    return RewardScores([float(text[:1] == "1") for text in texts], {})


def steps(prompts: Any, texts: Sequence[str], columns: Any) -> ProcessScores:
    """A step of one half per token; "3" cannot be scored."""
    result = [None if "3" in t else tuple((2 * i + 1, 0.5) for i in range(len(t.split()))) for t in texts]
    parts = {"half": [score for each in result if each for _, score in each]}
    return ProcessScores(result, parts, {"raised": result.count(None)}, ["boom"])


def run(algorithm: pg.Algorithm, score_steps: Any = steps) -> Any:
    return collect_rollout(
        rollouter(2, outcome, score_steps), algorithm, SamplingParams(max_tokens=3), prompts=2, samples=16
    )


def rollouter(prompts: int, score: Any, score_steps: Any) -> Rollouter:
    sampler = TabularSampler(2, 3, 4)
    return Rollouter(lambda i: Example(str(i % prompts)), TabularTokenizer(), sampler, score, score_steps=score_steps)  # type: ignore[arg-type, return-value]


def test_a_rollout_has_its_steps_at_tokens_and_the_outcome_apart() -> None:
    rollout = run(pg.GRPO_PROCESS)
    batch = rollout.batch
    for row, text in enumerate(rollout.completions):
        n, words = int(rollout.lengths[row]), len(text.split())
        if "3" in text:  # its steps failed: it has no reward and takes no part
            assert not batch.mask[row].any()
            assert not batch.step_end[row].any()
            continue
        ends = [*range(words - 1), n - 1] if words else [n - 1]  # the last one takes the end token along
        assert batch.step_end[row].nonzero().flatten().tolist() == ends
        assert batch.token_reward[row][ends].tolist() == [0.5] * words or [0.0] * (not words)
        assert batch.reward[row] == float(text[:1] == "1")
    assert any("3" in text for text in rollout.completions)
    assert rollout.metrics["rewards/half"].value == 0.5
    assert rollout.metrics["rewards/failed_raised"].value == sum("3" in text for text in rollout.completions)
    counts = [max(1, len(text.split())) for text in rollout.completions if "3" not in text]
    assert rollout.metrics["steps/mean"].value == pytest.approx(sum(counts) / len(counts))
    assert rollout.metrics["reward"].value == pytest.approx(float(batch.reward[batch.counted].mean()))
    assert rollout.messages == ("boom",)
    assert pg.GRPO_PROCESS.compute_advantages(batch).abs().max() > 0.1


def test_dense_rewards_reach_an_algorithm_that_does_not_ask_for_steps() -> None:
    """Reward to go: what a completion has earned before a token is no merit of it."""
    batch = run(pg.REINFORCE).batch
    psi = pg.REINFORCE.compute_advantages(batch)
    row = next(i for i in range(32) if bool(batch.mask[i].any()) and int(batch.step_end[i].sum()) == 3)
    assert (psi[row, 0] - psi[row, 2]).item() == pytest.approx(1.0)


def test_where_only_ends_are_asked_for_scores_are_not_used() -> None:
    algorithm = replace(pg.VINEPPO, advantage=(pg.PrefixValue(2),))
    rollout = run(algorithm)
    assert rollout.batch.token_reward is None
    assert rollout.batch.values is not None
    assert "rewards/half" not in rollout.metrics
    assert rollout.metrics["values/prefixes"].value > 2


def test_dynamic_sampling_looks_at_the_outcome_alone() -> None:
    """Steps differ in every group; the outcome in none: nothing is kept."""
    algorithm = replace(pg.GRPO_PROCESS, filters=(pg.DropZeroVariance("reweight"),))

    def alike(prompts: Any, texts: Sequence[str], columns: Any) -> RewardScores:
        return RewardScores([0.0] * len(texts), {})

    batch = collect_rollout(
        rollouter(1, alike, steps), algorithm, SamplingParams(max_tokens=3), prompts=1, samples=16
    ).batch
    assert batch.token_reward.abs().sum() > 0
    assert algorithm.coefficients(batch).abs().sum() == 0
