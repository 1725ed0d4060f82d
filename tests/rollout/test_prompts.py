"""Prompts that have been solved rest: they are passed over before anything is drawn, in this epoch and later ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.files import rows, write_rows
from doubles.resuming import check_resume
from doubles.rollouts import collect_rollout
from doubles.tabular_sampler import TabularSampler, TabularTokenizer
from doubles.trackers import Record
from policygrad.rewards.base import RewardScores
from policygrad.rollout.batching import ALL_EXCLUDED_NOTE, EXTRA_LOOKAHEAD, hash_prompt, next_examples
from policygrad.rollout.rollouter import Rollouter
from policygrad.samplers.base import SamplingParams
from policygrad.tasks.base import Example
from policygrad.tasks.mixtures import MixturePart, RowsTask
from policygrad.training.config.evaluation import EvaluationConfig
from policygrad.training.config.run import Run

RESTING = replace(pg.DR_GRPO, filters=(pg.NoPositiveResampling(0.9),))


def prompt(i: int) -> Example:
    return Example(str(i % 4), {"answer": "1"})  # type: ignore[arg-type]


def batch_of(*rewards: float, example: Sequence[int], **fields: Any) -> pg.Batch:
    n = len(rewards)
    return pg.Batch(
        mask=torch.ones(n, 1, dtype=torch.bool),
        group=torch.zeros(n, dtype=torch.int64),
        reward=torch.tensor(rewards, dtype=torch.float64),
        example_id=torch.tensor(example),
        **fields,
    )


def test_what_is_solved_is_remembered_whatever_the_filters_have_made_of_it() -> None:
    part = pg.NoPositiveResampling(0.75)
    batch = batch_of(1, 1, 1, 0, 1, 0, example=[7, 7, 7, 7, 5, 5], in_statistics=torch.zeros(6, dtype=torch.bool))
    state = part.update_state(part.init_state(), batch, {})
    assert state == {"solved": [7]}
    assert part.update_state(state, batch_of(1, 0, example=[5, 7]), {}) == {"solved": [5, 7]}
    shown = torch.tensor([True, False])
    assert part.update_state(part.init_state(), batch_of(1, 0, example=[5, 5], demonstration=shown), {}) == {
        "solved": []
    }
    assert part.with_state(state).excluded_examples == {7}
    assert part.with_state(state)(batch) is batch


def test_what_is_outside_the_band_rests_twice_as_long_each_time_in_a_row() -> None:
    """By hand, with a rest of 2: of 7 nothing is solved, of 5 everything, of 3 a half."""
    part = pg.PassRateBand(cooldown=2, max_cooldown=5)
    batch = batch_of(0, 0, 1, 1, 1, 0, example=[7, 7, 5, 5, 3, 3])
    state = part.update_state(part.init_state(), batch, {})
    assert state == {"rollouts": 1, "outside": {"5": [3, 1], "7": [3, 1]}}
    assert part.with_state(state).excluded_examples == {5, 7}
    for rests in ({5, 7}, set()):  # rollouts 1 and 2 pass them over, rollout 3 does not
        state = part.update_state(state, batch_of(1, 0, example=[3, 3]), {})
        assert part.with_state(state).excluded_examples == rests
    state = part.update_state(state, batch_of(0, 0, 1, 0, example=[7, 7, 5, 5]), {})
    assert state == {"rollouts": 4, "outside": {"7": [8, 2]}}  # 5 is inside now, 7 rests for 4
    assert part.update_state(state, batch_of(0, example=[7]), {})["outside"] == {"7": [10, 3]}  # 5 at most
    assert part.update_state(state, batch_of(0.5, example=[7]), {})["outside"] == {}
    assert pg.PassRateBand(0.2, 0.8).update_state(part.init_state(), batch, {})["outside"].keys() == {"5", "7"}
    assert part.with_state(state)(batch) is batch


def test_refusals() -> None:
    with pytest.raises(pg.ConfigError, match=r"PassRateBand\.low must be below PassRateBand\.high"):
        pg.PassRateBand(0.5, 0.5)
    with pytest.raises(pg.ConfigError, match=r"PassRateBand\.cooldown must be from 1 to max_cooldown"):
        pg.PassRateBand(cooldown=0)
    with pytest.raises(pg.ConfigError, match=r"NoPositiveResampling\.threshold must be above 0"):
        pg.NoPositiveResampling(0.0)
    without = replace(batch_of(1, example=[0]), example_id=None)
    with pytest.raises(pg.ConfigError, match=r"NoPositiveResampling needs Batch\.example"):
        RESTING.apply_filters(without)


def test_those_that_rest_are_passed_over() -> None:
    resting = frozenset({hash_prompt(prompt(1)), hash_prompt(prompt(2))})
    result, rerun = next_examples(prompt, 4, 1, resting)
    assert [i for i, _ in result] == [3, 4, 7, 8]
    assert not rerun
    assert next_examples(prompt, 3, 5, frozenset()) == ([(i, prompt(i)) for i in (5, 6, 7)], False)


def test_where_all_rest_they_are_taken_as_they_come() -> None:
    result, rerun = next_examples(prompt, 3, 0, frozenset(hash_prompt(prompt(i)) for i in range(4)))
    assert rerun
    assert [i for i, _ in result] == [8 + EXTRA_LOOKAHEAD + 1 + i for i in range(3)]


def test_a_prompt_has_the_same_number_in_every_epoch() -> None:
    task = RowsTask("t", [MixturePart(1.0, "t", [Example(f"{i}?", source=f"line {i}") for i in range(40)])], (), seed=1)
    first, second = ({hash_prompt(task.train_example(epoch * 40 + i)) for i in range(40)} for epoch in range(2))
    assert first == second
    assert len(first) == 40
    assert all(0 <= n < 2**63 for n in first)


def test_a_rollout_says_which_and_goes_on_behind_the_last() -> None:
    def solved(prompts: Sequence[str], texts: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> RewardScores:
        return RewardScores([float(p == "2") for p in prompts], {})

    rollouter = Rollouter(prompt, TabularTokenizer(), TabularSampler(4, 3, 4), solved)  # type: ignore[arg-type]
    state, position, seen = RESTING.init_state(), 0, []
    for step in range(1, 4):
        algorithm = RESTING.with_state(state)
        rollout = collect_rollout(
            rollouter,
            algorithm,
            SamplingParams(max_tokens=3),
            prompts=4,
            samples=2,
            step=step,
            position=position,
        )
        seen.append([int(p) for p in rollout.prompts[::2]])
        assert rollout.batch.example_id.tolist() == [hash_prompt(prompt(int(p))) for p in rollout.prompts]
        state, position = RESTING.update_state(state, rollout.batch), rollout.position
    assert seen == [[0, 1, 2, 3], [0, 1, 3, 0], [1, 3, 0, 1]]
    assert position == 14


@pytest.mark.full
@pytest.mark.parametrize(
    ("part", "resting"), [(pg.NoPositiveResampling(0.9), [0, 4, 6]), (pg.PassRateBand(cooldown=2), [0, 4, 6])]
)
def test_a_run_remembers_and_goes_on_where_it_was(
    random_model: Path, tmp_path: Path, part: pg.Filter, resting: list[int]
) -> None:
    """Every prompt is solved at once: they rest, in the end all of them, which is said; taken up again it is the same run."""
    (tmp_path / "mine.py").write_text("def all_right(prompts, completions): return [1.0 for c in completions]\n")
    run = Run(
        algorithm=replace(RESTING, filters=(part,)),
        model=str(random_model),
        task=write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i} =\n", "answer": str(i)} for i in range(6)]),
        reward=(f"{tmp_path / 'mine.py'}:all_right",),
        steps=3,
        prompts_per_step=4,
        samples_per_prompt=2,
        sampling=SamplingParams(max_tokens=3),
        evaluation=EvaluationConfig(problems=0),
    )
    display = Record()
    full = check_resume(run, tmp_path, display=display)
    assert [row["prompts/excluded"] for row in rows(full / "metrics.jsonl")] == resting
    prompts = [row["prompt"] for row in rows(full / "completions.jsonl")][::2]
    assert len(set(prompts[:4])) == 4
    assert set(prompts[:4]) | set(prompts[4:6]) == {f"{i} =\n" for i in range(6)}
    assert display.said.count(ALL_EXCLUDED_NOTE) >= 1
