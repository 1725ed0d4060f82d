"""Gates, bounds and weights of rewards, parsed and applied; penalties against hand-computed values."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.files import rows
from policygrad.errors import ConfigError, RewardError
from policygrad.rewards.builtin import LengthPenalty, RepetitionPenalty
from policygrad.rewards.resolve import RewardSpec, find_code, resolve_reward
from policygrad.rewards.workers.pool import RewardPool

MINE = """
import policygrad as pg

def asked(prompts, completions, label, **columns):
    '''Fails wherever it is asked about a text of the wrong form.'''
    assert all(text.startswith("ok") for text in completions), "asked before the gate"
    return [float(len(text)) for text in completions]

async def slow(prompts, completions):
    return [2.0 for _ in completions]

@pg.reward(batch=True, timeout=77)
def all_at_once(prompts, completions):
    return [float(len(completions)) for _ in completions]

def broken(prompts, completions):
    raise KeyError("gone")

def nan(prompts, completions):
    return [float("nan") for _ in completions]

@pg.reward(process=True)
def steps(prompts, completions):
    return [[(1, 1.0)] for _ in completions]
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return f"{tmp_path / 'mine.py'}"


def scores(*rewards: str, texts: list[str], **columns: list[object]) -> list[float | None]:
    with RewardPool(rewards, num_workers=1) as pool:
        return pool.score([""] * len(texts), texts, columns).total


# --- parsing


@pytest.mark.parametrize(
    ("text", "name", "weight"),
    [
        (r"format:\d+*0.1", r"format:\d+", 0.1),
        (r"0.1*format:\d+", r"format:\d+", 0.1),
        (r"format:a|b * -2e-1 ", "format:a|b", -0.2),
        (r"format:a\*2", r"format:a\*2", 1.0),  # a star that is meant literally
        (r"format:a\\*2", r"format:a\\", 2.0),
        (r"format:(?:a*2)", r"format:(?:a*2)", 1.0),
        (r"0.5*format:(?:a*2)", r"format:(?:a*2)", 0.5),
        ("format:one if two", "format:one if two", 1.0),  # `two` is no reward
        ("math within 0..1*0.5", "math within 0..1", 0.5),
        ("0.5*math within ..1", "math within ..1", 0.5),
        ("math*3 within -1..2.5 if format", "math within -1..2.5 if format", 3.0),
        ("math if format and exact_match", "math if format and exact_match", 1.0),
        ("format:a if b*2 if format:c if d", "format:a if b if format:c if d", 2.0),
    ],
)
def test_a_weight_is_never_part_of_a_pattern(text: str, name: str, weight: float) -> None:
    result = resolve_reward(text)
    assert (result.name, result.weight) == (name, pytest.approx(weight))


