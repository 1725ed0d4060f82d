"""Prompts that leave no room in the model's context: refused or skipped when a run starts, or the end of their group."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.files import rows, write_rows
from doubles.rewards import digits_first
from doubles.rollouts import collect_rollout
from doubles.trackers import Record
from policygrad.environments.tools import ToolUse
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.rewards.base import Reward
from policygrad.rewards.workers.pool import RewardPool
from policygrad.rollout.rollouter import Rollouter
from policygrad.rollout.row_checks import check_reward_columns, check_rows
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.tasks import load_task
from policygrad.tasks.base import Example, Task

LONG = 5  # the row whose prompt is too long


def lookup(city: str) -> str:
    """Looks up.

    Args:
        city: its name
    """
    return "rain"


def reward(answer: str, example: Example) -> float:
    return float(len(answer))


def words(count: int) -> str:
    return " ".join(["again"] * count)


def write_questions(path: Path, length: int, count: int = 40) -> str:
    """Write questions, one of them with `length` words."""
    return write_rows(
        path, [{"prompt": f"{i} {words(length if i == LONG else 1)} =\n", "answer": str(i)} for i in range(count)]
    )


@pytest.fixture(scope="module")
def tokenizer(random_model: Path) -> Tokenizer:
    """Of a model with 256 positions."""
    return load_tokenizer(str(random_model), load_model(str(random_model)))


def test_prompts_are_measured_with_the_descriptions_of_tools(tokenizer: Tokenizer, tmp_path: Path) -> None:
    shown = pg.ToolUse((lookup,), reward)
    larger = replace(tokenizer, context_length=400)  # of which the tool's description takes 294, and the question 303
    task = load_task(write_questions(tmp_path / "q.jsonl", 60))
    assert check_rows(task, larger, 20) is task
    message = (
        rf"q\.jsonl:{LONG + 1} has \d+ tokens, with the descriptions of its tools, and max_tokens is 20: .*skip-bad"
    )
    with pytest.raises(pg.ModelError, match=message):
        check_rows(task, larger, 20, shown)
    for hidden in (pg.ToolUse(lambda example: (lookup,), reward), replace(shown, tools_in_prompt=False)):
        check_rows(task, larger, 20, hidden)  # known in an episode alone, or not in the prompt


def test_skipped_rows_are_counted_and_the_others_stay_on_their_side(tokenizer: Tokenizer, tmp_path: Path) -> None:
    short = load_task(write_questions(tmp_path / "short.jsonl", 1))
    long = load_task(write_questions(tmp_path / "long.jsonl", 300))
    with pytest.raises(pg.ModelError, match=r"long\.jsonl:6 has"):
        check_rows(long, tokenizer, 8)
    with pytest.warns(UserWarning, match=r"long\.jsonl: 1 of 40 rows skipped, the first: .*long\.jsonl:6 has"):
        checked = check_rows(long, tokenizer, 8, skip_bad_rows=True)
    assert len(checked.rows) == 39

    def held_out(task: Task) -> set[Any]:
        return {example.prompt for example in task.eval_examples(40)}

    assert held_out(checked) == held_out(short) - {f"{LONG} again =\n"}
    drawn = {checked.train_example(i).prompt for i in range(200)}
    assert drawn | held_out(checked) == {example.prompt for example in checked.rows}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_rows(short, tokenizer, 8, skip_bad_rows=True) is short
    given = load_task([{"prompt": "one =\n", "answer": "1"}], eval_data=str(tmp_path / "long.jsonl"))
    with pytest.warns(UserWarning, match="1 of 41 rows skipped"):
        assert len(check_rows(given, tokenizer, 8, skip_bad_rows=True).eval_examples(99)) == 39
    with pytest.raises(pg.DataError, match="no row is left to train on; the first that was skipped"):
        check_rows(short, tokenizer, 256, skip_bad_rows=True)


def test_a_demonstration_that_is_too_long_is_skipped_with_its_row(tokenizer: Tokenizer, tmp_path: Path) -> None:
    shown = [{"prompt": f"{i} =\n", "demonstration": words(99 if i == LONG else 1)} for i in range(8)]
    task = load_task(write_rows(tmp_path / "d.jsonl", shown))
    with pytest.raises(pg.DataError, match="demonstrations are too long"):
        check_rows(task, tokenizer, 30, has_demonstrations=True)
    with pytest.warns(UserWarning, match="1 of 8 rows skipped"):
        assert len(check_rows(task, tokenizer, 30, has_demonstrations=True, skip_bad_rows=True).rows) == 7


class EagerPool(RewardPool):
    """Scores while others are sampled."""

    def is_overlap_worthwhile(self, count: int) -> bool:
        return True


def test_a_generated_prompt_that_is_too_long_ends_its_group(small: pg.Run) -> None:
    """Also where rewards are computed during sampling; the other groups are as without it."""
    model = load_model(small.model)
    tokenizer = load_tokenizer(small.model, model)
    sampler = LocalSampler.from_tokenizer(model, tokenizer)

    def example(i: int) -> Example:
        return Example(words(300) if i == 1 else f"{i} =\n")

    with EagerPool([digits_first], num_workers=1) as pool:
        for used in (None, pool):
            rollouter = Rollouter(example, tokenizer, sampler, pool.score, pool=used)
            rollout = collect_rollout(rollouter, pg.GRPO, pg.SamplingParams(max_tokens=6), prompts=3, samples=4)
            assert [t.reward is None for g in rollout.groups for t in g.trajectories] == [False] * 4 + [True] * 4 + [
                False
            ] * 4
            assert not rollout.batch.mask[4:8].any()
            assert rollout.batch.mask[[0, 3, 8, 11]].any(1).all()
            (note,) = rollout.messages
            assert note.startswith("a prompt is too long, so its group is left out: training prompt 1 has")
            assert rollout.metrics["completions/failed_ratio"].value == pytest.approx(1 / 3)
            if used is None:
                alone = rollout
            else:
                assert torch.equal(alone.batch.tokens, rollout.batch.tokens)


def test_a_run_goes_on_and_resumes_past_a_prompt_that_is_found_too_long_in_an_episode(
    small: pg.Run, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Its tools are known in an episode alone; the row fits without their descriptions."""
    positions = 400
    model = load_model(small.model)
    model.config.max_position_embeddings = positions  # type: ignore[union-attr]
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    tokenizer.save_pretrained(tmp_path / "model")
    question = write_questions(tmp_path / "q.jsonl", 60, count=6)
    environment = pg.ToolUse(lambda example: (lookup,), reward)
    run = replace(
        small,
        model=str(tmp_path / "model"),
        task=question,
        reward=(),
        steps=3,
        prompts_per_step=6,
        samples_per_prompt=2,
        sampling=pg.SamplingParams(max_tokens=6),
        output=str(tmp_path / "run"),
    )
    pg.train(run, environment=environment, stop_after=1, display=False)
    record = Record()
    result = pg.train(resume=run.output, environment=environment, display=record)
    assert "so its group is left out" in record.said
    steps = [row for row in rows(result.output / "metrics.jsonl") if "completions/failed_ratio" in row]
    assert [row["completions/failed_ratio"] for row in steps] == [pytest.approx(1 / 6)] * 3


