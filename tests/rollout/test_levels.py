"""The difficulty moves with what is solved: by hand, in rollouts, and in a run that is taken up again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.files import rows, untimed
from doubles.rollouts import collect_rollout
from doubles.tabular_sampler import TabularSampler, TabularTokenizer
from policygrad.rewards.base import RewardScores
from policygrad.rollout.rollouter import Rollouter
from policygrad.samplers.base import SamplingParams
from policygrad.tasks.base import LEVEL_STRIDE, Example, decode_level_index

MOVING = replace(pg.DR_GRPO, filters=(pg.MovingLevel(up=0.75, down=0.25, rollouts=2),))


def batch_of(*rewards: float, level: Sequence[int] | int, levels: int = 4, **fields: Any) -> pg.Batch:
    n = len(rewards)
    return pg.Batch(
        mask=torch.ones(n, 1, dtype=torch.bool),
        group=torch.zeros(n, dtype=torch.int64),
        reward=torch.tensor(rewards, dtype=torch.float64),
        level=torch.tensor([level] * n if isinstance(level, int) else level),
        levels=torch.full((n,), levels),
        **fields,
    )


def test_a_level_up_and_a_level_down() -> None:
    part = pg.MovingLevel(up=0.75, down=0.25, rollouts=2)
    state = part.update_state(part.init_state(), batch_of(1, 1, 1, 0, level=0), {})
    assert state == {"level": 0, "rates": [0.75]}
    assert part.with_state(state).task_level == 0
    state = part.update_state(state, batch_of(1, 1, level=0), {})
    assert state == {"level": 1, "rates": []}  # the mean of 3/4 and 1
    for rate in ((1, 0), (1, 0), (0, 0)):
        state = part.update_state(state, batch_of(*rate, level=1), {})
    assert state == {"level": 0, "rates": []}  # 1/2, 1/2, 0: the last two make 1/4
    state = part.update_state(state, batch_of(0, 0, level=0), {})
    state = part.update_state(state, batch_of(0, 0, level=0), {})
    assert state == {"level": 0, "rates": [0.0, 0.0]}  # there is none below
    assert part.with_state(state)(batch := batch_of(1, level=0)) is batch


def test_what_was_sampled_at_another_level_or_shown_does_not_count() -> None:
    part = pg.MovingLevel(rollouts=1)
    state = {"level": 2, "rates": []}
    assert part.update_state(state, batch_of(1, 1, level=1), {}) == state
    assert part.update_state(state, batch_of(0, 0, 1, level=[1, 1, 2]), {}) == {"level": 3, "rates": []}
    shown = torch.tensor([True, False])
    assert part.update_state(state, batch_of(1, 0, level=2, demonstration=shown), {}) == {"level": 1, "rates": []}


def test_the_last_level_is_the_task_s() -> None:
    part = pg.MovingLevel(rollouts=1, start=9)
    state = part.update_state(part.init_state(), batch_of(1, level=3), {})  # a task of four has made its last
    assert state == {"level": 3, "rates": [1.0]}
    assert part.update_state(state, batch_of(0, level=3), {}) == {"level": 2, "rates": []}


def test_refusals() -> None:
    with pytest.raises(pg.ConfigError, match=r"MovingLevel\.down must be below MovingLevel\.up"):
        pg.MovingLevel(0.5, 0.5)
    with pytest.raises(pg.ConfigError, match=r"MovingLevel\.rollouts must be at least 1"):
        pg.MovingLevel(rollouts=0)
    with pytest.raises(pg.ConfigError, match=r"MovingLevel\.start must be at least 0"):
        pg.MovingLevel(start=-1)
    with pytest.raises(pg.ConfigError, match=r"MovingLevel needs Batch\.level"):
        MOVING.update_state(MOVING.init_state(), replace(batch_of(1, level=0), level=None))


def made(place: int) -> Example:
    """The prompt is its level's number, so that the tabular policy knows it."""
    level, index = decode_level_index(place)
    return Example(str(min(level, 3)), {"level": min(level, 3), "levels": 4, "index": index})