def test_weight_before_or_after_is_equivalent() -> None:
    texts = ["1", "x"]
    assert scores("format:[0-9]*0.1", texts=texts) == scores("0.1*format:[0-9]", texts=texts) == [0.1, 0.0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0.5*format:a*2", r"two weights, 0.5 and 2: drop one; .*format:\(\?:…\)"),
        ("math within 1..0", "needs LOW below HIGH"),
        ("math within ..", "needs LOW below HIGH"),
        ("math if format*0.5", "the gate 'format\\*0.5' holds or does not"),
        ("format:x if 0.5*format", "the gate '0.5\\*format' holds or does not"),
        ("math if format:a if format", "the gate 'format:a if format' holds or does not"),
        ("math if format within 0..1", "the gate 'format within 0..1' holds or does not"),
        ("format:x if math within 0..1", "the gate 'math within 0..1' holds or does not"),
        ("worked_steps if format", "'worked_steps' scores steps"),
        ("length_penalty", "needs max_length: length_penalty:…,max_length=…"),
        ("length_penalty:max_length=4,ramp=5", "ramp from 1 to max_length"),
        ("length_penalty:max_length=x", "max_length is a whole number, not 'x'"),
        ("length_penalty:max_length=9,unit=tokens", "unit is words or characters, not 'tokens'"),
        ("repetition_penalty:n=3", "has no option 'n'; write repetition_penalty:ngram=…,unit=…"),
        ("repetition_penalty:ngram=0", "ngram must be at least 1"),
    ],
)
def test_invalid_rewards_are_rejected(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_reward(text)


def test_gates_count_as_code() -> None:
    """A gate is code, too: a file of options needs permission for it."""
    assert find_code("0.5*a.py:f if b.py:g and c.d") == ("a.py", "b.py", "c")
    assert find_code("format:x if evil.py:f") == ("evil.py",)
    assert find_code("math within 0..1 if format") == ()


def test_spec_titles() -> None:
    assert RewardSpec("math", 2.0).title == "math"
    assert RewardSpec("math", 2.0, 0.0, math.inf, ("format",)).title == "math within 0.. if format"


# --- scoring


def test_gates_are_called_first_and_bounds_clip(mine: str) -> None:
    texts = ["ok", "okay", "no", "ok ok"]
    label: list[object] = [1] * 4
    result = scores(f"{mine}:asked within ..3 if format:\\Aok", texts=texts, label=label)
    assert result == [2.0, 3.0, 0.0, 3.0]  # not asked about "no", and not more than 3
    both = scores(f"0.5*{mine}:asked if format:\\Aok and format:ay", "format:n*2", texts=texts, label=label)
    assert both == [0.0, 2.0, 2.0, 0.0]


def test_a_gate_that_does_not_apply_holds(mine: str) -> None:
    assert scores(f"{mine}:slow if exact_match", texts=["4", "5", "5"], answer=["4", "4", None]) == [2.0, 0.0, 2.0]


def test_batched_parts_get_one_call_with_what_passes(mine: str) -> None:
    """A batched function gets all that pass in one call; a gate that is not batched gets one text at a time."""
    reward = resolve_reward(f"{mine}:all_at_once if {mine}:slow and format:a")
    assert (reward.batched, reward.timeout, reward.dedicated_worker) == (True, 77, False)
    assert scores(f"{mine}:all_at_once if format:a", texts=["a", "b", "a", "a"]) == [3.0, 0.0, 3.0, 3.0]


def test_a_failing_part_fails_the_sample_with_its_reason(mine: str) -> None:
    texts = ["a", "b"]
    with RewardPool([f"{mine}:nan if format:a"], num_workers=1) as pool:
        result = pool.score(["", ""], texts, {})
    assert result.total == [None, 0.0]
    assert result.failures == {"nan": 1}
    with RewardPool([f"format if {mine}:broken"], num_workers=1) as pool:
        result = pool.score(["", ""], texts, {})
    assert result.total == [None, None]
    assert result.failures == {"raised": 2}
    assert "KeyError: 'gone'" in result.messages[0]


def test_columns_of_every_part_are_required(mine: str) -> None:
    with (
        RewardPool([f"format if {mine}:asked"], num_workers=1) as pool,
        pytest.raises(RewardError, match="column 'label'"),
    ):
        pool.score([""], ["x"], {})


def test_gated_rewards_work_inside_a_running_loop() -> None:
    async def inside() -> list[float | None]:
        return [message.value for message in resolve_reward("format:a if format:b").function([""], ["ab"])]  # type: ignore[union-attr]

    assert asyncio.run(inside()) == [1.0]


def test_a_run_logs_each_reward(small: pg.Run, tmp_path: Path) -> None:
    """In metrics by its name, in completions.jsonl before its weight; weighted they add up to the reward."""
    own = small.reward[0]
    names = (f"{own} if format:..", "format:[0-9]*0.5", "repetition_penalty:ngram=1,unit=characters")
    folder = tmp_path / "run"
    run = replace(small, reward=(names[0], names[1], f"{names[2]}*2"), steps=1, output=str(folder))
    pg.train(run, display=False)
    (metrics,), report = rows(folder / "metrics.jsonl"), rows(folder / "completions.jsonl")
    result = (names[0], "format:[0-9]", names[2])
    assert [row["group"] for row in report] == [i // 8 for i in range(4 * 8)]
    for row in report:
        assert tuple(row["rewards"]) == result
        gated, digits, repeated = row["rewards"].values()
        assert gated == float(row["completion"][:1].isdigit() and len(row["completion"]) > 1)
        assert row["reward"] == pytest.approx(gated + 0.5 * digits + 2 * repeated, abs=1e-6)
    for name in result:
        assert metrics[f"rewards/{name}"] == pytest.approx(sum(row["rewards"][name] for row in report) / len(report))


# --- penalties


def test_length_penalty_by_hand() -> None:
    """L_max 10, L_cache 4: nothing up to 6, a quarter more for each word, all of it at 10 and beyond."""
    result = LengthPenalty.from_options("max_length=10,ramp=4")
    assert result("", ["w " * n for n in (0, 6, 7, 9, 10, 99)]) == [0, 0, -0.25, -0.75, -1, -1]
    assert LengthPenalty.from_options("max_length=10,unit=characters")("", ["w" * 9]) == [-0.5]  # a ramp of a fifth, 2


def test_repetition_penalty_by_hand() -> None:
    """a b a b a: the 2-grams ab, ba, ab, ba: two of four are new."""
    two, three = RepetitionPenalty(2), RepetitionPenalty()
    assert two("", ["a b a B a", "a b c", "a", ""]) == [-0.5, 0.0, 0.0, 0.0]
    assert three("", ["x " * 12]) == [pytest.approx(-0.9)]
    assert RepetitionPenalty.from_options("ngram=1,unit=characters")("", ["aab"]) == [pytest.approx(-1 / 3)]
