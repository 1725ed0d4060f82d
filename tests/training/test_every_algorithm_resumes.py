"""Every named algorithm, killed and taken up again, ends bit for bit as if it had not been killed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.algorithms import SINGLE_TURN, runnable
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
        steps=3,
        prompts_per_step=3,
        samples_per_prompt=4,
        sampling=pg.SamplingParams(max_tokens=6),
    )


SOME = ("dapo", "ppo", "prime", "trpo_vine", "reinforce")
"""With rollouts that are drawn ahead too: with groups that wait, a critic, a reward model, a trust region, a baseline's state. The
others with them are `make test-full`."""
CASES = [
    *((name, 0) for name in SINGLE_TURN),
    *(pytest.param(name, 1, marks=[] if name in SOME else pytest.mark.full) for name in SINGLE_TURN),
]


@pytest.mark.parametrize(("name", "staleness"), CASES)
def test_resume_is_bitwise_for_every_algorithm(run: pg.Run, tmp_path: Path, name: str, staleness: int) -> None:
    algorithm = runnable(name)
    run = replace(
        run, algorithm=algorithm, lr=run.lr if algorithm.update_rule.uses_lr else None, max_staleness=staleness
    )
    if name in ("vineppo", "trpo_vine", "gdpo"):  # which refuse scores of steps
        run = replace(run, reward=run.reward[:1], step_end="[a-z ]" if name == "vineppo" else None)
    full = check_resume(run, tmp_path)
    assert all(math.isfinite(value) for row in untimed(full / "metrics.jsonl") for value in row.values())
