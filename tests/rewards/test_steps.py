"""Process rewards: the checker of the embedded tasks, hacks against it, and failures in the workers."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import policygrad as pg
from policygrad.errors import ConfigError, RunError
from policygrad.rewards.base import Reward, reward
from policygrad.rewards.builtin import StepEnd, check_step_pattern, worked_steps
from policygrad.rewards.resolve import list_rewards, resolve_reward
from policygrad.rewards.workers.pool import RewardPool
from policygrad.samplers.base import SamplingParams
from policygrad.tasks import list_tasks, load_task
from policygrad.training.config.run import Run
from policygrad.training.reward_setup import choose_rewards

SUM = ("chain_sum", {"answer": "74", "metadata": {"expression": "92 - 18"}})
EQUATION = ("simple_equations", {"answer": "3", "metadata": {"variable": "d", "equation": "9*d + 2 = 29"}})
PLAIN = ("simple_equations", {"answer": "7", "metadata": {"variable": "z", "equation": "z + 2 = 9"}})
WORD = ("spell_backward", {"answer": "tap", "metadata": {"word": "pat"}})


def steps(problem: tuple[str, dict[str, Any]], text: str) -> list[tuple[str, float]]:
    """(the text up to a step's end, its score)."""
    (result,) = worked_steps(["?"], [text], [problem[0]], [problem[1]])
    assert result is not None
    return [(text[:end], score) for end, score in result]


@pytest.mark.parametrize(
    ("problem", "text", "ends"),
    [
        (SUM, "Let me work it out: 90 - 10 = 80, 2 - 8 = -6. <answer>74</answer>", [("80", 1.0), ("-6", 1.0)]),
        (SUM, "90 - 10 = 80, 2 - 8 = 6. <answer>86</answer>", [("80", 1.0), ("6", 0.0)]),
        (SUM, "2-8=-6 and so 90  -  10= 80 <answer>", [("-6", 1.0), ("80", 1.0)]),
        (EQUATION, "Step by step: 9*d = 27, d = 3. <answer>3</answer>", [("27", 1.0), ("3", 1.0)]),
        (EQUATION, "9d = 27, d = 4. <answer>4</answer>", [("27", 1.0), ("4", 0.0)]),
        (PLAIN, "z = 7. <answer>7</answer>", [("7", 1.0)]),
        (WORD, "Step by step: t-a-p. <answer>tap</answer>", [("t-a-p", 1.0)]),
        (WORD, "t-p-a. <answer>tap</answer>", [("t-p-a", 0.0)]),
        (WORD, "Probably <answer>tap</answer>", []),
        (SUM, "I guess <answer>74</answer>", []),
        (SUM, "", []),
    ],
)
def test_worked_steps_of_each_dataset(problem: Any, text: str, ends: list[tuple[str, float]]) -> None:
    result = steps(problem, text)
    assert [score for _, score in result] == [score for _, score in ends]
    for (upto, _), (end, _) in zip(result, ends, strict=True):
        assert upto.endswith(end)


@pytest.mark.parametrize("task", ["embedded", "embedded_steps"])
def test_demonstrations_score_one_at_every_step(task: str) -> None:
    """For the task's own problems, the working of scripts/make_base_model.py scores 1 at every step."""
    problems = load_task(task)
    assert problems.steps == ("worked_steps",)
    kinds = set()
    for i in range(20):
        columns = problems.train_example(i).columns
        entry = columns["entry"]
        kinds.add(columns["dataset"])
        if columns["dataset"] == "chain_sum":
            a, sign, b = entry["metadata"]["expression"].split()
            x, y, s = int(a), int(b), 1 if sign == "+" else -1
            tens = f"{x - x % 10} {sign} {y - y % 10} = {x - x % 10 + s * (y - y % 10)}"
            work, count = f"{tens}, {x % 10} {sign} {y % 10} = {x % 10 + s * (y % 10)}", 2
        elif columns["dataset"] == "simple_equations":
            v, equation = entry["metadata"]["variable"], entry["metadata"]["equation"]
            factor = equation.partition(f"*{v}")[0].split()[-1] if f"*{v}" in equation else ""
            last, count = f"{v} = {entry['answer']}", 2 if factor else 1
            work = f"{factor}*{v} = {int(factor) * int(entry['answer'])}, {last}" if factor else last
        else:
            work, count = "-".join(entry["answer"]), 1
        text = f"Step by step: {work}. <answer>{entry['answer']}</answer>"
        assert columns["demonstration"] == text  # what the task shows to who learns from demonstrations
        result = steps((columns["dataset"], entry), text)
        assert [score for _, score in result] == [1.0] * count, (text, entry)
    assert len(kinds) == (3 if task == "embedded" else 2)


# --- hacks -----------------------------------------------------

HONEST = "90 - 10 = 80, 2 - 8 = -6. <answer>74</answer>"
HACKS = {
    "trivially true": "1 + 1 = 2, 2 + 2 = 4, 3 + 3 = 6, 90 - 10 = 80, 2 - 8 = -6. <answer>74</answer>",
    "repeated": "90 - 10 = 80, 90 - 10 = 80, 90 - 10 = 80, 2 - 8 = -6. <answer>74</answer>",
    "repeated, spelt otherwise": "90-10 = 80, 90 -10 = 080, 2 - 8 = -6. <answer>74</answer>",
    "trying out": "2 - 8 = -4, 2 - 8 = -5, 2 - 8 = -6, 90 - 10 = 80. <answer>74</answer>",
    "after the answer": "<answer>74</answer> 90 - 10 = 80, 2 - 8 = -6.",
    "inside the answer": "<answer>90 - 10 = 80, 2 - 8 = -6</answer>",
    "the problem itself": "92 - 18 = 74, 92 - 18 = 74. <answer>74</answer>",
    "an identity": "80 = 80, -6 = -6, 74 = 74. <answer>74</answer>",
    "part of a longer number": "90 - 10 = 800, 2 - 8 = -6.5, 190 - 10 = 80, 0.2 - 8 = -6. <answer>74</answer>",
}


@pytest.mark.parametrize("name", HACKS)
def test_hacks_earn_less_than_honest_work(name: str) -> None:
    """In a group with the honest answer and a guess, by the algorithm itself: Ψ of the first token."""
    texts = [HONEST, HACKS[name], "Probably <answer>74</answer>", "Probably <answer>75</answer>"]
    width = 9
    step_end, token_reward = torch.zeros(4, width, dtype=torch.bool), torch.zeros(4, width)
    for row, text in enumerate(texts):
        scores = [score for _, score in steps(SUM, text)]
        assert set(scores) <= {0.0, 1.0}
        token_reward[row, : len(scores)] = torch.tensor(scores)
        step_end[row, : len(scores) + 1] = True  # the answer is the last step
    batch = pg.Batch(
        mask=step_end,
        group=torch.zeros(4, dtype=torch.int64),
        reward=torch.tensor([1.0, 0.0 if "inside" in name else 1.0, 1.0, 0.0]),
        step_end=step_end,
        token_reward=token_reward,
    )
    psi = pg.GRPO_PROCESS.compute_advantages(replace(batch, logp_ref=torch.zeros(4, width)))
    assert psi[0, 0] > psi[1, 0]
    useless = step_end & (token_reward == 0) & (torch.arange(width) < step_end.sum(1, keepdim=True) - 1)
    worth = psi - torch.cat([psi[:, 1:], torch.zeros(4, 1)], 1)  # what each step adds to the sum
    assert not (worth[useless] > 0).any()


def test_adversarial_text_is_scored_in_reasonable_time() -> None:
    """In CPU seconds, which a busy machine does not add to."""
    began = time.process_time()
    for text in ("1+" * 3000, "1 + " * 1500, "9" * 20_000, "a-" * 5000, "a=" * 5000, " " * 20_000 + "="):
        steps(SUM, text)
        steps(WORD, text)
    assert time.process_time() - began < 20


# --- in the workers --------------------------------------------------------


def functions() -> tuple[Any, Any]:
    """(an outcome, a process reward); made here, so that they travel to a worker by value and it imports nothing of ours."""

    def outcome(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [1.0] * len(completions)

    @reward(process=True)
    def unruly(prompts: Any, completions: Any, **_: Any) -> Any:
        """Return what the completion asks for."""
        import time

        import numpy

        deeds: dict[str, Any] = {
            "good": lambda: [[(4, 0.5), (2, 1)]],
            "array": lambda: numpy.array([[[1.0, 0.25], [4.0, 0.5]]]),
            "does not apply": lambda: [None],
            "empty": lambda: [()],
            "raise": lambda: 1 / 0,
            "hang": lambda: time.sleep(1000),
            "number": lambda: [1.0],
            "bare": lambda: 1.0,
            "two": lambda: [[], []],
            "a triple": lambda: [[(1, 2, 3)]],
            "text": lambda: [[(1, "1.0")]],
            "nan": lambda: [[(1, float("nan"))]],
            "inf": lambda: [[(1, float("inf"))]],
            "beyond": lambda: [[(7, 1.0)]],  # of six characters
            "zero": lambda: [[(0, 1.0)]],
            "half": lambda: [[(1.5, 1.0)]],
        }
        return deeds[completions[0]]()

    return outcome, unruly


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    outcome, unruly = functions()
    with RewardPool([outcome, replace(resolve_reward(unruly), weight=2.0)], num_workers=1, timeout=60.0) as opened:
        yield opened


@pytest.mark.parametrize(
    ("deed", "expected"),
    [
        ("good", ((2, 1.0), (4, 0.5))),
        ("array", ((1, 0.25), (4, 0.5))),
        ("does not apply", ()),
        ("empty", ()),
    ],
)
def test_steps_are_sorted_by_their_end_and_weighted(pool: RewardPool, deed: str, expected: Any) -> None:
    result = pool.score_steps(["p"], [deed], {})
    assert result.steps == [tuple((end, 2 * score) for end, score in expected)]
    assert result.parts == {"unruly": [score for _, score in expected]}
    assert (result.failures, result.messages) == ({}, [])
    scores = pool.score(["p"], [deed], {})  # the outcome's reward alone
    assert scores.total == [1.0]
    assert list(scores.parts) == ["outcome"]


@pytest.mark.parametrize(
    ("deed", "reason", "message"),
    [
        ("raise", "raised", "ZeroDivisionError"),
        ("number", "type", r"returned 1\.0.* list of"),
        ("bare", "type", r"one list of \(end, score\) per completion"),
        ("two", "length", "returned 2 rewards for 1 completions"),
        ("a triple", "type", "each end from 1 to its 8 characters"),
        ("text", "type", r"list of \(end, score\)"),
        ("nan", "nan", "returned .*nan"),
        ("inf", "inf", "beyond"),
        ("beyond", "type", "from 1 to its 6 characters"),
        ("zero", "type", "from 1 to its 4 characters"),
        ("half", "type", "from 1 to its 4 characters"),
    ],
)
def test_a_failure_costs_its_sample_only(pool: RewardPool, deed: str, reason: str, message: str) -> None:
    result = pool.score_steps(["p"] * 3, ["good", deed, "good"], {})
    assert result.steps == [((2, 2.0), (4, 1.0)), None, ((2, 2.0), (4, 1.0))]
    assert result.failures == {reason: 1}
    assert len(result.messages) == 1
    assert re.search(message, result.messages[0]), result.messages[0]
    assert "unruly" in result.messages[0]


def test_a_process_reward_that_hangs_is_stopped() -> None:
    with RewardPool([*functions()], num_workers=1, timeout=3.0) as pool:
        result = pool.score_steps(["p"] * 2, ["hang", "good"], {})
    assert result.steps == [None, ((2, 1.0), (4, 0.5))]
    assert result.failures == {"timeout": 1}
    assert "more than its timeout" in result.messages[0]


def test_several_process_rewards_add_up_and_too_large_a_sum_is_none() -> None:
    @reward(process=True)
    def halves(prompts: Any, completions: Sequence[str], **_: Any) -> Any:
        return [[(2, 0.5)]] * len(completions)

    outcome, _ = functions()
    with RewardPool(
        [outcome, Reward("a", halves, process_reward=True), Reward("b", halves, -3.0, process_reward=True)]
    ) as pool:
        assert pool.score_steps(["p"], ["xyz"], {}).steps == [((2, 0.5), (2, -1.5))]
    with RewardPool([outcome, Reward("a", halves, 1e19, process_reward=True)]) as pool:
        result = pool.score_steps(["p"], ["xyz"], {})
        assert (result.steps, result.failures) == ([None], {"inf": 1})


def test_a_pattern_ends_steps() -> None:
    assert StepEnd(r"\n")(["p"], ["a\nbc\n", "", "x"]) == [((2, 0.0), (5, 0.0)), (), ()]
    assert StepEnd(r"(?<=\.)|^")(["p"], ["a.b."]) == [
        ((2, 0.0), (4, 0.0))
    ]  # where a match is empty, but not at the start
    with RewardPool([functions()[0], resolve_reward(StepEnd("b"))]) as pool:
        assert pool.score_steps(["p"], ["abb"], {}).steps == [((2, 0.0), (3, 0.0))]
    with pytest.raises(ConfigError, match=r"step_end '\(a' is not a regular expression: .*position 0"):
        check_step_pattern("(a")
    with pytest.raises(ConfigError, match=r"position 2"):
        check_step_pattern("ab(")
    for everywhere in ("", "x*", "(?:, )?"):
        with pytest.raises(ConfigError, match="matches the empty text everywhere"):
            check_step_pattern(everywhere)
    for pattern in (r"\n", "(?m)$", r"(?<=\.)", "."):
        check_step_pattern(pattern)


# --- choosing --------------------------------------------------------------

SCORED, ENDS = frozenset({"step_end", "token_reward"}), frozenset({"step_end"})


def chosen(task: str, names: tuple[str, ...], needs: frozenset[str] | None, step_end: str | None = None) -> list[str]:
    return [r.name for r in choose_rewards(load_task(task), names, needs, step_end)]


def test_task_steps_are_used_only_when_needed(tmp_path: Any) -> None:
    (tmp_path / "f.py").write_text(
        "import policygrad as pg\n@pg.reward(process=True)\ndef f(prompts, completions, **c): return [()]\n"
    )
    mine = f"{tmp_path / 'f.py'}:f"
    assert "embedded_steps" in list_tasks()
    assert "worked_steps" in list_rewards()
    assert chosen("embedded_steps", (), frozenset()) == ["reasoning_gym"]
    assert chosen("embedded_steps", (), None) == ["reasoning_gym"]
    assert chosen("embedded_steps", (), SCORED) == ["reasoning_gym", "worked_steps"]
    assert chosen("embedded", ("exact_match",), ENDS) == ["exact_match", "worked_steps"]
    assert chosen("embedded", (mine,), frozenset()) == ["reasoning_gym", mine]  # the outcome stays the task's
    assert chosen("embedded", (mine, "exact_match"), SCORED) == ["exact_match", mine]
    assert chosen("embedded", (), ENDS, r"\n") == ["reasoning_gym", "step_end"]
    with pytest.raises(RunError, match="an evaluation scores outcomes"):
        chosen("embedded", (mine,), None)
    with pytest.raises(RunError, match="both mark where steps end"):
        chosen("embedded", (mine,), ENDS, r"\n")


def test_missing_steps_suggest_a_remedy(tmp_path: Any) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    task = str(tmp_path / "t.jsonl")
    with pytest.raises(RunError, match=r"--task embedded_steps.*process=True\)$"):
        chosen(task, ("exact_match",), SCORED)
    with pytest.raises(RunError, match=r"--step-end '\\n'"):
        chosen(task, ("exact_match",), ENDS)
    assert chosen(task, ("exact_match",), ENDS, r"\n") == ["exact_match", "step_end"]
    with pytest.raises(RunError, match="no reward of its own for the outcome"):
        chosen(task, ("worked_steps",), SCORED)


def test_a_run_rejects_a_useless_step_end() -> None:
    options = {"sampling": SamplingParams(max_tokens=8), "task": "embedded"}
    assert Run(algorithm=pg.VINEPPO, step_end=r"\n", **options).step_end == r"\n"
    with pytest.raises(ConfigError, match="no part of grpo uses reasoning steps"):
        Run(algorithm=pg.GRPO, step_end=r"\n", **options)
    with pytest.raises(ConfigError, match="also needs a reward for each"):
        Run(algorithm=pg.GRPO_PROCESS, step_end=r"\n", **options)
    with pytest.raises(ConfigError, match=r"not a regular expression: .*at position 1"):
        Run(algorithm=pg.VINEPPO, step_end="a(", **options)
