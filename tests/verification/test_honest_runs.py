"""`verify` raises no false alarm: runs of many rows and seeds, stopped and resumed, stale, with adapters, data, environments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.cases import keep_fast
from policygrad.learners.config import LearnerConfig
from policygrad.samplers.base import SamplingParams
from policygrad.tasks.base import Example
from policygrad.training.config.checkpoint import CheckpointConfig
from policygrad.training.config.evaluation import EvaluationConfig
from policygrad.training.config.guard import GuardConfig
from policygrad.training.config.run import Run
from policygrad.training.config.serialization import load_config
from policygrad.training.config.trust import CodePermissions
from policygrad.verification.verify import verify_run

Stops = tuple[int, ...]
CASES: dict[str, tuple[str, Stops, dict[str, Any]]] = {
    "dapo, stale and stopped": ("dapo", (2,), {"max_staleness": 2, "seed": 5}),
    "grpo, evaluated, a budget of tokens": ("grpo", (), {"tokens": 300, "evaluation": EvaluationConfig(4, every=1)}),
    "grpo, adapters in bf16": ("grpo", (1,), {"learner": LearnerConfig(lora="rank=4", dtype="bf16"), "seed": 8}),
    "grpo, steps undone": ("grpo", (), {"guard": GuardConfig(action="skip", window=2, grad_norm=1.01), "seed": 11}),
    "ppo_penalty, an adaptive β": ("ppo_penalty", (2,), {"seed": 19}),
}
MORE: dict[str, tuple[str, Stops, dict[str, Any]]] = {
    "grpo, adapters, with a calculator": (
        "grpo",
        (1,),
        {
            "environment": "calculator",
            "reward": ("exact_match",),
            "model": "tiny",
            "learner": LearnerConfig(lora="rank=4"),
            "seed": 7,
        },
    ),
    "dapo": ("dapo", (), {"seed": 1}),
    "dapo, stopped after every step": ("dapo", (1, 1), {"seed": 3}),
    "grpo, stale and stopped": ("grpo", (1, 1), {"max_staleness": 1, "seed": 6}),
    "grpo, top-k and top-p": ("grpo", (), {"sampling": SamplingParams(max_tokens=8, top_k=20, top_p=0.9)}),
    "grpo, bf16": ("grpo", (1,), {"learner": LearnerConfig(dtype="bf16"), "seed": 10}),
    "vapo": ("vapo", (1,), {"seed": 13}),
    "trpo, stopped": ("trpo", (1,), {"lr": None, "seed": 14}),
    "remax": ("remax", (1,), {"seed": 15}),
    "vineppo": ("vineppo", (1,), {"step_end": "[0-9]", "seed": 16}),
    "trpo_vine": ("trpo_vine", (1,), {"lr": None, "seed": 17}),
    "prime": ("prime", (1,), {"seed": 18}),
    "magistral, stale": ("magistral", (), {"max_staleness": 2, "seed": 20}),
    "cispo, the sampler's π_old": ("cispo", (1,), {"max_staleness": 1, "seed": 21}),
    "two learners": ("grpo", (1,), {"learner": LearnerConfig(world_size=2), "seed": 22}),
}


@pytest.mark.parametrize("case", keep_fast([*CASES, *MORE], *list(CASES)[:2]))
def test_an_honest_run_holds(case: str, small: Run, tmp_path: Path) -> None:
    name, stops, options = (CASES | MORE)[case]
    algorithm = pg.ALGORITHMS[name]
    folder = tmp_path / "run"
    changes: dict[str, Any] = {
        "steps": 3,
        "prompts_per_step": 2,
        "samples_per_prompt": min(4, algorithm.samples_per_prompt),
        "verify": 3,
        "checkpoint": CheckpointConfig(every=2),
        **options,
    }
    run = replace(small, algorithm=algorithm, output=str(folder), **changes)
    for number, stop in enumerate((*stops, None)):
        if number == 0:
            pg.train(run, stop_after=stop, display=False)
        else:
            pg.train(resume=folder, stop_after=stop, display=False)
    result = verify_run(folder, load_config(folder / "run.toml", Run(), CodePermissions(("/",))))
    assert not result.failures, result.failures
    repeated = {
        finding.subject for finding in result.findings if finding.step is not None and finding.status == "holds"
    }
    assert repeated >= {"batch", "advantages", "metrics"}, [str(finding) for finding in result.findings]
    assert "weights" in repeated or options.get("guard") or options["learner"].world_size == 2


class CountCharacters:
    """An environment that only Python can give to a run."""

    def __init__(self, example: Example) -> None:
        self.prompt = example.prompt

    async def reset(self) -> pg.Observation:
        return pg.Observation(self.prompt)

    async def step(self, action: pg.Action) -> pg.Step:
        return pg.Step(reward=float(len(action.text)))


def test_steps_in_an_environment_from_python_are_not_checked(small: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = replace(small, output=str(folder), steps=2, prompts_per_step=2, samples_per_prompt=2, verify=0)
    pg.train(run, environment=CountCharacters, display=False)
    result = verify_run(folder, load_config(folder / "run.toml", Run(), CodePermissions(("/",))), [2])
    assert not result.failures, result.failures
    [finding] = [finding for finding in result.findings if finding.step == 2 and finding.status == "not checked"]
    assert "environment was given to the run" in finding.message
