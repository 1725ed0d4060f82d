"""Every named algorithm, killed and taken up again, ends bit for bit as if it had not been killed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.algorithms import SINGLE_TURN, trainable
from doubles.files import untimed, write_rows
from doubles.resuming import check_resume

TASK = [
    {"prompt": f"{i} + {j} =\n", "answer": str(i + j), "demonstration": f"{i + j}!"} for i in range(4) for j in range(4)
]


@pytest.fixture
def run(small: pg.Run, tmp_path: Path) -> pg.Run:
    """With all that some algorithm asks for: demonstrations, scores of steps, places where steps end."""
    digits = small.reward[0].replace(":starts_with_a_digit", ":digits")
    return replace(
        small,
        task=write_rows(tmp_path / "rows.jsonl", TASK),
        reward=(*small.reward, digits),
        steps=2,
        prompts_per_step=3,
        samples_per_prompt=3,
        sampling=pg.SamplingParams(max_tokens=6),
    )


FIRST = {
    *(("dapo", 1), ("ppo", 1), ("prime", 1)),  # groups that wait, a critic, a reward model; drawn ahead
    *(("reinforce", 0), ("scale_rl", 0), ("astar_po", 0)),  # a mean of rewards, solved prompts, values of prompts
    *(("sdpo", 0), ("trpo_vine", 0), ("luffy", 0)),  # a moving average for a teacher, a trust region, demonstrations
}
"""One for each kind of state, with and without rollouts that are drawn ahead. The others are `make test-full`."""
CASES = [
    pytest.param(name, staleness, marks=[] if (name, staleness) in FIRST else pytest.mark.full)
    for name in SINGLE_TURN
    for staleness in (0, 1)
]


@pytest.mark.parametrize(("name", "staleness"), CASES)
def test_resume_is_bitwise_for_every_algorithm(run: pg.Run, tmp_path: Path, name: str, staleness: int) -> None:
    algorithm = trainable(name)
    run = replace(
        run, algorithm=algorithm, lr=run.lr if algorithm.update_rule.uses_lr else None, max_staleness=staleness
    )
    if name in ("vineppo", "trpo_vine", "gdpo"):  # which refuse scores of steps
        run = replace(run, reward=run.reward[:1], step_end="[a-z ]" if name == "vineppo" else None)
    full = check_resume(run, tmp_path)
    assert all(math.isfinite(value) for row in untimed(full / "metrics.jsonl") for value in row.values())