def needs_tests(prompts: Any, completions: Any, tests: Any, **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def test_a_reward_without_its_column_is_refused_before_anything_is_sampled(small: pg.Run, tmp_path: Path) -> None:
    rewards = (Reward("needs_tests", needs_tests),)
    task = load_task([{"prompt": "1 =\n", "answer": "1"}])
    for environment in (None, pg.ToolUse((lookup,))):
        with pytest.raises(pg.RewardError, match="'needs_tests' needs the column 'tests', and the task has: answer"):
            check_reward_columns(rewards, task, environment)
    check_reward_columns(rewards, load_task([{"prompt": "1 =\n", "tests": "1"}]))
    check_reward_columns(rewards, task, lambda example: None)  # which may add it
    sums = write_rows(tmp_path / "sums.jsonl", [{"prompt": "1 =\n", "solution": "1"}])
    with pytest.raises(pg.RewardError, match="'exact_match' needs the column 'answer', and the task has: solution"):
        pg.train(replace(small, task=sums, reward=("exact_match",), output=str(tmp_path / "run")), display=False)
    assert not (tmp_path / "run").exists()


UNKNOWN_CALLS = (
    "{% if tools %}{{ tools[0]['function']['name'] }} {% endif %}{% for m in messages %}{{ m['role'] }}: "
    "{% for call in m.get('tool_calls') or () %}[CALLING {{ call['function']['name'] }}]{% endfor %}{{ m['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
DEAF = UNKNOWN_CALLS.replace("[CALLING", "<tool_call>").replace(
    "{% for m in messages %}", "{% for m in messages if m['role'] == 'assistant' or m == messages[0] %}"
)


def test_a_template_with_which_tools_cannot_be_used_is_named_when_a_run_starts(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": "1"} for i in range(3)]
    task = load_task(write_rows(tmp_path / "rows.jsonl", rows))

    def check(template: str, parser: Any = None, skip_bad_rows: bool = False) -> None:
        hf = copy.deepcopy(tokenizer.hf)
        hf.chat_template = template
        check_rows(
            task,
            replace(tokenizer, hf=hf),
            8,
            ToolUse([lookup], parser=parser, reward=reward),
            skip_bad_rows=skip_bad_rows,
        )

    with pytest.raises(
        pg.ModelError, match=r"rows\.jsonl:1: the chat template of .* has an unknown format.*parser=.*hermes"
    ):
        check(UNKNOWN_CALLS)
    with pytest.raises(pg.ModelError, match="has an unknown format"):  # of the template, so no row is skipped for it
        check(UNKNOWN_CALLS, skip_bad_rows=True)
    check(UNKNOWN_CALLS, parser=lambda text: ())
    check(UNKNOWN_CALLS.replace("[CALLING", "<tool_call>"))
    with pytest.raises(pg.ModelError, match=r"rows\.jsonl:1: the chat template of .* leaves out"):
        check(DEAF)
