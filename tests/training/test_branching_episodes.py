"""A run whose chat template writes earlier turns anew: it trains, is counted, and goes on bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.files import rows
from doubles.models import changed_copy
from doubles.resuming import check_resume
from policygrad.models.loading import resolve_model

ENVIRONMENT = """
import policygrad as pg


class Asks:
    '''Three turns: the user asks for more, and letters count.'''

    def __init__(self, example):
        self.example, self.turns = example, 0

    async def reset(self):
        return pg.Observation(({"role": "user", "content": f"{self.example.columns['answer']} and 1 ="},))

    async def step(self, action):
        self.turns += 1
        worth = float(sum(c.isdigit() for c in action.text))
        if self.turns == 3:
            return pg.Step(reward=worth)
        return pg.Step(pg.Observation(({"role": "user", "content": f"more, {self.turns} ="},)), worth / 2)
"""
SHOUTING = (
    "{%- for message in messages -%}{%- if message['role'] == 'assistant' -%}{{ (message['content'] | upper) + eos_token }}"
    "{%- else -%}{{ message['content'] + '\\n' }}{%- endif -%}{%- endfor -%}"
)
CARRIED = replace(pg.GSPO, filters=(pg.DropZeroVariance(max_rounds=3),), update_rule=pg.GradientSteps())
PREDICTED = replace(CARRIED, terms=(pg.ObservationNLL(),))
BY_TURN = replace(
    pg.PPO, advantage=(pg.TurnGAE(0.9), pg.Whiten()), critic=pg.Critic(turn_gamma=0.9), update_rule=pg.GradientSteps()
)


@pytest.fixture
def run(small: pg.Run, tmp_path: Path) -> pg.Run:
    (tmp_path / "asks.py").write_text(ENVIRONMENT)
    model = changed_copy(Path(resolve_model("tiny")), tmp_path / "shouting")
    (model / "chat_template.jinja").write_text(SHOUTING)
    return replace(
        small,
        model=str(model),
        reward=(),
        steps=2,
        prompts_per_step=2,
        samples_per_prompt=3,
        sampling=pg.SamplingParams(max_tokens=24),
        environment=f"{tmp_path / 'asks.py'}:Asks",
        output=str(tmp_path / "run"),
    )


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(CARRIED, id="groups that wait"),
        pytest.param(BY_TURN, id="a critic", marks=pytest.mark.full),
        pytest.param(pg.GIGPO, id="states", marks=pytest.mark.full),
        pytest.param(PREDICTED, id="predicted observations", marks=pytest.mark.full),
    ],
)
def test_resume_is_bitwise_with_branching_episodes(run: pg.Run, tmp_path: Path, algorithm: pg.Algorithm) -> None:
    run = replace(run, algorithm=algorithm)
    full = check_resume(run, tmp_path)
    report = rows(full / "completions.jsonl")
    measured = rows(full / "metrics.jsonl")
    assert all(1 < row["environment/branches"] <= row["environment/turns"] for row in measured)
    assert all(0 < row["environment/branched_ratio"] <= 1 for row in measured)
    assert all(row["mismatch/logp_max"] < 1e-3 for row in measured if "mismatch/logp_max" in row)
    talks = [row for row in report if row.get("branches", 1) > 1]
    assert talks
    for row in talks:
        assert "".join(text for _, text in row["turns"]) == row["completion"]
        assert [text for who, text in row["turns"] if who == "environment"] == [
            f"more, {turn + 1} =\n" for turn in range(len(row["turns"]) // 2)
        ]


def test_branching_episodes_are_noted_once(run: pg.Run, capsys: pytest.CaptureFixture[str]) -> None:
    pg.train(replace(run, prompts_per_step=1, samples_per_prompt=2))
    said = "".join(capsys.readouterr())
    assert said.count("the chat template rewrites earlier turns in") == 1