def test_a_rollout_asks_for_the_level_and_goes_on_behind_its_prompts() -> None:
    def solved(prompts: Sequence[str], texts: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> RewardScores:
        return RewardScores([float(int(p) < 2) for p in prompts], {})

    rollouter = Rollouter(made, TabularTokenizer(), TabularSampler(4, 3, 4), solved)  # type: ignore[arg-type]
    state, position, seen = MOVING.init_state(), 0, []
    for step in range(1, 8):
        rollout = collect_rollout(
            rollouter,
            MOVING.with_state(state),
            SamplingParams(max_tokens=3),
            prompts=2,
            samples=2,
            step=step,
            position=position,
        )
        assert rollout.batch.level.tolist() == [int(p) for p in rollout.prompts]
        assert [g.spec.key[3] // LEVEL_STRIDE for g in rollout.groups] == [int(p) for p in rollout.prompts[::2]]
        assert [g.spec.key[3] % LEVEL_STRIDE for g in rollout.groups] == [position, position + 1]
        seen.append(int(rollout.prompts[0]))
        message = MOVING.with_state(state).report(rollout.batch)
        assert message["prompts/level"].value == seen[-1]
        state, position = MOVING.update_state(state, rollout.batch), rollout.position
    assert seen == [0, 0, 1, 1, 2, 2, 1]  # levels 0 and 1 are solved always, 2 never
    assert position == 14


@pytest.fixture
def run(random_model: Path, tmp_path: Path) -> pg.Run:
    (tmp_path / "mine.py").write_text("def right(prompts, completions): return [1.0 for c in completions]\n")
    return pg.Run(
        algorithm=replace(MOVING, filters=(pg.MovingLevel(rollouts=1),)),
        model=str(random_model),
        task="curriculum:chain_sum",
        reward=(f"{tmp_path / 'mine.py'}:right",),
        steps=3,
        prompts_per_step=2,
        samples_per_prompt=2,
        sampling=SamplingParams(max_tokens=3),
        evaluation=pg.EvaluationConfig(problems=0),
        output=str(tmp_path / "whole"),
    )


@pytest.mark.full
def test_a_run_remembers_its_level(run: pg.Run, tmp_path: Path) -> None:
    uninterrupted = pg.train(run, display=False)
    assert [row["prompts/level"] for row in rows(uninterrupted.output / "metrics.jsonl")] == [0, 1, 2]
    pieces = tmp_path / "pieces"
    pg.train(replace(run, output=str(pieces)), stop_after=1, display=False)
    pg.train(resume=pieces, display=False)
    assert untimed(uninterrupted.output / "metrics.jsonl") == untimed(pieces / "metrics.jsonl")
    assert rows(uninterrupted.output / "completions.jsonl") == rows(pieces / "completions.jsonl")


def test_rollouts_drawn_before_the_level_moved_do_not_count(run: pg.Run) -> None:
    """With one step of staleness every second rollout is of the level before."""
    ahead = replace(run, max_staleness=1, steps=6)
    uninterrupted = pg.train(ahead, display=False)
    levels = [row["prompts/level"] for row in rows(uninterrupted.output / "metrics.jsonl")]
    assert levels == sorted(levels)
    assert levels[0] == levels[1] == 0
    assert max(levels) >= 2


def test_levels_that_nothing_moves_and_what_moves_none_are_refused(run: pg.Run) -> None:
    with pytest.raises(pg.ConfigError, match="11 levels of difficulty, and nothing changes them"):
        pg.train(replace(run, algorithm=pg.DR_GRPO), display=False)
    with pytest.raises(pg.ConfigError, match="MovingLevel changes the difficulty of a task with levels"):
        pg.train(replace(run, task="chain_sum"), display=False)
