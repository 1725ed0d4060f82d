"""Process rewards and prefix values on the real path: runs that resume bit for bit, and what is refused before they start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import policygrad as pg
from policygrad.errors import RunError
from policygrad.samplers.base import Sampling
from policygrad.trackers import RunInfo, Tracker
from policygrad.training.config.run import Checkpointing, Evaluation, Run
from policygrad.training.trainer import train

REWARD = """
import policygrad as pg

def starts_with_a_digit(prompts, completions, **columns):
    return [float(c[:1].isdigit()) for c in completions]

@pg.reward(process=True)
def digits(prompts, completions, **columns):
    '''A step per third of the text, worth 1 where it holds a digit.'''
    found = []
    for c in completions:
        ends = sorted({len(c) * k // 3 for k in (1, 2, 3)} - {0})
        found.append([(b, float(any(x.isdigit() for x in c[a:b]))) for a, b in zip([0, *ends], ends)])
    return found
"""


@pytest.fixture(scope="module")
def small(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of seconds: a random model, two prompts, rewards of our own."""
    folder = tmp_path_factory.mktemp("task")
    (folder / "mine.py").write_text(REWARD)
    rows = [{"prompt": f"{i} + {j} =\n", "answer": str(i + j)} for i in range(3) for j in range(4)]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Run(
        algorithm=pg.GRPO_PROCESS,
        model=str(random_model),
        task=str(folder / "sums.jsonl"),
        reward=(f"{folder / 'mine.py'}:starts_with_a_digit", f"{folder / 'mine.py'}:digits"),
        steps=3,
        prompts_per_step=2,
        samples_per_prompt=6,
        lr=3e-3,
        sampling=Sampling(max_tokens=8),
        evaluation=Evaluation(problems=2, samples=2),
        checkpoint=Checkpointing(every=1),
    )


def untimed(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().split("\n") if line]
    return [{k: v for k, v in row.items() if "time" not in k and "per_second" not in k} for row in rows]


def vine(run: Run) -> Run:
    algorithm = replace(pg.VINEPPO, psi=(pg.PrefixValue(3),), step=pg.FirstOrder(epochs=2))
    return replace(run, algorithm=algorithm, reward=run.reward[:1], step_end="[a-z ]")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo_process", "vineppo"])
def test_resume_at_every_step_is_bitwise_equal(small: Run, tmp_path: Path, name: str) -> None:
    run = small if name == "grpo_process" else vine(small)
    whole = train(replace(run, output=str(tmp_path / "whole")))
    pieces = tmp_path / "pieces"
    result = train(replace(run, output=str(pieces)), stop_after=1)
    while result.steps < run.steps:
        result = train(resume=pieces, stop_after=1)
    a, b = (load_file(folder / "model" / "model.safetensors") for folder in (whole.output, pieces))
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert untimed(whole.output / "metrics.jsonl") == untimed(pieces / "metrics.jsonl")
    assert (whole.output / "completions.jsonl").read_text() == (pieces / "completions.jsonl").read_text()
    written = [json.loads(line) for line in (whole.output / "completions.jsonl").read_text().split("\n") if line]
    assert all(row["steps"][-1][0] == row["tokens"] for row in written)
    assert any(abs(advantage) > 0.1 for row in written for _, advantage in row["steps"])
    steps = [row for row in untimed(whole.output / "metrics.jsonl") if "steps/mean" in row]
    assert len(steps) == run.steps
    for row in steps:
        assert row["steps/mean"] > 1.2
        if name == "vineppo":
            assert row["tokens/values"] > row["tokens/sampled"] / 2
            assert row["values/failed"] == 0
        else:
            assert 0 < row["rewards/" + run.reward[1]] < 1


class Facts(Tracker):
    """Keeps what a display is told at the start."""

    facts: Mapping[str, str]

    def start(self, info: RunInfo) -> None:
        self.facts = info.facts


def test_the_start_says_what_is_read_of_the_steps(small: Run, tmp_path: Path) -> None:
    def told(run: Run, name: str) -> str:
        shown = Facts()
        train(replace(run, output=str(tmp_path / name), evaluation=Evaluation(problems=0)), display=shown, stop_after=1)
        return shown.facts["reward"]

    process = small.reward[1]
    assert told(small, "a").endswith(f"{process} (of steps)")
    assert told(replace(small, algorithm=pg.DR_GRPO), "b").endswith(f"{process} (of steps)")
    assert told(replace(vine(small), reward=small.reward, step_end=None), "c").endswith(
        f"{process} (only where steps end)"
    )
    assert told(vine(small), "d").endswith("steps by '[a-z ]'")


def test_a_run_without_steps_does_not_start(small: Run, tmp_path: Path) -> None:
    for algorithm in (pg.GRPO_PROCESS, pg.VINEPPO):
        run = replace(small, algorithm=algorithm, reward=small.reward[:1], output=str(tmp_path / "no"))
        with pytest.raises(RunError, match="does not say where they end: take --task embedded_steps"):
            train(run)
    assert not (tmp_path / "no").exists()
